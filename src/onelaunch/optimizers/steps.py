"""The optimizer steps of a capture, with stand-ins in place of the numbers of their groups."""

from __future__ import annotations

import functools
import math
import operator
import re
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Rational, Real
from types import CodeType
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onelaunch.errors import CaptureError
from onelaunch.frames.codes import functions_in
from onelaunch.frames.stack import Use
from onelaunch.optimizers.capturable import (
    is_real,
    outlasting,
    parameters_of,
    refusal,
    settle,
    watching_steps,
)
from onelaunch.source import changed_at, is_users, line_of
from onelaunch.state.slots import Slot
from onelaunch.state.walk import Change, StateWalk
from onelaunch.watch.observer import Observer

_SET_OUTSIDE = (
    "graph the forward and backward alone, and call the `step()` that sets it after the callable; "
    "or keep the number in a tensor on the device"
)
"""The fix for a wrapper of an optimizer that counts in its groups, as Lookahead does."""


class PlaceId(NamedTuple):
    """The id of a group, with the key and item of a `NumberPlace`."""

    group: int
    key: str
    item: int | None


class NumberPlace(NamedTuple):
    """The place of an optimizer's number: ``group[key]``, or an item of the tuple there."""

    group: dict[str, Any]
    key: str
    item: int | None

    @property
    def id(self) -> PlaceId:
        return PlaceId(id(self.group), self.key, self.item)

    def read(self) -> Any:
        value = self.group[self.key]
        return value if self.item is None else value[self.item]

    @property
    def reader(self) -> Callable[[], Any]:
        """A function like `read`, in 0.05 us."""
        group, key, item = self
        if item is None:
            return functools.partial(operator.getitem, group, key)
        return lambda: group[key][item]

    def write(self, value: Any) -> None:
        if self.item is None:
            self.group[self.key] = value
        else:
            parts = list(self.group[self.key])
            parts[self.item] = value
            self.group[self.key] = tuple(parts)


def places_of(group: dict[str, Any], without: Collection[str]) -> list[NumberPlace]:
    """Return the numbers of a group that could be patched. Zero is excluded, as most steps branch
    on it. A learning rate of zero is not: schedules begin and end with it."""
    places: list[NumberPlace] = []
    for key, value in group.items():
        if key in without or key == "params":
            continue
        if _is_patchable(value) or (key == "lr" and is_real(value) and math.isfinite(value)):
            places.append(NumberPlace(group, key, None))
        elif type(value) is tuple and all(map(_is_float, value)):
            places += [
                NumberPlace(group, key, i) for i, part in enumerate(value) if _is_patchable(part)
            ]
    return places


def _is_float(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, Rational)


def _is_patchable(value: object) -> bool:
    return _is_float(value) and value != 0 and math.isfinite(value)


@dataclass(slots=True, eq=False)
class Steps:
    """The optimizer steps of one capture."""

    kept: Callable[[Optimizer], frozenset[str]] = lambda _: frozenset()
    """Returns the keys of an optimizer's groups whose numbers stay constants."""
    capturable: bool = False  # see `Driver.demands_capturable`
    lasts: Callable[[Optimizer], bool] = lambda _: True
    """Returns whether an optimizer outlives the call, as far as known. One that the callable makes
    and drops is not held, and its numbers are constants like others."""
    stored: set[tuple[int, str]] = field(default_factory=set)
    """(id of a group, key) of numbers that steps set themselves, as far as known."""
    stand_in: Callable[[NumberPlace], object] = NumberPlace.read
    """Returns the stand-in for a number."""
    optimizers: list[Optimizer] = field(default_factory=list)
    places: dict[PlaceId, NumberPlace] = field(default_factory=dict)  # numbers that have stand-ins
    _before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = field(
        default_factory=list
    )
    """(group, its content, its content during the step)."""
    _passing: list[weakref.ref[Optimizer]] = field(default_factory=list)
    """Optimizers that are not known to outlive the call."""

    def before(self, optimizer: Optimizer) -> None:
        """Put stand-ins in place of an optimizer's numbers, before it steps."""
        error = refusal(optimizer)
        if error is not None:
            raise error
        settle(optimizer)
        lasts = self.lasts(optimizer)
        if lasts:
            self._hold(optimizer)
        else:
            self._passing.append(weakref.ref(optimizer))
        for group in optimizer.param_groups:
            before = dict(group)
            if self.capturable and group.get("fused") and not group.get("capturable"):
                group["capturable"] = True
            for place in places_of(group, self.kept(optimizer)) if lasts else ():
                self.places.setdefault(place.id, place)
                place.write(self.stand_in(place))
            self._before.append((group, before, dict(group)))

    def _hold(self, optimizer: Optimizer) -> None:
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)

    def outlasting(self) -> bool:
        """Return, after the run, whether it stepped an optimizer that unexpectedly outlives it.
        That optimizer is kept alive from now on."""
        optimizers = outlasting(self._passing) if self._passing else []
        self._passing.clear()
        for optimizer in optimizers:
            self._hold(optimizer)
        return bool(optimizers)

    @contextmanager
    def watched(self, observer: Observer) -> Generator[None]:
        """Watch the optimizers that step in a run of the callable."""

        def before(optimizer: Optimizer) -> None:
            try:
                self.before(optimizer)
            except CaptureError as error:
                observer.note_refusal(error)
                raise
            shown = {place.group for place in self.places}
            observer.admission.stepping = any(id(g) in shown for g in optimizer.param_groups)

        def after(optimizer: Optimizer) -> None:
            observer.admission.stepping = False
            self.restore()

        try:
            with watching_steps(before, after):
                yield
        finally:
            observer.admission.stepping = False
            self.restore()

    def dependencies(
        self,
        slots: Sequence[tuple[Slot, object]],
        before: StateWalk,
        writes: Callable[[Tensor], bool],
    ) -> list[tuple[Slot, object]]:
        """Return `slots` without numbers that each call reads, and without numbers of optimizers
        that do not step here, unless the callable's own code names them."""
        optimizers = [
            value  # one under construction has no groups yet
            for _, value in before.slots.values()
            if isinstance(value, Optimizer) and "param_groups" in vars(value)
        ]
        if not (self.optimizers or optimizers):  # then no schedulers either, which hold optimizers
            return list(slots)
        patched = {(place.group, place.key) for place in self.places}
        # An optimizer's state is written as seldom as its attributes.
        states = {id(o.state): o for o in self.optimizers}
        states.update((id(inner), o) for o in self.optimizers for inner in o.state.values())
        idle: dict[int, frozenset[str]] = {}
        for value in optimizers:
            if any(value is o for o in self.optimizers):
                continue
            if not any(map(writes, parameters_of(value))):
                named = keys_read(before, value) | {"params"}
                idle.update((id(group), named) for group in value.param_groups)

        def matters(slot: Slot) -> bool:
            return not any(
                at.id in patched or at.key not in idle.get(id(at.holder), (at.key,))
                for at in _way(slot)
            )

        return [
            (slot._replace(owner=states.get(id(slot.holder), slot.owner)), value)
            for slot, value in slots
            if matters(slot)
        ]

    def refuse_schedule(self, changes: Sequence[Change], fn: object) -> None:
        for slot, _, _ in changes:
            if isinstance(slot.owner, LRScheduler):
                name = type(slot.owner).__name__
                variable = slot.name.rpartition(".")[0].rpartition(".")[2]
                place = line_of(fn, rf"\b{re.escape(variable)}\.step\(")
                what = f"the callable steps a schedule, {name}"
                raise CaptureError("OL122", what, where=place)

    def moved(
        self, changes: Sequence[Change], before: StateWalk, followed: Collection[tuple[int, object]]
    ) -> list[Change]:
        """Return the changes of numbers that optimizers in this run read, except mere counts.
        `followed`: ids of the slots whose numbers each replay moves on."""
        held, groups = self._holders()

        def is_moved(change: Change) -> bool:
            slot, old, new = change
            number = is_real(old) and _holder(slot, held) is not None
            if id(slot.holder) in groups:
                number = any(is_real(value) or type(value) is tuple for value in (old, new))
            return number and before.use(slot) not in (Use.NONE, Use.GROWS)

        return [change for change in changes if change.slot.id not in followed and is_moved(change)]

    def _holders(self) -> tuple[dict[int, Optimizer], set[int]]:
        """Return id -> optimizer for where optimizers keep numbers, and ids of groups."""
        held = {id(part): o for o in self.optimizers for part in _parts(o)}
        return held, {id(group) for o in self.optimizers for group in o.param_groups}

    def refuse_moved(self, change: Change, codes: Iterable[CodeType], fn: object) -> CaptureError:
        """Return the error for a number of an optimizer that each call would have to move on."""
        slot, old, new = change
        held, groups = self._holders()
        kind = type(_holder(slot, held)).__name__
        place = changed_at(codes, slot.word, slot.is_item)
        if id(slot.holder) in groups and (id(slot.holder), slot.key) not in self.stored:
            what = f"the callable sets `{slot.key}` of {kind} from {old} to {new}"
            fix = None if slot.key == "lr" else _SET_OUTSIDE
            return CaptureError("OL122", what, where=place or line_of(fn), fix=fix)
        what = f"{kind} counts its steps in Python, in `{slot.name}`"
        fix = "count in a tensor beside the parameters, or call `optimizer.step()` after it"
        where = place or line_of(fn, r"\.step\(")
        return CaptureError("OL120", what, where=where, fix=fix)

    def set_places(self) -> list[PlaceId]:
        """Return the places of stand-ins where a step set another number."""
        return [place for place in self.places if (place.group, place.key) in self.stored]

    def restore(self) -> None:
        """Put every optimizer's own numbers back, also after a step that raised. Numbers that the
        step set itself stay."""
        for group, before, during in reversed(self._before):
            for key, value in during.items():
                now = group.get(key)
                if now is not value:
                    self.stored.add((id(group), key))
                elif key not in before:
                    del group[key]
                elif before[key] is not value:
                    group[key] = before[key]
        self._before.clear()


def _parts(optimizer: Optimizer) -> list[object]:
    """Return the optimizer and the dicts in which it keeps numbers."""
    return [
        optimizer,
        vars(optimizer),
        optimizer.state,
        *optimizer.state.values(),
        *optimizer.param_groups,
    ]


def _holder(slot: Slot, held: Mapping[int, Optimizer]) -> Optimizer | None:
    """Return the optimizer that a slot belongs to, by itself or in plain containers."""
    return next((held[id(at.holder)] for at in _way(slot) if id(at.holder) in held), None)


def _way(slot: Slot) -> Iterator[Slot]:
    """List a slot, the slot that led to it, and so on."""
    at: Slot | None = slot
    while at is not None:
        yield at
        at = at.via


def keys_kept(
    before: StateWalk, constant: Collection[tuple[int, str]]
) -> Callable[[Optimizer], frozenset[str]]:
    """Return a function from an optimizer to its keys whose numbers get no stand-ins. `constant`:
    (id of a group, key) of numbers that no recording follows."""

    def kept(optimizer: Optimizer) -> frozenset[str]:
        groups = {id(group) for group in optimizer.param_groups}
        return keys_read(before, optimizer).union(k for group, k in constant if group in groups)

    return kept


def keys_read(before: StateWalk, optimizer: Optimizer) -> frozenset[str]:
    """Return the strings in the user's code that ran, except the optimizer's own class. Keys of its
    groups among these strings are read."""
    members = [member for kind in type(optimizer).__mro__ for member in vars(kind).values()]
    own = {function.__code__ for member in members for function in functions_in(member)}
    codes = before.reads.codes - own if before.reads is not None else ()
    constants = [c for code in codes if is_users(code.co_filename) for c in code.co_consts]
    return frozenset(constant for constant in constants if isinstance(constant, str))


def every_key(optimizer: Optimizer) -> frozenset[str]:
    return frozenset(key for group in optimizer.param_groups for key in group)
