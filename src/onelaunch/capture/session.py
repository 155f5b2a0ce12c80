"""The capture of a call: attempts until one succeeds."""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, cast

from torch import Tensor

from onelaunch.call.tree import Tree
from onelaunch.capture import distributed
from onelaunch.capture.checks import refuse_compound_leaves
from onelaunch.capture.compilation import CompiledInCapture
from onelaunch.capture.counts import Counts, number_slot
from onelaunch.capture.followed import FollowedNumbers, NumberTrials
from onelaunch.capture.forward import BackwardInside
from onelaunch.capture.io_plan import Inputs, plan_inputs
from onelaunch.capture.numbers import Following, Numbers, Unfollowed
from onelaunch.capture.recording import CapturedCall, NeedsGrad
from onelaunch.capture.result import captured_call
from onelaunch.capture.run import CaptureJob, CaptureRun, PlainRun, Retry
from onelaunch.capture.survivors import late_refusal
from onelaunch.driver.protocol import Capture, Graph, InPlace, Rewind, Travel
from onelaunch.errors import CaptureError, let_go
from onelaunch.optimizers.capturable import lasting
from onelaunch.optimizers.steps import Steps, every_key
from onelaunch.optimizers.trials import ScalarTrials
from onelaunch.state.slots import gradient_of
from onelaunch.state.snapshot import StateSnapshot
from onelaunch.state.walk import Slot
from onelaunch.watch.difference import Difference
from onelaunch.watch.ledger import TRIES, moved, optimizers_in
from onelaunch.watch.lifted import Lifted

_OTHER_VALUES = "the host gives compiled code other values in each run"
_MOST = 200
"""The most characters of an error's first line."""
_OF_DEVICES = ("OL103", "OL109")
"""The codes of what a device refuses in code whose operations nobody watches."""


@dataclass(slots=True)
class CaptureSession:
    """Attempts at the capture of one call, until one succeeds, with what each of them showed."""

    job: CaptureJob
    serves_one_call: bool = False
    """True if numbers that the caller varies are constants for this call alone."""
    _number_trials: NumberTrials = field(default_factory=NumberTrials)
    _plain: PlainRun = field(default_factory=PlainRun)
    _counts_on_device: list[Slot] = field(default_factory=list)
    """The counted numbers that the device needs."""
    _state_inputs: list[Slot] = field(default_factory=list)
    """State that is passed to the callable like arguments, because the callable replaces it."""
    _trials: ScalarTrials = field(default_factory=ScalarTrials)
    _retries: list[str] = field(default_factory=list)
    """The reasons for the attempts after the first."""
    _outlasted: bool = False
    """True if an attempt showed an optimizer that unexpectedly outlives it."""
    _rewind: Rewind | None = None
    _by_value: set[int] = field(default_factory=set)
    """The 0-dim host tensors, by input number, that the callable reads on the host."""
    _lifted: Lifted | None = None
    """The host values that the callable copies to the device."""
    _host_inputs: list[object] | None = None
    """The values that compiled code got in the run before this attempt, if known."""
    _differing: int = 0
    """The number of attempts in which it got something else."""
    _runs: list[CaptureRun] = field(default_factory=list)
    """The runs of this attempt, as far as they were watched."""

    def record(self, tree: Tree, tensors: Sequence[Tensor]) -> CapturedCall:
        """Capture the call ``fn(*args, **kwargs)`` whose flattened form is given.

        Whether it succeeds or not, the state that the callable reaches is as it was before. `fn`
        runs once in each attempt: what it prints or writes to files stays.
        """
        # Torch imports it at the first operation under a mode: 1 s, which is no part of a capture.
        importlib.import_module("torch._dynamo")
        started = time.perf_counter()
        job = self.job
        if job.known is None:
            self._rewind = job.driver.rewind(job.device)
        if job.forward is not None:
            job.forward.rewind = self._rewind
        if job.device.type != "cpu":
            before = job.known or job.earlier
            self._lifted = Lifted(job.device, before.brought if before else ())
        self._host_inputs = job.known and job.known.host_inputs
        while True:
            if self._lifted is not None:
                self._lifted.make()
            try:
                return self._attempt(tree, tensors, started)
            except Retry as retry:
                self._retries.append(str(retry))
                continue
            except (NeedsGrad, BackwardInside, Unfollowed) as error:
                let_go(error)
                raise
            except Exception as error:
                # Also an exception of the callable's own: a stand-in may do less than a number, and
                # without stand-ins the next attempt shows whether the callable raises it.
                if job.following:
                    let_go(error)
                    self._unfollow(job.following.names())
                    self._retries.append("it fails with stand-ins for numbers")
                    continue
                if job.counting:
                    let_go(error)
                    self._stop_counting()
                    self._retries.append("it fails with stand-ins for the numbers that it counts")
                    continue
                if not isinstance(error, CaptureError):
                    if not job.callee.in_place:
                        raise
                    error = _only_here(error)
                let_go(error)
                unfollowed = [o for run in self._runs for o in run.observer.admission.unfollowed]
                if self._wanted_by_host() or self._trials.keep(unfollowed):
                    self._retries.append("the host reads a number that was on the device")
                    continue
                if self._lifted is not None and self._lifted.misses():
                    self._retries.append("host values that it brings to the device are kept there")
                    continue
                if self._lifted is not None and self._lifted.exhausted:
                    error = self._changed() or error
                error = self._as_written(error)
                error.where = error.where or job.line(error.code)
                raise error
            finally:
                self._release()

    def _stop_counting(self) -> None:
        self.job.counting = ()
        self._counts_on_device.clear()

    def _unfollow(self, escaped: Sequence[object], only_this_call: bool = False) -> None:
        """Have the next attempt take numbers for constants.

        Args:
            escaped: the numbers.
            only_this_call: see `Unfollowed`.

        Raises:
            Unfollowed: there are arguments among them.
        """
        following = self.job.following
        positions = [i for i in following.arguments if i in escaped]
        self.job.following = following.without(escaped)
        self.serves_one_call = only_this_call
        if positions:
            raise Unfollowed(positions, only_this_call)

    def _retry_without_stand_ins(self) -> NoReturn:
        """Have the next attempt run without stand-ins, as a baseline for the one after it. If there
        was a baseline already, have it take all numbers for constants.

        Raises:
            Retry: to that end.
        """
        if self._plain.ledger is None:
            self._plain.due = True
        else:
            self._unfollow(self.job.following.names())
        raise Retry("a run with stand-ins for numbers is not like the one before it")

    def _wanted_by_host(self) -> bool:
        """Return whether the refused value is an argument that the host has: a 0-dim tensor that
        was copied to the device. The next attempt leaves it on the host."""
        found = {
            index
            for run in self._runs
            for storage, index in run.filled.items()
            if storage in run.observer.admission.wanted
        }
        self._by_value |= found
        return bool(found)

    def _changed(self) -> CaptureError | None:
        """Return the refusal of a difference between this run and the one before it, or None."""
        if self.job.known is not None:
            return CaptureError("OL117", _OTHER_VALUES)
        differences = (run.differs for run in self._runs if run.differs is not None)
        return next((difference.refusal() for difference in differences), None)

    def _as_written(self, error: CaptureError) -> CaptureError:
        """Return the refusal of the user's line for a device's refusal of the code compiled of it,
        which names neither."""
        known = self.job.known
        if known is None or known.suspected is None or known.refused is not None:
            return error
        late = isinstance(error, CompiledInCapture)
        return error if late or error.code not in _OF_DEVICES else copy.copy(known.suspected)

    def _pinned(self, snapshot: StateSnapshot, state: Sequence[Tensor]) -> set[int]:
        """Return the storages that the callable reaches by address, and not as `state` alone: that
        is read in place where it lies in memory of a tensor that is no input."""
        of_state = set(map(self.job.driver.storage, state))
        read = {id(t) for slot, t in snapshot.walk.tensors() if snapshot.walk.is_read(slot)}
        read.difference_update(map(id, state))
        return {
            storage
            for storage, tensors in snapshot.held.items()
            if storage not in of_state or any(id(t) in read for t in tensors)
        }

    def _release(self) -> None:
        # Runs are in cycles. Results, and the views of an observer, keep AccumulateGrad nodes on
        # this stream.
        while self._runs:
            run = self._runs.pop()
            run.observer.forget()
            run.result = run.outputs = None

    def _attempt(self, tree: Tree, tensors: Sequence[Tensor], started: float) -> CapturedCall:
        """Capture once, and undo everything if that fails.

        Raises:
            Retry: the next attempt knows a fact that this one had to find out.
        """
        job, driver, device = self.job, self.job.driver, self.job.device
        snapshot = StateSnapshot.of(driver, device, job.reached)
        refuse_compound_leaves(snapshot.walk)
        all_state_inputs = (*self._state_inputs, *map(number_slot, self._counts_on_device))
        state = [cast(Tensor, slot.read()) for slot in all_state_inputs]
        pinned = self._pinned(snapshot, state)
        kept, lasts = self._trials.kept(snapshot.walk), lasting(optimizers_in(snapshot.walk))
        steps = Steps(kept, driver.demands_capturable, self._trials.seed, lasts)
        plan = plan_inputs(driver, [*tensors, *state], device, pinned)
        plan.varying = dict(job.varying)
        plan.give_by_value(self._by_value)
        counts, brought = Counts(job.counting, device), tuple(self._counts_on_device)
        run = CaptureRun(
            job, snapshot, plan, steps, counts, all_state_inputs, brought, self._lifted
        )
        following = Following() if self._plain.due else job.following
        run.varied, run.plain = Numbers(following, device, self._number_trials.seed), self._plain
        graph: Graph | None = None
        try:
            before, self._host_inputs = self._host_inputs, None
            graph, statics = self._recorded(run, tree)
            self._agree(before, run)
            self._retry_if_incomplete(run)
            numbers = self._followed(run, graph)
            error = late_refusal(run)
            if error is not None:
                raise error
            scalars = self._trials.patch(driver, device, job.pool, steps, graph)
            if scalars is None:
                raise Retry("numbers of an optimizer are constants in the recording")
            rewound = self._rewind is not None and self._rewind.used
            pure = not (run.found or run.varied or rewound)
            if job.in_place is not None and run.differs is None and pure:
                graph = self._rebound(graph, run, tree, job.in_place)
            results = statics[: len(statics) - len(run.lasting)]
            captured = captured_call(run, graph, results, scalars, started)
            captured.retries = tuple(self._retries)
            captured.followed = numbers
            captured.reads_more = job.callee.read_more(job.reached, snapshot.walk, run.found)
            captured.differs = self._unexplained(captured, run)
            if job.strict and captured.differs is not None:
                raise captured.differs.refusal()
            return captured
        except BaseException as error:
            self._roll_back(run, graph, error)
            raise

    def _recorded(self, run: CaptureRun, tree: Tree) -> tuple[Graph, list[Tensor]]:
        job = self.job

        def body(capture: Capture) -> list[Tensor]:
            self._run(run, capture, tree)
            assert run.outputs is not None
            kept = run.result if job.static_outputs or job.forward else ()
            return [*kept, *run.lasting]

        return job.driver.capture(
            body,
            job.pool,
            run.snapshot.generators(tree),
            job.forward and job.forward.stream,
            bundled=job.in_place is None or job.in_place.inputs != 0,
            rewind=self._rewind,
        )

    def _run(self, run: CaptureRun, capture: Capture, tree: Tree) -> None:
        run.stage(capture)
        self._runs.append(run)
        ledger = run.observer.ledger
        if run.varied and ledger is not None and not ledger.compares:
            self._retry_without_stand_ins()
        run.execute(capture, tree)

    def _agree(self, before: list[object] | None, run: CaptureRun) -> None:
        """Raise `Retry` if compiled code got other host values than in the run before this.

        Raises:
            CaptureError: OL117, so it does each time.
        """
        if self.job.known is None:
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
        if run.again:
            self._state_inputs += run.again
            raise Retry("state that the callable replaces became inputs")
        if run.counts.escaped:
            self._stop_counting()
            raise Retry(
                "a number that the callable moves on is kept elsewhere too, or asked for its type"
            )
        if run.counts.wanted:
            self._counts_on_device += run.counts.wanted
            raise Retry("numbers that the callable moves on became inputs")
        if self._rewind is not None and not self._rewind.done:
            raise Retry("the places in the stream of random numbers are known now")
        if self.job.pool.written_by_others(run.lasting):
            # A launch of an earlier recording would overwrite the gradients that this one leaves.
            self.job.pool = self.job.apart()
            raise Retry("gradients lie in memory that other recordings write")
        if run.steps.outlasting() and not self._outlasted:
            self._outlasted = True  # a callable that makes and keeps another is not asked twice
            raise Retry("an optimizer made in the call outlives it")

    def _followed(self, run: CaptureRun, graph: Graph) -> FollowedNumbers:
        """Return the numbers that each call reads.

        Raises:
            Retry: some of them are constants, or their scalars are to be others.
        """
        numbers, job = run.varied, self.job
        if self._plain.due:
            assert run.observer.ledger is not None
            self._plain.note(run.observer.ledger)
            raise Retry("the same with stand-ins for numbers")
        if not numbers:
            return FollowedNumbers.none()
        found = None
        if run.differs is not None:
            self._retry_without_stand_ins()
        escaped = numbers.escaped()
        if not escaped:
            trials = self._number_trials
            found = trials.follow(job.driver, job.device, job.pool, numbers, graph)
            escaped = numbers.escaped()
            if found is None and trials.exhausted:
                escaped = job.following.names()
        if escaped:
            self._unfollow(escaped)
            raise Retry("numbers that the caller varies are constants in the recording")
        if found is None:
            raise Retry("the scalars of numbers are to be others")
        if not found.write_current(*numbers.arguments):
            self._unfollow(job.following.names(), only_this_call=True)
            raise Retry("no recording that follows numbers serves these")
        return found

    def _roll_back(self, run: CaptureRun, graph: Graph | None, error: BaseException) -> None:
        """Undo a failed attempt: free its recording, and restore the state that the run changed.

        The driver puts its stream and allocator back itself, and `CaptureRun` the host's random
        numbers.
        """
        again = self.job.runs_again(error)
        try:
            if graph is not None:
                graph.reset()
            else:
                distributed.abandon_step(value for _, value in run.snapshot.walk.held.values())
        finally:
            run.snapshot.undo(run.found, run.reads, again)
            run.plan.release()  # frames of the traceback refer to it for good

    def _unexplained(self, captured: CapturedCall, run: CaptureRun) -> Difference | None:
        """Return the difference from the run before, unless guarded values differ too: then each
        gets a recording."""
        earlier, differs = self.job.earlier, run.differs or self._plain.differs
        if earlier is None or differs is None or captured.changed_numbers or self._counts_on_device:
            return None
        # A call's work depends on the gradient that it finds, although it leaves another one.
        own = {change.slot.id for change in run.found if change.slot.key is not gradient_of}
        if any(earlier.values.get(i) != value for i, value in captured.values.items()):
            return None
        kept = {*run.snapshot.walk.held, *earlier.held} - own
        guarded = [(slot.id, value) for slot, value in captured.guard.held() if slot.id in kept]
        guarded += [(slot.id, slot) for slot in captured.hidden if slot.id not in earlier.held]
        return None if moved(earlier, guarded) else differs

    def _rebound(self, graph: Graph, run: CaptureRun, tree: Tree, in_place: InPlace) -> Graph:
        """Make kernels reach the caller's memory, as far as that is proven right.

        The callable is captured again for it, so it must have no Python effects.
        """
        job, driver, device, forward = self.job, self.job.driver, self.job.device, self.job.forward
        pinned = {driver.storage(t) for ts in run.snapshot.held.values() for t in ts}

        def body(capture: Capture) -> None:
            snapshot = replace(run.snapshot, held=dict(run.snapshot.held))
            plan = plan_inputs(driver, run.plan.tensors, device, pinned)
            steps, counts = Steps(every_key, driver.demands_capturable), Counts((), device)
            own = job if forward is None else replace(job, forward=copy.copy(forward))
            again = CaptureRun(own, snapshot, plan, steps, counts, lifted=self._lifted)
            self._run(again, capture, tree)
            if forward is not None:  # nothing of its autograd graph is to outlive it
                again.job, again.result, again.outputs = job, None, None

        observer = run.observer
        state = [t for t in observer.written.values() if not observer.known(t)]
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
            forward.pair.reach(in_place, readable, _rebound_inputs(run.plan, graph))
        return graph


def _only_here(error: Exception) -> CaptureError:
    """Return the refusal of compiled code that fails under capture: AOTAutograd's, for arguments
    that share memory and require grad, whose stand-ins are no views of each other."""
    line = str(error).partition("\n")[0]
    what = f"its compiled code failed in the capture, {type(error).__name__}: {line[:_MOST]}"
    refusal = CaptureError("OL109", what)
    refusal.__cause__ = error
    return refusal


def _rebound_inputs(plan: Inputs, graph: Graph) -> set[int]:
    """Return the inputs that kernels read where the caller has them."""
    pairs = zip(plan.groups, graph.travels, strict=True)
    return {i for group, how in pairs if how == Travel.REBIND for i in group.members}
