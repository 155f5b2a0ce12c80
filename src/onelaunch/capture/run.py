"""How a call is to be captured, and one run of it under capture: its inputs, what it does, and what
it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onelaunch.autograd.proxies import proxy_for
from onelaunch.beside import begin_run, is_beside
from onelaunch.call.ambient import noted_modes, readers
from onelaunch.call.identity import Identities, argument_objects
from onelaunch.call.spec import has_strides
from onelaunch.call.tree import Flat, Same, Tree, flatten
from onelaunch.capture import distributed
from onelaunch.capture.callee import Callee
from onelaunch.capture.checks import (
    Check,
    RunArguments,
    give_marks,
    leaves_refused,
    marks_read,
    refuse_attributes,
    refuse_gradients,
    refuse_leaves_of_host,
    refuse_opaque,
    refuse_parts,
)
from onelaunch.capture.counted_places import CountedPlaces
from onelaunch.capture.effects import recurrent_state
from onelaunch.capture.followed import PlainRun
from onelaunch.capture.io_plan import COPIED, CannotPadInside, Inputs, Outputs, output_ports, stage
from onelaunch.capture.numbers import NumberStandIns, NumbersToFollow
from onelaunch.capture.outcome import Returned, StateEffects, plan_results
from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.host_factories import HostFactories
from onelaunch.driver.host_generator import watching_host_generator
from onelaunch.driver.protocol import Capture, DevicePool, Driver, InPlace, Travel
from onelaunch.driver.schedule import Parallel
from onelaunch.driver.seeding import SEEDING, HostGenerators, watching_seeds
from onelaunch.errors import CaptureError, CaptureSignal
from onelaunch.frames.reads import Reads
from onelaunch.gc_pause import out_of_reach
from onelaunch.identity import id
from onelaunch.optimizers.capturable import noting_steps
from onelaunch.optimizers.steps import Steps
from onelaunch.sizes.dims import SizeLink, Varying
from onelaunch.source import argument_changed_at, line_of, loaded_at, user_line
from onelaunch.state.guard import Reader
from onelaunch.state.replaced import ReplacedSlot, Staged
from onelaunch.state.snapshot import ReachableState, StateSnapshot
from onelaunch.state.walk import Slot, note_uncounted
from onelaunch.unwinding import unwound
from onelaunch.watch.compiled_accesses import (
    CompiledAccesses,
    HostInputs,
    places,
    refuse_handed_on,
)
from onelaunch.watch.device_constants import DeviceConstants
from onelaunch.watch.difference import RunDifference
from onelaunch.watch.host_memory import references
from onelaunch.watch.ledger import Ledger, optimizers_in
from onelaunch.watch.observer import Observer
from onelaunch.watch.operations import CompiledLanes
from onelaunch.watch.other_sizes import repeats

if TYPE_CHECKING:
    from onelaunch.capture.forward import Forward


class NeedsTheCaller(CaptureError):
    """The refusal of a capture beside calls: it would put stand-ins into state that they read."""

    def __init__(self, what: str) -> None:
        super().__init__("OL109", f"it is captured in the thread of a call: {what}")


@dataclass(slots=True, eq=False)
class CaptureJob:
    """A callable and how a call of it is to be captured."""

    driver: Driver
    device: torch.device
    pool: DevicePool  # of the recording's memory
    new_pool: Callable[[], DevicePool]  # makes a device pool that no other recording uses
    callee: Callee
    reached: ReachableState  # the state that the callable reaches
    static_outputs: bool  # whether results stay in the recording's memory
    in_place: InPlace | None  # the memory of the caller that kernels are to reach, where they can
    capture_answer: CaptureAnswer
    earlier: Ledger | None  # the operations of the run before, to compare with
    differed_in_a_row: int | None  # captures that differed; None: differences are not refused
    shrinks: bool  # whether state that grows was seen to be small again
    accesses: CompiledAccesses | None
    """The reads and writes of an eager run, for code whose operations cannot be watched."""
    forward: Forward | None  # the autograd side of the capture, if the results require grad
    wrap_for_capture: Callable[[Callable[..., Any], torch.device], Callable[..., Any]]
    """A function of the callable and the device: the callable as the capture runs it."""
    varying: Mapping[int, Varying]
    """Argument index -> how an argument that may be smaller in a call varies."""
    follows: Sequence[tuple[SizeLink, ...]]
    """Dimensions of each tensor of the result that follow sizes of arguments."""
    following: NumbersToFollow
    """Numbers that the caller was seen to vary, or the callable to move on, without constants."""
    replaced: tuple[ReplacedSlot, ...]  # state that the caller replaces between calls: inputs
    parallel: Parallel  # see `Driver.capture`
    draws: bool  # whether a run has drawn from the device's default generator
    studied: Ledger | None = None
    """The operations of a run at other sizes, which the capture must repeat: none came before."""

    def line(self, code: str = "") -> str | None:
        """Return the place of a refusal without a line. It is the line that does such things, else
        the beginning of the callable. If the code is torch's, it is the line that calls it."""
        place = loaded_at(self.callee.codes, "checkpoint") if code == "OL116" else None
        if code == "OL105":
            place = argument_changed_at(self.callee.fn)
        place = place or line_of(self.callee.fn, SEEDING if code == "OL106" else None)
        return str(place) if place else user_line()


class Retry(Exception):
    """A sign that a run showed a fact that the next run has to know; the text names it."""


_UNDONE = (Retry, CaptureError, CaptureSignal, CannotPadInside)
"""Exceptions after which the callable always runs once more for the same call."""


@dataclass(slots=True, eq=False)
class CaptureRun:
    """One run of a callable under capture: inputs staged, the call made, changes and results found.
    A retry makes another."""

    job: CaptureJob
    snapshot: StateSnapshot  # the state before the run
    plan: Inputs  # how the inputs reach it
    steps: Steps  # the optimizer steps in it
    numbers: NumberStandIns  # the numbers that it follows
    state_inputs: Sequence[Slot] = ()  # slots of the last inputs
    constants: DeviceConstants | None = None
    """The host values that the callable copies to the device."""
    baseline: PlainRun = field(default_factory=PlainRun)
    filled: dict[int, int] = field(default_factory=dict)
    """Storage -> input index of a 0-dim host tensor that is copied there."""
    observer: Observer = field(init=False)
    returned: Returned = field(default_factory=Returned)
    effects: StateEffects = field(default_factory=StateEffects)
    missing_inputs: list[Slot] = field(default_factory=list)
    """Slots that have to be inputs of the next attempt."""
    host_inputs: list[object] = field(default_factory=list)
    """The host values that compiled code got."""
    reads: Reads | None = None  # of the callable, this run included, if it was watched
    marks: dict[int, Check] = field(default_factory=dict)  # see `marks_read`
    staged: Staged = field(init=False)  # the contents of slots that the caller replaces
    modes: list[Reader] = field(default_factory=readers)  # torch's modes before the run
    _left_modes: bool = False  # whether it has left them changed

    def __post_init__(self) -> None:
        replaced = self.job.replaced
        self.staged = Staged(replaced, self.snapshot.walk.all_slots.values() if replaced else ())

    def runs_again(self, error: BaseException) -> bool:
        """Return whether the callable runs again after an error: a stand-in may be its cause."""
        stood = bool(self.job.following or self.steps.places)
        return isinstance(error, _UNDONE) or (stood and isinstance(error, Exception))

    @property
    def differs(self) -> RunDifference | None:
        """The difference from the run before it, as far as operations were seen."""
        ledger = self.observer.ledger
        return None if ledger is None else ledger.difference

    def shows_all(self) -> bool:
        """Return whether its operations show all that it did."""
        ledger, admission = self.observer.ledger, self.observer.admission
        hidden = ledger is None or not ledger.shows_whole_run() or admission.draws
        return not (hidden or self._left_modes)

    def repeats(self, studied: Ledger) -> bool:
        """Return whether it has repeated a run at other sizes."""
        ledger = self.observer.ledger
        return ledger is not None and repeats(studied, ledger)

    def stage(self, capture: Capture) -> None:
        """Make the callable's tensors, fill the slots of state, and make the observer."""
        driver, plan, state = self.job.driver, self.plan, self.state_inputs
        statics = stage(driver, capture, plan, self.job.device)
        self.filled = {driver.storage(statics[i]): i for i in plan.going(Travel.FILL)}
        if self.job.forward is not None:
            refuse_leaves_of_host(plan)
            for index in plan.going(Travel.ADDRESS):
                statics[index] = proxy_for(statics[index])
        for slot, static in zip(state, statics[len(statics) - len(state) :], strict=True):
            slot.write(static)
        self.staged.begin()
        self.observer = self._observer(capture)
        self.observer.host_scalars = {storage: frozenset({storage}) for storage in self.filled}

    def execute(self, capture: Capture, tree: Tree) -> None:
        """Run the callable on the tensors of `stage`, and find its results and effects. Plan the
        replay, and refuse effects that no replay repeats. Plan nothing if inputs are missing."""
        job, snapshot, plan, codes = self.job, self.snapshot, self.plan, self.job.callee.codes
        if self.staged.changed:
            raise Retry("state that the caller replaces is reached by other ways, too")
        give_marks(plan.statics, plan.tensors)
        statics = plan.statics[: len(plan.statics) - len(self.state_inputs)]
        arguments = RunArguments.of(self.numbers.with_stand_ins(tree), statics)
        if job.forward is None and torch.is_grad_enabled():
            refuse_gradients(arguments.paths, statics, plan, codes, read=True)
        on_host = [] if job.forward is None else [plan.statics[i] for i in plan.going(Travel.HOST)]
        referred = references(on_host)
        result = self._called_once(arguments)
        new_references = [now - was for was, now in zip(referred, references(on_host), strict=True)]
        job.driver.join(distributed.side_streams(v for _, v in snapshot.walk.slots.values()))
        if self.reads is not None:
            names = [*arguments.paths, *(slot.name for slot in self.state_inputs)]
            self.marks = marks_read(self.reads, plan.statics, plan.tensors, names, codes)
        arguments.check(plan, self.observer, codes)
        flat, whole, identities = self._taken_apart(result, arguments)
        returned = list(flat.tensors)  # stand-ins of parameters included
        if job.forward is not None:
            job.forward.replace_proxies(self.observer, flat.tensors, statics, plan)
        for argument, more in zip(on_host, new_references, strict=True):
            # The graph of this run keeps it, so that a backward that is captured later may read it.
            if more > sum(t is argument for t in flat.tensors):
                self.observer.host.read(argument)
        values = [*snapshot.walk.owners, *(value for _, value in snapshot.values(arguments.tree))]
        refuse_opaque(flat.tree, {*whole, *map(id, values)})
        memory, named = self.observer.memory, zip(flat.paths, flat.tensors, strict=True)
        refuse_attributes([(p, t) for p, t in named if has_strides(t) and memory.is_new(t)], codes)
        self._find_changes(capture, result, returned, flat)
        if self.missing_inputs:
            self.returned.outputs, self.returned.tensors = Outputs(), []
            return
        for storage, tensors in memory.external.items():
            snapshot.tensors_by_storage.setdefault(storage, []).extend(tensors)
        outputs = plan_results(self, flat, whole, identities)
        output_ports(job.driver, capture, plan, outputs, self.observer)

    def _called_once(self, arguments: RunArguments) -> Any:
        """Run the callable. Put back what the caller replaces, and before another run for the same
        call the host's generators, too."""
        generators = HostGenerators(self.snapshot.values(arguments.tree))
        try:
            return self._called(arguments.args, arguments.kwargs, generators)
        except BaseException as error:
            # The caller's call is still to come, and draws its numbers anew.
            if self.runs_again(error):
                generators.restore()
            raise
        finally:
            self.staged.put_back()

    def _taken_apart(
        self, result: object, arguments: RunArguments
    ) -> tuple[Flat, Mapping[int, Same], Identities]:
        """Return the result, flattened; the objects that the callable may return or store as they
        are; and the containers that are in several places."""
        job = self.job
        whole: dict[int, Same] = {}
        if not job.follows:  # which counts tensors
            whole = self.snapshot.objects() | argument_objects(
                arguments.tree, (arguments.args, arguments.kwargs)
            )
        whole = job.callee.returned_before() | whole
        identities = Identities()  # not kept with the run: what it holds would be read as state
        flat = flatten(result, "result", objects="made", whole=whole, number=identities.note)
        return flat, whole, identities

    def _find_changes(
        self, capture: Capture, result: object, returned: Sequence[Tensor], flat: Flat
    ) -> None:
        """Find the run's effects on the state, and slots that have to be inputs for them."""
        job, walk, effects = self.job, self.snapshot.walk, self.effects
        effects.after, effects.changes = job.reached.changed(walk)
        note_uncounted(walk, effects.changes)
        if is_beside() and effects.changes:
            raise NeedsTheCaller("the callable changes state")
        self.staged.note_handed_on([result, *(change.after for change in effects.changes)])
        if self.staged.changed:
            raise Retry("the callable changes state that the caller replaces, or hands it on")
        self._note_handed_on(capture, returned, flat.tree)
        self.steps.refuse_schedule(effects.changes, job.callee.fn)
        effects.optimizer_changes = self.steps.moved(effects.changes, walk, self.numbers.counted())
        state, results = self.state_inputs, flat.tensors
        self.missing_inputs = recurrent_state(
            job.driver, job.device, effects.changes, state, self.observer, results
        )
        contents = (slot.read() for slot in self.missing_inputs)
        refuse_parts([t for t in contents if isinstance(t, Tensor)], (), ())

    def _observer(self, capture: Capture) -> Observer:
        job, plan, snapshot, statics = self.job, self.plan, self.snapshot, self.plan.statics
        device = [(statics[i], plan.tensors[i]) for i in plan.going(*COPIED)]
        displaced = [s for s, t in device if t.storage_offset() != s.storage_offset()]
        observer = Observer(
            job.driver,
            job.device,
            [static for static, _ in device],
            displaced=displaced,
            held=snapshot.tensors_by_storage,
            constants=self.constants,
        )
        observer.filled_sets, observer.admission.may_draw = snapshot.walk.filled_sets(), job.draws
        observer.lanes = capture.lanes
        if job.accesses is None:
            count = len(statics) - len(self.state_inputs)
            inputs = list(zip(plan.tensors[:count], statics[:count], strict=True))
            stand = zip(self.state_inputs, statics[count:], strict=True)
            slots = {job.driver.storage(static): slot.name for slot, static in stand}
            earlier = job.earlier if self.baseline.ledger is None else self.baseline.ledger
            with no_functions():
                observer.ledger = Ledger(
                    job.driver, job.device, inputs, snapshot.walk, slots, earlier, capture
                )
        observer.host.note_arguments({i: statics[i] for i in plan.going(Travel.HOST)})
        return observer

    def _called(self, args: Any, kwargs: Any, generators: HostGenerators) -> Any:
        job, walk, plan, observer = self.job, self.snapshot.walk, self.plan, self.observer
        forward, fn = job.forward, job.callee.captured_form(job.driver)
        around = nullcontext() if forward is None else forward.around(walk, self.state_inputs)
        if job.accesses is not None:
            if job.accesses.refused is not None:
                raise copy.copy(job.accesses.refused)  # what catches it adds to it
            brings = bool(job.accesses.copied_to_device) and self.constants is not None
            host_inputs = HostInputs(job.device, self.constants)
            self.host_inputs = host_inputs.notes
            begin_run()
            lanes = observer.lanes
            dealt = nullcontext() if lanes is None else CompiledLanes(lanes, job.driver, job.device)
            with leaves_refused(), around, host_inputs.noting(brings), dealt:
                result = fn(*args, **kwargs)
            generators.refuse_drawn(fn, job.callee.reads, self.snapshot.words)
            now = places(plan.tensors, walk)
            job.accesses.note_in(observer, dict(now), plan.tensors, plan.statics)
            return result
        # Code may ask for a stand-in's type, so earlier reads are not reused.
        before = None if self.numbers.following or optimizers_in(walk) else walk
        arguments = plan.tensors[: len(plan.tensors) - len(self.state_inputs)]
        watch = job.callee.read_watch(job.device, before=before, arguments=arguments)
        if watch is not None:
            self.reads, self.effects.stored = watch.reads, watch.stored
        seeds = watching_seeds(
            observer.note_seeding,
            reads=forward is not None,
            draw=observer.refuse_draw,
            take=observer.refuse_taken,
            frames=watch,
        )
        stepping = self.steps.watched(observer)
        ledger = observer.ledger
        assert ledger is not None
        numbers = self.numbers
        numbers.begin(lambda: ledger.origins.steps > 0)
        observer.placed, self.steps.stand_in = numbers.placed, numbers.in_group
        with (
            unwound(),
            nullcontext() if job.studied is None else self._noting_modes(),
            self._host_generator(),
            stepping,
            noting_steps(ledger),
            observer.host_reads,
            HostFactories(job.device, whole=forward is None),
            CountedPlaces(numbers) if numbers.following.incremented else nullcontext(),
            leaves_refused(),
            around,
            job.capture_answer.in_force(),
            nullcontext() if watch is None else watch.active(),
            seeds,
            observer,
            out_of_reach(),
        ):
            try:
                result = observer.outcome(job.wrap_for_capture(fn, job.device), *args, **kwargs)
            finally:
                numbers.end()
        job.callee.store_reads(watch)
        unseen = job.callee.unseen()
        if unseen is not None:
            raise unseen
        generators.refuse_drawn(fn, job.callee.reads, self.snapshot.words)
        return result

    def _note_handed_on(self, capture: Capture, returned: Sequence[Tensor], tree: Tree) -> None:
        """Note what the run returned or stored, and finish its comparison with the run before."""
        job, held, ledger = self.job, self.snapshot.tensors_by_storage, self.observer.ledger
        stored = (t for c in self.effects.changes for t in flatten(c.after).tensors)
        tensors = [*returned, *stored]
        if ledger is not None:
            for t in ledger.handed_on(tensors, tree):
                held.setdefault(job.driver.storage(t), []).append(t)
            ledger.finish()
        else:
            known = [*self.plan.statics, *(t for ts in held.values() for t in ts)]
            refuse_handed_on(job.driver, job.device, capture, tensors, known)

    @contextmanager
    def _noting_modes(self) -> Generator[None]:
        """Note whether the run leaves torch's modes changed, before they are put back."""
        changed = noted_modes()
        yield
        self._left_modes = bool(changed())

    def _host_generator(self) -> AbstractContextManager[None]:
        """Watch the host's default generator. A recording on the host advances it, and is seen."""
        job, observer = self.job, self.observer
        if job.driver.computes_on_host:
            return nullcontext()
        admission, note = observer.admission, observer.note_refusal
        return watching_host_generator(job.driver, admission, note, job.line)
