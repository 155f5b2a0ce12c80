"""What the caller varies between calls: numbers, and contents of slots that it replaces.

A number among the arguments, or in state that is guarded, costs a recording for each value. From
the third value on a recording is tried that follows it; see `capture.numbers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from onelaunch.call.numbers import any_number, is_number, numbers_in, numbers_read
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Constant, Tree
from onelaunch.capture.callee import Callee
from onelaunch.capture.numbers import NumbersToFollow, Unfollowed
from onelaunch.driver.protocol import Driver
from onelaunch.runtime.candidate import SignatureStatus
from onelaunch.state.replaced import ReplacedSlot, replaced_alike
from onelaunch.state.slots import Slot

if TYPE_CHECKING:
    from onelaunch.runtime.table import TableEntry

_MOST_RECORDINGS = 4  # the recordings of one signature that follow numbers
_MOST_OWN = 64  # the calls of one signature that get a recording of their own nevertheless
FEW = 2  # the values of a number that get a recording each before it is followed


@dataclass(slots=True, eq=False)
class _Family:
    """Calls that differ in numbers and tensors alone."""

    values: list[set[Constant]]  # for each number, its values, as far as they count
    constant: set[int] = field(default_factory=set)
    """The positions of numbers that no recording follows."""
    constant_calls: set[tuple[Constant, ...]] = field(default_factory=set)
    """Numbers of calls that get a recording of their own."""
    statuses: list[SignatureStatus] = field(default_factory=list)  # of the first calls


_MOST_FAMILIES = 1024
"""The most kinds of calls, alike but for their numbers, that are remembered."""


class VaryingNumbers:
    """The numbers that the caller of one callable varies."""

    def __init__(self) -> None:
        self._families: dict[tuple[Tree, tuple[object, ...]], _Family] = {}
        self._constant: set[object] = set()  # ids of slots whose numbers no recording follows

    def clear(self) -> None:
        self._families.clear()
        self._constant.clear()

    def spec(self, spec: CallSpec, entries: Iterable[TableEntry]) -> CallSpec:
        """Return the signature to use for a call whose own is new: numbers that vary are replaced
        by a placeholder for any number."""
        of_family = self._family(spec)
        if of_family is None:
            return spec
        numbers, family = of_family
        for seen, number in zip(family.values, numbers, strict=True):
            if len(seen) <= FEW:
                seen.add(number)
        places = [i for i, seen in enumerate(family.values) if len(seen) > FEW]
        places = [i for i in places if i not in family.constant]
        if tuple(numbers) in family.constant_calls:
            return spec
        if not places or any(status.has_backward for status in family.statuses):
            return spec
        read = replace(spec, tree=any_number(spec.tree, places))
        return spec if _many(entry for entry in entries if entry.spec == read) else read

    def note(self, spec: CallSpec, status: SignatureStatus) -> None:
        of_family = self._family(spec)
        if of_family is not None and len(of_family[1].statuses) <= FEW:
            of_family[1].statuses.append(status)

    def hold(self, spec: CallSpec, tree: Tree, error: Unfollowed) -> None:
        """Take numbers that the callable branches on for constants: in all later calls, or with
        their values in this call, where others are followed."""
        of_family = self._family(spec)
        assert of_family is not None
        if not error.only_this_call:
            of_family[1].constant.update(error.positions)
        elif len(of_family[1].constant_calls) < _MOST_OWN:
            of_family[1].constant_calls.add(tuple(numbers_in(tree)))

    def following(self, spec: CallSpec, entries: Iterable[TableEntry]) -> NumbersToFollow:
        """Return the numbers that a new recording of a signature should follow: each number that
        differs between two recordings, or that a recording follows already; and those that the
        callable itself changes."""
        counted: dict[tuple[int, object], Slot] = {}
        values: defaultdict[tuple[int, object], set[Constant]] = defaultdict(set)
        slots: dict[tuple[int, object], Slot] = {}
        again: dict[tuple[int, object], Slot] = {}
        for entry in entries:
            captured = entry.captured
            if entry.spec != spec or captured.pair is not None:
                continue
            counted.update((slot.id, slot) for slot in captured.moved_numbers())
            for slot, value in captured.guard.changed():
                if _may_follow(slot, value):
                    values[slot.id].add(Constant(value))
                    slots[slot.id] = slot
            again.update((slot.id, slot) for slot in captured.followed.slots)
        again.update((i, slots[i]) for i, seen in values.items() if len(seen) >= FEW)
        if _many(entry for entry in entries if entry.spec == spec):
            again.clear()
        places = [slot for i, slot in again.items() if i not in self._constant | counted.keys()]
        return NumbersToFollow(tuple(numbers_read(spec.tree)), tuple(places), (*counted.values(),))

    def covers(self, entry: TableEntry, other: TableEntry) -> bool:
        """Return whether another recording differs only in numbers that this one follows."""
        followed = entry.captured.followed
        tree = any_number(other.spec.tree, followed.arguments)
        same_rest = replace(other.spec, tree=tree) == entry.spec and other.captured.pair is None
        less = other.captured.followed.names() < followed.names()  # sets
        if not same_rest or not less:
            return False
        numbers = [numbers_in(other.spec.tree)[i] for i in followed.arguments]
        if numbers_read(other.spec.tree) or followed.serves(*(n.value for n in numbers)):
            changed = {slot.id for slot, _ in other.captured.guard.changed()}
            return changed <= {slot.id for slot in followed.slots}
        return False

    def note_recorded(self, expected: NumbersToFollow, followed: NumbersToFollow) -> None:
        """Take numbers that a recording should have followed for constants from now on."""
        self._constant.update({*expected.names()} - {*followed.names()})

    def _family(self, spec: CallSpec) -> tuple[list[Constant], _Family] | None:
        numbers = numbers_in(spec.tree)
        if not numbers:
            return None
        key = any_number(spec.tree, range(len(numbers))), spec.modes
        family = self._families.get(key)
        if family is None:
            if len(self._families) >= _MOST_FAMILIES:  # a text of each request's own, say
                known = list(self._families.items())[_MOST_FAMILIES // 2 :]
                self._families = dict(known)
            family = self._families[key] = _Family([set() for _ in numbers])
        return numbers, family


def _many(entries: Iterable[TableEntry]) -> bool:
    """Return whether `_MOST_RECORDINGS` recordings follow numbers, and none serves the present
    ones. The callable then branches on them in ever more ways. The next holds them constant."""
    return (
        sum(bool(e.captured.followed.names()) and e.captured.guard.check() for e in entries)
        >= _MOST_RECORDINGS
    )


def _may_follow(slot: Slot, value: object) -> bool:
    """Return whether a slot held a number, holds another of its type, and can hold a stand-in."""
    in_container = isinstance(slot.holder, dict | list) and not isinstance(slot.owner, type)
    return (
        is_number(value)
        and type(slot.read()) is type(value)
        and (slot.kind == "cell" or (slot.kind == "item" and in_container))
    )


_OFTEN = 2
"""The replacements from which on the next are expected. One is enough for a small content, if it
came right after the call of the capture."""
_SMALL = 1 << 24  # the most bytes of a small content: each call may copy it, in 10 us


class Replacements:
    """The slots whose contents the caller replaced, and recordings could not follow."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, object], tuple[ReplacedSlot, int, int]] = {}
        """id of a slot -> the slot, the number of replacements, and the id of the last content."""
        self._constant: set[tuple[int, object]] = set()
        """ids of slots whose contents no recording takes as inputs."""

    def clear(self) -> None:
        self._seen.clear()
        self._constant.clear()

    def note(self, driver: Driver, entries: Iterable[TableEntry], callee: Callee) -> bool:
        """Learn from the recordings that do not fit the present state. Return True if the next
        recording is to have further inputs. `callee`: forgets the reads of former contents, which
        are no state any more."""
        before = len(self.expected())
        for entry in entries:
            captured = entry.captured
            if captured.pair is not None and captured.pair.in_flight:
                continue
            written = {driver.storage(t) for t in captured.writes.tensors}
            empty = {id(c) for c, length in captured.guard.lengths() if not length}
            for slot, value in captured.guard.changed():
                # A memo that was empty, and is filled by the calls of a step.
                was = {} if type(value) is dict and id(value) in empty else value
                replacement = replaced_alike(slot, was, lambda t, w=written: driver.storage(t) in w)
                if replacement is None or slot.id in self._constant:
                    continue
                _, count, last = self._seen.get(slot.id, (replacement, 0, 0))
                content = id(slot.read())
                at_once = captured.launches[0] <= 1 and replacement.nbytes() <= _SMALL
                if content != last:
                    count = _OFTEN if at_once else count + 1
                self._seen[slot.id] = replacement, count, content
                callee.forget(replacement.objects(value))
        return len(self.expected()) > before

    def expected(self) -> tuple[ReplacedSlot, ...]:
        """Return the slots whose contents the next recording takes as inputs."""
        return tuple(slot for slot, count, _ in self._seen.values() if count >= _OFTEN)

    def note_recorded(
        self, expected: Iterable[ReplacedSlot], taken: Iterable[ReplacedSlot]
    ) -> None:
        """Leave slots alone that a recording should have taken as inputs, and could not."""
        left = {b.slot.id for b in expected} - {b.slot.id for b in taken}
        self._constant |= left
        for key in left:
            self._seen.pop(key, None)
