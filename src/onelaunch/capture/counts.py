"""Counts: integers that the callable moves on, and that a recording follows from call to call.

A cache counts its tokens in Python and asks whether its window is full. In the capture such a
number is a `Count`, which notes what is asked of it: each comparison bounds the values that the
recording serves. Where a tensor of integers is added to it, or compared with it, the device gets
the number of each call. Whatever else is done with it, the recording serves this one value. Each
replay moves the number on in `replay.launch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from onelaunch.frames.reads import StandIn
from onelaunch.optimizers.traced_float import swapped
from onelaunch.state.slots import Kind, Slot


@dataclass(slots=True)
class Follower:
    """The values of one number that a recording serves.

    Attributes:
        slot: the place of the number.
        least, most: bounds of the values; None: none.
        without: values between them that it does not serve.
    """

    slot: Slot
    least: int | None = None
    most: int | None = None
    without: set[int] = field(default_factory=set)

    def serves(self, value: object) -> bool:
        return (
            type(value) is int
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and value not in self.without
        )

    def current(self) -> bool:
        """Return whether the recording serves the present value: 0.3 us."""
        return self.serves(self.slot.read())

    def at(self, slot: Slot) -> Follower:
        """Return the same for a number in another place."""
        return replace(self, slot=slot)

    def bound(self, compare: Callable[[Any, Any], bool], other: int, outcome: bool) -> None:
        """Serve only values whose comparison with `other` has this outcome."""
        if not outcome:
            compare = _OPPOSITES[compare]
        if compare is operator.ne:
            self.without.add(other)
        if compare in (operator.lt, operator.le, operator.eq):
            most = other - (compare is operator.lt)
            self.most = most if self.most is None else min(self.most, most)
        if compare in (operator.gt, operator.ge, operator.eq):
            least = other + (compare is operator.gt)
            self.least = least if self.least is None else max(self.least, least)


_OPPOSITES: dict[Any, Any] = {
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
    operator.eq: operator.ne,
    operator.ne: operator.eq,
}


class HostNumber(NamedTuple):
    """A reader of the number in a slot, as a host tensor, which a launch brings to the device."""

    kind: Kind
    key: Any

    def __call__(self, holder: Any) -> Tensor:
        return torch.tensor(Slot(self.kind, holder, self.key, "", None).read())


def number_slot(slot: Slot) -> Slot:
    """Return a slot that holds the number in a slot as a host tensor."""
    return Slot("contents", slot.holder, HostNumber(slot.kind, slot.key), slot.name, None, slot)


@dataclass(slots=True)
class Counts:
    """The numbers that one run of a capture counts.

    Args:
        slots: places of numbers that the callable was seen to move on.
        device: the recording's device.
        on_device: id of a slot -> the device's tensor for its number.

    Attributes:
        followed: id of a slot -> its follower, once the run is over.
        steps: id of a slot -> the amount that the run added to its number.
        wanted: slots whose numbers the device needs.
        escaped: True if the run left a count where it is not followed, or told one from a number.
    """

    slots: Sequence[Slot]
    device: torch.device
    on_device: dict[tuple[int, object], Tensor] = field(default_factory=dict)
    followed: dict[tuple[int, object], Follower] = field(default_factory=dict)
    steps: dict[tuple[int, object], int] = field(default_factory=dict)
    wanted: list[Slot] = field(default_factory=list)
    escaped: bool = False
    _made: list[ref[Count]] = field(default_factory=list)

    def begin(self, held: Collection[tuple[int, object]]) -> None:
        """Put counts into the slots of these ids."""
        for slot in self.slots:
            value = slot.read()
            if slot.id in held and type(value) is int:
                follower = self.followed[slot.id] = Follower(slot)
                slot.write(self.make(follower, value, 0))

    def end(self) -> None:
        """Put plain numbers back."""
        for slot in self.slots:
            value = slot.read()
            if type(value) is Count:
                if value.follower.slot is slot:
                    self.steps[slot.id] = value.offset
                else:
                    self.escaped = True
                slot.write(value.value)
        value = None
        self.escaped |= any(made() is not None for made in self._made)

    def make(self, follower: Follower, value: int, offset: int) -> Count:
        made = Count(self, follower, value, offset)
        self._made.append(ref(made))
        return made

    def step(self, slot: Slot) -> int | None:
        """Return the amount that each replay adds to the number in a slot; None if it does not."""
        return self.steps.get(slot.id) if slot.id in self.followed else None

    def fix(self, follower: Follower) -> None:
        """Have the recording serve the present value of a number and no other."""
        self.followed.pop(follower.slot.id, None)

    def tensor(self, count: Count) -> Tensor | None:
        """Return the device's tensor for a count; None if this run has none."""
        slot = count.follower.slot
        base = self.on_device.get(slot.id)
        if base is None:
            if all(slot.id != known.id for known in self.wanted):
                self.wanted.append(slot)
            return None
        return base + count.offset if count.offset else base


class Count(StandIn):
    """A number that notes what is asked of it; to Python code an int.

    It is no subclass of int, of which C code would read the value unnoticed.
    """

    __slots__ = ("__weakref__", "counts", "follower", "offset", "value")

    def __init__(self, counts: Counts, follower: Follower, value: int, offset: int) -> None:
        self.counts, self.follower = counts, follower
        self.value, self.offset = value, offset

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return int

    def tell(self) -> None:
        self.counts.escaped = True

    def fixed(self) -> int:
        self.counts.fix(self.follower)
        return self.value

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return self.counts.make(self.follower, self.value + other, self.offset + other)
        return _computed(self, operator.add, other)

    def __radd__(self, other: Any) -> Any:
        if type(other) is int:
            return self + other
        return _computed(self, swapped(operator.add), other)

    def __sub__(self, other: Any) -> Any:
        if type(other) is int:
            return self + -other
        return _computed(self, operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return _computed(self, swapped(operator.sub), other)

    def __bool__(self) -> bool:
        outcome = self.value != 0
        self.follower.bound(operator.ne, -self.offset, outcome)
        return outcome


def _computed(count: Count, operation: Callable[[Any, Any], Any], other: Any) -> Any:
    """Return a sum, a difference or a comparison without noting it: on the device, if the other
    operand is a tensor of integers there, for which a number and a tensor of it give the same bits;
    else with the plain number."""
    device = count.counts.device
    if isinstance(other, Tensor) and _keeps_dtype(other) and other.device == device:
        mine = count.counts.tensor(count)
        if mine is not None:
            return operation(mine, other)
    return _of_plain(count, operation, other)


def _of_plain(count: Count, operation: Callable[..., Any], *others: Any) -> Any:
    return operation(count.fixed(), *(o.fixed() if type(o) is Count else o for o in others))


def _keeps_dtype(t: Tensor) -> bool:
    """Return whether a tensor keeps its dtype when the number is added as an int64 tensor."""
    return t.dtype == torch.int64 or (t.dtype == torch.int32 and t.dim() > 0)


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Count, Any], Any]:
    def method(self: Count, other: Any) -> Any:
        if type(other) is not int:
            return _computed(self, compare, other)
        outcome = compare(self.value, other)
        self.follower.bound(compare, other - self.offset, outcome)
        return outcome

    return method


def _plain(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Count, *others: Any) -> Any:
        return _of_plain(self, operation, *others)

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Count, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _how: Any = getattr(operator, _name)
    _name = _name.strip("_")
    setattr(Count, f"__{_name}__", _plain(_how))
    setattr(Count, f"__r{_name}__", _plain(swapped(_how)))
for _name, _how in (
    *(("divmod", divmod), ("rdivmod", swapped(divmod))),
    *(("round", round), ("format", format)),
    *(("neg", operator.neg), ("invert", operator.invert), ("abs", abs), ("index", operator.index)),
    *(("int", int), ("float", float), ("complex", complex), ("hash", hash), ("repr", repr)),
    *(("str", str), ("trunc", int), ("floor", int), ("ceil", int)),
):
    setattr(Count, f"__{_name}__", _plain(_how))
