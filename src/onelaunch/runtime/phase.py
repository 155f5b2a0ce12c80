"""The phase of a call that no recording fits: warm-up, capture, eager, or refused.

The options `warmup`, `max_recordings`, `max_in_flight` and `on_mismatch` act here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from threading import get_ident
from typing import NamedTuple

from onelaunch.call.numbers import numbers_read
from onelaunch.call.spec import CallSpec
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.errors import CaptureError
from onelaunch.runtime.candidate import UNPADDED, Call, Candidate, OneWarmup, SignatureStatus
from onelaunch.runtime.options import Options
from onelaunch.runtime.ranks import NotAllReady, Ranks
from onelaunch.runtime.signature import Signatures, opaque, spec_of
from onelaunch.runtime.stats import DEFERRED
from onelaunch.runtime.table import Table, in_flight, refuse_moving
from onelaunch.runtime.warmup import Warmup
from onelaunch.runtime.why import (
    KEEP_IN_PLACE,
    mismatch,
    recorded_in_vain,
    still_waiting,
    varying,
    why,
)
from onelaunch.source import line_of
from onelaunch.state.snapshot import ReachableState
from onelaunch.watch.operations import HigherOrder

_SIGNATURES_A_RECORDING = 4  # the signatures that are remembered, as a multiple of `max_recordings`


class RunsEagerly(NamedTuple):
    """A call that runs eagerly, with a warning if there is a code. `reason`: the code of an
    earlier warning, or a word, for the counts of calls without a code."""

    code: str = ""
    why: str = ""
    fix: str = ""
    kind: str = ""
    reason: str = DEFERRED


class Refused(NamedTuple):
    """A signature that cannot be captured."""

    status: SignatureStatus
    error: CaptureError


class Warming(NamedTuple):
    """A signature that needs more warm-up calls."""

    candidate: Candidate


class Ready(NamedTuple):
    """A signature that is to be captured."""

    candidate: Candidate


Phase = RunsEagerly | Refused | Warming | Ready


@dataclass(slots=True, eq=False)
class Phases:
    """The rules that give a call its phase, over the signatures and recordings of one callable."""

    _name: str
    _options: Options
    _callee: Callee
    _signatures: Signatures
    _table: Table
    _ranks: Ranks
    _warmup: Warmup

    def of(self, call: Call) -> Phase:
        """Choose the phase of a call, as `_of_this_process` does. Processes that share collectives
        choose together: all capture, or none."""
        phase = self._of_this_process(call)
        if not self._ranks.several:
            return phase
        error = None
        match phase:
            case RunsEagerly(code, _, _, _, reason):
                self._ranks.runs_eagerly(code or reason)
                return phase
            case Warming():
                self._ranks.warms_up()
                return phase
            case Ready(candidate):
                status = candidate.status
                if not self._warmup.foresees_capture(candidate):
                    self._ranks.warms_up()  # a rehearsal runs collectives, so the call itself
                    return Warming(candidate)
            case Refused(status, error):
                pass
        try:
            refused = self._ranks.meet(error)
        except NotAllReady:
            return RunsEagerly()
        return phase if refused is None else Refused(status, refused)

    def _of_this_process(self, call: Call) -> Phase:
        """Choose the phase of a call, and update its signature. The signature is made, its backoff
        counted, and its stale recordings freed."""
        flat, driver, entries = call.flat, call.driver, self._table.entries
        incomparable = opaque(flat)
        if incomparable is not None:
            return RunsEagerly("OL302", f"{incomparable}: runs eagerly")
        noted = self._spec_and_status(call)
        if isinstance(noted, RunsEagerly):
            return noted
        spec, status = noted
        reached = self._callee.reached(flat)
        status = status.for_case(self._callee.training, reached)
        history = status.history
        waits = history.take_turn()
        if reason := status.refusal.code or waits:
            return RunsEagerly(reason=reason)
        if distributed.is_unsharded(reached.values):
            return RunsEagerly()
        of_signature = [entry for entry in entries if entry.spec == spec]
        if self._signatures.replacements.note(driver, of_signature, self._callee):
            status.warmups = status.enough_warmups(self._options.enough_warmups) - 1
        self._table.drop_stale(spec, status)  # recordings whose parameters moved: recorded anew
        moving = refuse_moving(self._name, self._table.entries, spec, self._callee.codes)
        refused = self._refusal(status, reached) or moving
        if refused is not None:
            return Refused(status, refused)
        waiting = in_flight(self._table.entries, spec)
        if waiting >= self._options.max_in_flight:
            return RunsEagerly("OL305", still_waiting(self._name, waiting))
        if status.one_warmup is OneWarmup.UNASKED and self._is_settled(spec, call):
            status.one_warmup = OneWarmup.ENOUGH
        candidate = Candidate(*call, spec, status, reached)
        enough = status.enough_warmups(self._options.enough_warmups)
        cold = status.warmups < enough and not waiting
        if cold or get_ident() not in status.threads:
            return Warming(candidate)
        entries = self._table.entries
        if len(entries) >= self._options.max_recordings:
            specs = self._signatures.statuses
            return RunsEagerly("OL301", *varying(self._name, entries, specs, spec, flat.tensors))
        if status.has_backward and self._table.others_run():
            return RunsEagerly()
        if waiting:
            history.worth.let_off()
        if history.worth.gives_up(self._signatures.launched(history.worth, entries)):
            reason = history.why or why(entries, spec, flat.tensors)
            text = recorded_in_vain(self._name, history.worth.row, history.worth.used, reason)
            return RunsEagerly("OL301", text, KEEP_IN_PLACE, "state")
        return Ready(candidate)

    def _spec_and_status(self, call: Call) -> tuple[CallSpec, SignatureStatus] | RunsEagerly:
        """Return the signature of a call and its status, made if it is new."""
        signatures, entries = self._signatures, self._table.entries
        flat, strategy, spec = call.flat, call.strategy, spec_of(call)
        status = signatures.statuses.get(spec)
        if status is None and strategy is UNPADDED and not self._callee.is_compiled(call.driver):
            exact, spec = spec, signatures.varied.spec(spec, entries)
            status = signatures.statuses.get(spec)
            if spec is not exact:  # noted as one of many, in case its numbers cannot be followed
                signatures.note_new(exact, flat, SignatureStatus(warmups=1), followed=True)
        if status is not None:
            return spec, status
        mismatching = strategy.mismatching(entries)
        if self._options.on_mismatch == "raise" and mismatching:
            raise mismatch(self._name, mismatching[0], spec)
        if len(signatures.statuses) >= _SIGNATURES_A_RECORDING * self._options.max_recordings:
            return RunsEagerly("OL301", *varying(self._name, entries, signatures.statuses, spec))
        signatures.drop_unreachable({entry.spec for entry in entries})
        status = signatures.status(spec)
        signatures.varied.note(spec, status)
        if not numbers_read(spec.tree):
            signatures.note_new(spec, flat, status)
        return spec, status

    def _is_settled(self, spec: CallSpec, call: Call) -> bool:
        """Return whether a bucket of other sizes is recorded for such calls and the present state.
        Its warm-ups have shown what the callable reads, and that it does the same each time. The
        capture of the new size checks both."""
        if call.strategy is UNPADDED or self._ranks.several:
            return False
        if self._callee.is_compiled(call.driver):
            return False
        same = spec.without_sizes()
        others = (e for e in self._table.entries if e.spec != spec)
        return any(e.spec.without_sizes() == same and e.captured.guard.check() for e in others)

    def _refusal(self, status: SignatureStatus, reached: ReachableState) -> CaptureError | None:
        """Return the known refusal of a signature before any capture, or None."""
        if status.warmups == 0 and not self._table.entries:  # modules of several processes
            values = distributed.sharded_values(reached.values)
            status.least = distributed.least_warmup(values)
            refused = distributed.refused_step(values)
            if refused is not None:
                return refused
        if status.refusal.error is not None:
            return copy.copy(status.refusal.error)
        reads = self._callee.reads
        if reads is not None and reads.takes_functions is not None:
            return HigherOrder(reads.takes_functions)
        options = status.history.options
        moving = None if options is None else options.restless(self._callee.codes)
        if moving is not None and moving.where is None:
            place = line_of(self._callee.fn, r"\.step\(")
            moving.where = place and str(place)
        return moving
