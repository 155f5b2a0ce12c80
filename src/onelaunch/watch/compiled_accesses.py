"""With `compile=True`: what a warm-up of compiled code read and wrote, for its capture, which sees
neither.

Tensors are identified by their places: the number of an argument, the name of a slot. Each call has
new arguments, and slots may hold other tensors by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from onelaunch.call.spec import has_strides
from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import local
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import operator
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.state.host_values import MOST_STORED_BYTES
from onelaunch.state.slots import gradient_of
from onelaunch.state.walk import StateWalk
from onelaunch.watch.difference import of_made_memory
from onelaunch.watch.ledger import content_of
from onelaunch.watch.lifted import Lifted, bits_of, brought
from onelaunch.watch.observer import Observer
from onelaunch.watch.operations import Watching


def watching(
    driver: Driver,
    device: torch.device,
    arguments: Sequence[Tensor],
    held: Mapping[int, Sequence[Tensor]],
    save: bool = False,
) -> Observer:
    """Return an observer for an eager run that stands for compiled code.

    Args:
        held, save: see `Observer`.
    """
    here = [t for t in arguments if t.device.type == device.type]
    host = {i: t for i, t in enumerate(arguments) if t.device.type != device.type}
    observer = Observer(
        driver,
        device,
        here,
        held=held,
        save=save,
        refuse="later",
        lifted=Lifted(device),
        numbers=[t for t in host.values() if not t.dim()],
    )
    observer.host.give({i: t for i, t in host.items() if t.dim()})
    return observer


class Bringing(Watching):
    """A mode that finds the host values that code brings to the device whose operations nobody
    watches: Inductor's copies, and its indices on the host, are operations of torch's.

    Args:
        lifted: the device's copies of them, which the operations get; None only to note them.
        notes: where what is brought is noted.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have Dynamo run what it has compiled: under other modes it runs the code as it was."""
        return True

    def __init__(self, device: torch.device, lifted: Lifted | None, notes: list[object]) -> None:
        super().__init__()
        self._kind = device.type
        self._lifted = lifted
        self._notes = notes
        self.found: list[Tensor] = []
        """Copies of what was brought, if there is no `lifted`."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; see `Watching`."""
        name = operator(func).base
        with unwatched(), no_functions():
            host = brought(name, args, kwargs, self._kind)
            self._notes += map(bits_of, host)
            if self._lifted is None:
                self.found += [t.detach().clone() for t in host]
            elif host:
                args = self._lifted.swapped(name, args, host)
        return func(*args, **kwargs)

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions."""
        return func(*args, **kwargs)


_noting = threading.local()


@contextmanager
def noting_host_inputs(notes: list[object]) -> Generator[list[Tensor]]:
    """Return a context in which this thread's `note_host_inputs` adds to `notes`; it gives the list
    of the tensors that the compiled code writes to."""
    written: list[Tensor] = []
    try:
        _noting.notes, _noting.written = notes, written
        yield written
    finally:
        _noting.notes = _noting.written = None


def note_host_inputs(args: Iterable[object], written: Iterable[Tensor]) -> None:
    """Note the host values among the arguments of a compiled graph: it gets the same ones in two
    runs of a call, or a replay would freeze what varies; and the arguments that it writes to."""
    notes: list[object] | None = getattr(_noting, "notes", None)
    if notes is not None:
        _noting.written += written
        with unwatched(), no_functions():
            notes += map(_noted, args)


def _noted(value: object) -> object:
    if not isinstance(value, Tensor):
        return type(value), repr(value) if is_plain(value) else None
    on_host = value.device.type == "cpu" and has_strides(value)
    return bits_of(value) if on_host and value.nbytes <= MOST_STORED_BYTES else None


def places(arguments: Sequence[Tensor], walk: StateWalk) -> list[tuple[object, Tensor]]:
    """Return each tensor of a call, its arguments and the callable's state, with its place."""
    return [*enumerate(arguments), *((slot.name, t) for slot, t in walk.tensors())]


class Kind(NamedTuple):
    """The facts of a tensor that code may branch on."""

    cls: type[Tensor]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    sizes: tuple[torch.Size, tuple[int, ...]] | None
    """With the strides."""

    @staticmethod
    def of(t: Tensor) -> Kind:
        """Return a tensor's kind; a lazy parameter has no sizes yet."""
        sizes = None if is_lazy(t) or not has_strides(t) else (t.shape, t.stride())
        return Kind(type(t), t.dtype, t.device.type, t.requires_grad, sizes)


@dataclass(slots=True)
class CompiledAccesses:
    """The reads and writes of one run.

    Args:
        external: storage -> tensors over it that were read by address, except arguments.
        wrote: storage -> a tensor over it, for memory that existed before and was written.
        version_bumped: the storages whose version counters the writes advanced.
        draws: draws from the host's default generator.
        host: the state on the host that the host read, or that was brought to the device, each
            with its places.
        read: the numbers of the arguments on the host that the host read.
        brought: the host tensors that were brought to the device, the same in each call.
        host_inputs: the host values that the compiled code got in its last run; None before it.
        refused: the error for what no replay repeats.
        suspected: the error for what a capture refuses if compiled code does it too.
        places: storage -> the places of the tensors over it.
        began: the contents of the slots before the run; of a tensor, its kind.
    """

    external: Mapping[int, list[Tensor]]
    wrote: Mapping[int, Tensor]
    version_bumped: set[int]
    draws: Sequence[Callable[[], object]]
    host: Sequence[tuple[Sequence[object], Tensor]]
    read: Sequence[int]
    brought: Sequence[Tensor]
    refused: CaptureError | None
    suspected: CaptureError | None
    places: Mapping[int, Sequence[object]]
    began: dict[object, object]
    host_inputs: list[object] | None = None

    @contextmanager
    def noting(
        self, driver: Driver, device: torch.device, now: dict[object, Tensor]
    ) -> Generator[None]:
        """Return a context for a run of the compiled code that the capture is compared with.

        Code that asks whether it is compiled may write to what the watched run did not; a capture
        would not know of it, and could not undo it. That is refused. And where the watched run
        left a version counter as it was, as BatchNorm those of its statistics, so does this one:
        another forward may wait for its backward.

        Args:
            now: place -> tensor of the call. It is emptied: the run may replace them.
        """
        notes: list[object] = []
        bringing = Bringing(device, None, notes)
        standing: dict[int, set[object]] = {}
        for place, t in now.items():
            if t.device.type == device.type and has_strides(t):
                standing.setdefault(driver.storage(t), set()).add(place)
        unmoved = self.wrote.keys() - self.version_bumped
        silent = [t for storage in unmoved for t in self._now(storage, (), now)]
        now.clear()
        known = {place for storage in self.wrote for place in self.places.get(storage, ())}
        versions = torch.autograd._unsafe_preserve_version_counter(tuple(silent))
        bring = bringing if self.brought else nullcontext()
        with noting_host_inputs(notes) as written, bring, versions:
            yield
        for t in written:
            places = standing.get(driver.storage(t)) if has_strides(t) else None
            if places and known.isdisjoint(places):
                self.refused = self.refused or _written_if_compiled(places)
        self.host_inputs, self.brought = notes, bringing.found or self.brought

    def holds_for(self, now: StateWalk) -> bool:
        """Return whether a run from this state reads and writes the same. From another (a flag that
        the first call sets, a cache that it makes, a gradient that is None) it may take another
        way. Of a tensor that was not there, or that no run had been seen to read, nothing is known;
        nor of what an object has got since."""
        began, contents = self.began, contents_of(now)
        if not (now.runs_backward() or now.asks("grad")):
            began, contents = _without_gradients(began), _without_gradients(contents)
        if any(contents.get(slot, value) != value for slot, value in began.items()):
            return False
        holders = {slot[0] for slot in began if isinstance(slot, tuple)}
        new = [slot for slot in contents.keys() - began.keys() if isinstance(slot, tuple)]
        known = not any(slot[0] in holders or isinstance(contents[slot], Kind) for slot in new)
        return known and _gradients(began) <= contents.keys()

    def note_contents(self, after: StateWalk) -> None:
        """Note the contents of what only this run was seen to read, as they are after it. Of its
        tensors the places are not known."""
        found = contents_of(after).items()
        self.began = {s: value for s, value in found if not isinstance(value, Kind)} | self.began

    def refuse_unseen(self) -> None:
        """Refuse memory without a place that the run read and that is gone by now: it was made
        where no operation is seen, in another thread, say. A replay would not make it."""
        loose = [tensors for s, tensors in self.external.items() if s not in self.places]
        memory = [StorageWeakRef(local(tensors[0]).untyped_storage()) for tensors in loose]
        for tensors, ref in zip(loose, memory, strict=True):
            known = [weakref.ref(t) for t in tensors]
            tensors.clear()
            if not ref.expired():
                tensors += [t for t in (r() for r in known) if t is not None] or [_bytes_of(ref)]
        if any(ref.expired() for ref in memory):
            self.refused = self.refused or of_made_memory().refusal()

    @staticmethod
    def of(
        observer: Observer,
        places: Iterable[tuple[object, Tensor]],
        began: dict[object, object],
    ) -> CompiledAccesses:
        """Return the accesses of a run that was watched; the places are those before it."""
        by_storage: dict[int, list[object]] = {}
        on_host: dict[int, list[object]] = {}
        for place, t in places:
            storage = observer.storage_of(t)
            if storage is not None:
                by_storage.setdefault(storage, []).append(place)
            elif has_strides(t):
                on_host.setdefault(t.untyped_storage()._cdata, []).append(place)
        state = observer.host.read_state()
        return CompiledAccesses(
            observer.external,
            observer.written,
            observer.version_bumped,
            observer.admission.draws,
            [(on_host.get(t.untyped_storage()._cdata, ()), t) for t in state],
            list(observer.host.read_arguments()),
            observer.brought,
            observer.refused,
            observer.suspected,
            by_storage,
            began,
        )

    def give(
        self,
        observer: Observer,
        now: Mapping[object, Tensor],
        originals: Sequence[Tensor],
        statics: Sequence[Tensor],
    ) -> None:
        """Have an observer take these accesses for those of its own run.

        Args:
            now: place -> tensor of its run, for the places of the run that was watched.
            originals, statics: the inputs of the recording, and the tensor the callable got for
                each.
        """
        observer.admission.draws += self.draws
        for known_places, known in self.host:
            for t in [now[place] for place in known_places if place in now] or [known]:
                observer.host.read(t)
        for index in self.read:
            observer.host.read(statics[index])
        stands_for: dict[int | None, list[Tensor]] = {}
        for t, static in zip(originals, statics, strict=True):
            storage = observer.storage_of(t)
            if storage is not None and static is t:
                observer.external.setdefault(storage, []).append(t)  # read where it is
            elif storage is not None:
                stands_for.setdefault(storage, []).append(static)
        for known, tensors in self.external.items():
            for t in self._now(known, tensors, now):
                storage = observer.storage_of(t)
                if storage is not None and storage not in stands_for:
                    held = observer.external.setdefault(storage, [])
                    held += [] if any(t is other for other in held) else [t]
        for known, wrote in self.wrote.items():
            for t in self._now(known, [wrote], now):
                for memory in stands_for.get(observer.storage_of(t), [t]):
                    storage = observer.storage_of(memory)
                    assert storage is not None
                    observer.written.setdefault(storage, memory)
                    if known in self.version_bumped:
                        observer.version_bumped.add(storage)

    def _now(
        self, storage: int, held: Sequence[Tensor], now: Mapping[object, Tensor]
    ) -> Sequence[Tensor]:
        """Return the tensors now in the places of these; the same ones if they have no place."""
        return [now[place] for place in self.places.get(storage, ()) if place in now] or held


def contents_of(walk: StateWalk) -> dict[object, object]:
    """Return the contents of the slots of a state, and the lengths of its containers and of its
    objects' dicts of attributes, as `CompiledAccesses.began` has them."""
    found: dict[object, object] = {
        key: Kind.of(value) if isinstance(value, Tensor) else content_of(value)
        for key, (_, value) in walk.held.items()
    }
    lengths = {id(inside): length for read, inside, length in walk.facts if read is len}
    return found | lengths | {key: count for key, (_, _, count) in walk.containers.items()}


def _gradients(contents: Mapping[object, object]) -> set[object]:
    return {slot for slot in contents if isinstance(slot, tuple) and slot[1] is gradient_of}


def _without_gradients(contents: Mapping[object, object]) -> dict[object, object]:
    gradients = _gradients(contents)
    return {slot: value for slot, value in contents.items() if slot not in gradients}


def _written_if_compiled(places: Iterable[object]) -> CaptureError:
    """Return the refusal of code that writes to a tensor only where it is compiled."""
    place = min(map(str, places))
    what = f"argument {place}" if place.isdigit() else f"`{place}`"
    return CaptureError(
        "OL109",
        f"{what} is written by the compiled code, and was not when the callable ran as it is",
        why="it takes another way where it is compiled, and a capture could not undo the write",
        fix="let it take one way, whatever `torch.compiler.is_compiling()` says; of an optimizer: "
        "SGD(..., foreach=True)",
    )


def _bytes_of(memory: StorageWeakRef) -> Tensor:
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
