"""Objects that a request makes anew and passes to the callable, and their recordings.

A decoder is called with a cache that each request makes anew. A recording reads the memory of its
cache by address. When a cache of the same structure comes, the two change places in memory, each
with its contents. The recording goes on with the new cache, without a capture or copies. Tensors
keep their identity and change their addresses, so nothing else may refer to that memory.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.containers import is_ordinary, objects_in
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Constant, Container, Same, Tree, call_constants, mapped
from onelaunch.capture.callee import Callee
from onelaunch.capture.io_plan import Held, HeldView, HostConstant, Memory
from onelaunch.capture.recording import CapturedCall, Writes
from onelaunch.driver.protocol import Travel
from onelaunch.replay.call_path import CallPath, build_call
from onelaunch.runtime.candidate import Call
from onelaunch.runtime.table import TableEntry
from onelaunch.state.counterparts import Counterparts, Unlike


class Objects:
    """A set of objects, by identity, that keeps none of them alive. Torch's `WeakIdKeyDictionary`
    would ask them for attributes."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[object]] = {}

    def add(self, value: object) -> None:
        key = id(value)
        self._refs[key] = weakref.ref(value, lambda _: self._refs.pop(key, None))

    def __contains__(self, value: object) -> bool:
        ref = self._refs.get(id(value))
        return ref is not None and ref() is value

    def __iter__(self) -> Iterator[object]:
        objects = [ref() for ref in list(self._refs.values())]
        return (value for value in objects if value is not None)


class Requests:
    """The requests that a callable has served, each with objects of its own. `displaced`: objects
    whose recordings another request has taken over: they get new recordings. Two requests that
    alternate would otherwise change places at each call."""

    def __init__(self) -> None:
        self.displaced = Objects()
        self._served: set[type] = set()  # classes of objects that took recordings over
        self._parts = Objects()  # the objects that requests brought, and the objects inside

    def brings_new_object(self, objects: Sequence[object]) -> bool:
        """Return whether this is the first call with objects of classes that took recordings over.
        If no recording fits, as for a prompt before its tokens, it is worth no warm-up: the next
        request brings another object."""
        return all(type(value) in self._served for value in objects) and not any(
            value in self._parts for value in objects
        )

    def begin(self, objects: Sequence[object], callee: Callee) -> None:
        """Note a call with these objects, and forget the reads of other requests' objects."""
        parts = objects_in(objects)
        mine = {id(part) for part in parts}
        callee.forget(part for part in self._parts if id(part) not in mine)
        for part in parts:
            self._parts.add(part)

    def displace(self, objects: Sequence[object]) -> None:
        """Note objects whose recordings others have taken over."""
        for value in objects:
            self.displaced.add(value)
            self._served.add(type(value))


def requests_in(tree: Tree) -> list[object]:
    """Return the objects among a call's arguments that another request could replace."""
    return [constant.value for _, constant in call_constants(tree) if is_request(constant)]


def is_request(constant: Constant) -> bool:
    """Return whether a constant is an object that another request could replace."""
    value = constant.value
    return constant.by_identity and is_ordinary(type(value)) and hasattr(type(value), "__weakref__")


Pairs = list[tuple[object, object]]
Storage = Callable[[Tensor], int]
_C: Any = torch._C


def memory_uses(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return id of a tensor -> number of references to its memory."""
    return {id(t): _uses(t) for t in tensors if t.layout is torch.strided}


def shares(
    before: Mapping[int, int], tensors: Sequence[Tensor], entries: Sequence[TableEntry]
) -> dict[int, int]:
    """Return id of a tensor -> number of references of a new recording to its memory. Memory is
    left out if anything but its tensor and recordings refers to it. `before`: the uses of the
    memory before the capture."""
    now = memory_uses(tensors)
    return {
        id(t): now[id(t)] - before[id(t)]
        for t in tensors
        if id(t) in before and before[id(t)] == _own_uses(t, entries)
    }


def locked(call: CallPath, lock: RLock) -> CallPath:
    """Return a call path that holds a lock from its checks to its launch. Meanwhile no other thread
    moves the memory. 0.1 us."""

    def call_locked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lock:
            return call(args, kwargs)

    return call_locked


def _uses(t: Tensor) -> int:
    storage = t.untyped_storage()  # one object for all who hold it, which torch counts as one
    return _C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def _own_uses(t: Tensor, entries: Sequence[TableEntry]) -> int:
    """Return the uses of a tensor's memory by the tensor itself and by recordings."""
    return _alone(t.device) + sum(e.shares.get(id(t), 0) for e in entries)


@functools.cache
def _alone(device: torch.device) -> int:
    """Return the uses of memory under a single tensor."""
    return _uses(torch.empty(1, device=device))


class Takeover(NamedTuple):
    """The recordings that a new request takes over. `successors`: id of a recording in the table ->
    the recording that takes its place."""

    successors: dict[int, TableEntry]
    outdated: list[TableEntry]  # recordings that fit no call any more
    objects: list[object]  # the objects whose place was taken; none if nothing was taken over


def take_over(
    call: Call, entries: Sequence[TableEntry], spec: CallSpec, displaced: Objects, name: str
) -> Takeover:
    """Give recordings of other requests to a call of a new signature. The new objects take the
    places of the former ones in the conditions of each recording. A recording fits the calls that
    pass its whole guard. It stays if anything in its guard is gone for good. `entries`: the
    recordings; the last is the oldest. `displaced`: objects that take no recordings over."""
    outdated: list[TableEntry] = []
    if any(value in displaced for value in requests_in(spec.tree)):
        return Takeover({}, outdated, [])
    tried: list[CallSpec] = []
    for entry in reversed(entries):
        if entry.spec in tried:
            continue
        tried.append(entry.spec)
        pairs = _pairs(entry.spec, spec)
        group = [e for e in entries if e.spec == entry.spec]
        if not pairs or not all(_is_transferable(e.captured) for e in group):
            continue
        gone = [e for e in group if e.captured.guard.moved() is not None]
        outdated += gone
        group = [e for e in group if e not in gone]
        try:
            parts = Counterparts(pairs)
        except Unlike:
            continue
        storage = call.driver.storage
        homes = {storage(old): new for old, new in parts.tensors()}
        made = [(e, _transferred(e.captured, parts)) for e in group]
        made = [(e, new) for e, new in made if new.guard.moved_elsewhere() is None]
        places = _exchanged(group, entries, parts)
        if not made or places is None:
            continue
        with ExitStack() as locks:
            for e in group:
                locks.enter_context(e.lock)
            # Launches on other streams may still use this memory.
            call.driver.synchronize(call.device)
            exchange(places)
        successors: dict[int, TableEntry] = {}
        for old, captured in made:
            captured.writes = _transferred_writes(captured.writes, parts, homes, storage)
            path = locked(build_call(captured, spec, name), old.lock)
            own = {id(new): old.shares[id(t)] for t, new in parts.tensors() if id(t) in old.shares}
            figures = replace(old.figures_at_capture, spec=spec)
            successors[id(old)] = replace(
                old, call=path, spec=spec, captured=captured, figures_at_capture=figures, shares=own
            )
        outdated += [e for e in group if id(e) not in successors]
        return Takeover(successors, outdated, [old for old, _ in pairs])
    return Takeover({}, outdated, [])


def _pairs(old: CallSpec, new: CallSpec) -> Pairs | None:
    """Return the pairs of objects that alone distinguish two signatures; None if more does."""
    same = (old.tensors, old.overlaps, old.modes, old.device)
    if same != (new.tensors, new.overlaps, new.modes, new.device):
        return None
    pairs: Pairs = []
    return pairs if _alike(old.tree, new.tree, pairs) else None


def _alike(old: Tree, new: Tree, pairs: Pairs) -> bool:
    if isinstance(old, Container) and isinstance(new, Container):
        return (
            (old.kind, old.keys, len(old.children)) == (new.kind, new.keys, len(new.children))
        ) and all(_alike(a, b, pairs) for a, b in zip(old.children, new.children, strict=True))
    if old == new:
        return True
    if not (isinstance(old, Constant) and isinstance(new, Constant)):
        return False
    if not (is_request(old) and is_request(new)):
        return False
    pairs.append((old.value, new.value))
    return True


def _exchanged(
    group: Sequence[TableEntry], entries: Sequence[TableEntry], parts: Counterparts
) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors that change places in memory; None if something else refers to it."""
    address = {id(t): at for e in group for t, at in e.captured.guard.places()}
    pairs: list[tuple[Tensor, Tensor]] = []
    for old, new in parts.tensors():
        at = address.get(id(old))
        if at is None or new.data_ptr() == at:
            continue
        if any(id(old) not in e.shares for e in group):
            return None
        if old.data_ptr() != at or old.requires_grad or not (old.is_leaf and new.is_leaf):
            return None
        if _uses(old) != _own_uses(old, entries) or _uses(new) != _alone(new.device):
            return None
        pairs.append((old, new))
    return pairs


def exchange(places: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Have tensors change places in memory, each with its contents. The first of each pair has its
    contents at any time: another thread may be reading it."""
    for is_inference, group in groupby(places, key=lambda pair: pair[0].is_inference()):
        with torch.inference_mode(is_inference), torch.no_grad():
            for old, new in group:
                here, there = old.detach(), new.detach()
                contents = new.clone()
                there.copy_(here)
                old.data = there
                here.copy_(contents)
                new.data = here


# The same recording over other objects.


def _is_transferable(captured: CapturedCall) -> bool:
    """Return whether a recording relies on no object in a way that cannot be transferred."""
    return (
        captured.pair is None
        and captured.bucket is None
        and not captured.optimizers
        and not captured.statics
        and not captured.kept_gradients
        and not captured.values
        and not captured.followed.names()
        and Travel.ADDRESS not in captured.inputs.travels
        and captured.guard.is_transferable
    )


def _transferred(captured: CapturedCall, parts: Counterparts) -> CapturedCall:
    """Return the same recording over other objects, once its tensors have changed places."""
    outputs = [
        replace(output, memory=_transferred_memory(output.memory, parts))
        for output in captured.outputs.tensors
    ]
    return replace(
        captured,
        state_input_slots=[parts.slot(slot) for slot in captured.state_input_slots],
        outputs=replace(captured.outputs, tensors=outputs),
        tree=_transferred_tree(captured.tree, parts),
        state=[
            s._replace(slot=parts.slot(s.slot), tree=_transferred_tree(s.tree, parts))
            for s in captured.state
        ],
        guard=captured.guard.transferred(parts),
        expected=captured.expected and captured.expected.transferred(parts),
        changed_numbers=tuple(map(parts.slot, captured.changed_numbers)),
        followed=captured.followed.at(parts.slot),
        facts=replace(captured.facts, untraced=[parts.of(t) for t in captured.facts.untraced]),
    )


def _transferred_writes(
    writes: Writes, parts: Counterparts, homes: Mapping[int, Tensor], storage: Storage
) -> Writes:
    """Return the writes of the same recording. A view of a tensor becomes one of its counterpart:
    the recording keeps as many references to the memory. `homes`: the storage of a tensor, from
    before the exchange -> the tensor's counterpart."""
    tensors: dict[int, Tensor] = {}
    for t in writes.tensors:
        new = parts.of(t)
        home = homes.get(storage(t)) if new is t else None
        tensors[id(t)] = new if home is None else home.detach()
    bumped = [tensors[id(t)] for t in writes.bumped]
    return replace(writes, tensors=list(tensors.values()), bumped=bumped)


def _transferred_memory(memory: Memory, parts: Counterparts) -> Memory:
    match memory:
        case Held(tensor) | HostConstant(tensor) | HeldView(tensor, _):
            return memory._replace(tensor=parts.of(tensor))
        case _:
            return memory


def _transferred_tree(tree: Tree, parts: Counterparts) -> Tree:
    def transferred(part: Tree) -> Tree:
        if isinstance(part, Same):
            return part._replace(value=parts.of(part.value))
        if isinstance(part, Constant) and part.by_identity:
            return Constant(parts.of(part.value))
        return part

    return mapped(tree, transferred)
