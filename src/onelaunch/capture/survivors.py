"""Tensors of a run that something still holds afterwards, where no replay would renew them."""

from __future__ import annotations

import functools
import gc
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, cast

from torch import Tensor
from torch.autograd.function import FunctionCtx

from onelaunch.autograd.graph_walk import CapturedGraph
from onelaunch.call.spec import TensorSpec
from onelaunch.call.tree import unique
from onelaunch.call.wrappers import is_memory, local
from onelaunch.capture.checks import WRITE_IN_PLACE
from onelaunch.capture.io_plan import written_groups
from onelaunch.capture.number import Number
from onelaunch.capture.numbers import NumberStandIns
from onelaunch.capture.recording import CapturedCall
from onelaunch.capture.run import CaptureRun
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads, is_of_globals
from onelaunch.gc_pause import FROZEN_AT_START
from onelaunch.identity import id
from onelaunch.state.iterators import KINDS, Standing, advanced
from onelaunch.state.slots import Slot

_SAVED = "ctx.save_for_backward(y) and `ctx.saved_tensors`, for an attribute, `ctx.y = y`"


def refuse_unreplayable(run: CaptureRun) -> None:
    """Refuse a capture that went well, but whose replays would do wrong, in three cases. A tensor
    of the state was given other memory. Compiled code writes to an argument that shares memory and
    requires grad. Something outside the state keeps a tensor of the run: a hook's list, an
    iterator. Each replay would overwrite that tensor's memory, and none would renew it."""
    observer = run.observer
    moved = run.snapshot.relocated()
    if moved is not None:
        t, reshaped = moved
        if not reshaped:
            what = f"a tensor of the callable's state, {TensorSpec.of(t)}, is given other memory"
            raise CaptureError("OL105", what, fix=WRITE_IN_PLACE)
        what = f"a tensor of the callable's state became {list(t.shape)}"
        raise CaptureError("OL107", what, where=observer.memory.reshaped_at(t))
    if run.job.forward is not None and run.job.callee.in_place and _writes_shared(run):
        what = "arguments of compiled code share memory and require grad, and it writes to one"
        raise CaptureError("OL113", what)
    dropped = _dropped(run)
    lasting = [part for t in run.effects.kept_gradients for part in (t, local(t))]
    expected = [*run.returned.tensors, *lasting, *run.plan.statics, *dropped]
    forward = run.job.forward
    # Views keep the tensor that they were made from. cuDNN makes another tensor over the weights'
    # storage, which the observer keeps.
    ids = {id(t) for t in expected} | {id(t._base) for t in expected} | observer.memory.own
    stray = _survivor(observer.memory.made_tensors, ids, forward.holders if forward else ())
    if stray is None:
        return
    spec, where = TensorSpec.of(stray), observer.memory.made_at(stray)
    if _on_a_context(stray):
        what = f"the context of an autograd.Function keeps a tensor made in the call, {spec}"
        raise CaptureError("OL105", what, where=where, fix=_SAVED)
    what = f"something keeps a tensor made in the call, {spec}"
    raise CaptureError("OL105", what, where=where)


@dataclass(slots=True, eq=False)
class Undone:
    """Runs that were undone, and what they may have left: the callable must not find it when it
    runs once more. `iterators`: those in the state, before the runs."""

    iterators: Sequence[Standing]
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)

    def note(self, run: CaptureRun) -> None:
        """Note the tensors of a run. Their values were never computed, or are overwritten."""
        given = set(map(id, run.plan.tensors))
        statics = [t for t in run.plan.statics if id(t) not in given]
        self.tensors += [*run.observer.memory.made_tensors, *map(weakref.ref, statics)]
        if run.job.forward is not None:
            run.job.forward.forget()

    def left(self, codes: Collection[CodeType]) -> bool:
        """Return whether something holds a tensor of the runs, or an iterator stands elsewhere.
        Clears caches of `functools`."""
        return _survivor(self.tensors, (), ()) is not None or self.drew(codes, True) is not None

    def drew(self, codes: Collection[CodeType], counts: bool = False) -> CaptureError | None:
        """Return the refusal of runs that advanced an iterator; None if they advanced none. A
        `count` often numbers calls, and matters only with `counts`."""
        return advanced((i for i in self.iterators if counts or type(i[1]) in KINDS), codes)


@dataclass(slots=True, eq=False)
class PassedOn:
    """The arguments and results of a run that lie in the recording's memory, and are not to stay,
    each with the line that made it."""

    tensors: list[tuple[weakref.ref[Tensor], str | None]]
    reads: Reads | None  # of the run

    @staticmethod
    def of(run: CaptureRun) -> PassedOn:
        memory = run.observer.memory
        stays = {id(t) for t in (*run.effects.kept_gradients, *run.returned.staying)}
        every = unique([*run.returned.tensors, *run.plan.statics])
        every = [t for t in every if t.numel() and id(t) not in stays and is_memory(t)]
        passed = [(weakref.ref(t), memory.made_at(t)) for t in every if memory.is_own(t)]
        return PassedOn(passed, run.reads)

    def refuse_kept(
        self, captured: CapturedCall, reads: Reads | None, undo: Callable[[], None]
    ) -> None:
        """Refuse (OL105) a capture after which something holds one of them: a closure, an iterator,
        an object that the callable stores. No replay puts others there. The capture has let go of
        them, and the slots that each replay writes are as before. `undo`: undoes the run."""
        place = self._kept(captured, [each for each in (self.reads, reads) if each is not None])
        if place is None:
            return
        captured.graph.reset()
        undo()
        ref, where = self.tensors[place]
        t = ref()
        what = "" if t is None else f", {TensorSpec.of(t)}"
        raise CaptureError("OL105", f"something keeps a tensor of the call{what}", where=where)

    def _kept(self, captured: CapturedCall, reads: Sequence[Reads]) -> int | None:
        """Return the place of a tensor that something holds besides the recording itself."""
        counts = _counts(captured)
        for collected in (False, True):
            alive = [ref() for ref, _ in self.tensors]
            suspects = [
                place
                for place, count in enumerate(_references(alive))
                if alive[place] is not None and count > _ALONE + counts[id(alive[place])]
            ]
            if not suspects:
                break
            if not collected:
                del alive  # what it holds may be in a cycle that nobody holds
                gc.collect()
                for each in reads:  # records of reads may keep an object of the call
                    each.sum_up()
                continue
            ours, several = _ours(captured), [alive[place] for place in suspects]
            for place, holders in zip(suspects, _holders(several), strict=True):
                others = [h for h in holders if h is not alive and id(h) not in ours]
                for holder in others:
                    if not (
                        isinstance(holder, FrameType) or _is_only_read(holder, [holders, others])
                    ):
                        return place
        return None


def _counts(captured: CapturedCall) -> Counter[int]:
    """Return id of a tensor -> the references to it that a recording with a backward has."""
    pair = captured.pair
    if pair is None:
        return Counter()
    static, saved = pair.static, [t for over in pair.uncopied.values() for t, _ in over]
    parts = [t for part in pair.components for t in part.statics]
    references = [*static.outputs, *static.inputs, *static.overwritten.statics, *parts, *saved]
    return Counter(map(id, (*references, *pair.saved.inputs.values())))


def _ours(captured: CapturedCall) -> set[int]:
    """Return the ids of a recording's objects: parts of the driver and of autograd, and containers
    in them. An object of the user's is not followed."""
    ids: set[int] = set()
    queue: list[object] = [captured.graph, captured.pair]
    while queue:
        value = queue.pop()
        kind, inside = type(value), gc.get_referents(value)
        module = kind.__module__
        if isinstance(value, FunctionType):
            module, inside = value.__module__, [value.__closure__, value.__defaults__]
        if id(value) not in ids and (kind in _CONTAINERS or module.startswith(_OURS)):
            ids.add(id(value))
            queue += inside
    if captured.pair is not None:
        ids.update(CapturedGraph(captured.pair.static.outputs).held())
    return ids


_OURS = ("onelaunch.driver", "onelaunch.testing", "onelaunch.autograd")
_CONTAINERS = (list, tuple, dict, set, frozenset, CellType)


def _is_only_read(holder: object, here: Sequence[object]) -> bool:
    """Return whether a holder is the globals of code that has run, which only records of reads and
    the lists `here` hold."""
    if type(holder) is not dict:
        return False
    for other in gc.get_referrers(holder):  # in no generator, which would be another holder
        ours = isinstance(other, FrameType) or any(map(operator.is_, here, repeat(other)))
        if not ours and not is_of_globals(other, holder):
            return False
    return True


def _writes_shared(run: CaptureRun) -> bool:
    """Return whether the callable writes to arguments that share memory and require grad."""
    plan = run.plan
    written = written_groups(run.job.driver, plan, run.observer.memory.written)
    shared = [group.members for group in written if len(group.members) > 1]
    return any(plan.specs[index].requires_grad for members in shared for index in members)


def _on_a_context(t: Tensor) -> bool:
    """Return whether an attribute of an `autograd.Function`'s `ctx` is this tensor."""
    return any(
        isinstance(owner, FunctionCtx)
        for holder in gc.get_referrers(t)
        for owner in (holder, *(gc.get_referrers(holder) if isinstance(holder, dict) else ()))
    )


def _survivor(
    refs: Sequence[weakref.ref[Tensor]], ids: Collection[int], holders: Collection[int]
) -> Tensor | None:
    """Return a tensor among `refs`, other than those of `ids`, that is still alive after the run.
    `holders`: ids of objects that may hold it."""

    def find() -> tuple[Tensor, Sequence[object]] | None:
        made = {id(t): t for t in (ref() for ref in refs) if t is not None}
        # One without elements has no memory that a replay could write over.
        alive = [t for key, t in made.items() if t.numel() and key not in ids]
        del made
        # C++ keeps what a backward reads, and the steps between a tensor and a view of it.
        several = [alive[n] for n, count in enumerate(_references(alive)) if count > _ALONE]
        known = {*holders, id(alive)}
        for t, found in zip(several, _holders(several), strict=True):
            others = [h for h in found if not isinstance(h, FrameType) and id(h) not in known]
            if others:
                return t, others
        return None

    if find() is None:
        return None
    gc.collect()  # it may be in a cycle that nobody holds
    while (found := find()) is not None:
        stray, others = found
        caches = _caches(others)
        if not caches:
            return stray
        del found, stray, others  # which hold what the caches do
        for cache in caches:
            cache.cache_clear()
    return None


def _caches(holders: Sequence[object]) -> list[functools._lru_cache_wrapper[Any]]:
    """Return the caches of `functools` that hold an object as a result, or in a key. Their contents
    can go: the cached function computes them again."""
    objects = list(holders)
    for kind in (tuple, dict):  # a key is a tuple; a cache without bounds has a dict
        inside = [holder for holder in objects if type(holder) is kind]
        owners = gc.get_referrers(*inside) if inside else ()
        # Not the lists here: `found` would hold itself, and so what it is about.
        objects += [o for o in owners if isinstance(o, (dict, functools._lru_cache_wrapper))]
    return [holder for holder in objects if isinstance(holder, functools._lru_cache_wrapper)]


def clear_caches(numbers: NumberStandIns) -> None:
    """Clear the caches of `functools` that keep a stand-in for a number after the run."""
    nodes = numbers.surviving()
    if nodes:
        objects = [holder for holders in _holders(nodes) for holder in holders]
        inside = [h for h in objects if type(h) is dict]  # the attributes of a stand-in
        owners = gc.get_referrers(*inside) if inside else ()
        stand_ins = [value for value in (*objects, *owners) if type(value) is Number]
        for cache in _caches([h for holders in _holders(stand_ins) for h in holders]):
            cache.cache_clear()


def _references(objects: Sequence[object]) -> list[int]:
    """Count the references to each object from Python. C++ holds one reference to the object of a
    tensor that C++ shares."""
    return [
        sys.getrefcount(o) - (isinstance(o, Tensor) and o._use_count() > 1)  # pyright: ignore
        for o in objects
    ]


_ALONE = _references([object()])[0]
"""The count for an object that only the list refers to."""


def _holders(objects: Sequence[object]) -> list[list[object]]:
    """Return the holders of each object, except the list; None for a holder that `gc.freeze` hides.
    The search goes through every object of the process once: 30 ms and more."""
    by_id: dict[int, list[object]] = {id(o): [] for o in objects}
    asked = tuple(objects)  # since Python 3.13 it is among those that hold them
    for holder in gc.get_referrers(*asked) if asked else ():
        if holder is not objects and holder is not asked:
            for one in {id(o) for o in gc.get_referents(holder)} & by_id.keys():
                by_id[one].append(holder)
    if gc.get_freeze_count() > FROZEN_AT_START:
        for o, count in zip(objects, _references(objects), strict=True):
            by_id[id(o)] += [None] * (count - _ALONE > len(by_id[id(o)]))
    return [by_id[id(o)] for o in objects]


def _dropped(run: CaptureRun) -> list[Tensor]:
    """Return the tensors in replaced containers that only the snapshot still holds. A GradScaler
    replaces its container of findings in each step."""
    changes, before = run.effects.changes, run.snapshot.walk
    containers = [c.before for c in changes if isinstance(c.before, dict | list)]
    if not containers:
        return []
    ours = {
        id(entry) for entry in (*before.all_slots.values(), *before.containers.values(), *changes)
    }
    ours |= {*run.snapshot.rollback.holders(), *map(id, before.dicts)}
    return [
        t
        for container, holders in zip(containers, _holders(containers), strict=True)
        if all(id(h) in ours or isinstance(h, FrameType | Slot) for h in holders)
        for t in _inside(container)
    ]


def _inside(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [t for part in cast(Sequence[object], parts) for t in _inside(part)]
