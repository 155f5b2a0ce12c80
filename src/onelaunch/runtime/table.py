"""The recordings of a graphed callable: the choice of those that are kept, dropped, warned of."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torch import Tensor

from onelaunch.autograd.pair import AutogradPair
from onelaunch.call.kinds import changed_kinds
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import Flat, flatten_call, is_ordinary
from onelaunch.capture.recording import CapturedCall, Recording
from onelaunch.errors import CaptureError, GraphWarning, ReplayError
from onelaunch.runtime.attempt import Attempt, SignatureState
from onelaunch.runtime.changing import MANY, Finding, Newest
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import Member, PoolManager
from onelaunch.runtime.stats import Counts, GraphStats, graph_stats
from onelaunch.runtime.varied import Varied
from onelaunch.source import levels_to_user, loaded_at, stored_at, user_line
from onelaunch.state.guard import StateGuard
from onelaunch.state.host_values import bytes_of
from onelaunch.state.slots import Slot
from onelaunch.watch.ledger import TRIES


@dataclass(slots=True, eq=False)
class Entry:
    """A recording in the table."""

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    spec: CallSpec
    signature: SignatureState
    paths: Sequence[str]
    captured: CapturedCall
    info: Recording
    member: Member
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held from the checks to the launch, where arguments are objects of a request, such as a
    cache, or numbers are followed."""
    shares: dict[int, int] = field(default_factory=dict[int, int])
    """id of a tensor in a request's objects -> how often it refers to its memory: `takeover`."""

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
    """The recordings of a callable, and their figures for users."""

    def __init__(self, name: str, options: Options, pool: PoolManager) -> None:
        self.options = options
        self._name = name
        self._pool = pool
        self._entries: tuple[Entry, ...] = ()
        self._signatures: dict[CallSpec, SignatureState] = {}
        self._counts = Counts()
        self._warned: set[str] = set()
        self._newest = Newest()
        self._varied = Varied()
        self._apart: dict[type, bool] = {}
        """Classes of which each call brings another object -> True if such objects are taken
        apart."""
        self._lock = threading.RLock()

    @property
    def recordings(self) -> list[Recording]:
        """The recordings, the newest first."""
        return [entry.figures() for entry in self._entries]

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the recordings hold, a shared pool counted once."""
        return self._pool.memory_bytes if self._entries else 0

    def stats(self) -> GraphStats:
        """Return the figures of the recordings and calls. Costs microseconds, and no sync."""
        gone = sum(signature.gone() for signature in list(self._signatures.values()))
        recordings = [entry.figures() for entry in self._entries]
        return graph_stats(recordings, self._counts, gone)

    def reset(self) -> None:
        """Free every recording and forget every signature; the next calls warm up again.

        Tensors returned by earlier calls stay valid, except under ``outputs="static"``.
        """
        with self._lock:
            # Only the graphs: the last of a pool frees the memory that no static result holds.
            members = [entry.member for entry in self._entries]
            self._entries = ()
            self._signatures.clear()
            self._newest.clear()
            self._varied.clear()
            self._counts = Counts()
            self._warned.clear()
            for member in members:
                self._pool.free(member)

    def _warmup_calls(self, signature: SignatureState) -> int:
        """Return the number of calls of a signature that warm up."""
        return max(self.options.warmup_calls, signature.least)

    def _shared(self, guard: StateGuard) -> StateGuard:
        """Return an earlier recording's guard that checks the same; else this one."""
        known = {id(e.captured.guard): e.captured.guard for e in self._entries}
        return next((earlier for earlier in known.values() if earlier.agrees(guard)), guard)

    def _add(self, entry: Entry, codes: Collection[CodeType]) -> None:
        with self._lock:  # another thread may reset
            self._entries = (entry, *self._entries)
        self._warn_unrepeated(entry.captured, codes)

    def _drop_followed(self, entry: Entry) -> None:
        """Free recordings of single values of numbers that a newer recording follows."""
        followed = {count.slot.id for count in entry.captured.counts}
        for other in self._entries:
            moves = {slot.id for slot in other.captured.moves}
            if other.spec == entry.spec and moves and moves <= followed:
                self._drop(other)
            elif self._varied.covers(entry, other):
                entry.captured.launches[0] += other.captured.launches[0]
                other.captured.launches[0] = 0
                self._drop(other)

    def _warn_unrepeated(self, captured: CapturedCall, codes: Collection[CodeType]) -> None:
        """Warn of Python in the callable, the code of which is given, whose other effects no replay
        repeats."""
        if captured.hooks:
            these = ", ".join(captured.hooks)
            what = "what they compute on tensors, and store of these, is repeated, and the rest not"
            self._warn("OL308", f"hooks in `{self._name}`, {these}: {what}")
        if captured.grown:
            these = ", ".join(f"`{name}`" for name in captured.grown)
            found = (loaded_at(codes, name.rpartition(".")[2]) for name in captured.grown)
            place = next((place for place in found if place is not None), None)
            what = f"`{self._name}` adds to {these}: replays leave it as it is"
            self._warn("OL309", what, where=str(place) if place else None)

    def _drop(self, entry: Entry) -> None:
        """Free a recording that fits no call any more."""
        with self._lock:
            self._entries = tuple(e for e in self._entries if e is not entry)
            entry.signature.lost(entry.captured.launches)
        self._pool.free(entry.member)

    def _drop_unsettled(self, entry: Entry) -> bool:
        """Free a recording that differs from the run before it, so that the next call is captured
        and compared with it; return False after `TRIES` in a row."""
        signature, captured = entry.signature, entry.captured
        self._drop(entry)
        signature.ledger = captured.ledger
        signature.unread += captured.reads_more
        signature.differing += captured.differs is not None
        signature.warm = self._warmup_calls(signature)
        return signature.differing < TRIES

    def _drop_unfit(self, entry: Entry, attempt: Attempt) -> str | None:
        """Free a recording that does not fit the call that it was captured for; return the
        difference if it is the second in a row."""
        attempt.signature.unfit += 1
        changed = why((entry,), attempt.spec, attempt.flat.tensors)
        self._drop(entry)
        if attempt.signature.unfit < 2:
            return None
        return (
            f"`{self._name}` was captured twice, and neither recording fits its own call; {changed}"
        )

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        """Flatten the arguments of a call, and take apart objects that are new at each call."""
        return flatten_call(args, kwargs, self._apart)

    def _note_new(
        self, spec: CallSpec, flat: Flat, signature: SignatureState, followed: bool = False
    ) -> None:
        """Note a new signature, and act if each call brings another number, object or size, before
        there are too many signatures to capture any more; of a number only if it is not to be
        followed."""
        found = self._newest.note(spec, flat.paths, signature)
        if found is None or (followed and found.kind == "number"):
            return
        kind = type(found.newest)
        if found.kind == "object" and kind not in self._apart and is_ordinary(kind):
            self._apart[kind] = True
            self._newest.clear()
        else:
            self._warn_changing(found)

    def _note_alone(self, entry: Entry) -> None:
        """Warn if each recording of a signature serves only its own call, because the state that
        it relies on differs at each call. Call it before the recording is added."""
        signature, captured = entry.signature, entry.captured
        before = [e.captured.launches[0] for e in self._entries if e.signature is signature]
        launched = signature.gone() + sum(before) + captured.launches[0]
        alone = launched <= signature.launched + 1 and not captured.moves
        if in_flight(self._entries, entry.spec):
            alone = False  # earlier ones still wait for their backward
        signature.alone = signature.alone + 1 if alone else 0
        signature.launched = launched
        if signature.alone >= MANY:
            what = f"`{self._name}` was recorded {signature.alone} times in a row for one call each"
            self._warn("OL301", f"{what}; {entry.info.why}", "state", _KEEP_IN_PLACE)

    def _keep_whole(self, before: Flat, after: Flat) -> None:
        """Stop taking apart objects that the callable changes: a replay would not change them. A
        dataclass is then what any object is."""
        changed = changed_kinds(before, after)
        self._apart.update(dict.fromkeys(changed, False))
        names = " and ".join(sorted(kind.__name__ for kind, asked in changed.items() if asked))
        if names:
            what = f"`{self._name}` is called with another {names} each time, and changes it"
            fix = "return what it stores there, or give it the same object at each call"
            self._warn("OL302", f"{what}: such calls run eagerly", "object", fix)

    def _warn_changing(self, found: Finding) -> None:
        code, end = "OL301", ""
        if found.kind == "object":
            code, end = "OL302", ": such calls run eagerly"
        text = f"`{self._name}` was called with {found.text}{end}"
        self._warn(code, text, found.kind, found.fix)

    def _warn(
        self, code: str, what: str, kind: str = "", fix: str = "", where: str | None = None
    ) -> None:
        """Warn once for each code and kind; of the line that runs, by default."""
        if code + kind not in self._warned:
            warning = GraphWarning(code, what, where=where or user_line(), fix=fix or None)
            self._tell(warning, kind)

    def _tell(self, warning: GraphWarning, kind: str = "") -> None:
        """Warn, unless that was done for the same code and kind."""
        if warning.code + kind not in self._warned:
            self._warned.add(warning.code + kind)
            warnings.warn(warning, stacklevel=levels_to_user())

    def _evicted(self, member: Member) -> None:
        """Drop a recording that the pool evicts; its signature is captured again when called."""
        with self._lock:
            entry = next((e for e in self._entries if e.member is member), None)
            if entry is None:
                return
            self._entries = tuple(e for e in self._entries if e is not entry)
            self._counts.evictions += 1
            signature = entry.signature
            together = signature.launches is not None  # with another one, since the last capture
            signature.lost(entry.captured.launches)
            signature.why = "evicted"
            signature.alone = 0
            signature.warm = self._warmup_calls(signature)
            signature.backoff.evicted(signature.gone(), together)

    def _drop_stale(self, spec: CallSpec, signature: SignatureState) -> None:
        """Free recordings of this signature whose parameters moved: they cannot fit again."""
        for entry in self._entries:
            moved = entry.captured.guard.moved() if entry.spec == spec else None
            if moved is not None:
                signature.why = f"{moved} moved"
                if signature.alone >= MANY:
                    signature.backoff.defer()
                if moved.endswith(".grad") and signature.parts is None:
                    signature.parts = {}
                self._drop(entry)


def newest_pair(table: Table) -> AutogradPair | None:
    """Return the autograd side of the newest recording, or None."""
    return table._entries[0].captured.pair if table._entries else None


def refuse_moving(
    name: str, entries: Iterable[Entry], spec: CallSpec, codes: Iterable[CodeType]
) -> CaptureError | None:
    """Return the refusal of another recording of a signature whose calls each change a number; None
    while more may be made.

    Args:
        codes: the code that the callable runs.
    """
    moving = [numbers for e in entries if e.spec == spec and (numbers := moving_in(e.captured))]
    if len(moving) < _MOST_VALUES:
        return None
    these = ", ".join(f"`{name}`" for name in dict.fromkeys(s.name for m in moving for s in m))
    what = f"`{name}` reads {these} and moves it on, to another value at each call"
    found = (stored_at(codes, slot.key) for slots in moving for slot in slots)
    place = next((place for place in found if place is not None), None)
    return CaptureError("OL118", what, where=str(place) if place else None)


def moving_in(captured: CapturedCall) -> list[Slot]:
    """Return the numbers that a recorded call moves on, and does not only count."""
    return [*captured.moves, *(count.slot for count in captured.counts)]


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


# Messages about a call that no recording fits.


def why(entries: Sequence[Entry], spec: CallSpec, tensors: Sequence[Tensor] = ()) -> str:
    """Return why a call with these tensors needs another recording."""
    for entry in entries:
        if entry.spec == spec:
            numbers = None if entry.captured.scalars.current() else "an optimizer's numbers"
            unlike = entry.captured.unlike(tensors)
            moved = entry.captured.guard.difference()
            values = _other_value(entry, tensors)
            changed = moved or numbers or unlike or values or _other_count(entry)
            pair = entry.captured.pair
            if changed is None and pair is not None and pair.in_flight:
                return "an earlier forward still waits for its backward"
            return f"state changed: {changed or 'memory shared otherwise'}"
    if not entries:
        return "first signature"
    where, how = entries[0].spec.difference(spec, entries[0].paths)
    return f"{where}: {how}"


def _other_value(entry: Entry, tensors: Sequence[Tensor]) -> str | None:
    """Describe a host argument that has other values than the host read; or return None."""
    for index, value in entry.captured.values.items():
        if index < len(tensors) and bytes_of(tensors[index]) != value:
            return f"the values of `{entry.paths[index]}`, which the host reads"
    return None


def _other_count(entry: Entry) -> str | None:
    """Describe a number whose value a recording that follows it does not serve; or return None."""
    slots = [count.slot for count in entry.captured.counts if not count.current()]
    followed = entry.captured.followed
    if not followed.arguments and not followed.serves():
        slots += followed.slots
    return ", ".join(f"{slot.name} is {slot.read()!r}" for slot in slots) or None


def mismatch(name: str, entry: Entry, spec: CallSpec) -> ReplayError:
    """Return the error of a call that differs from the only signature allowed."""
    where, how = entry.spec.difference(spec, entry.paths)
    what = f"`{name}` was captured for {entry.spec}, got {spec}"
    return ReplayError("OL201", what, where=f"{where}: {how}")


def varying(
    name: str,
    entries: Sequence[Entry],
    signatures: int,
    spec: CallSpec,
    tensors: Sequence[Tensor] = (),
) -> str:
    """Describe the difference between the calls of a callable that has too many recordings."""
    if not entries:
        return f"`{name}` was called with {signatures} signatures"
    if entries[0].spec == spec:
        return f"`{name}` has {len(entries)} recordings; {why(entries, spec, tensors)}"
    where, how = entries[0].spec.difference(spec, entries[0].paths)
    return f"`{name}` has {len(entries)} recordings; {where} varies: {how}"
