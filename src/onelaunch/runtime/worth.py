"""Whether another recording pays: one rule for everything that is recorded again and again.

A capture costs about as much as 32 eager calls. Another recording is needed for state that is a new
object at each call, a cache that each run fills anew, or a new argument in each request. Each time
the former recording serves no call any more. After a few such recordings calls run eagerly, with
another attempt now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Constant, Tree, mapped
from onelaunch.runtime.pool import EagerTurns

_PAYS = 8  # the calls that a recording has to serve, besides its own, to pay
DROPPED, UNUSED, FEW = 8, 4, 1
"""The weights of a recording that did not pay: it was dropped at once; it served no other call; it
served a few."""
_MOST_WEIGHT = 32  # the most weight of recordings in a row that did not pay
_WAIT = 32  # eager calls before the next recording is tried; doubled each time that it does not pay
_MOST_DOUBLED = 7


@dataclass(slots=True, eq=False)
class Worth(EagerTurns):
    """The recordings in a row, for similar calls, that did not pay. `row`: their number. `used`:
    True if any recording served a call besides its own."""

    row: int = 0
    used: bool = False
    _weight: int = 0
    _failed: int = 0
    _launched: int = 0  # the launches of all recordings when the newest had served its own call
    _unused: int | None = None
    """The weight of the newest recording if it serves no other call; None: it is not judged."""

    def recorded(self, launched: int, unused: int) -> None:
        """Note a recording that has served its own call. `launched`: the launches of all recordings
        of similar calls, dropped ones included. `unused`: its weight if it serves no other call."""
        self._launched, self._unused = launched, unused

    def let_off(self) -> None:
        """Do not judge the newest recording: it went for want of room, or is still in use."""
        self._unused = None

    def spent(self, launched: int) -> bool:
        """Judge the newest recording, as another is needed. Return True if too many in a row did
        not pay: the next calls run eagerly."""
        if self._unused is None:
            return False
        uses, unused = launched - self._launched, self._unused
        self._unused = None
        if uses >= _PAYS:
            self.row, self.used, self._weight, self._failed = 0, False, 0, 0
            return False
        self.row += 1
        self.used |= uses > 0
        self._weight += FEW if uses > 0 else unused
        if self._weight < _MOST_WEIGHT:
            return False
        self.wait = (_WAIT << min(self._failed, _MOST_DOUBLED)) + 1
        self._failed += 1
        return True


def alike(spec: CallSpec) -> CallSpec:
    """Return the signature of all calls that differ in objects of the same classes alone."""
    return replace(spec, tree=mapped(spec.tree, _class))


def _class(part: Tree) -> Tree:
    return Constant(type(part.value)) if isinstance(part, Constant) and part.by_identity else part
