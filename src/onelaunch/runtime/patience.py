"""Whether another recording pays: the counters of recordings that did not last.

A capture costs about as much as 32 eager calls. Another recording is needed for state that is a new
object at each call, a cache that each run fills anew, a new argument in each request, or after an
eviction. Each time the former recording serves no call any more. After a few such recordings calls
run eagerly, with another attempt now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Constant, Tree, mapped
from onelaunch.optimizers.capturable import StepOptions

_COST = 32  # the number of eager calls that cost about as much as a capture
_WAIT = 8 * _COST
"""The eager calls between two captures, so that captures take an eighth of the time."""
_PAYS = 8  # the calls that a recording has to serve, besides its own, to pay
DROPPED, UNUSED, FEW = 8, 4, 1
"""The weights of a recording that did not pay: dropped at once; used once; used a few times."""
_MOST_WEIGHT = 32  # the most weight of recordings in a row that did not pay
_MOST_DOUBLED = 7
"""The most times that the wait for the next recording doubles, as it did not pay again."""


@dataclass(slots=True, eq=False)
class EagerTurns:
    """The calls that have to run eagerly before the next capture."""

    wait: int = 0

    def take_turn(self) -> bool:
        """Count a call. Return True while calls still have to run eagerly."""
        self.wait = max(0, self.wait - 1)
        return self.wait > 0


@dataclass(slots=True, eq=False)
class Backoff(EagerTurns):
    """The eager calls of a signature before its next capture. One eviction costs none. From the
    second in a row, of a recording with little use, a signature waits. Otherwise recordings that do
    not all fit in the pool would take turns."""

    _early: bool = False
    _launched: int = 0

    def evicted(self, launches: int, together: bool = False) -> None:
        """Note an eviction after `launches` in all; of several `together` only one counts."""
        if not together:
            early = launches - self._launched < _COST
            self.wait = _WAIT if early and self._early else 0
            self._early = early
        self._launched = launches

    def defer(self) -> None:
        """Run eagerly for a while: there will be room later."""
        self.wait = _COST


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

    def gives_up(self, launched: int) -> bool:
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
        self.wait = (_COST << min(self._failed, _MOST_DOUBLED)) + 1
        self._failed += 1
        return True


@dataclass(slots=True, eq=False)
class History:
    """The recordings of a signature so far, and the captures in a row that did not last."""

    worth: Worth = field(default_factory=Worth)
    """The recordings that did not pay, of all signatures of similar calls."""
    why: str | None = None  # the reason for the next recording, if one was dropped
    launches: list[int] | None = None
    """The launch counter of a dropped recording, which the next one continues."""
    backoff: Backoff = field(default_factory=Backoff)
    misfits: int = 0  # recordings in a row that did not fit the very call of their capture
    differed: int = 0  # captures in a row that differed from the run before them
    read_more: int = 0  # captures in a row that read more than the runs before them
    changed: int | None = None
    """The launches when a capture was last refused for a change that the next may not make."""
    shrinks: bool = False
    """True if state that it replaces was seen to have other sizes, and not only larger ones."""
    options: StepOptions | None = None  # options of the optimizers that step in the last recording

    def take_turn(self) -> str | None:
        """Count a call. Return the code of the reason if it has to run eagerly, else None."""
        if self.backoff.take_turn():
            return "OL304"
        return "OL301" if self.worth.take_turn() else None

    def forgives(self, launched: int) -> bool:
        """Return whether to try once more after such a refusal: the last was paid off since then,
        or this is the first. `launched`: the launches so far."""
        forgiven = self.changed is None or launched - self.changed >= _PAYS
        self.changed = launched
        return forgiven

    def lost(self, launches: list[int]) -> None:
        """Keep the launch counter of a dropped recording."""
        launches[0] += self.launches[0] if self.launches else 0
        self.launches = launches


def without_objects(spec: CallSpec) -> CallSpec:
    """Return the signature of all calls that differ in objects of the same classes alone."""
    return replace(spec, tree=mapped(spec.tree, _class))


def _class(part: Tree) -> Tree:
    return Constant(type(part.value)) if isinstance(part, Constant) and part.by_identity else part
