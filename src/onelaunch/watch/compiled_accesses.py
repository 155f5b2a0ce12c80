"""With `compile=True`: the reads and writes of a watched warm-up, for a capture of the compiled
code, whose operations nobody sees.

Tensors are identified by their places: the number of an argument, the name of a slot. Each call has
new arguments, and slots may hold other tensors by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from onelaunch.call.spec import has_strides, lies_on
from onelaunch.call.tree import is_plain
from onelaunch.call.wrappers import local
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import Operator
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.protocol import Capture, Driver, Provenance
from onelaunch.errors import CaptureError
from onelaunch.identity import id
from onelaunch.state.host_values import MOST_STORED_BYTES
from onelaunch.state.slots import description, gradient_of
from onelaunch.state.walk import MARKS_OF_DYNAMO, StateWalk, is_mark_of_dynamo
from onelaunch.watch.contents_before import content_of
from onelaunch.watch.device_constants import DeviceConstants, bits_of, copied_to_device
from onelaunch.watch.difference import of_handed_on, of_made_memory
from onelaunch.watch.observer import Observer, OnRefusal
from onelaunch.watch.operations import WatchingCompiled


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
        on_refusal=OnRefusal.KEEP,
        constants=DeviceConstants(device),
        numbers=[t for t in host.values() if not t.dim()],
    )
    observer.host.note_arguments({i: t for i, t in host.items() if t.dim()})
    return observer


class HostInputs(WatchingCompiled):
    """The host values that compiled code gets in a run. As a mode, it finds those that the code
    copies to the device: Inductor's copies, and its indices on the host, are operations of torch's.

    Args:
        constants: copies that the operations get instead; None only to note the host values.

    Attributes:
        notes: the bits of each host value.
        copied: the host values that were copied, if there is no `constants`.
        written: the tensors that the code writes to.
    """

    def __init__(self, device: torch.device, constants: DeviceConstants | None) -> None:
        super().__init__()
        self._kind = device.type
        self._constants = constants
        self.notes: list[object] = []
        self.copied: list[Tensor] = []
        self.written: list[Tensor] = []

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unwatched(), no_functions():
            host = copied_to_device(op.base, args, kwargs, self._kind)
            self.notes += map(bits_of, host)
            if self._constants is None:
                self.copied += [t.detach().clone() for t in host]
            elif host:
                args = self._constants.swapped(op.base, args, host)
        return op.func(*args, **kwargs)

    @contextmanager
    def noting(self, copies: bool) -> Generator[Self]:
        """Note the host values of a run in this thread. `copies`: whether the code copies any."""
        _noting.here = self
        try:
            with self if copies else nullcontext():
                yield self
        finally:
            _noting.here = None


_noting = threading.local()


def note_host_inputs(args: Iterable[object], written: Iterable[Tensor]) -> None:
    """Note the host values among the arguments of a compiled graph, and the arguments that it
    writes to. A replay would freeze a host value that differs in two runs of a call."""
    inputs: HostInputs | None = getattr(_noting, "here", None)
    if inputs is not None:
        inputs.written += written
        with unwatched(), no_functions():
            inputs.notes += map(_noted, args)


def _noted(value: object) -> object:
    if not isinstance(value, Tensor):
        return type(value), repr(value) if is_plain(value) else None
    on_host = value.device.type == "cpu" and has_strides(value)
    return bits_of(value) if on_host and value.nbytes <= MOST_STORED_BYTES else None


def places(arguments: Sequence[Tensor], walk: StateWalk) -> list[tuple[object, Tensor]]:
    """Return each tensor of a call, its arguments and the callable's state, with its place."""
    return [*enumerate(arguments), *((slot.name, t) for slot, t in walk.tensors())]


@dataclass(slots=True, eq=False)
class CompiledAccesses:
    """The reads and writes of one run.

    Args:
        external, written, version_bumped: see `DeviceMemory`; without arguments.
        draws: draws from the host's default generator.
        host: (places, host tensor) for the state on the host whose values the host read.
        read: the numbers of the arguments on the host that the host read.
        copied_to_device: the host tensors that were copied to the device, the same in each call.
        refused: the error of an operation that no replay repeats.
        suspected: the error of an operation that compiled code may have left out.
        places: storage -> the places of the tensors over it.
        began: slot -> its content before the run; a tensor's is a text, its `description`.
        host_inputs: the host values that the compiled code got in its last run; None before it.
    """

    external: Mapping[int, list[Tensor]]
    written: Mapping[int, Tensor]
    version_bumped: set[int]
    draws: Sequence[Callable[[], object]]
    host: Sequence[tuple[Sequence[object], Tensor]]
    read: Sequence[int]
    copied_to_device: Sequence[Tensor]
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

        Code that asks whether it is compiled may write to tensors that the watched run left alone.
        That is refused, as a capture could not undo the write. Version counters that the watched
        run did not advance (BatchNorm's statistics) stay: another forward may wait for its
        backward.

        Args:
            now: place -> tensor of the call. It is emptied, as the run may replace tensors.
        """
        standing: dict[int, set[object]] = {}
        for place, t in now.items():
            if t.device.type == device.type and has_strides(t):
                standing.setdefault(driver.storage(t), set()).add(place)
        unmoved = self.written.keys() - self.version_bumped
        silent = [t for storage in unmoved for t in self._now(storage, now)]
        now.clear()
        expected = {place for storage in self.written for place in self.places.get(storage, ())}
        versions = torch.autograd._unsafe_preserve_version_counter(tuple(silent))
        with HostInputs(device, None).noting(bool(self.copied_to_device)) as inputs, versions:
            yield
        for t in inputs.written:
            places = standing.get(driver.storage(t)) if has_strides(t) else None
            if places and expected.isdisjoint(places):
                self.refused = self.refused or _written_if_compiled(places)
        self.host_inputs = inputs.notes
        self.copied_to_device = inputs.copied or self.copied_to_device

    def holds_for(self, now: StateWalk) -> bool:
        """Return whether a run from this state reads and writes the same.

        The code may branch on a flag that the first call sets, on a cache that it makes, on a
        gradient that is None. Nothing is known of a tensor that no run was seen to read, nor of
        an attribute that an object got since.
        """
        began, contents = self.began, contents_of(now)
        both = {**began, **contents}
        gradients = {s for s in both if isinstance(s, tuple) and s[1] is gradient_of}
        if not (now.runs_backward() or now.asks("grad")):
            began = {slot: value for slot, value in began.items() if slot not in gradients}
            contents = {slot: value for slot, value in contents.items() if slot not in gradients}
        if any(contents.get(slot, value) != value for slot, value in began.items()):
            return False
        holders = {slot[0] for slot in began if isinstance(slot, tuple)}
        new = [slot for slot in contents.keys() - began.keys() if isinstance(slot, tuple)]
        alike = not any(slot[0] in holders or isinstance(contents[slot], str) for slot in new)
        return alike and gradients.isdisjoint(began.keys() - contents.keys())

    def note_contents(self, after: StateWalk) -> None:
        """Note the contents of slots that only this run was seen to read, as they are after it.
        Tensors are left out, as their places before the run are not known."""
        contents = contents_of(after).items()
        self.began = {s: value for s, value in contents if not isinstance(value, str)} | self.began

    def refuse_unseen(self) -> None:
        """Refuse memory that the run read, that has no place and that is gone by now. A replay
        would not make it: another thread did, for example."""
        loose = [tensors for s, tensors in self.external.items() if s not in self.places]
        memory = [StorageWeakRef(local(tensors[0]).untyped_storage()) for tensors in loose]
        for tensors, ref in zip(loose, memory, strict=True):
            refs = [weakref.ref(t) for t in tensors]
            tensors.clear()
            if not ref.expired():
                tensors += [t for t in (r() for r in refs) if t is not None] or [_bytes_of(ref)]
        if any(ref.expired() for ref in memory):
            self.refused = self.refused or of_made_memory().refusal()

    @staticmethod
    def of(
        observer: Observer, places: Iterable[tuple[object, Tensor]], began: dict[object, object]
    ) -> CompiledAccesses:
        """Return the accesses of a watched run, with the places before it."""
        by_storage: dict[int, list[object]] = {}
        on_host: dict[int, list[object]] = {}
        for place, t in places:
            storage = observer.memory.storage_of(t)
            if storage is not None:
                by_storage.setdefault(storage, []).append(place)
            elif has_strides(t):
                on_host.setdefault(t.untyped_storage()._cdata, []).append(place)
        state = observer.host.read_state()
        return CompiledAccesses(
            observer.memory.external,
            observer.memory.written,
            observer.memory.version_bumped,
            observer.admission.draws,
            [(on_host.get(t.untyped_storage()._cdata, ()), t) for t in state],
            list(observer.host.read_arguments()),
            observer.copied_to_device,
            observer.refused,
            observer.tentative_refusal,
            by_storage,
            began,
        )

    def note_in(
        self,
        observer: Observer,
        now: Mapping[object, Tensor],
        originals: Sequence[Tensor],
        statics: Sequence[Tensor],
    ) -> None:
        """Note the accesses in the observer of another run, by the tensors now in the same places.

        Args:
            now: place -> tensor of that run, for the places of the watched run.
            originals, statics: the inputs of the recording, and the callable's tensor for each.
        """
        memory = observer.memory
        observer.admission.draws += self.draws
        for known, t in self.host:
            for host in _in_places(known, now) or [t]:
                observer.host.read(host)
        for index in self.read:
            observer.host.read(statics[index])
        # storage of an input -> the callable's tensors in its place. An input that is read where it
        # lies has none.
        stand_ins: dict[int | None, list[Tensor]] = {}
        for t, static in zip(originals, statics, strict=True):
            storage = memory.storage_of(t)
            if storage is not None:
                given = memory.external if static is t else stand_ins
                given.setdefault(storage, []).append(static)
        for known, tensors in self.external.items():
            for t in self._now(known, now) or tensors:
                storage = memory.storage_of(t)
                if storage is not None and storage not in stand_ins:
                    held = memory.external.setdefault(storage, [])
                    held += [] if any(t is other for other in held) else [t]
        for known, tensor in self.written.items():
            for t in self._now(known, now) or [tensor]:
                for target in stand_ins.get(memory.storage_of(t), [t]):
                    storage = memory.storage_of(target)
                    assert storage is not None
                    memory.written.setdefault(storage, target)
                    if known in self.version_bumped:
                        memory.version_bumped.add(storage)

    def _now(self, storage: int, now: Mapping[object, Tensor]) -> list[Tensor]:
        return _in_places(self.places.get(storage, ()), now)


def refuse_handed_on(
    driver: Driver,
    device: torch.device,
    capture: Capture,
    tensors: Iterable[Tensor],
    given: Iterable[Tensor],
) -> None:
    """Refuse what compiled code returned or stored, if it is neither known nor of the recording.

    Raises:
        CaptureError: OL117. Nobody saw where it comes from: an iterator, say, or another thread.
    """
    if device.type == "cpu":
        return  # plain memory of the host has no history
    storages = {driver.storage(t) for t in given if lies_on(t, device)}
    handed = (t for t in tensors if lies_on(t, device) and t.numel())
    for t in (t for t in handed if driver.storage(t) not in storages):
        if capture.provenance(local(t).untyped_storage()) is not Provenance.CAPTURE:
            raise of_handed_on().refusal()


def _in_places(places: Iterable[object], now: Mapping[object, Tensor]) -> list[Tensor]:
    return [now[place] for place in places if place in now]


def contents_of(walk: StateWalk) -> dict[object, object]:
    """Return the contents of a state's slots, and the lengths of its containers and of its objects'
    dicts of attributes, for `CompiledAccesses.began`. Dynamo's own marks are left out."""
    contents: dict[object, object] = {
        key: _described(value) if isinstance(value, Tensor) else content_of(value)
        for key, (_, value) in walk.all_slots.items()
        if not is_mark_of_dynamo(key[1])
    }
    lengths = {
        id(inside): length - sum(mark in inside for mark in MARKS_OF_DYNAMO)
        for inside, length in walk.sizes
    }
    return contents | lengths | {key: count for key, (_, _, count) in walk.containers.items()}


def _described(t: Tensor) -> str:
    """Return a text with the facts of a tensor that code may branch on."""
    if has_strides(t) and not is_lazy(t):
        return str(description(t))
    return f"{type(t)} {t.dtype} {t.device} {t.requires_grad}"


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
