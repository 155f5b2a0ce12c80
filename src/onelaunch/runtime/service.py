"""A graphed callable in a service: its start, its readiness, its memory and its metrics."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from weakref import WeakSet

from torch import Tensor

from onelaunch.call.spec import CallSpec
from onelaunch.capture.callee import Callee
from onelaunch.errors import ArgumentError, CaptureError, GraphWarning, describe_type, let_go
from onelaunch.runtime.batcher import Batcher
from onelaunch.runtime.candidate import Call
from onelaunch.runtime.metrics import Metrics
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.runtime.readiness import PendingCall, Readiness, RefusedCall, readiness_of
from onelaunch.runtime.recorder import CannotCaptureHere
from onelaunch.runtime.signature import Signatures, spec_of
from onelaunch.runtime.table import Table
from onelaunch.sizes.buckets import positive
from onelaunch.source import levels_to_user, user_line

Tell = Callable[[int, int, str], object]
"""A function that is told the calls done, all calls, and the call that is next."""
Given = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call
Planned = tuple[CallSpec, Callable[[], Given]]
"""The signature of a call to capture, and the maker of its arguments."""
_LEFT_OUT = frozenset({"OL301", "OL304"})
"""The refusals of a limit: `max_recordings`, the bytes of the pool."""
_FREED = "its recording was freed since"
_MOST_LISTED = 4  # the most calls that the warning lists


class Service:
    """The part of a graphed callable that a service needs beside calls."""

    options: Options
    _batchers: WeakSet[Batcher]
    _callee: Callee
    _name: str
    _pool: PoolManager
    _signatures: Signatures
    _table: Table

    def warm_up(
        self,
        examples: Iterable[object],
        *,
        progress: bool | Tell = False,
        budget_s: float | None = None,
        max_bytes: int | None = None,
    ) -> Readiness:
        """Capture the calls that a service will get, the largest first, before they come.

        No call is made: each is captured as by `capture`, and everything that it wrote is put back.
        Call it under the modes of torch in which calls will come, such as `torch.inference_mode`.

        Args:
            examples: the calls. Each is a tensor, a tuple of arguments, or a pair: a tuple of
                arguments and a dict of keyword arguments. With `buckets` an example stands for all
                sizes: its rows, 1 or more, are repeated as needed.
            progress: True shows a bar on stderr. A function is told before each call how many are
                done, how many there are, and which call is next; at the end the last is empty.
            budget_s: no capture begins after so many seconds; the last may end later.
            max_bytes: the most bytes that the pool may hold. The pool's own `max_bytes` holds, too.
                Calls that do not fit are left out.

        Returns:
            What `readiness` returns now.

        A call that is recorded already costs nothing. So a second `warm_up` goes on where Ctrl-C or
        a budget ended the first. What was left out or refused does not end the rest; a warning
        (OL314) lists it. A call that was left out warms up and is captured when it comes. Under
        ``on_refusal="raise"`` a refused call raises when it comes; otherwise it runs eagerly or in
        pieces from its first call on.

        Raises:
            ArgumentError: OL401, an argument is not as above.
            CaptureError: under ``on_refusal="raise"``, the first refusal if all calls are refused.
                OL109 at once, if nothing can be captured here: inside of a capture, or
                for training while another thread is in an eager run.

        Exceptions of the callable come through as they are. In each case the recordings that were
        made stay.
        """
        started = time.perf_counter()
        _check(examples, progress, budget_s, max_bytes)
        calls, planned = self._plan(examples), self._signatures.planned
        refusals: list[CaptureError] = []
        spent = ""
        with _told(progress, self._name) as tell:
            for done, (spec, make) in enumerate(calls):
                tell(done, len(calls), str(spec))
                if budget_s is not None and time.perf_counter() - started >= budget_s:
                    spent = f"budget_s={budget_s} was spent"
                if spent:
                    planned[spec] = PendingCall(str(spec), spent)
                    continue
                refused = self._capture_or_note(spec, make, max_bytes)
                refusals += [refused] if refused is not None else []
                for lost in self._lost(calls[:done]):  # and this call did not fit
                    spent = f"the pool is full: {spec} did not fit"
                    self._capture_or_note(*lost, max_bytes)
            tell(len(calls), len(calls), "")
        readiness, raises = self.readiness(), self.options.on_refusal == "raise"
        if raises and refusals and len(refusals) == len(calls):
            raise refusals[0]
        missed = [*readiness.pending, *(readiness.refused if raises else ())]
        if missed:
            total = len(missed) + len(readiness.captured)
            warning = _warning(f"{len(missed)} of {total} calls of `{self._name}`", missed)
            warnings.warn(warning, stacklevel=levels_to_user())
        return readiness

    def _plan(self, examples: Iterable[object]) -> list[Planned]:
        """Return the calls, the largest first, each signature once; note them as planned."""
        calls: dict[CallSpec, tuple[int, Callable[[], Given]]] = {}
        for example in examples:
            for make in self._sized(*_arguments(example)):
                call = self._recorded_as(*make())
                nbytes = sum(t.nbytes for t in call.flat.tensors)
                calls.setdefault(spec_of(call), (nbytes, make))
        ordered = sorted(calls.items(), key=lambda call: call[1][0], reverse=True)
        self._signatures.planned.update((spec, PendingCall(str(spec))) for spec, _ in ordered)
        return [(spec, make) for spec, (_, make) in ordered]

    def _sized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterable[Callable[[], Given]]:
        """Return the makers of the calls that an example stands for: itself, without buckets."""
        return [lambda: (args, kwargs)]

    def _recorded_as(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call as its recording takes it: as it is, without buckets."""
        return cast(Any, self)._call(args, kwargs)

    def _capture_or_note(
        self, spec: CallSpec, make: Callable[[], Given], max_bytes: int | None
    ) -> CaptureError | None:
        """Capture a call; else note why not, and return the refusal if it is no limit's."""
        args, kwargs = make()
        graphed, planned = cast(Any, self), self._signatures.planned
        call: Call = graphed._call(args, kwargs)
        try:
            # Other threads capture nothing meanwhile, so the limit holds for this call alone.
            with call.driver.exclusive(), self._pool.limited(max_bytes):
                graphed.capture(*args, **kwargs)
        except CannotCaptureHere:
            raise
        except CaptureError as error:
            let_go(error)
            if error.code in _LEFT_OUT:
                planned[spec] = PendingCall(str(spec), error.what)
                return None
            planned[spec] = RefusedCall(str(spec), error.code, error.what, error.where)
            # A call that makes lasting state (OL110) is captured once it has run.
            if self.options.on_refusal != "raise" and error.code != "OL110":
                status, reached = self._signatures.status(spec), self._callee.reached(call.flat)
                graphed._stay_eager(status.for_case(self._callee.training, reached), error)
            return error
        planned[spec] = PendingCall(str(spec), _FREED)  # if it has no recording any more
        return None

    def _lost(self, calls: list[Planned]) -> list[Planned]:
        """Return the captured calls without a recording. A pool whose last capture went beyond its
        limit was emptied: only with the last recording does memory go back to the device."""
        recorded, planned = {e.spec for e in self._table.entries}, self._signatures.planned
        gone = [call for call in calls if call[0] not in recorded]
        return [call for call in gone if planned.get(call[0]) == PendingCall(str(call[0]), _FREED)]

    @property
    def ready(self) -> bool:
        """True once `warm_up` has tried each call, and none of them would raise; see `Readiness`.
        False before the first `warm_up`, during it, and after Ctrl-C."""
        return self.readiness().ready

    def readiness(self) -> Readiness:
        """Return which calls of `warm_up` are captured, pending and refused. Costs microseconds,
        waits for nothing, and may be called from any thread, also during a `warm_up`."""
        recorded = [entry.spec for entry in self._table.entries]
        raises = self.options.on_refusal == "raise"
        return readiness_of(self._signatures.planned, recorded, raises)

    @property
    def memory_bytes(self) -> int:
        """Device bytes of the pool, other callables' recordings included; 0 without recordings."""
        return self._pool.memory_bytes if self._table.entries else 0

    def batcher(self, *, max_wait_ms: float, max_waiting: int = 1024) -> Batcher:
        """Return a queue that runs single requests in batches of the buckets; see `Batcher`.

        Its thread runs under this thread's autocast, and its `no_grad` or `inference_mode`; where
        gradients are on, under `inference_mode`. Call it under the modes of `warm_up`.

        Args:
            max_wait_ms: the most milliseconds that a request waits for others.
            max_waiting: the most requests that wait; one more is refused (OL211).

        Raises:
            ArgumentError: OL401, an argument is not as above, or the callable has no `buckets`.
        """
        batcher = Batcher(self._joining(), max_wait_ms, max_waiting)
        self._batchers.add(batcher)
        return batcher

    def _joining(self) -> Any:
        """Return the calls to be joined, with buckets."""
        fix = "ol.graph(f, buckets=ol.Buckets.powers_of_two(32))"
        raise ArgumentError("OL401", f"a batcher for `{self._name}`, without buckets", fix=fix)

    def metrics(self) -> str:
        """Return the figures of `stats()` in Prometheus' text format; see `Metrics`, which takes
        several callables. Costs a walk over the allocator's blocks, a millisecond or so."""
        return Metrics(self).text()


def _check(examples: object, progress: object, budget_s: object, max_bytes: object) -> None:
    """Refuse arguments of `warm_up` of the wrong kind."""
    if isinstance(examples, (Tensor, Mapping, str)) or not isinstance(examples, Iterable):
        fix = "a list of calls: `warm_up([x])`, or `warm_up([(x, mask)])`"
        raise ArgumentError(
            "OL401", f"examples is {describe_type(cast(object, examples))}", fix=fix
        )
    if not (isinstance(progress, bool) or callable(progress)):
        fix = "True, or a function that takes (done, total, call)"
        raise ArgumentError("OL401", f"progress={progress!r}", fix=fix)
    if budget_s is not None and not (isinstance(budget_s, (int, float)) and budget_s > 0):
        raise ArgumentError("OL401", f"budget_s={budget_s!r}", fix="seconds above 0, or None")
    if max_bytes is not None:
        positive("max_bytes", max_bytes)


def _arguments(example: object) -> Given:
    match example:
        case (tuple() as args, dict() as kwargs):
            return cast(Given, (args, kwargs))
        case tuple():
            return cast(tuple[Any, ...], example), {}
        case _:
            return (example,), {}


def _told(progress: bool | Tell, name: str) -> AbstractContextManager[Tell]:
    """Give the function to tell the progress to."""
    if progress is True:
        from onelaunch.runtime.progress import bar  # rich is imported for a bar alone

        return bar(name)
    return nullcontext(progress or (lambda done, total, what: None))


def _warning(which: str, missed: list[PendingCall | RefusedCall]) -> GraphWarning:
    lines = [
        f"{call.call}: {call.why}"
        if isinstance(call, PendingCall)
        else f"{call.call}: {call.code}, {call.what}" + (f" ({call.where})" if call.where else "")
        for call in missed
    ]
    rest = [f"and {len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
    what = "\n         ".join([f"{which} are not captured", *lines[:_MOST_LISTED], *rest])
    return GraphWarning("OL314", what, where=user_line())
