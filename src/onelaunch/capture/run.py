"""One run of a callable under capture: its inputs, what it does, and what it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.autograd.graph_walk import is_freed, is_pure_view, viewed
from onelaunch.autograd.proxies import proxy_for
from onelaunch.call.identity import Identities, argument_objects
from onelaunch.call.tree import Flat, Same, Tree, flatten, unflatten, unique
from onelaunch.call.wrappers import is_memory
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.checks import (
    inspect_arguments,
    refuse_attributes,
    refuse_gradients,
    refuse_opaque,
    refuse_parts,
    refuse_uncovered,
)
from onelaunch.capture.counted_places import CountedPlaces
from onelaunch.capture.counts import Counts
from onelaunch.capture.effects import (
    grown,
    lasting_gradients,
    moved_on,
    rebound,
    recurrent,
    refuse_reordered,
)
from onelaunch.capture.forward import BackwardInside, Forward, leaves_refused, refuse_leaves_of_host
from onelaunch.capture.io_plan import (
    Argument,
    ArgumentView,
    CannotPadInside,
    HeldView,
    Inputs,
    Lasting,
    Output,
    Outputs,
    Own,
    output_ports,
    plan_outputs,
    stage,
)
from onelaunch.capture.numbers import Following, Numbers, Unfollowed
from onelaunch.capture.recording import NeedsGrad, StateOutput
from onelaunch.driver.capture_query import Asking
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.protocol import Capture, DevicePool, Driver, InPlace, Travel
from onelaunch.driver.refusals import error_here
from onelaunch.driver.seeding import SEEDING, HostGenerators, seeded_once, watching_seeds
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.optimizers.capturable import noting_steps
from onelaunch.optimizers.steps import Steps
from onelaunch.sizes.dims import Follow, Varying
from onelaunch.source import line_of, loaded_at, user_line
from onelaunch.state.slots import node_of
from onelaunch.state.snapshot import ReachableState, StateSnapshot
from onelaunch.state.walk import Change, Slot, StateWalk
from onelaunch.unwinding import unwound
from onelaunch.watch.compiled_accesses import Bringing, CompiledAccesses, noting_host_inputs, places
from onelaunch.watch.difference import Difference, of_threads
from onelaunch.watch.ledger import Ledger, refuse_drawn
from onelaunch.watch.lifted import Lifted
from onelaunch.watch.observer import Observer


class Retry(Exception):
    """A run showed a fact that the next one has to know; the text names it."""


_GRADED = "call under `torch.no_grad()`, if no backward follows; or return a copy, `x = x.clone()`"
_UNDONE = (Retry, CaptureError, NeedsGrad, BackwardInside, CannotPadInside, Unfollowed)
"""The exceptions after which the callable always runs once more for the same call."""


@dataclass(slots=True)
class CaptureJob:
    """A callable and how a call of it is to be captured.

    Attributes:
        pool: the device pool of the recording's memory.
        apart: makes a device pool that no other recording uses.
        callee: the callable, and the reads that were seen.
        reached: the state that it reaches.
        static_outputs: whether the results stay in the recording's own memory.
        in_place: what kernels are to reach in the caller's memory, where they can; None: nothing.
        asking: the answer to a callable that asks whether it is being captured.
        earlier: the operations of the run before, which this one's are compared with.
        strict: whether to refuse if they differ.
        known: for code whose operations cannot be watched (Inductor's): the reads and writes of a
            watched eager run of the same call.
        forward: the autograd side of the capture, if the results require grad.
        varying: arguments that may be smaller in a call than here.
        follows: for each tensor of the result, the dimensions that follow their sizes.
        counting: numbers that the callable was seen to move on; none once that was given up.
        following: numbers that the caller was seen to vary, without those that are constants.
    """

    driver: Driver
    device: torch.device
    pool: DevicePool
    apart: Callable[[], DevicePool]
    callee: Callee
    reached: ReachableState
    static_outputs: bool
    in_place: InPlace | None
    asking: Asking
    earlier: Ledger | None
    strict: bool
    known: CompiledAccesses | None
    forward: Forward | None
    varying: Mapping[int, Varying]
    follows: Sequence[tuple[Follow, ...]]
    counting: Sequence[Slot]
    following: Following

    def runs_again(self, error: BaseException) -> bool:
        """Return whether the callable runs once more for the same call after an error: any may have
        come of a stand-in for a number."""
        stood = bool(self.counting or self.following)
        return isinstance(error, _UNDONE) or (stood and isinstance(error, Exception))

    def line(self, code: str = "") -> str | None:
        """Return the place of a refusal without a line: where such things are done, else where the
        callable begins; or the line that calls it, if its code is torch's."""
        place = loaded_at(self.callee.codes, "checkpoint") if code == "OL116" else None
        place = place or line_of(self.callee.fn, SEEDING if code == "OL106" else None)
        return str(place) if place else user_line()


@dataclass(slots=True)
class PlainRun:
    """A run without stand-ins for numbers, of the same call and state as one with them.

    Attributes:
        due: True if the next attempt is this run.
        ledger: its operations.
        differs: its difference from the run before it.
    """

    due: bool = False
    ledger: Ledger | None = None
    differs: Difference | None = None

    def note(self, ledger: Ledger) -> None:
        self.due, self.ledger, self.differs = False, ledger, ledger.difference


@dataclass(slots=True)
class CaptureRun:
    """One run of the callable under capture: its inputs and its effects.

    Attributes:
        snapshot: the state before the run.
        plan: how the inputs reach it.
        steps: the optimizer steps in it.
        counts: the numbers that it counts.
        varied: the numbers that the caller varies.
        plain: the run to compare with, if these have stand-ins.
        state_inputs: slots whose tensors are the last of the inputs.
        brought: the numbers of which the last of these are the tensors.
        lifted: the host values that the callable copies to the device.
        filled: storage -> input number of the 0-dim host tensor that is copied there.
        result, tree, numbers: the tensors that it returned, their tree, and the number of the
            output for each tensor in it.
        after, found: the state after it, and the changes.
        state: the slots that each replay writes, with their values.
        lasting: gradients that each replay writes in place.
        again: slots that have to be inputs; the next attempt passes them as such.
        grown: see `effects.grown`.
        stored: ids of slots that it surely stored to, as it was seen.
        host_inputs: the host values that compiled code got.
        reads: the reads of the callable, those of this run so far included, if it was watched.
    """

    job: CaptureJob
    snapshot: StateSnapshot
    plan: Inputs
    steps: Steps
    counts: Counts
    state_inputs: Sequence[Slot] = ()
    brought: Sequence[Slot] = ()
    lifted: Lifted | None = None
    varied: Numbers = field(default_factory=Numbers.none)
    plain: PlainRun = field(default_factory=PlainRun)
    filled: dict[int, int] = field(default_factory=dict)
    observer: Observer = field(init=False)
    outputs: Outputs | None = None
    result: Any = None
    tree: Tree | None = None
    numbers: tuple[int, ...] = ()
    after: StateWalk | None = None
    found: list[Change] = field(default_factory=list)
    state: list[StateOutput] = field(default_factory=list)
    lasting: list[Tensor] = field(default_factory=list)
    again: list[Slot] = field(default_factory=list)
    grown: tuple[str, ...] = ()
    stored: set[tuple[int, object]] = field(default_factory=set)
    host_inputs: list[object] = field(default_factory=list)
    reads: Reads | None = None

    @property
    def differs(self) -> Difference | None:
        """The difference from the run before it, as far as its operations were seen."""
        ledger = self.observer.ledger
        return None if ledger is None else ledger.difference

    def stage(self, capture: Capture) -> None:
        """Make the callable's tensor for each input, put those that are state into their slots, and
        make the observer of the run."""
        driver, plan, state = self.job.driver, self.plan, self.state_inputs
        statics = stage(driver, capture, plan, self.job.device)
        filled = [i for i, how in enumerate(plan.travels) if how == Travel.FILL]
        self.filled = {driver.storage(statics[i]): i for i in filled}
        if self.job.forward is not None:
            refuse_leaves_of_host(plan)
            for index, how in enumerate(plan.travels):
                if how == Travel.ADDRESS:
                    statics[index] = proxy_for(statics[index])
        for slot, static in zip(state, statics[len(statics) - len(state) :], strict=True):
            slot.write(static)
        numbers = statics[len(statics) - len(self.brought) :]
        self.counts.on_device = {
            slot.id: static for slot, static in zip(self.brought, numbers, strict=True)
        }
        self.observer = self._observer()
        self.observer.numbers = {storage: frozenset({storage}) for storage in self.filled}

    def execute(self, capture: Capture, tree: Tree) -> None:
        """Run the callable, and copy its results out; call `stage` first."""
        job, snapshot, plan, observer = self.job, self.snapshot, self.plan, self.observer
        arguments = plan.statics[: len(plan.statics) - len(self.state_inputs)]
        tree = self.varied.given(tree)
        args, kwargs = unflatten(tree, list(arguments))
        addresses = [(t.data_ptr(), t.grad_fn) for t in arguments]
        if job.forward is None and torch.is_grad_enabled():
            refuse_gradients(tree, (args, kwargs), arguments, plan, read=True)
        generators = HostGenerators(snapshot.values(tree))
        try:
            result = self._called(args, kwargs, generators)
        except BaseException as error:
            # The caller's call is still to come, and draws its numbers anew.
            if job.runs_again(error) and generators.sure():
                generators.restore()
            raise
        job.driver.join(distributed.side_streams(v for _, v in snapshot.walk.held.values()))
        inspect_arguments(tree, (args, kwargs), arguments, plan, observer)
        refuse_gradients(tree, (args, kwargs), arguments, plan, read=False)
        for t, spec, (address, graph) in zip(arguments, plan.specs, addresses, strict=False):
            if t.data_ptr() != address:
                where = observer.reshaped_at(t)
                raise CaptureError("OL107", "an argument was given other memory", where=where)
            if t.grad_fn is not graph:
                what = f"an argument, {spec}, is written with values that require grad"
                raise error_here("OL113", what, fix=_GRADED)
        # Objects that the callable may return or store as they are; `follows` counts tensors too.
        known = {} if job.follows else snapshot.objects() | argument_objects(tree, (args, kwargs))
        known = job.callee.returned_before() | known
        identities = Identities()  # not kept with the run: what it holds would be read as state
        flat = flatten(result, "result", objects="made", known=known, number=identities.note)
        if job.forward is not None:
            job.forward.replace_proxies(observer, flat.tensors, arguments, plan)
        refuse_opaque(flat.tree)
        named = zip(flat.paths, flat.tensors, strict=True)
        refuse_attributes([(p, t) for p, t in named if is_memory(t) and observer.made(t)])
        self.after, self.found = job.reached.changed(snapshot.walk)
        self.steps.refuse_schedule(self.found, job.callee.fn)
        state = self.state_inputs
        self.again = recurrent(job.driver, job.device, self.found, state, observer, flat.tensors)
        refuse_parts([cast(Tensor, slot.read()) for slot in self.again], (), ())
        if self.again:
            self.outputs, self.result = Outputs(), []
            return
        for storage, tensors in observer.external.items():
            snapshot.held.setdefault(storage, []).extend(tensors)
        outputs = self._plan_results(flat, known, identities)
        output_ports(job.driver, capture, plan, outputs, observer, job.static_outputs)

    def _observer(self) -> Observer:
        job, plan, snapshot = self.job, self.plan, self.snapshot
        statics = plan.statics
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
            job.driver,
            job.device,
            device,
            displaced=displaced,
            held=snapshot.held,
            lifted=self.lifted,
        )
        if job.known is None:
            count = len(statics) - len(self.state_inputs)
            inputs = list(zip(plan.tensors[:count], statics[:count], strict=True))
            stand = zip(self.state_inputs, statics[count:], strict=True)
            slots = {job.driver.storage(static): slot.name for slot, static in stand}
            earlier = job.earlier if self.plain.ledger is None else self.plain.ledger
            made.ledger = Ledger(
                job.driver, job.device, inputs, snapshot.walk, slots, earlier, job.pool
            )
        made.host.give({i: t for i, t in enumerate(statics) if plan.travels[i] == Travel.HOST})
        return made

    def _called(self, args: Any, kwargs: Any, generators: HostGenerators) -> Any:
        """Run the callable under watch."""
        job, walk, plan, observer = self.job, self.snapshot.walk, self.plan, self.observer
        forward, fn = job.forward, job.callee.on(job.driver)
        around = nullcontext() if forward is None else forward.around(walk, self.state_inputs)
        if job.known is not None:
            if job.known.refused is not None:
                raise copy.copy(job.known.refused)  # what catches it adds to it
            brings = bool(job.known.brought) and self.lifted is not None
            bringing = Bringing(job.device, self.lifted, self.host_inputs)
            bring = bringing if brings else nullcontext()
            with leaves_refused(), around, noting_host_inputs(self.host_inputs), bring:
                result = fn(*args, **kwargs)
            refuse_drawn(generators, fn, observer.ledger)
            now = places(plan.tensors, walk)
            job.known.give(observer, dict(now), plan.tensors, plan.statics)
            return result
        watch = job.callee.watch()
        if watch is not None:
            self.reads, self.stored = watch.reads, watch.stored
        seeds = watching_seeds(
            observer.note_seeding,
            reads=forward is not None,
            draw=observer.refuse_draw,
            frames=watch,
        )
        stepping = self.steps.watched(observer)
        reads = observer.host_reads()
        ledger = observer.ledger
        assert ledger is not None
        self.counts.begin(walk.held)
        if self.varied:
            self.varied.begin(lambda: ledger.steps > 0)
            observer.placed = self.varied.placed
        asking, numbers = job.asking.answering(), noting_steps(ledger)
        factories = HostFactories(job.device, whole=forward is None)
        with (
            unwound(),
            self._seeds_kept(),
            stepping,
            numbers,
            reads,
            factories,
            CountedPlaces(self.counts) if self.counts.slots else nullcontext(),
            leaves_refused(),
            around,
            asking,
            nullcontext() if watch is None else watch.active(),
            seeds,
            observer,
        ):
            try:
                result = observer.outcome(fn, *args, **kwargs)
            finally:
                self.counts.end()
                self.varied.end()
        job.callee.saw(watch)
        if job.callee.handed_on is not None:
            raise of_threads(job.callee.handed_on)
        refuse_drawn(generators, fn, observer.ledger)
        ledger.finish()
        return result

    def _plan_results(
        self, flat: Flat, known: Mapping[int, Same], identities: Identities
    ) -> Outputs:
        """Plan how the results reach the caller, and how stored values reach their slots."""
        job, snapshot, plan, observer = self.job, self.snapshot, self.plan, self.observer
        forward = job.forward
        stored = list(rebound(self.found, snapshot.walk, observer, job.callee.codes))
        trees = [flatten(v, slot.name, known=known, number=identities.note) for slot, v in stored]
        if forward is not None:
            for part in trees:
                part.tensors[:] = map(forward.real, part.tensors)
        every = [*flat.tensors, *(t for part in trees for t in part.tensors)]
        refuse_parts(every, stored, {id(t) for ts in snapshot.held.values() for t in ts})
        lasting: set[int] = set()
        if forward is None:
            state = self.state_inputs
            lasting = lasting_gradients(job.driver, stored, flat.tensors, state, job.device)
        self.outputs = outputs = plan_outputs(
            job.driver,
            every,
            plan,
            observer,
            job.device,
            snapshot.held,
            lasting,
            {id(t) for _, t in snapshot.walk.tensors()},
            viewed if forward is None else forward.viewed,
        )
        if any(_is_made_leaf(o, t, plan) for o, t in zip(outputs.made, unique(every), strict=True)):
            raise BackwardInside
        self.lasting = [o.memory.tensor for o in outputs.made if isinstance(o.memory, Lasting)]
        if forward is not None:
            forward.plan(outputs, unique(every), plan, observer, snapshot.held)
        else:
            _mark_spent(outputs, every, snapshot.held)
        numbers = outputs.numbers
        for t, follows in zip(flat.tensors, job.follows, strict=False):
            output = outputs.made[numbers[id(t)]]
            output.follows = follows
            if follows and not isinstance(output.memory, Own | Argument):
                raise CannotPadInside
        self.tree = identities.shared(flat.tree)
        self.numbers = tuple(numbers[id(t)] for t in flat.tensors)
        self.state = [
            StateOutput(
                slot, identities.shared(part.tree), tuple(numbers[id(t)] for t in part.tensors)
            )
            for (slot, _), part in zip(stored, trees, strict=True)
        ]
        own = {state.slot.id for state in self.state}
        moved = [s for s in moved_on(self.found, snapshot.walk) if s.slot.id not in own]
        steps = self.counts.step
        self.state += [s if (n := steps(s.slot)) is None else s._replace(step=n) for s in moved]
        if forward is not None:
            static = forward.pair.static
            static.asking, static.reads = job.asking, snapshot.walk.reads
            static.rebound = [slot for slot, _ in stored]
            static.where = job.line()
            static.compiled = job.known is not None
            static.brought = self.lifted.known if static.compiled and self.lifted else ()
        assert self.after is not None
        covered = [*every, *(t for _, value in stored for t in flatten(value).tensors)]
        refuse_uncovered(snapshot.walk, self.after, covered, observer, job.device)
        self.grown = grown(self.found, snapshot.walk)
        refuse_reordered(self.found, snapshot.walk)
        kept = {id(t) for t in self.lasting}
        self.result = [t for t in unique(every) if id(t) not in kept]
        return outputs

    def _seeds_kept(self) -> AbstractContextManager[None]:
        if self.job.driver.computes_on_host:
            return nullcontext()  # a recording advances the host's generator, which is watched

        def refusal() -> CaptureError:
            what = "`torch.manual_seed`, or the like, in a capture"
            return CaptureError("OL106", what, where=self.job.line("OL106"))

        def redraw() -> None:
            for draw in self.observer.admission.draws:
                draw()

        return seeded_once(refusal, redraw)


def _mark_spent(
    outputs: Outputs, results: Sequence[Tensor], held: Mapping[int, Sequence[Tensor]]
) -> None:
    """Mark results whose backward has run inside.

    Raises:
        NeedsGrad: a result still needs a backward: it is no mere view of the caller's memory.
    """
    ends = {node_of(t) for ts in held.values() for t in ts}
    for t in results:
        output = outputs.made[outputs.numbers[id(t)]]
        owned = isinstance(output.memory, Own)
        output.spent = owned and is_freed(t)
        if output.spec.requires_grad and not output.spent and (owned or not is_pure_view(t, ends)):
            raise NeedsGrad


def _is_made_leaf(output: Output, t: Tensor, plan: Inputs) -> bool:
    """Return whether the call made a leaf of memory from before it, `x.detach().requires_grad_()`.
    Under `no_grad` a view of a tensor that requires grad does, too."""
    match output.memory:
        case ArgumentView(index, _):
            owner = plan.specs[index].requires_grad
        case HeldView(tensor, _):
            owner = tensor.requires_grad
        case _:
            return False
    return output.spec.requires_grad and t.is_leaf and not (t._is_view() and owner)
