"""The optimizer steps of a capture, with unmistakable numbers in place of the groups' own."""

from __future__ import annotations

import math
import random
import re
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Rational, Real
from typing import Any, NamedTuple, TypeGuard, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onelaunch.driver.aten import leaves
from onelaunch.errors import CaptureError
from onelaunch.frames.loads import only_counts
from onelaunch.frames.members import functions_in
from onelaunch.optimizers.capturable import (
    is_number,
    is_of_torch,
    outlasting,
    parameters_of,
    refusal,
    settle,
    watching_steps,
)
from onelaunch.optimizers.traced_float import ScalarTrace, unmistakable
from onelaunch.source import is_users, line_of
from onelaunch.state.slots import Slot
from onelaunch.state.walk import Change, StateWalk
from onelaunch.watch.observer import LIFTS, Observer

_SET_OUTSIDE = (
    "graph the forward and backward alone, and call the `step()` that sets it after the callable; "
    "or keep the number in a tensor on the device"
)
"""The fix for a wrapper of an optimizer that counts in its groups, as Lookahead does."""


class NumberPlace(NamedTuple):
    """The place of an optimizer's number: ``group[key]``, or an item of the tuple there."""

    group: dict[str, Any]
    key: str
    item: int | None

    def read(self) -> Any:
        value = self.group[self.key]
        return value if self.item is None else value[self.item]


def places_of(group: dict[str, Any], without: Collection[str]) -> list[NumberPlace]:
    """Return the numbers of a group that could be patched. Zero is excluded, as most steps branch
    on it, except for the learning rate, with which schedules begin and end."""
    places: list[NumberPlace] = []
    for key, value in group.items():
        if key in without or key == "params":
            continue
        if _is_patchable(value) or (key == "lr" and is_number(value) and math.isfinite(value)):
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


@dataclass(slots=True)
class Steps:
    """The optimizer steps of one capture.

    Args:
        kept: returns the keys of an optimizer's groups whose numbers stay constants.
        capturable: see `Driver.demands_capturable`.
        seed: of the stand-in numbers.
        lasts: returns whether an optimizer outlives the call, as far as known. One that the
            callable makes and drops is not held, and its numbers are constants like others.
    """

    kept: Callable[[Optimizer], frozenset[str]] = lambda _: frozenset()
    capturable: bool = False
    seed: int = 0
    lasts: Callable[[Optimizer], bool] = lambda _: True
    optimizers: list[Optimizer] = field(default_factory=list)
    trace: ScalarTrace = field(default_factory=ScalarTrace)
    places: dict[tuple[int, str, int | None], tuple[NumberPlace, Any]] = field(default_factory=dict)
    _before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = field(
        default_factory=list
    )
    """(group, its content, its content during the step)."""
    stepped: dict[int, list[Tensor]] = field(default_factory=dict)
    """id of an optimizer -> its parameters that had a gradient as it stepped."""
    noted: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Operations of steps that are not torch's, with their numbers; see `agree`."""
    _passing: list[weakref.ref[Optimizer]] = field(default_factory=list)
    """Optimizers that are not known to outlive the call."""
    _counts: dict[int, list[Counter]] = field(default_factory=dict)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

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
        self._counts[id(optimizer)] = _counters(optimizer)
        for group in optimizer.param_groups:
            before = dict(group)
            if self.capturable and group.get("fused") and not group.get("capturable"):
                group["capturable"] = True
            if lasts:
                self._swap(group, self.kept(optimizer))
            self._before.append((group, before, dict(group)))

    def _hold(self, optimizer: Optimizer) -> None:
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        self.stepped[id(optimizer)] = [p for p in parameters_of(optimizer) if p.grad is not None]

    def outlasting(self) -> bool:
        """Return, after the run, whether it stepped an optimizer that unexpectedly outlives it.
        That optimizer is kept alive from now on."""
        found = outlasting(self._passing) if self._passing else []
        self._passing.clear()
        for optimizer in found:
            self._hold(optimizer)
        return bool(found)

    @contextmanager
    def watched(self, observer: Observer) -> Generator[None]:
        """Watch the optimizers that step in a run of the callable."""

        def before(optimizer: Optimizer) -> None:
            try:
                self.before(optimizer)
            except CaptureError as error:
                observer.note_refusal(error)
                raise
            observer.on_operation = None if is_of_torch(optimizer) else self._note
            groups = {id(group) for group in optimizer.param_groups}
            replaced = any(group in groups for group, _, _ in self.places)
            observer.admission.stepping = optimizer if replaced else None

        def after(optimizer: Optimizer) -> None:
            observer.on_operation = observer.admission.stepping = None
            self.after(optimizer)

        try:
            with watching_steps(before, after):
                yield
        finally:
            observer.on_operation = observer.admission.stepping = None
            self.restore()

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        numbers: list[Any] = []
        for value in leaves((args, kwargs)):
            if isinstance(value, Tensor):
                if value.device.type == "cpu" and func._schema.name in LIFTS:
                    numbers += value.detach().flatten().tolist()
            elif isinstance(value, int | float):
                numbers.append(float(value))
        self.noted.append((str(func), tuple(numbers)))

    def agree(self, other: Steps) -> bool:
        """Return whether two captures with different stand-ins did the same, except for terms
        traced to these. A stand-in that got into a step untraced differs too."""
        known = set(zip(self.trace.values, other.trace.values, strict=False))

        def same(a: Any, b: Any) -> bool:
            return a == b or (a, b) in known or repr(a) == repr(b)  # equal for two NaNs

        return len(self.noted) == len(other.noted) and all(
            name == others_name and len(numbers) == len(others) and all(map(same, numbers, others))
            for (name, numbers), (others_name, others) in zip(self.noted, other.noted, strict=True)
        )

    def dependencies(
        self,
        slots: Sequence[tuple[Slot, object]],
        before: StateWalk,
        writes: Callable[[Tensor], bool],
    ) -> list[tuple[Slot, object]]:
        """Return `slots` without numbers that each call reads, and without numbers of optimizers
        that do not step here, unless the callable's own code names them.

        Args:
            writes: returns whether the call wrote a tensor's memory.
        """
        optimizers = [
            value  # one under construction has no groups yet
            for _, value in before.held.values()
            if isinstance(value, Optimizer) and "param_groups" in vars(value)
        ]
        if not (self.optimizers or optimizers):  # then no schedulers either, which hold optimizers
            return list(slots)
        patched = {(group, key) for group, key, _ in self.places}
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
            leading: Slot | None = slot
            while leading is not None:
                if leading.id in patched or leading.key not in idle.get(
                    id(leading.holder), (leading.key,)
                ):
                    return False
                leading = leading.via
            return True

        return [
            (slot._replace(owner=states.get(id(slot.holder), slot.owner)), value)
            for slot, value in slots
            if matters(slot)
        ]

    def refuse_schedule(self, found: Sequence[Change], fn: object) -> None:
        """Refuse a callable, `fn`, that changes the numbers of an optimizer that steps in it."""
        groups = {id(g): type(o).__name__ for o in self.optimizers for g in o.param_groups}
        for slot, old, new in found:
            if isinstance(slot.owner, LRScheduler):
                name = type(slot.owner).__name__
                variable = slot.name.rpartition(".")[0].rpartition(".")[2]
                place = line_of(fn, rf"\b{re.escape(variable)}\.step\(")
                what = f"the callable steps a schedule, {name}"
                raise CaptureError("OL122", what, where=place)
            if id(slot.holder) in groups and (is_number(new) or type(new) is tuple):
                kind = groups[id(slot.holder)]
                what = f"the callable sets `{slot.key}` of {kind} from {old} to {new}"
                place = line_of(fn, rf"\[[\"']{re.escape(str(slot.key))}[\"']\]\s*[-+*/]?=")
                fix = None if slot.key == "lr" else _SET_OUTSIDE
                raise CaptureError("OL122", what, where=place, fix=fix)

    def _swap(self, group: dict[str, Any], kept: Collection[str]) -> None:
        for place in places_of(group, kept):
            key = (id(group), place.key, place.item)
            if key not in self.places:
                number = self.trace.number(unmistakable(float(place.read()), self._random))
                self.places[key] = (place, number)
            number = self.places[key][1]
            if place.item is None:
                group[place.key] = number
            else:
                parts = list(group[place.key])
                parts[place.item] = number
                group[place.key] = tuple(parts)

    def after(self, optimizer: Optimizer) -> None:
        """Restore an optimizer's own numbers after its step."""
        counts = any(_differ(group, during) for group, _, during in self._before)
        self.restore()
        before = self._counts.pop(id(optimizer), [])
        moved = [c for c in before if [c.read()] != [c.value]]  # in a list a NaN equals itself
        now = _counters(optimizer)
        if counts or moved or [c.value for c in now] != [c.value for c in before]:
            for counter in moved:  # an eager step may follow, which counts again
                counter.holder[counter.key] = counter.value
            kind = type(optimizer).__name__
            name = f", in `{moved[0].name}`" if moved and moved[0].name else ""
            fix = "count in a tensor beside the parameters, or call `optimizer.step()` after it"
            raise CaptureError("OL120", f"{kind} counts its steps in Python{name}", fix=fix)

    def restore(self) -> None:
        """Restore every optimizer's own numbers; also after a step that raised."""
        for group, before, _ in reversed(self._before):
            group.clear()
            group.update(before)
        self._before.clear()


def _differ(group: dict[str, Any], during: dict[str, Any]) -> bool:
    """Return whether a step has put other numbers into its group."""
    numbers = {key: value for key, value in group.items() if isinstance(value, int | float)}
    return any(
        value is not during.get(key) and repr(value) != repr(during.get(key))
        for key, value in numbers.items()
    )


class Counter(NamedTuple):
    """A number that an optimizer keeps in Python."""

    holder: Any
    key: Any
    value: int | float
    name: str
    """Name of the optimizer's attribute; empty for its state."""

    def read(self) -> object:
        try:
            return self.holder[self.key]
        except LookupError:
            return None


_WATCHED_ELSEWHERE = frozenset({"state", "param_groups", "defaults", "_step_count"})
"""Attributes of every optimizer. Schedulers of older torch count its steps in the last."""


def _counters(optimizer: Optimizer) -> list[Counter]:
    """Return the numbers that an optimizer keeps in Python: in its state, and, unless it is
    torch's, in its attributes. A number that only counts, and is used for nothing, is left out."""
    found: list[Counter] = []
    for state in optimizer.state.values():
        items = cast(dict[Any, Any], state).items() if isinstance(state, dict) else ()
        found += [Counter(state, k, v, "") for k, v in items if isinstance(v, int | float)]
    if is_of_torch(optimizer):
        return found
    own = vars(optimizer)
    methods = [m for kind in type(optimizer).__mro__ for m in vars(kind).values()]
    codes = [f.__code__ for m in methods for f in functions_in(m)[-1:]]
    for key, value in own.items():
        if key in _WATCHED_ELSEWHERE:
            continue
        if is_number(value):
            if not all(only_counts(code, key) for code in codes):
                found.append(Counter(own, key, value, key))
        else:
            found += _inside(value, key, 2)
    return found


def _numbers(holder: Any, name: str) -> list[Counter]:
    """Return the numbers directly in a dict or list."""
    items = enumerate(holder) if isinstance(holder, list) else holder.items()
    return [Counter(holder, key, value, name) for key, value in items if is_number(value)]


def _inside(value: Any, name: str, depth: int) -> list[Counter]:
    """Return the numbers in plain containers."""
    if type(value) not in (dict, list):
        return []
    inner = value if type(value) is list else value.values()
    deeper = [c for part in inner for c in _inside(part, name, depth - 1)] if depth else []
    return _numbers(value, name) + deeper


def keys_read(before: StateWalk, optimizer: Optimizer) -> frozenset[str]:
    """Return the strings in the user's code that ran, except the optimizer's own class: keys of its
    groups among them are read."""
    members = [member for kind in type(optimizer).__mro__ for member in vars(kind).values()]
    own = {function.__code__ for member in members for function in functions_in(member)}
    codes = before.reads.codes - own if before.reads is not None else ()
    constants = [c for code in codes if is_users(code.co_filename) for c in code.co_consts]
    return frozenset(constant for constant in constants if isinstance(constant, str))


def every_key(optimizer: Optimizer) -> frozenset[str]:
    """Return all keys of an optimizer's groups."""
    return frozenset(key for group in optimizer.param_groups for key in group)
