"""The recordings of a graphed callable, and why they are kept or dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from onelaunch.call.spec import CallSpec
from onelaunch.capture.recording import CapturedCall, Recording
from onelaunch.errors import CaptureError
from onelaunch.replay.call_path import CallPath
from onelaunch.runtime.candidate import Candidate, SignatureStatus
from onelaunch.runtime.notices import Notices, Unserved
from onelaunch.runtime.pool import PoolManager, PoolMember
from onelaunch.runtime.stats import Counters
from onelaunch.runtime.varied import VaryingNumbers
from onelaunch.runtime.why import why
from onelaunch.source import changed_at
from onelaunch.state.guard import StateGuard
from onelaunch.state.parts import whole_of
from onelaunch.state.slots import Slot
from onelaunch.watch.difference import TRIES


@dataclass(slots=True, eq=False)
class TableEntry:
    """A recording in the table of its callable, with the call path that replays it."""

    call: CallPath
    spec: CallSpec
    status: SignatureStatus
    paths: Sequence[str]
    captured: CapturedCall
    figures_at_capture: Recording
    pool_member: PoolMember
    lock: threading.RLock = field(default_factory=threading.RLock)
    """A lock held from the checks to the launch. Used where numbers are followed, or arguments are
    objects of a request, such as a cache."""
    shares: dict[int, int] = field(default_factory=dict)
    """id of a tensor of a request -> number of this recording's references to its memory."""
    undo: Callable[[], object] = bool
    """Restores the state from before the captured run, until that run has served its call."""
    unsettled_on_other_rank: bool = False
    """True if another process that made it too has to drop its own."""

    @property
    def ran_differently(self) -> bool:
        """True if the captured run did or read something new, compared with the runs before it."""
        compared = self.captured.compared
        new = compared.reads_more and self.status.history.read_more < TRIES
        return new or compared.differs is not None or self.unsettled_on_other_rank

    def figures(self) -> Recording:
        """Return its present figures: a backward may have been captured since."""
        captured, graph = self.captured, self.captured.graph
        kept_bytes = (
            self.figures_at_capture.kept_bytes if captured.pair is None else graph.memory_bytes
        )
        return replace(
            self.figures_at_capture,
            pool_bytes=graph.memory_bytes,
            kept_bytes=kept_bytes,
            driver_bytes=graph.driver_bytes,
            replays=captured.launches[0],
        )


class Table:
    """The recordings of one callable, the newest first."""

    def __init__(self, name: str, enough_warmups: int, pool: PoolManager, notices: Notices) -> None:
        self.entries: tuple[TableEntry, ...] = ()  # the recordings
        self.calls: tuple[CallPath, ...] = ()  # their call paths, which a call tries in turn
        self.index: dict[Any, Any] = {}
        """Call paths by a key of the owner's choice, who fills it; emptied at each change."""
        self.counts = Counters()  # the captures, evictions and calls that were no replays
        self.lock = threading.RLock()  # held during changes of the table
        self.running: list[int] = []
        """The threads in an eager run. Meanwhile no backward is captured: stand-ins would replace
        parameters that these threads read."""
        self.unserved = Unserved(name, notices, self._launched)  # calls that no recording serves
        self._gone = 0
        self._name = name
        self._enough_warmups = enough_warmups
        self._pool = pool
        self._notices = notices

    def _launched(self) -> int:
        """Return a number that grows with each launch."""
        return self._gone + sum(entry.captured.launches[0] for entry in self.entries)

    def others_run(self) -> bool:
        return any(ident != threading.get_ident() for ident in self.running)

    def figures(self) -> list[Recording]:
        return [entry.figures() for entry in self.entries]

    def keep(self, entries: Iterable[TableEntry]) -> None:
        """Replace the recordings. Hold the lock."""
        self.entries = tuple(entries)
        self.calls = tuple(entry.call for entry in self.entries)
        self.index = {}  # a new one: another thread may be filling the old one

    def clear(self) -> None:
        """Free every recording, and forget the counts."""
        with self.lock:
            # Only the graphs: the last of a pool frees the memory that no static result holds.
            members = [entry.pool_member for entry in self.entries]
            self.keep(())
            self.counts = Counters()
            self.unserved.clear()
            for member in members:
                self._pool.free(member)

    def shared(self, guard: StateGuard) -> StateGuard:
        """Return an earlier recording's guard that checks the same; else this one."""
        guards = {id(e.captured.guard): e.captured.guard for e in self.entries}
        return next((earlier for earlier in guards.values() if earlier.agrees(guard)), guard)

    def add(self, entry: TableEntry) -> None:
        entry.undo = bool  # the replaced function holds the former contents of the state
        with self.lock:  # another thread may reset
            self.keep((entry, *self.entries))
        self._warn_omitted(entry.captured)

    def drop_superseded(self, entry: TableEntry, varied: VaryingNumbers) -> None:
        """Free recordings of single values of numbers that a newer recording follows, or of single
        contents of slots that are its inputs."""
        followed = {slot.id for slot in entry.captured.followed.counted}
        inputs = {whole_of(slot).id for slot in entry.captured.state_input_slots}
        for other in self.entries:
            moves = {slot.id for slot in other.captured.changed_numbers}
            same = other.spec == entry.spec
            changed = {slot.id for slot, _ in other.captured.guard.changed()} if same else set()
            if same and (
                0 < len(moves & followed) == len(moves) or 0 < len(changed & inputs) == len(changed)
            ):
                self.drop(other)
            elif varied.covers(entry, other):
                entry.captured.launches[0] += other.captured.launches[0]
                other.captured.launches[0] = 0
                self.drop(other)

    def _warn_omitted(self, captured: CapturedCall) -> None:
        """Warn of effects in Python that no replay repeats: hooks, and containers that grow."""
        facts = captured.facts
        if facts.hooks:
            these = ", ".join(hook.name for hook in facts.hooks)
            what = "what they compute on tensors, and store of these, is repeated, and the rest not"
            lines = dict.fromkeys(str(hook.place) for hook in facts.hooks if hook.place)
            where = "\n".join(lines) or None
            self._notices.warn("OL308", f"hooks in `{self._name}`, {these}: {what}", where=where)
        if facts.growing.names:
            these = ", ".join(f"`{name}`" for name in facts.growing.names)
            what = f"`{self._name}` adds to {these}: replays leave it as it is"
            self._notices.warn("OL309", what, where=facts.growing.place)

    def drop(self, entry: TableEntry) -> None:
        with self.lock:
            self.keep(e for e in self.entries if e is not entry)
            self._gone += entry.captured.launches[0]
            entry.status.history.lost(entry.captured.launches)
        self._pool.free(entry.pool_member)

    def drop_unsettled(self, entry: TableEntry) -> bool:
        """Free a recording whose run differed, for the next capture to be compared with that run.
        Return False after too many differences in a row."""
        status, compared = entry.status, entry.captured.compared
        self.drop(entry)
        status.ledger = compared.ledger
        status.history.read_more += compared.reads_more
        status.history.differed += compared.differs is not None
        status.warmups = status.enough_warmups(self._enough_warmups)
        return compared.differs is None or status.history.differed < compared.differs.tries

    def drop_misfit(self, entry: TableEntry, candidate: Candidate) -> str | None:
        """Free a recording that does not fit the call of its capture, and undo the captured run.
        Return the difference if it is the second in a row."""
        candidate.status.history.misfits += 1
        changed = why((entry,), candidate.spec, candidate.flat.tensors)
        self.drop(entry)
        entry.undo()
        if candidate.status.history.misfits < 2:
            return None
        return (
            f"`{self._name}` was captured twice, and neither recording fits its own call; {changed}"
        )

    def evicted(self, member: PoolMember) -> None:
        """Drop a recording that the pool evicts; its next call warms up for another."""
        with self.lock:
            entry = next((e for e in self.entries if e.pool_member is member), None)
            if entry is None:
                return
            self.counts.evictions += 1
            status, history = entry.status, entry.status.history
            together = history.launches is not None  # with another one, since the last capture
            self.drop(entry)
            history.why = "evicted"
            history.worth.let_off()
            status.warmups = status.enough_warmups(self._enough_warmups)
            history.backoff.evicted(status.past_launches(), together)

    def drop_stale(self, spec: CallSpec, status: SignatureStatus) -> None:
        """Free recordings of this signature that cannot fit again. Parameters moved, or a library
        freed memory for them, which a warm-up makes anew."""
        for entry in self.entries:
            lost = entry.captured.graph.lost if entry.spec == spec else None
            if lost is not None:
                self.drop(entry)
                status.history.why = lost
                status.warmups = status.enough_warmups(self._enough_warmups) - 1
                continue
            moved = entry.captured.guard.moved() if entry.spec == spec else None
            if moved is not None:
                status.history.why = f"{moved} moved"
                if moved.endswith(".grad") and status.by_gradients is None:
                    status.by_gradients = {}
                self.drop(entry)


def refuse_moving(
    name: str, entries: Iterable[TableEntry], spec: CallSpec, codes: Iterable[CodeType]
) -> CaptureError | None:
    """Return the refusal of a signature whose calls each change a number, and so need a recording
    each. None while it may get more recordings. Recordings of state that has since been replaced do
    not count. `codes`: the code that the callable runs."""
    moving: list[list[Slot]] = []
    for captured in (e.captured for e in entries if e.spec == spec):
        numbers = captured.moved_numbers()
        ids = {slot.id for slot in numbers}
        if numbers and all(slot.id in ids for slot, _ in captured.guard.changed()):
            moving.append(numbers)
    if len(moving) < _MOST_VALUES:
        return None
    these = ", ".join(f"`{name}`" for name in dict.fromkeys(s.name for m in moving for s in m))
    what = f"`{name}` reads {these} and moves it on, to another value at each call"
    places = (changed_at(codes, slot.word, slot.is_item) for slots in moving for slot in slots)
    place = next((place for place in places if place is not None), None)
    return CaptureError("OL118", what, where=place)


_MOST_VALUES = 8  # most values of a number that the callable itself changes, each with a recording


def in_flight(entries: Iterable[TableEntry], spec: CallSpec) -> int:
    """Count the recordings of a signature that fit the present state and wait for a backward."""
    return sum(
        entry.captured.pair is not None
        and entry.captured.pair.in_flight
        and entry.spec == spec
        and entry.captured.guard.check()
        for entry in entries
    )
