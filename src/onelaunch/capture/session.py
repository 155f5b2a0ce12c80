"""The capture of a call: attempts until one succeeds."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.autograd.proxies import proxy_for
from onelaunch.call.tree import Flat, Same, Tree, argument_objects, flatten, unflatten, unique
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.checks import (
    inspect_arguments,
    late_refusal,
    refuse_gradients,
    refuse_opaque,
    refuse_parts,
    refuse_uncovered,
)
from onelaunch.capture.counts import Counts, number_slot
from onelaunch.capture.effects import grown, lasting_gradients, moved_on, rebound, recurrent
from onelaunch.capture.forward import BackwardInside, Forward, leaves_refused
from onelaunch.capture.io_plan import Outputs, Unfit, plan_inputs, plan_outputs, stage
from onelaunch.capture.recording import CapturedCall, NeedsGrad, StateOutput
from onelaunch.capture.result import CaptureRun, captured_call, mark_spent, output_ports
from onelaunch.driver.capture_query import Asking
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import Capture, Driver, Graph, Rewind, Travel
from onelaunch.driver.protocol import Pool as DevicePool
from onelaunch.driver.random_state import (
    HostGenerators,
    seeded_once,
    seeding_line_of,
    watching_seeds,
)
from onelaunch.errors import CaptureError, let_go
from onelaunch.optimizers.capturable import lasting, noting_steps
from onelaunch.optimizers.steps import Steps, every_key
from onelaunch.optimizers.trials import ScalarTrials
from onelaunch.sizes.dims import Follow, Varying
from onelaunch.source import line_of, user_line
from onelaunch.state.slots import gradient_of
from onelaunch.state.snapshot import ReachableState, StateSnapshot
from onelaunch.state.walk import Slot
from onelaunch.unwinding import unwound
from onelaunch.watch.compiled import CompiledAccesses, places
from onelaunch.watch.ledger import Difference, Ledger, moved, optimizers_in, refuse_drawn
from onelaunch.watch.lifted import Lifted
from onelaunch.watch.observer import Observer


class Retry(Exception):
    """An attempt showed a fact that the next one has to know; the text names it."""


_UNDONE = (Retry, CaptureError, NeedsGrad, BackwardInside, Unfit)
"""The ends of an attempt after which the callable always runs once more for the same call."""


@dataclass(slots=True)
class CaptureSession:
    """Attempts at the capture of one call, until one succeeds.

    Args:
        callee: the callable, and the reads that were seen.
        fn: the function that runs in the capture.
        pool: the device pool of the recording's memory.
        apart: makes a device pool that no other recording uses.
        reached: the state that `fn` reaches.
        forward: the autograd side of the capture, if the results require grad.
        earlier: the operations of the run before, which this run's are compared with.
        strict: whether to refuse if they differ.
        known: for code whose operations cannot be watched (Inductor's): the reads and writes of a
            watched eager run of the same call.
    """

    driver: Driver
    device: torch.device
    pool: DevicePool
    apart: Callable[[], DevicePool]
    callee: Callee
    fn: Callable[..., Any]
    reached: ReachableState
    static_outputs: bool
    rebind: bool
    earlier: Ledger | None = None
    strict: bool = False
    asking: Asking = field(default_factory=Asking)
    known: CompiledAccesses | None = None
    forward: Forward | None = None
    varying: Mapping[int, Varying] = field(default_factory=dict[int, Varying])
    """Arguments that may be smaller in a call than here."""
    follows: Sequence[tuple[Follow, ...]] = ()
    """For each tensor of the result, the dimensions that follow their sizes."""
    counting: Sequence[Slot] = ()
    """Numbers that the callable was seen to move on."""
    _brought: list[Slot] = field(default_factory=list[Slot])
    """Those of them that the device needs."""
    _state_inputs: list[Slot] = field(default_factory=list[Slot])
    """State that is passed to the callable like arguments, because the callable replaces it."""
    _trials: ScalarTrials = field(default_factory=ScalarTrials)
    _outlasted: bool = False
    """True if an attempt showed an optimizer that unexpectedly outlives it."""
    _rewind: Rewind | None = None
    _by_value: set[int] = field(default_factory=set[int])
    """The 0-dim host tensors, by input number, that the callable reads on the host."""
    _filled: dict[int, int] = field(default_factory=dict[int, int])
    """storage -> input number of the 0-dim host tensor that is copied there in this attempt."""
    _lifted: Lifted | None = None
    """The host values that the callable copies to the device."""
    _observers: list[Observer] = field(default_factory=list[Observer])
    """The observers of this attempt."""

    def record(self, tree: Tree, tensors: Sequence[Tensor]) -> CapturedCall:
        """Capture the call ``fn(*args, **kwargs)`` whose flattened form is given.

        Whether it succeeds or not, nothing remains of its effects except the Python effects of
        running `fn` once.
        """
        # The first operation under a mode would: 1 s, which is no part of a capture.
        importlib.import_module("torch._dynamo")
        started = time.perf_counter()
        if self.known is None:
            self._rewind = self.driver.rewind(self.device)
        if self.forward is not None:
            self.forward.rewind = self._rewind
        if self.known is None and self.device.type != "cpu":
            self._lifted = Lifted(self.device, self.earlier.brought if self.earlier else ())
        while True:
            if self._lifted is not None:
                self._lifted.make()
            try:
                return self._attempt(tree, tensors, started)
            except Retry:
                continue
            except (NeedsGrad, BackwardInside) as error:
                let_go(error)
                raise
            except Exception as error:
                refused = isinstance(error, CaptureError)
                if not (refused or self.counting):
                    raise
                let_go(error)
                if self.counting or not refused:  # a count may do less than a number
                    self.counting = ()
                    self._brought.clear()
                    continue
                unfollowed = [o for observer in self._observers for o in observer.unfollowed]
                if self._wanted_by_host() or self._trials.keep(unfollowed):
                    continue
                if self._lifted is not None and self._lifted.misses():
                    continue
                if self._lifted is not None and self._lifted.exhausted:
                    error = self._changed() or error
                error.where = error.where or self._line(error.code)
                raise error
            finally:
                self._release()

    def _line(self, code: str = "") -> str | None:
        """Return the place where the callable begins, for a refusal without a line; or the line
        that calls it, if its code is torch's."""
        find = seeding_line_of if code == "OL106" else line_of
        place = find(self.callee.fn)
        return str(place) if place else user_line()

    def _wanted_by_host(self) -> bool:
        """Return whether the refused value is an argument that the host has: a 0-dim tensor that
        was copied to the device. The next attempt leaves it on the host."""
        found = {
            index
            for observer in self._observers
            for storage, index in self._filled.items()
            if storage in observer.wanted
        }
        self._by_value |= found
        return bool(found)

    def _changed(self) -> CaptureError | None:
        """Return the refusal of a difference between this run and the one before it, or None."""
        ledgers = [observer.ledger for observer in self._observers if observer.ledger is not None]
        differences = [ledger.difference for ledger in ledgers if ledger.difference is not None]
        return differences[0].refusal() if differences else None

    def _release(self) -> None:
        # They hold themselves, and views that keep AccumulateGrad nodes on this stream.
        while self._observers:
            self._observers.pop().release()

    def _attempt(self, tree: Tree, tensors: Sequence[Tensor], started: float) -> CapturedCall:
        """Capture once, and undo everything if that fails.

        Raises:
            Retry: the next attempt knows a fact that this one had to find out.
        """
        before = StateSnapshot.of(self.driver, self.device, self.reached)
        state_inputs = (*self._state_inputs, *map(number_slot, self._brought))
        state = [cast(Tensor, slot.read()) for slot in state_inputs]
        pinned = set(before.held) - {self.driver.storage(t) for t in state}
        kept, lasts = self._trials.kept(before.walk), lasting(optimizers_in(before.walk))
        steps = Steps(kept, self.driver.demands_capturable, self._trials.seed, lasts)
        plan = plan_inputs(self.driver, [*tensors, *state], self.device, pinned)
        plan.varying = dict(self.varying)
        plan.give_by_value(self._by_value)
        run = CaptureRun(before, plan, state_inputs, steps, Counts(self.counting, self.device))
        graph: Graph | None = None
        try:
            graph, statics = self._recorded(run, tree)
            self._learn(run, graph)
            error = late_refusal(run, self.forward.holders if self.forward else ())
            if error is not None:
                raise error
            scalars = self._trials.patch(self.driver, self.device, self.pool, steps, graph)
            if scalars is None:
                raise Retry("numbers of an optimizer are constants in the recording")
            rewound = self._rewind is not None and self._rewind.used
            if self.rebind and run.differs is None and not run.found and not rewound:
                graph = self._rebound_inputs(graph, run, tree)
            captured = captured_call(
                run,
                graph,
                statics[: len(statics) - len(run.lasting)],
                scalars,
                self.driver,
                self.device,
                forward=self.forward,
                watched=self.known is None,
                static_outputs=self.static_outputs,
                started=started,
            )
            captured.told_capturing = self.asking.answer
            captured.lifted = list(self._lifted.used.values()) if self._lifted else []
            captured.reads_more = self.callee.read_more(self.reached, before.walk, run.found)
            captured.differs = self._unexplained(captured, run)
            if self.strict and captured.differs is not None:
                raise captured.differs.refusal()
            return captured
        except BaseException as error:
            self._roll_back(run, graph, error)
            raise

    def _recorded(self, run: CaptureRun, tree: Tree) -> tuple[Graph, list[Tensor]]:
        """Record the body on the device."""

        def body(capture: Capture) -> list[Tensor]:
            self._run(capture, run, tree)
            assert run.outputs is not None
            kept = run.result if self.static_outputs or self.forward else ()
            return [*kept, *run.lasting]

        return self.driver.capture(
            body,
            self.pool,
            run.before.generators(tree),
            self.forward and self.forward.stream,
            bundled=not self.rebind,
            rewind=self._rewind,
        )

    def _learn(self, run: CaptureRun, graph: Graph) -> None:
        """Raise `Retry` if the run showed a fact that the attempt should have known."""
        if run.again:
            self._state_inputs += run.again
            raise Retry("state that the callable replaces became inputs")
        if run.counts.escaped:
            self.counting = ()
            self._brought.clear()
            raise Retry(
                "a number that the callable moves on is kept elsewhere too, or asked for its type"
            )
        if run.counts.wanted:
            self._brought += run.counts.wanted
            raise Retry("numbers that the callable moves on became inputs")
        if self._rewind is not None and not self._rewind.done:
            raise Retry("the places in the stream of random numbers are known now")
        if self.pool.written_by_others(run.lasting):
            # A launch of an earlier recording would overwrite the gradients that this one leaves.
            self.pool = self.apart()
            raise Retry("gradients lie in memory that other recordings write")
        if run.steps.outlasting() and not self._outlasted:
            self._outlasted = True  # a callable that makes and keeps another is not asked twice
            raise Retry("an optimizer made in the call outlives it")

    def _roll_back(self, run: CaptureRun, graph: Graph | None, error: BaseException) -> None:
        """Undo a failed attempt: free its recording, and restore the state."""
        again = self._runs_again(error)
        try:
            if graph is not None:
                graph.reset()
            else:
                distributed.abandon_step(value for _, value in run.before.walk.held.values())
        finally:
            run.before.undo(run.found, again)
            run.plan.release()  # frames of the traceback refer to it for good

    def _runs_again(self, error: BaseException) -> bool:
        """Return whether the callable runs once more for the same call: any error may have come of
        a count that stood for a number."""
        return isinstance(error, _UNDONE) or (bool(self.counting) and isinstance(error, Exception))

    def _unexplained(self, captured: CapturedCall, run: CaptureRun) -> Difference | None:
        """Return the difference from the run before, unless guarded values differ too: then each
        gets a recording."""
        if self.earlier is None or run.differs is None or captured.moves or self._brought:
            return None
        # A call's work depends on the gradient that it finds, although it leaves another one.
        own = {change.slot.id for change in run.found if change.slot.key is not gradient_of}
        if any(self.earlier.values.get(i) != value for i, value in captured.values.items()):
            return None
        kept = {*run.before.walk.held, *self.earlier.held} - own
        guarded = [(slot.id, value) for slot, value in captured.guard.held() if slot.id in kept]
        guarded += [(slot.id, slot) for slot in captured.hidden if slot.id not in self.earlier.held]
        return None if moved(self.earlier, guarded) else run.differs

    def _rebound_inputs(self, graph: Graph, run: CaptureRun, tree: Tree) -> Graph:
        """Make kernels read the inputs in the caller's memory, as far as that is proven right.

        The callable is captured again for it, so it must have no Python effects.
        """
        pinned = {self.driver.storage(t) for ts in run.before.held.values() for t in ts}

        def body(capture: Capture) -> None:
            before = replace(run.before, held=dict(run.before.held))
            plan = plan_inputs(self.driver, run.plan.tensors, self.device, pinned)
            steps = Steps(every_key, self.driver.demands_capturable)
            self._run(capture, CaptureRun(before, plan, (), steps, Counts((), self.device)), tree)

        observer = run.observer
        state = [t for t in observer.written.values() if not observer.known(t)]
        generators = run.before.generators(tree)
        try:
            return self.driver.rebind(graph, body, self.pool, state, generators)
        except CaptureError:
            return graph  # it works with copied inputs

    def _run(self, capture: Capture, run: CaptureRun, tree: Tree) -> None:
        """Run the body: copy the inputs in, run the callable, copy the outputs out."""
        before, plan = run.before, run.plan
        statics = self._stage_inputs(capture, run)
        arguments = statics[: len(statics) - len(run.state_inputs)]
        observer = run.observer = self._observer(run, statics)
        args, kwargs = unflatten(tree, list(arguments))
        places = [t.data_ptr() for t in arguments]
        if self.forward is None and torch.is_grad_enabled():
            refuse_gradients(tree, (args, kwargs), arguments, plan, read=True)
        generators = HostGenerators(before.values(tree))
        try:
            result = self._called(args, kwargs, run, generators)
        except BaseException as error:
            # The caller's call is still to come, and draws its numbers anew.
            if self._runs_again(error) and generators.sure():
                generators.restore()
            raise
        self.driver.join(distributed.side_streams(v for _, v in before.walk.held.values()))
        inspect_arguments(tree, (args, kwargs), arguments, plan, observer)
        refuse_gradients(tree, (args, kwargs), arguments, plan, read=False)
        for t, place in zip(arguments, places, strict=True):
            if t.data_ptr() != place:
                where = observer.reshaped_at(t)
                raise CaptureError("OL107", "an argument was given other memory", where=where)
        # Objects that the callable may return or store as they are; `follows` counts tensors too.
        known = {} if self.follows else before.objects() | argument_objects(tree, (args, kwargs))
        flat = flatten(result, "result", objects=True, known=known)
        if self.forward is not None:
            self.forward.replace_proxies(observer, flat.tensors, arguments, plan)
        refuse_opaque(flat.tree)
        run.after, run.found = self.reached.changed(before.walk)
        run.steps.refuse_schedule(run.found, self.callee.fn)
        state = run.state_inputs
        run.again = recurrent(self.driver, self.device, run.found, state, observer, flat.tensors)
        refuse_parts([cast(Tensor, slot.read()) for slot in run.again], (), ())
        if run.again:
            run.outputs = Outputs()
            run.result = []
            return
        for storage, tensors in observer.external.items():
            before.held.setdefault(storage, []).extend(tensors)
        outputs = self._plan_results(run, flat, known)
        output_ports(self.driver, capture, plan, outputs, observer, self.static_outputs)

    def _stage_inputs(self, capture: Capture, run: CaptureRun) -> list[Tensor]:
        """Return the callable's tensor for each input; put inputs that are state into their
        slots."""
        statics = stage(self.driver, capture, run.plan, self.device)
        numbers = [i for i, how in enumerate(run.plan.travels) if how == Travel.FILL]
        self._filled = {self.driver.storage(statics[i]): i for i in numbers}
        if self.forward is not None:
            for index, how in enumerate(run.plan.travels):
                if how == Travel.ADDRESS:
                    statics[index] = proxy_for(statics[index])
        state = run.state_inputs
        for slot, static in zip(state, statics[len(statics) - len(state) :], strict=True):
            slot.write(static)
        numbers = statics[len(statics) - len(self._brought) :]
        run.counts.on_device = {
            slot.id: static for slot, static in zip(self._brought, numbers, strict=True)
        }
        return statics

    def _observer(self, run: CaptureRun, statics: Sequence[Tensor]) -> Observer:
        plan, before = run.plan, run.before
        device = [
            static
            for static, how in zip(statics, plan.travels, strict=True)
            if how not in (Travel.HOST, Travel.ADDRESS)
        ]
        displaced = [
            static
            for static, t in zip(statics, plan.tensors, strict=True)
            if any(static is d for d in device) and t.storage_offset() != static.storage_offset()
        ]
        made = Observer(
            self.driver,
            self.device,
            device,
            displaced=displaced,
            held=before.held,
            lifted=self._lifted,
        )
        if self.known is None:
            count = len(statics) - len(run.state_inputs)
            inputs = list(zip(plan.tensors[:count], statics[:count], strict=True))
            stand = zip(run.state_inputs, statics[count:], strict=True)
            slots = {self.driver.storage(static): slot.name for slot, static in stand}
            made.ledger = Ledger(self.driver, self.device, inputs, before.walk, slots, self.earlier)
        made.host.give({i: t for i, t in enumerate(statics) if plan.travels[i] == Travel.HOST})
        self._observers.append(made)
        return made

    def _called(self, args: Any, kwargs: Any, run: CaptureRun, generators: HostGenerators) -> Any:
        """Run the callable under watch."""
        walk, plan, observer = run.before.walk, run.plan, run.observer
        forward = self.forward
        around = nullcontext() if forward is None else forward.around(walk, run.state_inputs)
        if self.known is not None:
            if self.known.refused is not None:
                raise self.known.refused
            with around:
                result = self.fn(*args, **kwargs)
            refuse_drawn(generators, self.fn, observer.ledger)
            now = places(plan.tensors, ((slot.name, t) for slot, t in walk.tensors()))
            self.known.give(observer, dict(now), plan.tensors, plan.statics)
            return result
        watch = self.callee.watch()
        seeds = watching_seeds(
            observer.refuse_seed,
            reads=forward is not None,
            draw=observer.refuse_draw,
            frames=watch,
        )
        stepping = run.steps.watched(observer)
        reads = observer.host_reads()
        assert observer.ledger is not None
        run.counts.begin(walk.held)
        asking, numbers = self.asking.answering(), noting_steps(observer.ledger)
        factories = HostFactories(self.device, whole=forward is None)
        with (
            unwound(),
            self._seeds_kept(observer),
            stepping,
            numbers,
            reads,
            factories,
            leaves_refused(),
            around,
            asking,
            nullcontext() if watch is None else watch.active(),
            seeds,
            observer,
        ):
            try:
                result = observer.outcome(self.fn, *args, **kwargs)
            finally:
                run.counts.end()
        self.callee.saw(watch)
        run.stored = set() if watch is None else watch.stored
        refuse_drawn(generators, self.fn, observer.ledger)
        observer.ledger.finish()
        return result

    def _plan_results(self, run: CaptureRun, flat: Flat, known: Mapping[int, Same]) -> Outputs:
        """Plan how the results reach the caller, and how stored values reach their slots."""
        before, plan, observer = run.before, run.plan, run.observer
        stored = list(rebound(run.found, before.walk, observer))
        trees = [flatten(value, slot.name, known=known) for slot, value in stored]
        if self.forward is not None:
            for part in trees:
                part.tensors[:] = map(self.forward.real, part.tensors)
        every = [*flat.tensors, *(t for part in trees for t in part.tensors)]
        refuse_parts(every, stored, {id(t) for ts in before.held.values() for t in ts})
        lasting: set[int] = set()
        if self.forward is None:
            state = run.state_inputs
            lasting = lasting_gradients(self.driver, stored, flat.tensors, state, self.device)
        run.outputs = outputs = plan_outputs(
            self.driver,
            every,
            plan,
            observer,
            self.device,
            before.held,
            lasting,
            {id(t) for _, t in before.walk.tensors()},
        )
        run.lasting = [o.tensor for o in outputs.made if o.tensor is not None and o.lasts]
        if self.forward is not None:
            self.forward.plan(outputs, unique(every), plan, observer, before.held)
        else:
            mark_spent(outputs, every)
        numbers = outputs.numbers
        for t, follows in zip(flat.tensors, self.follows, strict=False):
            output = outputs.made[numbers[id(t)]]
            output.follows = follows
            if follows and output.source not in ("own", "argument"):
                raise Unfit
        run.tree, run.numbers = flat.tree, tuple(numbers[id(t)] for t in flat.tensors)
        run.state = [
            StateOutput(slot, part.tree, tuple(numbers[id(t)] for t in part.tensors))
            for (slot, _), part in zip(stored, trees, strict=True)
        ]
        own = {state.slot.id for state in run.state}
        moved = [s for s in moved_on(run.found, before.walk) if s.slot.id not in own]
        steps = run.counts.step
        run.state += [s if (n := steps(s.slot)) is None else s._replace(step=n) for s in moved]
        if self.forward is not None:
            static = self.forward.pair.static
            static.asking, static.reads = self.asking, before.walk.reads
            static.rebound = [slot for slot, _ in stored]
            static.where = self._line()
            static.compiled = self.known is not None
        assert run.after is not None
        covered = [*every, *(t for _, value in stored for t in flatten(value).tensors)]
        refuse_uncovered(before.walk, run.after, covered, observer, self.device)
        run.grown = grown(run.found, before.walk)
        kept = {id(t) for t in run.lasting}
        run.result = [t for t in unique(every) if id(t) not in kept]
        return outputs

    def _seeds_kept(self, observer: Observer) -> AbstractContextManager[None]:
        if self.driver.computes_on_host:
            return nullcontext()  # a recording advances the host's generator, which is watched

        def refusal() -> CaptureError:
            what = "`torch.manual_seed`, or the like, in a capture"
            return CaptureError("OL106", what, where=self._line("OL106"))

        def redraw() -> None:
            for draw in observer.draws:
                draw()

        return seeded_once(refusal, redraw)
