"""The recordings of a graphed callable, and why they are kept or dropped."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from onelaunch.call.spec import CallSpec
from onelaunch.capture.recording import CapturedCall, Recording
from onelaunch.errors import CaptureError
from onelaunch.replay.call_path import CallPath
from onelaunch.runtime.attempt import Attempt, SignatureState
from onelaunch.runtime.changing import MANY
from onelaunch.runtime.notices import Notices
from onelaunch.runtime.pool import Member, PoolManager
from onelaunch.runtime.stats import Counts
from onelaunch.runtime.varied import Varied
from onelaunch.runtime.why import why
from onelaunch.source import loaded_at, stored_at
from onelaunch.state.guard import StateGuard
from onelaunch.state.slots import Slot
from onelaunch.watch.ledger import TRIES


@dataclass(slots=True, eq=False)
class Entry:
    """A recording in the table."""

    call: CallPath
    spec: CallSpec
    signature: SignatureState
    paths: Sequence[str]
    captured: CapturedCall
    info: Recording
    member: Member
    lock: threading.RLock = field(default_factory=threading.RLock)
    """A lock held from the checks to the launch, where arguments are objects of a request, such as
    a cache, or numbers are followed."""
    shares: dict[int, int] = field(default_factory=dict)
    """id of a tensor in a request's objects -> how often it refers to its memory."""

    @property
    def unsettled(self) -> bool:
        """True if the captured run did something that the runs before it did not."""
        captured = self.captured
        new = captured.reads_more and self.signature.unread < TRIES
        return new or captured.differs is not None

    def figures(self) -> Recording:
        """Return its figures as they are now: a backward may have been captured since."""
        captured, graph = self.captured, self.captured.graph
        kept_bytes = self.info.kept_bytes if captured.pair is None else graph.memory_bytes
        return replace(
            self.info,
            pool_bytes=graph.memory_bytes,
            kept_bytes=kept_bytes,
            driver_bytes=graph.driver_bytes,
            replays=captured.launches[0],
        )


_KEEP_IN_PLACE = (
    "write what changes into a tensor that stays where it is, `t.copy_(new)`, or pass it as an "
    "argument that is a tensor"
)


class Table:
    """The recordings of one callable, the newest first.

    Attributes:
        entries: the recordings.
        calls: their call paths, which a call tries in turn.
        index: call paths by a key of the owner's choice, which it fills; emptied at each change.
        counts: the captures, evictions and calls that were no replays.
        lock: held while they are changed.
        running: the threads in an eager run. Until they are done, nothing is captured with a
            backward: a capture puts stand-ins in place of the parameters that they read.
    """

    def __init__(self, name: str, enough_warmups: int, pool: PoolManager, notices: Notices) -> None:
        self.entries: tuple[Entry, ...] = ()
        self.calls: tuple[CallPath, ...] = ()
        self.index: dict[Any, Any] = {}
        self.counts = Counts()
        self.lock = threading.RLock()
        self.running: list[int] = []
        self._name = name
        self._enough_warmups = enough_warmups
        self._pool = pool
        self._notices = notices

    def others_run(self) -> bool:
        """Return whether other threads are in an eager run."""
        return any(ident != threading.get_ident() for ident in self.running)

    def figures(self) -> list[Recording]:
        return [entry.figures() for entry in self.entries]

    def keep(self, entries: Iterable[Entry]) -> None:
        """Replace the recordings. Hold the lock."""
        self.entries = tuple(entries)
        self.calls = tuple(entry.call for entry in self.entries)
        self.index = {}  # a new one: another thread may be filling the old one

    def clear(self) -> None:
        """Free every recording, and forget the counts."""
        with self.lock:
            # Only the graphs: the last of a pool frees the memory that no static result holds.
            members = [entry.member for entry in self.entries]
            self.keep(())
            self.counts = Counts()
            for member in members:
                self._pool.free(member)

    def shared(self, guard: StateGuard) -> StateGuard:
        """Return an earlier recording's guard that checks the same; else this one."""
        known = {id(e.captured.guard): e.captured.guard for e in self.entries}
        return next((earlier for earlier in known.values() if earlier.agrees(guard)), guard)

    def add(self, entry: Entry, codes: Collection[CodeType]) -> None:
        with self.lock:  # another thread may reset
            self.keep((entry, *self.entries))
        self._warn_omitted(entry.captured, codes)

    def drop_superseded(self, entry: Entry, varied: Varied) -> None:
        """Free recordings of single values of numbers that a newer recording follows."""
        followed = {count.slot.id for count in entry.captured.counts}
        for other in self.entries:
            moves = {slot.id for slot in other.captured.changed_numbers}
            if other.spec == entry.spec and moves and moves <= followed:
                self.drop(other)
            elif varied.covers(entry, other):
                entry.captured.launches[0] += other.captured.launches[0]
                other.captured.launches[0] = 0
                self.drop(other)

    def _warn_omitted(self, captured: CapturedCall, codes: Collection[CodeType]) -> None:
        """Warn of effects in Python that no replay repeats: hooks, and containers that `codes`, the
        code of the callable, adds to."""
        if captured.hooks:
            these = ", ".join(hook.name for hook in captured.hooks)
            what = "what they compute on tensors, and store of these, is repeated, and the rest not"
            lines = dict.fromkeys(str(hook.place) for hook in captured.hooks if hook.place)
            where = "\n".join(lines) or None
            self._notices.warn("OL308", f"hooks in `{self._name}`, {these}: {what}", where=where)
        if captured.grown:
            these = ", ".join(f"`{name}`" for name in captured.grown)
            found = (loaded_at(codes, name.rpartition(".")[2]) for name in captured.grown)
            place = next((place for place in found if place is not None), None)
            what = f"`{self._name}` adds to {these}: replays leave it as it is"
            self._notices.warn("OL309", what, where=place)

    def drop(self, entry: Entry) -> None:
        """Free a recording that fits no call any more."""
        with self.lock:
            self.keep(e for e in self.entries if e is not entry)
            entry.signature.lost(entry.captured.launches)
        self._pool.free(entry.member)

    def drop_unsettled(self, entry: Entry) -> bool:
        """Free an unsettled recording, so that the next call is captured and compared with it;
        return False after `TRIES` in a row that did not do what the run before them did."""
        signature, captured = entry.signature, entry.captured
        self.drop(entry)
        signature.ledger = captured.ledger
        signature.unread += captured.reads_more
        signature.differing += captured.differs is not None
        signature.warmups = signature.enough_warmups(self._enough_warmups)
        return signature.differing < TRIES

    def drop_misfit(self, entry: Entry, attempt: Attempt) -> str | None:
        """Free a recording that does not fit the call that it was captured for; return the
        difference if it is the second in a row."""
        attempt.signature.unfit += 1
        changed = why((entry,), attempt.spec, attempt.flat.tensors)
        self.drop(entry)
        if attempt.signature.unfit < 2:
            return None
        return (
            f"`{self._name}` was captured twice, and neither recording fits its own call; {changed}"
        )

    def warn_used_once(self, entry: Entry) -> None:
        """Warn if each recording of a signature serves only its own call, because the state that
        it relies on differs at each call. Call it before the recording is added."""
        signature, captured = entry.signature, entry.captured
        before = [e.captured.launches[0] for e in self.entries if e.signature is signature]
        launched = signature.gone() + sum(before) + captured.launches[0]
        alone = launched <= signature.launched + 1 and not captured.changed_numbers
        if in_flight(self.entries, entry.spec):
            alone = False  # earlier ones still wait for their backward
        signature.alone = signature.alone + 1 if alone else 0
        signature.launched = launched
        if signature.alone >= MANY:
            what = f"`{self._name}` was recorded {signature.alone} times in a row for one call each"
            self._notices.warn("OL301", f"{what}; {entry.info.why}", "state", _KEEP_IN_PLACE)

    def evicted(self, member: Member) -> None:
        """Drop a recording that the pool evicts; its signature is captured again when called."""
        with self.lock:
            entry = next((e for e in self.entries if e.member is member), None)
            if entry is None:
                return
            self.keep(e for e in self.entries if e is not entry)
            self.counts.evictions += 1
            signature = entry.signature
            together = signature.launches is not None  # with another one, since the last capture
            signature.lost(entry.captured.launches)
            signature.why = "evicted"
            signature.alone = 0
            signature.warmups = signature.enough_warmups(self._enough_warmups)
            signature.backoff.evicted(signature.gone(), together)

    def drop_stale(self, spec: CallSpec, signature: SignatureState) -> None:
        """Free recordings of this signature whose parameters moved: they cannot fit again."""
        for entry in self.entries:
            moved = entry.captured.guard.moved() if entry.spec == spec else None
            if moved is not None:
                signature.why = f"{moved} moved"
                if signature.alone >= MANY:
                    signature.backoff.defer()
                if moved.endswith(".grad") and signature.parts is None:
                    signature.parts = {}
                self.drop(entry)


def refuse_moving(
    name: str, entries: Iterable[Entry], spec: CallSpec, codes: Iterable[CodeType]
) -> CaptureError | None:
    """Return the refusal of a signature whose calls each change a number, and so need a recording
    each; None while it may get more of them.

    Args:
        codes: the code that the callable runs.
    """
    moving = [
        numbers for e in entries if e.spec == spec and (numbers := numbers_changed_in(e.captured))
    ]
    if len(moving) < _MOST_VALUES:
        return None
    these = ", ".join(f"`{name}`" for name in dict.fromkeys(s.name for m in moving for s in m))
    what = f"`{name}` reads {these} and moves it on, to another value at each call"
    found = (stored_at(codes, slot.key) for slots in moving for slot in slots)
    place = next((place for place in found if place is not None), None)
    return CaptureError("OL118", what, where=place)


def numbers_changed_in(captured: CapturedCall) -> list[Slot]:
    """Return the numbers that a recorded call both reads and changes."""
    return [*captured.changed_numbers, *(count.slot for count in captured.counts)]


_MOST_VALUES = 8
"""The most values, each with its recording, of a number that the callable itself changes."""


def in_flight(entries: Iterable[Entry], spec: CallSpec) -> int:
    """Count the recordings of a signature that fit the present state and wait for a backward."""
    return sum(
        entry.captured.pair is not None
        and entry.captured.pair.in_flight
        and entry.spec == spec
        and entry.captured.guard.check()
        for entry in entries
    )
