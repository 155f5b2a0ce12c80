"""The results and effects of a run under capture, and the plan of how each replay repeats them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from onelaunch.autograd.graph_walk import viewed
from onelaunch.call.identity import Identities
from onelaunch.call.tree import Flat, Same, Tree, flatten, unique
from onelaunch.capture.checks import (
    BackwardInside,
    is_made_leaf,
    mark_freed,
    refuse_made_parameters,
    refuse_parts,
    refuse_uncovered,
)
from onelaunch.capture.effects import (
    counted_numbers,
    growing_containers,
    keep_results,
    lasting_gradients,
    rebinds,
    refuse_other_attributes,
    refuse_renewed,
    refuse_reordered,
)
from onelaunch.capture.io_plan import Argument, CannotPadInside, Lasting, Outputs, Own, plan_outputs
from onelaunch.capture.recording import Growing, StateOutput
from onelaunch.driver.dispatch import no_functions
from onelaunch.errors import CaptureError
from onelaunch.identity import id
from onelaunch.sizes.dims import SizeLink
from onelaunch.state.slots import Slot
from onelaunch.state.walk import Change, StateWalk

if TYPE_CHECKING:
    from onelaunch.capture.run import CaptureRun


@dataclass(slots=True, eq=False)
class Returned:
    """The results of a run. Values that it stored in state reach their slots by `outputs`, too."""

    tensors: Any = None  # each tensor of the results and of stored values, once
    staying: list[Tensor] = field(default_factory=list)
    """The tensors that stay in the recording's memory, under ``outputs="static"``."""
    tree: Tree | None = None  # the containers of the results
    output_indices: tuple[int, ...] = ()  # for each tensor in `tree`, its place in `outputs`
    outputs: Outputs | None = None  # the memory that a replay gives each tensor


@dataclass(slots=True, eq=False)
class StateEffects:
    """The changes of the state by a run, and the part of these changes that each replay repeats."""

    after: StateWalk | None = None  # the state after the run
    changes: list[Change] = field(default_factory=list)  # all slots that differ from before it
    state: list[StateOutput] = field(default_factory=list)
    """The slots that each replay writes, with their values."""
    kept_gradients: list[Tensor] = field(default_factory=list)
    """Gradients that each replay writes in place."""
    optimizer_changes: list[Change] = field(default_factory=list)
    """Changes of optimizers' numbers that no replay would make."""
    growing: Growing = field(default_factory=Growing)  # containers that grow at each call
    stored: set[tuple[int, object]] = field(default_factory=set)
    """Ids of slots that the run was seen to store to."""


class _Stored(NamedTuple):
    slot: Slot
    value: object
    flat: Flat


def plan_results(
    run: CaptureRun, flat: Flat, whole: Mapping[int, Same], identities: Identities
) -> Outputs:
    """Plan how the results reach the caller, and how stored values reach their slots. `whole`:
    objects that a replay returns or stores as they are, by id."""
    with _may_pass():
        stored = _stored(run, whole, identities)
    every = [*flat.tensors, *(t for part in stored for t in part.flat.tensors)]
    pairs = [(part.slot, part.value) for part in stored]
    known = {id(t) for tensors in run.snapshot.tensors_by_storage.values() for t in tensors}
    refuse_parts(every, pairs, known)
    outputs = _outputs(run, flat, pairs, every)
    _keep_graphs(run, flat, stored, every, outputs)
    numbers = _moved_numbers(run, whole, identities)  # notes containers: before `shared`
    _follow_sizes(run.job.follows, flat, outputs)
    run.returned.tree = identities.shared(flat.tree)
    run.returned.output_indices = tuple(outputs.numbers[id(t)] for t in flat.tensors)
    run.effects.state = _state_outputs(stored, numbers, identities, outputs)
    with _may_pass():
        _refuse_unrepeatable(run, every, pairs)
    gradients = {id(t) for t in run.effects.kept_gradients}
    run.returned.tensors = [t for t in unique(every) if id(t) not in gradients]
    if run.job.static_outputs:
        run.returned.staying = keep_results(outputs, every, run.effects.state)
    return outputs


@contextmanager
def _may_pass() -> Generator[None]:
    """Mark refusals of changes of the state: a cache that is filled once changes once."""
    try:
        yield
    except CaptureError as error:
        error.may_pass = True
        raise


def _stored(
    run: CaptureRun, whole: Mapping[int, Same], identities: Identities
) -> Sequence[_Stored]:
    """Return the values that each replay stores."""
    walk, codes, forward = run.snapshot.walk, run.job.callee.codes, run.job.forward
    stored: list[_Stored] = []
    for slot, value in list(rebinds(run.effects.changes, walk, run.observer, codes)):
        flat = flatten(value, slot.name, whole=whole, number=identities.note)
        if forward is not None:
            flat.tensors[:] = map(forward.real, flat.tensors)
        stored.append(_Stored(slot, value, flat))
    return stored


def _outputs(
    run: CaptureRun, flat: Flat, stored: Sequence[tuple[Slot, object]], every: Sequence[Tensor]
) -> Outputs:
    job, snapshot, plan, observer = run.job, run.snapshot, run.plan, run.observer
    forward, lasting = job.forward, set[int]()
    if forward is None:
        state = run.state_inputs
        lasting = lasting_gradients(job.driver, stored, flat.tensors, state, job.device)
    run.returned.outputs = outputs = plan_outputs(
        job.driver,
        every,
        plan,
        observer,
        job.device,
        snapshot.tensors_by_storage,
        lasting,
        {id(t) for _, t in snapshot.walk.tensors()},
        viewed if forward is None else forward.viewed,
    )
    refuse_made_parameters(outputs, unique(every))
    if any(is_made_leaf(o, t, plan) for o, t in zip(outputs.tensors, unique(every), strict=True)):
        raise BackwardInside
    run.effects.kept_gradients = [
        o.memory.tensor for o in outputs.tensors if isinstance(o.memory, Lasting)
    ]
    return outputs


def _keep_graphs(
    run: CaptureRun,
    flat: Flat,
    stored: Sequence[_Stored],
    every: Sequence[Tensor],
    outputs: Outputs,
) -> None:
    """Plan the graph of autograd: of a forward its backward; else results count as freed."""
    job, snapshot = run.job, run.snapshot
    if job.forward is None:
        slots = ((part.slot, part.flat) for part in stored)
        mark_freed(outputs, flat.tensors, slots, run.observer, snapshot.tensors_by_storage)
        return
    from onelaunch.autograd.backward import ForwardRun  # inference needs none of it

    compiled = job.accesses is not None
    copied = run.constants.copied if compiled and run.constants else ()
    rebound = [run.staged.at_call(part.slot) for part in stored]
    reads = snapshot.walk.reads
    ran = ForwardRun(job.line(), job.capture_answer, reads, compiled, copied, rebound, job.parallel)
    job.forward.plan(
        outputs, unique(every), run.plan, run.observer, snapshot.tensors_by_storage, ran
    )


def _moved_numbers(
    run: CaptureRun, whole: Mapping[int, Same], identities: Identities
) -> Sequence[StateOutput]:
    counted, walk = run.numbers.counted(), run.snapshot.walk
    # Another run may change a value that this run left equal.
    stores = [slot for slot, step in counted.values() if not isinstance(step, int)]
    moved = counted_numbers(run.effects.changes, walk, whole, identities.note, stores)
    return [
        state._replace(step=state.step or counted[state.slot.id][1])
        if state.slot.id in counted
        else state
        for state in moved
    ]


def _follow_sizes(follows: Sequence[tuple[SizeLink, ...]], flat: Flat, outputs: Outputs) -> None:
    """Note which dimensions of the results follow sizes of arguments."""
    for t, links in zip(flat.tensors, follows, strict=False):
        output = outputs.tensors[outputs.numbers[id(t)]]
        output.follows = links
        if links and not isinstance(output.memory, Own | Argument):
            raise CannotPadInside


def _state_outputs(
    stored: Sequence[_Stored],
    moved: Sequence[StateOutput],
    identities: Identities,
    outputs: Outputs,
) -> list[StateOutput]:
    """Return what each replay writes to slots: the stored values, then other numbers."""
    written = [
        StateOutput(slot, flat.tree, tuple(outputs.numbers[id(t)] for t in flat.tensors))
        for slot, _, flat in stored
    ]
    ids = {state.slot.id for state in written}
    written += [state for state in moved if state.slot.id not in ids]
    return [state._replace(tree=identities.shared(state.tree)) for state in written]


def _refuse_unrepeatable(
    run: CaptureRun, every: Sequence[Tensor], stored: Sequence[tuple[Slot, object]]
) -> None:
    """Refuse effects on the state that no replay repeats, and find the containers that grow."""
    job, walk, effects, codes = run.job, run.snapshot.walk, run.effects, run.job.callee.codes
    assert effects.after is not None
    covered = [*every, *(t for _, value in stored for t in flatten(value).tensors)]
    with no_functions():
        refuse_uncovered(walk, effects.after, covered, run.observer, job.device, codes)
    effects.growing = growing_containers(effects.changes, walk, codes)
    refuse_reordered(effects.changes, walk, run.snapshot.orders)
    refuse_other_attributes(walk, codes)
    written = {state.slot.id for state in effects.state}
    refuse_renewed(effects.changes, walk, written, codes)
