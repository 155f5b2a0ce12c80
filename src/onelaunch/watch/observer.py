"""An observer of the memory that a run reads and writes, operation by operation.

The observer runs around the callable while it is captured. It finds the tensors that kernels read
by address, the memory that they write, and which version counters advance (`version_bumped`; those
of BatchNorm's statistics do not), and refuses, at the user's line, what a replay would freeze.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.call.spec import has_strides
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import Operator, operator, tensors
from onelaunch.driver.attention_seeds import given_seeds
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.host_reads import HostReads
from onelaunch.driver.protocol import Driver, Region
from onelaunch.driver.refusals import DRAWN, error_here
from onelaunch.errors import CaptureError, let_go
from onelaunch.source import Place, user_frame
from onelaunch.watch.admission import Admission, readable
from onelaunch.watch.host_memory import HostMemory, named
from onelaunch.watch.ledger import Ledger
from onelaunch.watch.lifted import Lifted, brought
from onelaunch.watch.masked_fill import fill_on_device
from onelaunch.watch.operations import Watching

T = TypeVar("T")


def _placed_nowhere(func: Any, args: Any, kwargs: Any) -> None:
    """Find no number that each call reads."""


_DEFERRED = frozenset({"OL101", "OL102", "OL103", "OL104"})
"""Codes of what compiled code does as eager code does it."""
LIFTS = ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")


class Observer(Watching):
    """A mode that watches one run of a callable.

    Args:
        driver: the driver of `device`.
        device: the device of the recording; tensors elsewhere are host tensors.
        inputs: device tensors that are inputs of the recording.
        held: storage -> tensors over it that exist already and that the callable can reach.
        displaced: inputs that stand for memory in the middle of a storage.
        save: keep a copy of memory that existed before, before its first write, for `restore`.
        refuse: True to raise for what cannot be captured; ``"later"`` to keep the refusals that no
            other check finds in compiled code; False only to watch.
        lifted: the device's copies of host values; an observer that keeps refusals asks for those
            that the run would need.
        numbers: host tensors that the recording gets on the device.
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        inputs: Iterable[Tensor] = (),
        *,
        displaced: Iterable[Tensor] = (),
        held: Mapping[int, Sequence[Tensor]] | None = None,
        save: bool = False,
        refuse: bool | Literal["later"] = True,
        lifted: Lifted | None = None,
        numbers: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self._driver = driver
        self._storage = driver.storage
        self._device = device
        self._kind = device.type
        self._save = save
        self._refuse = refuse is True
        self._deferring = refuse == "later"
        # storage -> the end of the inputs in it
        self._inputs: dict[int, int] = {}
        for region in map(driver.region, inputs):
            stop = self._inputs.get(region.storage, 0)
            self._inputs[region.storage] = max(stop, region.stop)
        self._reads = HostReads(self._on_device, self._refuse_read, self._read_on_host)
        self._lifted = lifted
        self._held = held or {}
        self._produced: set[int] = set()
        self.host = HostMemory()
        """The host tensors of the run."""
        self.host.give_there(numbers)
        self.admission = Admission(
            driver,
            device,
            self.host,
            self._reads,
            inputs=self._inputs,
            displaced={driver.storage(t) for t in displaced},
            lifted=lifted,
            read_on_host=self._read_on_host,
        )
        # ids of views made in the run, of memory that is read by address.
        self._derived: set[int] = set()
        # Kept so that no other tensor gets their ids or addresses during the run.
        self._kept: list[Tensor] = []
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._saved_regions: set[Region] = set()
        self.made_tensors: list[weakref.ref[Tensor]] = []
        """Tensors made in the run, over memory of the recording."""
        self._made_at: dict[int, Place | None] = {}
        self._reshaped_at: dict[int, Place | None] = {}
        self.seeds: set[int] = set()
        """Storages of seeds for a backward, which are on the host in eager."""
        self.numbers: dict[int, frozenset[int]] = {}
        """Storages of what is computed of numbers of the host alone, which eager has on the host ->
        those of the numbers."""
        self.refused: CaptureError | None = None
        """The first refusal, which the callable may have caught."""
        self.suspected: CaptureError | None = None
        """The first refusal of what compiled code may do in another way, or not at all."""
        self.placed: Callable[[Any, Any, Any], tuple[Any, Any] | None] = _placed_nowhere
        """Returns the arguments of an operation with plain numbers for those that each call reads;
        None if it has none of these."""
        self.on_operation: Callable[[Any, Any, Any], None] | None = None
        self.ledger: Ledger | None = None
        """The ledger that notes the operations."""
        self.external: dict[int, list[Tensor]] = {}
        """storage -> the tensors over it that were read or written by address."""
        self.written: dict[int, Tensor] = {}
        """storage -> a tensor over it, for memory that existed before and was written."""
        self.version_bumped: set[int] = set()
        """The storages whose version counters the writes advanced; a BatchNorm's statistics are
        written without that."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note what it does; see `Watching`."""
        op = operator(func)
        try:
            filled = None
            with unwatched(), no_functions():
                noting = args, kwargs
                args, kwargs = self.placed(func, args, kwargs) or noting
                given, inside, lifted = self._consume(op, args, kwargs)
                noted = self.ledger and self.ledger.note(op, *noting)
                if op.base == "aten::copy_" and self.admission.is_number(args):
                    func, args, kwargs = torch.ops.aten.fill_.Scalar, (args[0], args[1].item()), {}
                elif lifted and self._lifted is not None:
                    args = self._lifted.swapped(op.base, args, lifted)
                elif self._refuse:
                    filled = fill_on_device(op.base, args, self._on_device)
            result = filled() if filled else func(*args, **kwargs)
            with unwatched(), no_functions():
                results = tensors(result)
                self._produce(op, given, inside, results)
                if self.ledger is not None and noted is not None:
                    self.ledger.made(noted, results)
                self._note_seeds(op, given, result)
                if self.numbers:
                    self._note_numbers(given, results, kwargs.get("device"))
        except CaptureError as error:
            self.note_refusal(error)
            raise
        return result

    def _consume(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], set[int], list[Tensor]]:
        """Note the reads and writes of an operation before it runs. Return its tensors, their
        storages on the device, and the tensors whose copies there it gets instead."""
        lifted: list[Tensor] = []
        if self.on_operation is not None:
            self.on_operation(op.func, args, kwargs)
        given = tensors((args, kwargs))
        if op.base in LIFTS:
            self._lift(given)
        if self._refuse:
            lifted = self.admission.check(op, given, args, kwargs)
            if op.reshapes:
                self._reshaped_at[id(given[0])] = user_frame()
        elif self._deferring:
            self._defer(op, given, args, kwargs)
        host: list[Tensor] = []
        inside: set[int] = set()
        for t in given:
            if not has_strides(t):
                continue
            if self._on_device(t):
                storage = self._storage(t)
                inside.add(storage)
                self._read(t, storage)
            else:
                host.append(t)
                self.host.used(t)
        if op.writes:
            for t in op.written(args, kwargs):
                self._write(t, host, op.random)
            for t in op.declared(args, kwargs):
                if self._on_device(t):
                    self.version_bumped.add(self._storage(t))
        return given, inside, lifted

    def outcome(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `fn` inside the context of this observer, and return its result.

        Raises:
            CaptureError: the first refusal, even if the callable caught it or TorchScript's
                interpreter raised another error in its place.
        """
        result: Any = None
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            if self.refused is None:
                raise
            let_go(error)
        if self.refused is not None:  # outside of the handler: neither error refers to the other
            raise self.refused
        return result

    def note_refusal(self, error: CaptureError) -> CaptureError:
        """Return a refusal after noting it, as the callable may catch it."""
        self.refused = self.refused or error
        return error

    def _defer(
        self, op: Operator, given: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Keep the refusal of an operation, for a capture of compiled code; and the host values
        that it brings to the device."""
        try:
            found = self.admission.check(op, given, args, kwargs)
            if found and self._lifted is not None:
                self.suspected = self.suspected or _brings(op, found)
                for t in found:
                    self._lifted.of(t)
        except CaptureError as error:  # its frames would hold all that the run made
            there = brought(op.base, args, kwargs, self._kind) if error.code == "OL103" else ()
            constant = bool(there) and all(map(self.host.is_constant, there))
            self._keep(error.with_traceback(None), error.code in _DEFERRED and not constant)

    def _keep(self, error: CaptureError, sure: bool) -> None:
        """Keep a refusal; of what compiled code is not sure to do, as a suspicion. Constants of the
        code such code may make on the device."""
        if sure:
            self.note_refusal(error)
        else:
            self.suspected = self.suspected or error

    def made(self, t: Tensor) -> bool:
        """Return whether this memory was allocated in the run."""
        return self._storage(t) in self._produced

    def _on_device(self, t: Tensor) -> bool:
        return t.device.type == self._kind

    def storage_of(self, t: Tensor) -> int | None:
        """Return the storage of a tensor on the device; None for others."""
        return self._storage(t) if self._on_device(t) and has_strides(t) else None

    def known(self, t: Tensor) -> bool:
        """Return whether the recording made this memory, or it is an input."""
        storage = self._storage(t)
        return storage in self._produced or storage in self._inputs

    def note_seeding(self, method: str) -> CaptureError:
        """Return the error for a run that seeds a generator, or sets or reads its state. Torch's
        functions for the default generator are no error, see `Driver.rewind`."""
        fix = None
        if method.endswith("get_state"):
            fix = "get_rng_state and set_rng_state of torch or torch.cuda, which a replay repeats"
        what = f"`{method}` of a random generator in a capture"
        return self.note_refusal(error_here("OL106", what, fix=fix))

    def refuse_draw(self, method: str) -> CaptureError:
        """Return the error for a number drawn from Python's generator in the run."""
        what = f"`random.{method}` draws a number in a capture"
        return self.note_refusal(error_here("OL117", what, fix=DRAWN))

    def host_reads(self) -> HostReads:
        """Return a mode that refuses the host's reads of device memory."""
        return self._reads

    def _refuse_read(self, code: str, what: str, t: Tensor, fix: str | None) -> None:
        self.admission.wanted.add(self._storage(t))
        error = self.note_refusal(error_here(code, what, fix=fix))
        if not self._deferring:
            raise error

    def _lift(self, tensors: Sequence[Tensor]) -> None:
        """Note `torch.tensor(...)`: new memory, filled from Python without the dispatcher."""
        for t in tensors:
            if self._on_device(t) and self._device.type != "cpu":
                if self._refuse and t.numel():
                    raise _brings_numbers()
                if self._deferring and t.numel():
                    self.suspected = self.suspected or _brings_numbers()
            elif self._on_device(t):
                self._produced.add(self._storage(t))
            else:
                self._kept.append(t)
                self.host.lifted(t)

    def _read_on_host(self, t: Tensor) -> None:
        """Note that the host uses the values of a host tensor."""
        try:
            if self._refuse or (self._deferring and not self.host.is_given_there(t)):
                self.host.read(t)
        except CaptureError as error:
            self.note_refusal(error)
            if self._refuse:
                raise

    def _read(self, t: Tensor, storage: int) -> None:
        if storage in self._produced or storage in self._inputs:
            return
        held = self.external.setdefault(storage, [])
        if id(t) not in self._derived and not any(t is other for other in held):
            held.append(t)

    def _write(self, t: Tensor, host: Sequence[Tensor], random: bool) -> None:
        if not self._on_device(t):
            own = self.host.written(t, host, random)
            if (self._refuse or self._deferring) and not own:
                error = self.note_refusal(
                    error_here("OL104", f"a host tensor, {named(t)}, is written")
                )
                if self._refuse:
                    raise error
            return
        region = self._driver.region(t)
        if region.storage in self._produced:
            return
        self.written.setdefault(region.storage, t)
        if self._save and region not in self._saved_regions:
            # Regions are saved before their first write; `restore` goes backwards.
            self._saved_regions.add(region)
            with _disable_current_modes():  # other modes must see the callable's operations alone
                memory = self._driver.alias(t, torch.uint8, (region.nbytes,), (1,), 0)
                self._saved.append((memory, memory.clone()))

    def _produce(
        self, op: Operator, given: Sequence[Tensor], inside: Collection[int], made: Sequence[Tensor]
    ) -> None:
        """Note what an operation made, given tensors whose storages on the device are `inside`."""
        for t in made:
            if not has_strides(t):
                if t.is_nested and self._refuse:
                    raise error_here("OL109", f"{readable(op.name)} makes a nested tensor")
                continue
            if self._on_device(t):
                storage = self._storage(t)
                if storage in self._held and storage not in self.external:
                    # cuDNN makes a tensor over the weights' storage before anything reads one.
                    self.external[storage] = list(self._held[storage])
                if storage in self.external:
                    self._derived.add(id(t))
                    self._kept.append(t)
                else:
                    if storage not in self._inputs:
                        self._produced.add(storage)
                        # The line that made it, which is no line of an operation on it.
                        if self._refuse and storage not in inside:
                            self._made_at[storage] = user_frame()
                    self.made_tensors.append(weakref.ref(t))
                continue
            sources = [i.untyped_storage()._cdata for i in given if not self._on_device(i)]
            varies = op.random or (self._deferring and bool(inside))  # a copy from the device
            if self.host.made(t, sources, varies, op.idle):
                self._kept.append(t)

    def made_at(self, t: Tensor) -> str | None:
        """Return the user's line that made a tensor of the run, as a message has it."""
        place = self._made_at.get(self._storage(t))
        return str(place) if place else None

    def reshaped_at(self, t: Tensor) -> str | None:
        """Return the user's line that gave a tensor other sizes or strides, likewise."""
        place = self._reshaped_at.get(id(t))
        return str(place) if place else None

    def _note_seeds(self, op: Operator, given: Sequence[Tensor], result: Any) -> None:
        if self.seeds:  # a new tensor may have the memory of a seed that was freed
            made = set(map(self._storage, filter(has_strides, tensors(result))))
            self.seeds -= made - set(map(self._storage, filter(has_strides, given)))
        self.seeds.update(map(self._storage, given_seeds(op.func, result)))

    def _note_numbers(self, given: Sequence[Tensor], made: Sequence[Tensor], moved: object) -> None:
        """Note the results of an operation on numbers of the host, unless it moves them."""
        inputs = [s for s in map(self.storage_of, given) if s is not None]
        roots = [self.numbers[s] for s in inputs if s in self.numbers]
        of_numbers = bool(roots) and len(roots) == len(inputs) and moved is None
        for storage in filter(None, map(self.storage_of, made)):
            if of_numbers:
                self.numbers[storage] = frozenset().union(*roots)
            elif storage not in inputs:  # it may have the memory of one that was freed
                self.numbers.pop(storage, None)

    @property
    def brought(self) -> list[Tensor]:
        """Copies of the host tensors whose copies on the device a run would need."""
        return [] if self._lifted is None else list(self._lifted.missing.values())

    @property
    def own(self) -> set[int]:
        """ids of the tensors that this observer keeps alive."""
        return {id(t) for t in self.written.values()} | self._derived

    @property
    def saved_bytes(self) -> int:
        """Bytes of the copies for `restore`."""
        return sum(before.nbytes for _, before in self._saved)

    def release(self) -> None:
        """Release tensors made during the run, so that their memory can be used again."""
        self.made_tensors.clear()
        self._kept.clear()
        self._derived.clear()
        self._produced.clear()
        self._made_at.clear()
        self._reshaped_at.clear()
        self.host.release()

    def forget(self) -> None:
        """Release every tensor. The reads and writes of the run are unknown from then on."""
        self.release()
        self.external, self.written = {}, {}  # others may use these dicts

    def restore(self) -> None:
        """Restore every byte that existed before the run; needs `save`."""
        for memory, before in reversed(self._saved):
            if memory.untyped_storage().nbytes():  # else the run allocated it and freed it
                memory.copy_(before)
        self._saved.clear()


def _brings(op: Operator, host: Sequence[Tensor]) -> CaptureError:
    return error_here("OL103", f"{readable(op.base)} copies {named(host[0])} across")


def _brings_numbers() -> CaptureError:
    what = "torch.tensor(...) copies numbers to the device"
    fix = "torch.full((), value, device=...), or make the tensor before the call"
    return error_here("OL103", what, fix=fix)
