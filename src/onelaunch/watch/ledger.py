"""A ledger: the operations of a run, without values of tensors, compared with another run's.

Each capture is compared with the run before it, the last warm-up. A replay repeats one run: if two
runs of the same call differ in an operation, a number or memory, then something changes in Python
that a replay would freeze.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from onelaunch.call.spec import has_strides
from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import local
from onelaunch.driver.aten import Operator, operator, tensors
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.overlaps import joined
from onelaunch.driver.protocol import DevicePool, Driver, Provenance, Region
from onelaunch.driver.refusals import DRAWN
from onelaunch.driver.seeding import DRAWING, HostGenerators
from onelaunch.errors import CaptureError
from onelaunch.source import Place, line_of, user_frame
from onelaunch.state.dependencies import classes
from onelaunch.state.host_values import key_of, values_of
from onelaunch.state.slots import (
    MISSING,
    description_slot,
    gradient_of,
    read_hooks,
    read_last_hooks,
)
from onelaunch.state.walk import StateWalk
from onelaunch.watch.difference import Difference, Operand, of_memory, of_operations
from onelaunch.watch.lifted import bits_of, brought
from onelaunch.watch.operations import HigherOrder, Watching

TRIES = 3
"""Number of captures in a row that may differ from the run before them."""

_SMALL_BYTES = 64
"""Largest host tensor that is compared by its value."""

_BY_IDENTITY = (Tensor, torch.nn.Module, OrderedDict)
"""Types of nearly all that is no plain value, to tell it at once."""
_COMPARED_BY_VALUE = frozenset(
    {bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _AnyNumber:
    """A number that each call reads: equal to every noted number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AnyNumber) or (
            type(other) is tuple and other[:1] in ((float,), (int,))  # pyright: ignore
        )

    __hash__ = None  # pyright: ignore


class _Unseen(NamedTuple):
    """Memory of unknown origin: neither the call nor its state has it, and no operation made it.

    What comes from the capture is recorded, though no mode sees it: kernels that TorchScript
    generates make it. Other memory has to be what the run before read.

    Attributes:
        provenance: known in a capture; else `BEFORE`.
        at: number of the first operation that used it.
        place: the line of that.
    """

    storage: int
    reference: StorageWeakRef
    provenance: Provenance
    at: int
    place: Place | None


class Ledger:
    """A list of the operations of one run, in order. Keeps nothing alive; 10 us for each operation.

    Args:
        inputs: (tensor of the call, tensor that the run gets in its place).
        walked: the state that the callable reaches, before the run.
        hidden: storage -> slot, for memory that replaces a slot's own in the run.
        earlier: the run to compare with.
        pool: of a capture, the memory that its operations get.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        inputs: Sequence[tuple[Tensor, Tensor]],
        walked: StateWalk,
        hidden: Mapping[int, str] | None = None,
        earlier: Ledger | None = None,
        pool: DevicePool | None = None,
    ) -> None:
        self._storage = driver.storage
        self._region = driver.region
        self._pool = pool
        self._on_host = device.type == "cpu"
        self._kind = device.type
        self.brought: list[Tensor] = []
        """Copies of the host tensors that the run brought to the device."""
        self._origins: dict[int, object] = {}
        for slot, t in walked.tensors():
            if _has_memory(t):
                self._origins.setdefault(self._storage(t), f"`{slot.name}`")
        self._origins.update({storage: f"`{name}`" for storage, name in (hidden or {}).items()})
        self._displaced = frozenset(hidden or ())  # their offsets depend on the capture
        self._starts: dict[int, int] = {}
        """storage -> bytes to the first element of the argument or result that it belongs to, from
        which offsets are counted: where that lies differs in a capture."""
        named = dict(self._origins)
        layouts: list[object] = []
        self._arguments: dict[int, list[tuple[Region, str, int]]] = {}
        """storage -> the arguments in it. A capture has those apart that do not overlap, wherever
        the caller's lie: `f(z[:4], z[4:])` is the same call as `f(x, y)`."""
        given = [(i, t, here) for i, (t, here) in enumerate(inputs) if _has_memory(t)]
        first = joined(driver, [t for _, t, _ in given])
        for (_, t, here), joins in zip(given, first, strict=True):
            place = named.get(self._storage(t))
            layouts.append((t.dtype, t.shape, t.stride(), t.device, place))
            name, storage = f"argument {given[joins][0]}", self._storage(here)
            self._arguments.setdefault(storage, []).append(
                (driver.region(here), name, _bytes(here))
            )
            self._starts.setdefault(storage, _bytes(here))
            self._origins[storage] = self._arguments[storage][0][1]
            self._displaced |= {storage}
        self._layouts = layouts
        self.values = values_of(t for t, _ in inputs) if not self._on_host else {}
        """Bytes of the host arguments, by number."""
        leaves = [t for _, t in walked.tensors() if t.requires_grad]
        self._hooks = [tuple(hooks or ()) for t in leaves for hooks in _hooks_of(t)]
        self.held: dict[object, object] = {
            key: id(value) if issubclass(type(value), _BY_IDENTITY) else content_of(value)
            for key, (_, value) in walked.held.items()
        }
        """id of a slot -> its content before the run: a plain value, or the id of an object."""
        descriptions = [
            description_slot(slot) for slot, _ in walked.tensors() if walked.is_read(slot)
        ]
        self.held.update((slot.id, content_of(slot.read())) for slot in descriptions)
        of_slots = (value for _, value in walked.held.values())
        self.held.update((slot.id, id(kind)) for slot, kind in classes(walked, of_slots))
        if not self._on_host:
            for _, t in walked.tensors():
                if _has_memory(t) and t.device.type == "cpu":
                    key = key_of(t)
                    self.held[id(t), key] = content_of(key(t))
        self._made: dict[int, StorageWeakRef] = {}
        """storage -> a weak reference, which keeps the id of a storage taken, not its memory: so no
        storage that a compiled kernel makes unseen is mistaken for one that was freed."""
        self._unseen: list[_Unseen] = []
        self._entries: list[tuple[Any, ...]] = []
        # Only calls alike are compared: the same sizes (buckets have others than the capture), the
        # same sharing of memory between arguments, the same hooks on leaves.
        alike = (
            earlier is not None and earlier._layouts == layouts and earlier._hooks == self._hooks
        )
        self._earlier = earlier if alike else None
        self.difference: Difference | None = None
        self.optimizers = optimizers_in(walked)
        """ids of the optimizers that the callable reaches."""
        self.steps = 0
        """Number of these that step at present. The numbers of their groups are read at each call,
        or guarded, and replaced in a capture; the numbers of an optimizer made in the call are
        like any others."""

    @property
    def compares(self) -> bool:
        """True if the run is compared with one before it."""
        return self._earlier is not None

    def note(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Note an operation before it runs. Return its storages, for `made`."""
        storages: set[int] = set()
        number = len(self._entries)
        if op.base.startswith("aten::lift"):  # its argument is memory made outside the dispatcher
            for t in tensors(args):
                self._origins[self._storage(t)] = self._lifted(t, number)
        host = brought(op.base, args, kwargs, self._kind)
        self.brought += [t.detach().clone() for t in host]
        entry = (op.text, self._noted(args, storages), self._noted(kwargs, storages))
        self._entries.append(entry)
        if self._earlier is not None and self.difference is None:
            others = self._earlier._entries
            other = others[number] if number < len(others) else None
            if other != entry:
                self.difference = of_operations(number, other, entry)
        return storages

    def made(self, storages: set[int], results: Sequence[Tensor]) -> None:
        """Note the results of an operation: new memory is named by the operation's number."""
        number = len(self._entries) - 1
        for place, t in enumerate(results):
            if _has_memory(t):
                storage = self._storage(t)
                if storage not in storages:
                    self._origins[storage] = number, place
                    self._starts[storage] = _bytes(t)
                    self._made[storage] = StorageWeakRef(local(t).untyped_storage())

    def differs(self, difference: Difference) -> None:
        """Note a difference that is not in an operation."""
        if self._earlier is not None:
            self.difference = self.difference or difference

    def finish(self) -> None:
        """Finish the comparison after the run.

        Raises:
            CaptureError: OL117, another thread has made memory that the capture read. It was made
                of stand-ins: a replay would be wrong even for the call under capture.
        """
        for met in self._unseen:
            if met.provenance is Provenance.MEANWHILE:
                raise of_memory(met.at, self._entries[met.at], met.place).refusal()
        if self._earlier is not None and self.difference is None:
            others = self._earlier._entries
            if len(others) > len(self._entries):
                number = len(self._entries)
                self.difference = of_operations(number, others[number], None)
            for was, now in zip(self._earlier._unseen, self._unseen, strict=False):
                lasts = was.storage == now.storage and not was.reference.expired()
                if now.provenance is Provenance.BEFORE and not lasts:
                    self.differs(of_memory(now.at, self._entries[now.at], now.place))
        self._earlier = None
        self._origins.clear()
        self._made.clear()

    def _noted(self, value: Any, storages: set[int]) -> Any:
        kind = type(value)
        if kind in _COMPARED_BY_VALUE:
            return kind, value
        if isinstance(value, Tensor):
            return self._operand(value, storages)
        if isinstance(value, torch.SymFloat):
            return _AnyNumber()
        if kind is float:
            return kind, None if self.steps else value.hex()
        if isinstance(value, (list, tuple)):
            return [self._noted(part, storages) for part in value]  # pyright: ignore
        if isinstance(value, dict):
            return [(key, self._noted(part, storages)) for key, part in value.items()]  # pyright: ignore
        return kind, repr(value) if kind is complex else None

    def _operand(self, t: Tensor, storages: set[int]) -> Operand:
        if not _has_memory(t):
            return Operand(None, (), t.dtype)  # nested or sparse
        storage = self._storage(t)
        storages.add(storage)
        origin = self._origins.get(storage)
        if isinstance(origin, tuple) and storage in self._made and self._made[storage].expired():
            origin = None  # other memory, at an address that was free again
            self._starts.pop(storage, None)
        scalar = not t.dim()
        displaced = isinstance(origin, tuple) or storage in self._displaced
        from_ = self._starts.get(storage, 0)
        several = self._arguments.get(storage, ())
        if len(several) > 1:
            start = self._region(t).start
            named = [(n, b) for at, n, b in several if at.start <= start < at.stop]
            origin, from_ = named[0] if named else (origin, from_)
        if origin is None:
            origin = self._unnamed(t, storage)
            displaced = scalar
        if scalar or _is_position(t):
            # The memory of a number depends on how the call gets it; attention's seed and offset
            # are on the device in a capture only.
            return Operand(origin, tuple(t.shape), t.dtype)
        if displaced:
            offset = (_bytes(t) - from_) // t.element_size() if storage in self._starts else 0
        else:
            offset = int(t.storage_offset())
        shape, stride = tuple(t.shape), t.stride()
        return Operand(origin, shape, t.dtype, stride, offset, t.device, t.requires_grad)

    def _lifted(self, t: Tensor, number: int) -> object:
        return self._value(t) if t.device.type == "cpu" else (number, 0)

    def _value(self, t: Tensor) -> tuple[str, object]:
        """Describe a host tensor by its value, but for the numbers of optimizers."""
        if self.steps and t.is_floating_point():
            return "value", None
        with no_functions():
            if t.nbytes <= _SMALL_BYTES:
                return "value", repr(t.detach().tolist())
            bits = bits_of(t)[-1].hex()
            return "value", f"{t.dtype}{list(t.shape)} (bits {bits[:16]})"

    def _unnamed(self, t: Tensor, storage: int) -> object:
        """Name memory that is in neither the call nor its state, and that no operation made."""
        if t.device.type == "cpu" and (not self._on_host or not t.dim()):
            return self._value(t)
        for number, met in enumerate(self._unseen):
            if met.storage == storage and not met.reference.expired():
                return "memory", number
        memory = local(t).untyped_storage()
        found = Provenance.BEFORE if self._pool is None else self._pool.provenance(memory)
        reference, at = StorageWeakRef(memory), len(self._entries)
        self._unseen.append(_Unseen(storage, reference, found, at, user_frame()))
        return "memory", len(self._unseen) - 1


def _hooks_of(t: Tensor) -> tuple[Any, Any]:
    return read_hooks(t), read_last_hooks(t)


def _has_memory(t: Tensor) -> bool:
    return not is_lazy(t) and has_strides(t)


def _bytes(t: Tensor) -> int:
    """Return the offset of a tensor in its storage."""
    return int(t.storage_offset()) * t.element_size()


def _is_position(t: Tensor) -> bool:
    return t.numel() <= 2 and t.dtype in (torch.int64, torch.uint64)


def optimizers_in(walked: StateWalk) -> set[int]:
    """Return the ids of the optimizers among the state that a callable reaches."""
    held = (value for _, value in walked.held.values())
    return {id(value) for value in held if issubclass(type(value), Optimizer)}


class Noting(Watching):
    """A mode that notes the operations of a run in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._met: HigherOrder | None = None

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note it; see `Watching`."""
        with no_functions():
            storages = self._ledger.note(operator(func), args, kwargs)
        result = func(*args, **kwargs)
        with no_functions():
            self._ledger.made(storages, tensors(result))
        return result

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator as far as it runs under a mode: the run may be one of the caller's own
        calls, which is made once. The capture will refuse it."""
        self._met = HigherOrder(func.name())
        return func(*args, **kwargs)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._met is not None:
            self._met.mend_dynamo()


def refuse_drawn(generators: HostGenerators, fn: object, ledger: Ledger | None) -> None:
    """Refuse a call that advances the generators of Python or NumPy.

    Raises:
        CaptureError: OL117; if another thread may have drawn, the ledger differs instead.
    """
    generator = generators.moved()
    if generator is None:
        return
    place = line_of(fn, DRAWING)
    what = f"the generator {generator} is advanced in the call"
    if generators.sure():
        generators.restore()
        raise CaptureError("OL117", what, where=place, fix=DRAWN)
    if ledger is not None:
        ledger.differs(Difference(what, place))


def moved(earlier: Ledger, slots: Iterable[tuple[Any, object]]) -> bool:
    """Return whether one of these slots, by id and content, held another content before a run. A
    slot that was unknown then counts as unchanged, except for gradients, which were None."""
    held = earlier.held
    return any(
        held[key] != content_of(value)
        if key in held
        else key[1] is gradient_of and value is not MISSING
        for key, value in slots
    )


def content_of(value: object) -> object:
    """Return what is compared of a slot's content: a plain value, or an object's identity."""
    return (type(value), repr(value)) if is_plain(value) else id(value)
