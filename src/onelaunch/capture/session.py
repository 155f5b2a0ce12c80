"""The capture of a call: attempts until one succeeds."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

from torch import Tensor

from onelaunch.beside import is_beside, make_way
from onelaunch.call.tree import Tree
from onelaunch.capture import distributed
from onelaunch.capture.checks import refuse_compound_leaves
from onelaunch.capture.compilation import CompiledInCapture, failed_in_capture
from onelaunch.capture.followed import FollowedNumbers, NumberTrials, PlainRun
from onelaunch.capture.io_plan import plan_inputs
from onelaunch.capture.numbers import NumberStandIns, NumbersToFollow, Unfollowed
from onelaunch.capture.outcome import Returned, StateEffects
from onelaunch.capture.recording import CapturedCall
from onelaunch.capture.result import captured_call
from onelaunch.capture.run import CaptureJob, CaptureRun, Retry
from onelaunch.capture.survivors import PassedOn, Undone, clear_caches, refuse_unreplayable
from onelaunch.driver.protocol import Capture, Graph, InPlace, Rewind, Travel
from onelaunch.driver.refusals import DrawsAfterAll
from onelaunch.errors import CaptureError, CaptureSignal, let_go
from onelaunch.optimizers.capturable import lasting
from onelaunch.optimizers.steps import Steps, every_key, keys_kept
from onelaunch.state.iterators import iterators_of
from onelaunch.state.parts import whole_of
from onelaunch.state.slots import MISSING, description_slot, gradient_of
from onelaunch.state.snapshot import StateSnapshot
from onelaunch.state.walk import Slot
from onelaunch.watch.device_constants import DeviceConstants
from onelaunch.watch.difference import TRIES, RunDifference
from onelaunch.watch.ledger import Ledger, optimizers_in

_OTHER_VALUES = "the host gives compiled code other values in each run"
_DEVICE_CODES = ("OL103", "OL109")
"""Refusals of a device, in code whose operations nobody watches."""


@dataclass(slots=True, eq=False)
class CaptureSession:
    """Attempts at the capture of one call until one succeeds, and the lessons of each."""

    job: CaptureJob
    serves_one_call: bool = False
    """True if numbers that the caller varies are constants for this call alone."""
    undo: Callable[[], None] = field(init=False)
    """Restores Python's state from before the captured run."""
    _number_trials: NumberTrials = field(default_factory=NumberTrials)
    _baseline: PlainRun = field(default_factory=PlainRun)
    _state_inputs: list[Slot] = field(default_factory=list)
    """State that is passed like arguments, because the callable replaces it."""
    _constant: set[tuple[int, Any]] = field(default_factory=set)
    """(id of a group, or holder, key) of numbers that no recording follows."""
    _stored: set[tuple[int, str]] = field(default_factory=set)
    """(id of a group, key) of numbers that steps of optimizers set themselves, in any attempt."""
    _retries: list[str] = field(default_factory=list)
    """The reasons for the attempts after the first."""
    _outlasted: bool = False
    """True if an attempt showed an optimizer that unexpectedly outlives it."""
    _rewind: Rewind | None = None
    _by_value: set[int] = field(default_factory=set)
    """Indices of 0-dim host tensors that the callable reads on the host."""
    _constants: DeviceConstants | None = None
    """The host values that the callable copies to the device."""
    _host_inputs: list[object] | None = None
    """The values that compiled code got in the run before this attempt, if known."""
    _ran_before: Ledger | None = None
    """The operations of an attempt with which the next one is compared."""
    _resized: bool = False
    """True if the run before found state of another size, and not only a smaller one."""
    _differing: int = 0
    """The number of attempts in which compiled code got other values."""
    _runs: list[CaptureRun] = field(default_factory=list)
    """The watched runs of this attempt."""
    _undone: Undone = field(init=False)
    """The attempts that were undone."""

    def record(self, tree: Tree, tensors: Sequence[Tensor]) -> CapturedCall:
        """Capture a call, given in flattened form. The state that it reaches is as before. Success
        keeps only changes in Python that no replay writes; see `undo`. Each attempt runs `fn`."""
        started = time.perf_counter()
        job = self.job
        if job.accesses is None:
            self._rewind = job.driver.rewind(job.device)
        if job.forward is not None:
            job.forward.rewind = self._rewind
        if job.device.type != "cpu":
            before = job.accesses or job.earlier
            self._constants = DeviceConstants(job.device, before.copied_to_device if before else ())
        self._host_inputs = job.accesses and job.accesses.host_inputs
        self._undone = Undone(iterators_of(job.reached.walk(), every=True))
        while True:
            if self._constants is not None:
                self._constants.make()
            try:
                captured, passed = self._try_once(tree, tensors, started)
                break
            except Retry as retry:
                self._retries.append(str(retry))
                changed = {i for run in self._runs for i in run.staged.changed}
                job.replaced = tuple(b for b in job.replaced if b.slot.id not in changed)
                if error := self._undone.drew(job.callee.codes):
                    raise error from None
            except CaptureSignal as error:
                let_go(error)
                raise
            except Exception as error:
                let_go(error)
                cause = self._avoid_cause(error)
                if cause is None:
                    if not isinstance(error, CaptureError) and not job.callee.in_place:
                        raise
                    error = self._refusal(error)
                    raise error
                self._retries.append(cause)
            finally:
                self._release()
        passed.refuse_kept(captured, job.callee.reads, self.undo)
        return captured

    def _avoid_cause(self, error: Exception) -> str | None:
        """Have the next attempt do without a failure's cause, and name it; None: it cannot."""
        if isinstance(error, DrawsAfterAll) and not (self.job.draws or is_beside()):
            self.job.draws = True
            return "it draws random numbers"
        # Also an exception of the callable's own: a stand-in may do less than a number, and
        # without stand-ins the next attempt shows whether the callable raises it.
        if self.job.following:
            self._unfollow(self.job.following.names())
            return "it fails with stand-ins for numbers"
        if isinstance(error, CaptureError):
            if self._leave_on_host():
                return "the host reads a number that was on the device"
            if self._constants is not None and self._constants.misses():
                return "host values that it brings to the device are kept there"
        places = [place for run in self._runs for place in run.steps.places]
        if places:
            self._unfollow(places)
            return "it fails with stand-ins for numbers of an optimizer"
        return None

    def _refusal(self, error: Exception) -> CaptureError:
        """Return the refusal of the capture, with a line."""
        refusal = error if isinstance(error, CaptureError) else failed_in_capture(error)
        if self._constants is not None and self._constants.exhausted:
            refusal = self._difference_refusal() or refusal
        refusal = self._as_written(refusal)
        refusal.where = refusal.where or self.job.line(refusal.code)
        known = refusal.code == "OL117" or self.job.earlier is None or self.job.earlier.refused
        differs = not known and any(run.differs for run in self._runs)
        self._release()
        left = self._undone.left(self.job.callee.codes)
        refusal.may_pass = (differs or refusal.may_pass) and not left
        return refusal

    def _unfollow(self, escaped: Sequence[object], only_this_call: bool = False) -> None:
        """Have the next attempt take numbers for constants; `Unfollowed` if by argument."""
        following = self.job.following
        positions = [i for i in following.arguments if i in escaped]
        self.job.following = following.without(escaped)
        self._constant |= {place[:2] for place in escaped if isinstance(place, tuple)}
        self.serves_one_call = only_this_call
        if positions:
            raise Unfollowed(positions, only_this_call)

    def _retry_without_stand_ins(self, run: CaptureRun) -> NoReturn:
        """Have the next attempt run without stand-ins, as a baseline for the attempt after it. If
        there was a baseline already, numbers become constants: those that the differing operation
        takes; all of them, if it takes none, or the baseline differed too."""
        if self._baseline.ledger is None:
            self._baseline.due = True
        else:
            names, trace = run.numbers.names(), run.numbers.trace
            terms = () if run.differs is None or self._baseline.differs else run.differs.terms
            taken = {leaf for term in terms for leaf in trace.leaves(term)}
            self._unfollow([names[leaf] for leaf in sorted(taken)] or names)
        raise Retry("a run with stand-ins for numbers is not like the one before it")

    def _leave_on_host(self) -> bool:
        """Return whether the host asked for a 0-dim host tensor that was copied to the device. The
        next attempt leaves this argument on the host."""
        indices = {
            index
            for run in self._runs
            for storage, index in run.filled.items()
            if storage in run.observer.admission.read_by_host
        }
        self._by_value |= indices
        return bool(indices)

    def _difference_refusal(self) -> CaptureError | None:
        """Return the refusal of a difference from the run before, or None."""
        if self.job.accesses is not None:
            return CaptureError("OL117", _OTHER_VALUES)
        differences = (run.differs for run in self._runs if run.differs is not None)
        return next((difference.refusal() for difference in differences), None)

    def _as_written(self, error: CaptureError) -> CaptureError:
        """Return the refusal of the user's line, where a device refused compiled code."""
        accesses = self.job.accesses
        if accesses is None or accesses.suspected is None or accesses.refused is not None:
            return error
        late = isinstance(error, CompiledInCapture)
        return error if late or error.code not in _DEVICE_CODES else copy.copy(accesses.suspected)

    def _pinned(self, snapshot: StateSnapshot, state: Sequence[Tensor]) -> set[int]:
        """Return the storages that the callable reaches by address, rather than by `state` alone.
        State is read in place where it lies in the memory of a tensor that is no input."""
        of_state = set(map(self.job.driver.storage, state))
        read = {id(t) for slot, t in snapshot.walk.tensors() if snapshot.walk.is_read(slot)}
        read.difference_update(map(id, state))
        return {
            storage
            for storage, tensors in snapshot.tensors_by_storage.items()
            if storage not in of_state or any(id(t) in read for t in tensors)
        }

    def _release(self) -> None:
        # Runs are in cycles. Results and observers' views keep AccumulateGrad nodes on this stream.
        while self._runs:
            run = self._runs.pop()
            run.observer.forget()
            run.returned, run.effects = Returned(), StateEffects()

    def _try_once(
        self, tree: Tree, tensors: Sequence[Tensor], started: float
    ) -> tuple[CapturedCall, PassedOn]:
        """Capture once, and undo everything if that fails. Raises `Retry`: this attempt found out a
        fact that the next has to know."""
        job, driver, device = self.job, self.job.driver, self.job.device
        snapshot = StateSnapshot.of(driver, device, job.reached)
        refuse_compound_leaves(snapshot.walk)
        inputs = (*(slot for b in job.replaced for slot in b.inputs()), *self._state_inputs)
        state = [cast(Tensor, slot.read()) for slot in inputs]
        gone = next((s for s, t in zip(inputs, state, strict=True) if t is MISSING), None)
        if gone is not None:  # it came in the attempt before, which was undone
            what = f"the callable adds to `{whole_of(gone).name}`, and puts another in its place"
            raise CaptureError("OL105", what, fix="make one container with all of it")
        pinned = self._pinned(snapshot, state)
        is_kept = every_key if self._baseline.due else keys_kept(snapshot.walk, self._constant)
        lasts = lasting(optimizers_in(snapshot.walk))
        steps = Steps(is_kept, driver.demands_capturable, lasts, self._stored)
        plan = plan_inputs(driver, [*tensors, *state], device, pinned)
        plan.varying = dict(job.varying)
        plan.give_by_value(self._by_value)
        following = job.following
        if self._baseline.due:
            following = NumbersToFollow(incremented=following.incremented)
        numbers = NumberStandIns(following, device, self._number_trials.seed)
        run = CaptureRun(job, snapshot, plan, steps, numbers, inputs, self._constants)
        run.baseline = self._baseline
        graph: Graph | None = None
        try:
            before, self._host_inputs = self._host_inputs, None
            graph, statics = self._recorded(run, tree)
            make_way()
            self._retry_if_host_inputs_differ(before, run)
            self._retry_if_incomplete(run)
            followed = self._followed(run, graph)
            refuse_unreplayable(run)
            rewound = self._rewind is not None and self._rewind.used
            pure = not (run.effects.changes or run.numbers or rewound)
            if job.studied is not None and not (pure and run.shows_all()):
                raise CaptureError("OL109", "a run before the capture has to show its effects")
            if job.studied is not None and not run.repeats(job.studied):
                job.studied = None
                raise self._to_compare(run, "it does otherwise than at other sizes")
            if job.in_place is not None and run.differs is None and pure:
                graph = self._rebound(graph, run, tree, job.in_place)
            results = statics[: len(statics) - len(run.effects.kept_gradients)]
            passed = PassedOn.of(run)
            captured = captured_call(run, graph, results, started, self._retries)
            make_way()
            captured.followed = followed
            compared, row = captured.compared, job.differed_in_a_row
            compared.reads_more = job.callee.read_more(
                job.reached, snapshot.walk, run.effects.changes
            )
            compared.differs = differs = self._unexplained(captured, run)
            compared.resized = self._resized
            if differs and row is not None and row + 1 >= differs.tries:
                raise differs.refusal()
            self.undo = snapshot.restorer(run.reads)
            return captured, passed
        except BaseException as error:
            self._roll_back(run, graph, error)
            raise

    def _recorded(self, run: CaptureRun, tree: Tree) -> tuple[Graph, list[Tensor]]:
        job = self.job

        def body(capture: Capture) -> list[Tensor]:
            self._run(run, capture, tree)
            assert run.returned.outputs is not None
            return [
                *(run.returned.tensors if job.forward else run.returned.staying),
                *run.effects.kept_gradients,
            ]

        return job.driver.capture(
            body,
            job.pool,
            run.snapshot.generators(tree),
            job.forward and job.forward.stream,
            bundled=job.in_place is None or job.in_place.inputs != 0,
            rewind=self._rewind,
            parallel=job.parallel,
            draws=job.draws,
        )

    def _run(self, run: CaptureRun, capture: Capture, tree: Tree) -> None:
        run.stage(capture)
        self._runs.append(run)
        ledger = run.observer.ledger
        alone = ledger is not None and not ledger.compares
        if not (run.numbers.varied and alone):
            run.execute(capture, tree)
        if run.numbers.varied and alone:  # perhaps the run has shown optimizers' numbers
            self._retry_without_stand_ins(run)

    def _retry_if_host_inputs_differ(self, before: list[object] | None, run: CaptureRun) -> None:
        """Compare the host values that compiled code got with those of the run before. Raises
        `Retry`: they differ; `CaptureError`, OL117: they differ each time."""
        if self.job.accesses is None:
            return
        self._host_inputs = run.host_inputs
        if run.host_inputs == before:
            return
        self._differing += 1
        if self._differing > TRIES:
            raise CaptureError("OL117", _OTHER_VALUES)
        raise Retry("the host hands compiled code other values than in the run before")

    def _retry_if_incomplete(self, run: CaptureRun) -> None:
        """Raise `Retry` if the run showed a fact that the attempt should have known."""
        if run.missing_inputs:
            self._state_inputs += run.missing_inputs
            raise Retry("state that the callable replaces became inputs")
        escaped = run.numbers.escaped() + run.steps.set_places()
        if escaped:
            self._unfollow(escaped)
            raise Retry("numbers are constants in the recording, or a step sets them")
        if run.effects.optimizer_changes:
            self._retry_with_counted_numbers(run)
        if self._rewind is not None and not self._rewind.done:
            raise Retry("the places in the stream of random numbers are known now")
        if self.job.pool.written_by_others(run.effects.kept_gradients):
            # A launch of an earlier recording would overwrite the gradients that this one leaves.
            self.job.pool = self.job.new_pool()
            raise Retry("gradients lie in memory that other recordings write")
        if run.steps.outlasting() and not self._outlasted:
            self._outlasted = True  # a callable that makes and keeps another is not asked twice
            raise Retry("an optimizer made in the call outlives it")

    def _retry_with_counted_numbers(self, run: CaptureRun) -> NoReturn:
        """Have the next attempt count the numbers that optimizers move on. Refuse (OL120, OL122) a
        number that no recording can count."""
        job, counted = self.job, self.job.following.incremented
        ids = {slot.id for slot in counted} | self._constant
        for change in run.effects.optimizer_changes:
            counts = type(change.before) is int and run.snapshot.walk.is_read(change.slot)
            if not counts or change.slot.id in ids or job.forward:
                raise run.steps.refuse_moved(change, job.callee.codes, job.callee.fn)
        counted = (*counted, *(change.slot for change in run.effects.optimizer_changes))
        job.following = job.following._replace(incremented=counted)
        raise Retry("numbers that an optimizer moves on are counted")

    def _followed(self, run: CaptureRun, graph: Graph) -> FollowedNumbers:
        """Return the numbers that each call reads; `Retry` if they need another attempt."""
        numbers, job = run.numbers, self.job
        if self._baseline.due:
            assert run.observer.ledger is not None
            self._baseline.note(run.observer.ledger)
            raise Retry("the same with stand-ins for numbers")
        if not numbers:
            return FollowedNumbers.none()
        if run.differs is not None and numbers.varied:
            self._retry_without_stand_ins(run)
        trials = self._number_trials
        followed = trials.follow(job.driver, job.device, job.pool, numbers, graph)
        escaped = numbers.names() if followed is None and trials.exhausted else numbers.escaped()
        if escaped:
            self._unfollow(escaped)
            raise Retry("numbers are constants in the recording")
        if followed is None:
            raise Retry("the scalars of numbers are to be others")
        if not followed.serves_own:
            self._unfollow(numbers.names(), only_this_call=True)
            raise Retry("no recording that follows numbers serves these")
        return followed

    def _roll_back(self, run: CaptureRun, graph: Graph | None, error: BaseException) -> None:
        """Undo a failed attempt: free its recording, and restore the state that the run changed."""
        again = run.runs_again(error)
        try:
            if graph is not None:
                graph.reset()
            else:
                distributed.abandon_step(value for _, value in run.snapshot.walk.slots.values())
        finally:
            run.snapshot.undo(run.effects.changes, run.reads, again)
            if run in self._runs:
                self._undone.note(run)
            run.plan.release()  # frames of the traceback refer to it for good
            clear_caches(run.numbers)

    def _unexplained(self, captured: CapturedCall, run: CaptureRun) -> RunDifference | None:
        """Return the difference from the run before, unless the state that the two found explains
        it. If their states differ only in sizes, or in contents that the caller has replaced, the
        run before shows nothing. Raises `Retry`: the next attempt is compared with this one."""
        job, differs = self.job, run.differs or self._baseline.differs
        earlier = job.earlier
        as_tensor = run.numbers.entered_as_tensor  # which the run before did not need
        if earlier is None or differs is None or captured.changed_numbers or as_tensor:
            return None
        # A call's work depends on the gradient that it finds, although it leaves another one.
        slots = (change.slot for change in run.effects.changes)
        changed = {slot.id for slot in slots if slot.key is not gradient_of}
        if any(earlier.values.get(i) != value for i, value in captured.values.items()):
            return None
        noted = earlier.contents.by_id
        unchanged = {*run.snapshot.walk.all_slots, *noted} - changed
        guarded = [(slot.id, v) for slot, v in captured.guard.held() if slot.id in unchanged]
        guarded += [(slot.id, slot) for slot in captured.state_input_slots if slot.id not in noted]
        guarded += [((id(c), len), length) for c, length in captured.guard.lengths()]
        if earlier.contents.differ(guarded):
            return None
        if job.replaced and earlier is not self._ran_before:
            # It had other numbers, perhaps, in what the caller has replaced since.
            raise self._to_compare(run, "the run before it found what the caller has replaced")
        # Of a tensor that each call replaces, a recording fits one size, dtype and layout. If it
        # only ever grows, beyond what a call brings, none of them comes again.
        described = [(s.id, s.read()) for s in map(description_slot, captured.state_input_slots)]
        sizes = [math.prod(spec.shape) for spec in captured.inputs.specs]
        count = captured.caller_input_count
        of_caller, of_state = sizes[:count], sizes[count:]
        grows = differs.grows and max(of_state, default=0) > max(of_caller, default=0)
        if not earlier.contents.differ(described) or (grows and not job.shrinks):
            return differs
        self._resized |= not grows
        raise self._to_compare(run, "the run before it found state of another size")

    def _to_compare(self, run: CaptureRun, why: str) -> Retry:
        """Return the sign for another attempt, which is compared with this one."""
        self.job.earlier = self._ran_before = run.observer.ledger
        return Retry(why)

    def _rebound(self, graph: Graph, run: CaptureRun, tree: Tree, in_place: InPlace) -> Graph:
        """Make kernels reach the caller's memory, as far as that is proven right. The callable is
        captured again for it, so it must have no Python effects."""
        job, driver, device, forward = self.job, self.job.driver, self.job.device, self.job.forward
        pinned = {driver.storage(t) for ts in run.snapshot.tensors_by_storage.values() for t in ts}

        def body(capture: Capture) -> None:
            snapshot = replace(
                run.snapshot, tensors_by_storage=dict(run.snapshot.tensors_by_storage)
            )
            plan = plan_inputs(driver, run.plan.tensors, device, pinned)
            steps = Steps(every_key, driver.demands_capturable)
            job_again = job if forward is None else replace(job, forward=copy.copy(forward))
            none = NumberStandIns.none()
            inputs = run.state_inputs
            again = CaptureRun(job_again, snapshot, plan, steps, none, inputs, self._constants)
            self._run(again, capture, tree)
            if forward is not None:  # nothing of its autograd graph is to outlive it
                again.job, again.returned.tensors, again.returned.outputs = job, None, None

        observer = run.observer
        state = [t for t in observer.memory.written.values() if not observer.memory.is_own(t)]
        read = ([], {}) if forward is None else forward.read_after(run.plan, pinned)
        if read is None:
            return graph
        filled, readable = read
        generators, stream = run.snapshot.generators(tree), forward and forward.stream
        try:
            graph = driver.rebind(graph, body, state, generators, in_place, filled, stream)
        except CaptureError:
            return graph  # it works with copies
        if forward is not None:
            pairs = zip(run.plan.groups, graph.travels, strict=True)
            there = {i for group, how in pairs if how == Travel.REBIND for i in group.members}
            forward.pair.reach(in_place, readable, there)
        return graph
