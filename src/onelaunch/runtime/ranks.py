"""The agreement of the processes of a group: all of them record a call with collectives, or none.

A recording with a collective is launched by each process of its group at the same call. So before a
capture each process that comes posts its verdict in the group's store: warming up, ready, or the
reason why it cannot. After the capture it posts whether it has a recording. Whoever knows all
verdicts, or has waited too long for one, writes the decision, and the first that is written holds
for everybody. No collective is used for it, and a replay asks nothing.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from onelaunch.capture.distributed import initialized
from onelaunch.driver.aten import group_of, operator
from onelaunch.errors import CaptureError, CaptureSignal
from onelaunch.runtime.options import Options
from onelaunch.runtime.signature import Signatures
from onelaunch.runtime.stats import DEFERRED
from onelaunch.runtime.table import Table, TableEntry
from onelaunch.source import code_of, user_frame, user_line
from onelaunch.unwinding import DispatchMode

Verdict = dict[str, Any]
"""The verdict of a process on a call, with its rank and the members that it knows. A refusal has
its text, its line, and whether it is raised."""
_ORDER = ("warm", "no", "later", "unsettled", "ready")
"""The verdicts. The first one in this order that any process gives is the decision."""
_SOON = 2.0
"""Seconds that a process has to come if it was not seen to run the last call itself. Most likely it
has replayed the last call, and replays this one."""
_LATE = 10.0  # seconds that another process has to come
_AHEAD = 60.0  # seconds that it has to come to a capture ahead of calls
_CAPTURE = 300.0  # seconds that it has for its capture
_MISSED = 3  # the calls in a row to which a process does not come, until the others give up
_MISSING = "it does not record this call: it replays, or does not come here"
_CAUGHT = (CaptureError, CaptureSignal)
"""The exceptions of a capture after which the call goes on, as far as `on_refusal` lets it."""
_numbers: Counter[str] = Counter()
"""The callables of each name and line that were found to run collectives, in the order of these."""


class RefusedByOtherRank(CaptureError):
    """The refusal of a call that another process cannot record. `raises`: whether that process
    raises, so that this one has to; otherwise it runs eagerly."""

    def __init__(self, refusals: list[Verdict]) -> None:
        self.raises = any(refusal["raises"] for refusal in refusals)
        what = "; ".join(f"rank {one['rank']}: {one['what']}" for one in refusals[:4])
        where = next((one["where"] for one in refusals if one["where"]), None)
        super().__init__("OL131", what, where=where or user_line())


class NotAllReady(Exception):
    """A sign that another process cannot record this call yet."""


@dataclass(slots=True, eq=False)
class Ranks:
    """The processes that share the collectives of one callable."""

    _fn: object
    _name: str
    _options: Options
    _table: Table
    _signatures: Signatures
    _raised: int = 0  # the calls that raised a refusal, which nothing else counts
    _members: set[int] = field(default_factory=set)
    _group: Callable[[], object] = lambda: None
    _key: str = ""
    _at: str = ""  # the place of the present meeting
    _posted: int = -1  # the last call that was posted
    _recorded: bool = False
    """True once the processes have recorded together, so that they may replay."""
    _missed: int = 0
    _ahead: int = 0

    def forget(self) -> None:
        """Begin anew: the counts of calls do, too."""
        self._members, self._key, self._posted, self._recorded = set(), "", -1, False
        self._raised = self._missed = self._ahead = 0

    @property
    def several(self) -> bool:
        """True if the callable is known to run collectives with other processes."""
        if not self._members or not initialized():
            return False
        return self._group() is torch.distributed.group.WORLD

    def raises(self, error: CaptureError) -> bool:
        """Return whether the refusal of a call is raised, and count it."""
        raised = error.raises if isinstance(error, RefusedByOtherRank) else self._raises
        self._raised += raised
        return raised

    # What the callable's collectives need.

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note the process groups whose collectives run meanwhile."""
        if not initialized():
            yield
            return
        before = _collectives()
        try:
            yield
        finally:  # the others, too, count the callable, whatever has come of the run here
            self._join(g for g, count in _collectives().items() if before.get(g) != count)

    @contextmanager
    def noting_ahead(self) -> Generator[None]:
        """Note the groups of a run ahead of calls. The processes meet before its first collective.
        A process that is alone there refuses: in the collective it would wait."""
        if not initialized():
            yield
            return
        self._at = ""
        with self.noting(), _BeforeCollective(self._meet_ahead):
            yield

    def _join(self, groups: Iterable[Any]) -> None:
        for group in groups:
            if not self.several:
                self.forget()
                self._group = weakref.ref(torch.distributed.group.WORLD)
                line = getattr(code_of(self._fn), "co_firstlineno", 0)
                name = f"onelaunch/{self._name}/{line}"
                self._key = f"{name}/{_numbers[name]}"
                _numbers[name] += 1
            self._members |= set(torch.distributed.get_process_group_ranks(group))

    # Meetings.

    def warms_up(self) -> None:
        """Tell the others that this call is a warm-up."""
        self._posted = self._calls()
        self._tell(str(self._posted), self._verdict("warm"))

    def runs_eagerly(self, code: str) -> None:
        """Tell them that this call runs eagerly; after the first in a row they do not wait."""
        if self._posted == self._calls() - 1:
            say = "later" if code == DEFERRED else "no"
            self._tell(str(self._calls()), self._verdict(say, f"it runs eagerly ({code})"))

    def meet(self, error: CaptureError | None) -> CaptureError | None:
        """Return None if all processes are ready to capture this call; otherwise its refusal.
        Raises `NotAllReady`: another process cannot record it yet."""
        self._posted = self._calls()
        self._at = str(self._posted)
        last = [self._place(str(self._posted - 1), rank) for rank in self._members]
        seconds = _SOON if self._recorded and not _store().check(last) else _LATE
        verdict = self._verdict("ready") if error is None else self._refusal(error)
        decision = self._decided(self._at, verdict, seconds)
        if decision["say"] == "later":
            raise NotAllReady
        if decision["say"] == "ready":
            return None
        if error is None:
            return RefusedByOtherRank(decision["refusals"])
        # The others replay, and wait in a collective: this process runs eagerly.
        return RefusedByOtherRank([verdict | {"raises": False}]) if decision["missing"] else error

    def record(
        self, make: Callable[[], TableEntry | None], free: Callable[[TableEntry], None]
    ) -> TableEntry | None:
        """Return a recording if all processes have one, or None if there is no room for it. `free`:
        frees one that other processes lack. Raises `RefusedByOtherRank` if another process cannot
        record it, `NotAllReady` if it cannot yet."""
        if not self.several or not self._at:  # a run ahead without collectives
            return make()
        self._at = at = f"{self._at}/made"
        try:
            entry = make()
        except Exception as error:
            verdict = self._failure(error)
            self._give_way(at, verdict)
            self._raised += not (isinstance(error, _CAUGHT) or at.startswith("ahead"))
            raise
        except BaseException:
            self._tell(at, self._verdict("no", "it was interrupted", raises=True))
            raise
        if entry is None:
            verdict = self._verdict("no", "[OL304] its pool has no room for the recording")
            self._give_way(at, verdict)
            return None
        say = "unsettled" if entry.ran_differently else "ready"
        decision = self._decided(at, self._verdict(say), _CAPTURE)
        if decision["say"] in ("ready", "unsettled"):
            self._recorded = True
            entry.unsettled_on_other_rank = decision["say"] == "unsettled"
            return entry
        entry.undo()
        free(entry)
        if decision["say"] == "later":
            raise NotAllReady
        raise RefusedByOtherRank(decision["refusals"])

    def _failure(self, error: Exception) -> Verdict:
        """Return the verdict of this process, whose capture raised."""
        if isinstance(error, CaptureError):
            return self._refusal(error)
        if isinstance(error, _CAUGHT):
            return self._verdict("later")
        place = user_frame(error.__traceback__)
        what = f"{type(error).__name__}: {error}"
        return self._verdict("no", what, str(place) if place else None, raises=True)

    def _give_way(self, at: str, verdict: Verdict) -> None:
        """Tell that this process has no recording. Raise where another process raises: it does not
        come to the collectives of this call."""
        decision = self._decided(at, verdict, _CAPTURE)
        if not verdict["raises"] and any(refusal["raises"] for refusal in decision["refusals"]):
            raise RefusedByOtherRank(decision["refusals"]) from None

    def _meet_ahead(self, group: Any) -> None:
        self._join([group])
        self._at, self._ahead = f"ahead{self._ahead}", self._ahead + 1
        decision = self._decided(self._at, self._verdict("ready"), _AHEAD)
        if decision["say"] != "ready":
            raise RefusedByOtherRank(decision["refusals"])

    # The store.

    def _calls(self) -> int:
        """Return the number of calls so far, replays included: a place that all processes share."""
        counts, launched = self._table.counts, self._signatures.past_launches()
        launched += sum(entry.captured.launches[0] for entry in self._table.entries)
        eager = sum(counts.eager_reasons.values())
        return launched + counts.warmup_calls + eager + self._raised

    def _verdict(
        self, say: str, what: str = "", where: str | None = None, raises: bool = False
    ) -> Verdict:
        rank, members = torch.distributed.get_rank(), sorted(self._members)
        verdict: Verdict = {"say": say, "rank": rank, "with": members}
        return verdict | {"what": what, "where": where, "raises": raises}

    def _refusal(self, error: CaptureError) -> Verdict:
        return self._verdict("no", f"[{error.code}] {error.what}", error.where, self._raises)

    @property
    def _raises(self) -> bool:
        return self._options.on_refusal == "raise"

    def _tell(self, at: str, verdict: Verdict) -> None:
        _store().set(self._place(at, torch.distributed.get_rank()), json.dumps(verdict))

    def _place(self, at: str, rank: int) -> str:
        return f"{self._key}/{at}/{rank}"

    def _decided(self, at: str, verdict: Verdict, seconds: float) -> Verdict:
        """Tell this process's verdict, and return the decision of all."""
        self._tell(at, verdict)
        store, until = _store(), time.monotonic() + seconds
        members, verdicts = {*self._members}, dict[int, Verdict]()
        # A member may share other groups with processes that this one does not know.
        while asked := members - verdicts.keys():
            places = {rank: self._place(at, rank) for rank in asked}
            left = timedelta(seconds=max(until - time.monotonic(), 0.01))
            with suppress(RuntimeError):  # the time is over; what came is looked at all the same
                store.wait([*places.values()], left)
            came = [rank for rank in asked if store.check([places[rank]])]
            verdicts |= {rank: json.loads(store.get(places[rank])) for rank in came}
            members |= {rank for one in verdicts.values() for rank in one["with"]}
            if len(came) < len(asked):
                break
        missing = sorted(members - verdicts.keys())
        self._missed = self._missed + 1 if missing else 0
        say = next(say for say in _ORDER if any(v["say"] == say for v in verdicts.values()))
        refusals = [one for one in verdicts.values() if one["say"] == "no"]
        if missing:
            retries = seconds == _LATE and self._missed < _MISSED
            say = "later" if retries else "no"
            refusals = [self._verdict("no", _MISSING) | {"rank": rank} for rank in missing]
        say = "later" if say == "warm" else say
        mine = json.dumps({"say": say, "refusals": refusals, "missing": missing})
        # Whoever comes later, or sees otherwise, goes by what is there.
        return json.loads(store.compare_set(f"{self._key}/{at}/of{min(members)}", "", mine))


class _BeforeCollective(DispatchMode):
    """A mode that calls a function once, before the first collective with other processes. `meet`:
    the function; it gets the process group."""

    supports_higher_order_operators = True

    def __init__(self, meet: Callable[[Any], None]) -> None:
        super().__init__()
        self._meet: Callable[[Any], None] | None = meet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._meet is not None and isinstance(func, torch._ops.OpOverload):
            groups = [group_of(v) for v in args] if operator(func).communicates else []
            group = next((g for g in groups if g is not None and g.size() > 1), None)
            if group is not None:
                meet, self._meet = self._meet, None
                meet(group)
        return func(*args, **(kwargs or {}))


def _collectives() -> dict[Any, int]:
    """Return the number of collectives that each process group of several has begun."""
    counts: dict[Any, int] = {}
    for group in _c10d()._world.pg_map:
        for device in group._device_types if group.size() > 1 else ():
            with suppress(RuntimeError):  # a backend that does not count
                count = group._get_backend(device)._get_sequence_number_for_group()
                counts[group] = counts.get(group, 0) + count
    return counts


def _store() -> Any:
    return _c10d()._get_default_store()


def _c10d() -> Any:
    return torch.distributed.distributed_c10d
