"""The state that the caller of one callable was seen to replace between calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onelaunch.capture.callee import Callee
from onelaunch.driver.protocol import Driver
from onelaunch.state.brought import Brought, replaced_alike

if TYPE_CHECKING:
    from onelaunch.runtime.table import Entry

_OFTEN = 2
"""The replacements from which on the next are expected. One is enough for a small content, if it
came right after the call of the capture."""
_SMALL = 1 << 24  # the most bytes of a small content: each call may copy it, in 10 us


class Replacements:
    """The slots whose contents the caller replaced, and recordings could not follow."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, object], tuple[Brought, int, int]] = {}
        """id of a slot -> the slot, the number of replacements, and the id of the last content."""
        self._constant: set[tuple[int, object]] = set()
        """ids of slots whose contents no recording takes as inputs."""

    def clear(self) -> None:
        self._seen.clear()
        self._constant.clear()

    def note(self, driver: Driver, entries: Iterable[Entry], callee: Callee) -> bool:
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
                found = replaced_alike(slot, was, lambda t, w=written: driver.storage(t) in w)
                if found is None or slot.id in self._constant:
                    continue
                _, count, last = self._seen.get(slot.id, (found, 0, 0))
                content = id(slot.read())
                at_once = captured.launches[0] <= 1 and found.nbytes() <= _SMALL
                if content != last:
                    count = _OFTEN if at_once else count + 1
                self._seen[slot.id] = found, count, content
                callee.forget(found.objects(value))
        return len(self.expected()) > before

    def expected(self) -> tuple[Brought, ...]:
        """Return the slots whose contents the next recording takes as inputs."""
        return tuple(found for found, count, _ in self._seen.values() if count >= _OFTEN)

    def note_recorded(self, wanted: Iterable[Brought], taken: Iterable[Brought]) -> None:
        """Leave slots alone that a recording should have taken as inputs, and could not."""
        left = {b.slot.id for b in wanted} - {b.slot.id for b in taken}
        self._constant |= left
        for key in left:
            self._seen.pop(key, None)
