"""The `CapturedCall` made from the findings of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from onelaunch.beside import is_beside
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import unique
from onelaunch.capture import distributed
from onelaunch.capture.hooks import hooks_inside
from onelaunch.capture.io_plan import written_groups
from onelaunch.capture.recording import CapturedCall, RunComparison, RunFacts, Writes
from onelaunch.capture.run import CaptureRun
from onelaunch.driver.protocol import Graph, Travel
from onelaunch.errors import CaptureError
from onelaunch.identity import id
from onelaunch.optimizers.capturable import parameters_of
from onelaunch.state.dependencies import dependencies, hooked, laid_out
from onelaunch.state.guard import StateGuard
from onelaunch.state.host_values import slots_of
from onelaunch.state.parts import whole_of
from onelaunch.state.snapshot import StateSnapshot
from onelaunch.state.walk import restore
from onelaunch.watch.ledger import optimizers_in


def captured_call(
    run: CaptureRun, graph: Graph, statics: list[Tensor], started: float, retries: Sequence[str]
) -> CapturedCall:
    """Return all that the call path needs of a capture that succeeded, and that `started` at a time
    of `time.perf_counter`. `retries`: the reasons for the attempts after the first."""
    job, plan, observer, walk = run.job, run.plan, run.observer, run.snapshot.walk
    forward, outputs = job.forward, run.returned.outputs
    assert outputs is not None
    assert run.returned.tree is not None
    # The slots are as before the call until a launch rebinds them.
    rebound = {state.slot.id for state in run.effects.state}
    restore(change for change in run.effects.changes if change.slot.id in rebound)
    guard, untraced = _reliance(run, rebound)
    replaced = {b.slot.id for b in job.replaced}
    writes = _writes(run)
    plan.release()
    for group in outputs.groups:
        group.example = group.example if group.stays else group.example.new_empty(0)
    if forward is not None:
        from onelaunch.autograd.pair import ForwardGraph  # inference needs none of it

        graph, statics = ForwardGraph(graph, forward.pair), []
    optimizers = run.steps.optimizers if run.job.accesses is None else _stepped(run)
    counted = run.numbers.counted()
    roots = run.snapshot.reached.roots
    return CapturedCall(
        driver=job.driver,
        device=job.device,
        graph=graph,
        inputs=plan,
        state_input_slots=list(run.state_inputs),
        caller_input_count=len(plan.tensors)
        - sum(whole_of(s).id not in replaced for s in run.state_inputs),
        outputs=outputs,
        tree=run.returned.tree,
        output_indices=run.returned.output_indices,
        state=[s._replace(slot=run.staged.at_call(s.slot)) for s in run.effects.state],
        guard=guard,
        writes=writes,
        facts=RunFacts(
            seconds=time.perf_counter() - started,
            retries=tuple(retries),
            told_capturing=job.capture_answer.answer,
            untraced=untraced,
            hooks=hooks_inside(roots, walk, run.effects.changes, optimizers, forward is not None),
            growing=run.effects.growing,
        ),
        compared=RunComparison(observer.ledger),
        optimizers=optimizers,
        stored=run.steps.stored,
        draws=observer.admission.draws,
        statics=statics,
        kept_gradients=run.effects.kept_gradients,
        device_constants=list(run.constants.used.values()) if run.constants else [],
        values=observer.host.read_arguments(),
        marks=run.marks,
        changed_numbers=tuple(
            s.slot
            for s in run.effects.state
            if not s.output_indices and walk.is_read(s.slot) and s.slot.id not in counted
        ),
        pair=None if forward is None else forward.pair,
    )


def _reliance(run: CaptureRun, rebound: set[tuple[int, object]]) -> tuple[StateGuard, list[Tensor]]:
    """Return the guard of the state that the recording relies on, and tensors that it misses.
    `rebound`: ids of the slots that each replay writes."""
    driver, device, forward = run.job.driver, run.job.device, run.job.forward
    plan, observer, snapshot = run.plan, run.observer, run.snapshot
    assert run.returned.outputs is not None
    replaced = {b.slot.id for b in run.job.replaced}
    ids = {at.id for slot in run.state_inputs for at in (slot, whole_of(slot))}
    inputs = ids - replaced
    followed: set[Any] = {*run.numbers.counted(), *(s.id for s in run.numbers.following.slots)}
    if any(map(snapshot.walk.is_leaf_attribute, followed)) or optimizers_in(snapshot.walk):
        snapshot.walk.expand()
    slots = dependencies(
        snapshot.walk,
        run.effects.changes,
        rebound | inputs,
        inputs,
        observer.memory.external,
        driver,
        device,
        run.effects.stored,
        run.returned.outputs.from_before(),
        replaced,
        run.staged.gone,
    )
    slots = [pair for pair in slots if pair[0].id not in followed] if followed else slots
    slots += run.staged.guards()
    slots += slots_of(observer.host.read_state(), snapshot.walk.tensors())
    external = [t for tensors in observer.memory.external.values() for t in tensors]
    external += [value for _, value in slots if isinstance(value, Tensor)]
    if run.job.accesses is None:  # of compiled code no step is seen
        slots = run.steps.dependencies(slots, snapshot.walk, _is_written(run))
    pinned = [plan.tensors[i] for i in plan.going(Travel.ADDRESS)]
    unmoved = laid_out(unique([*external, *pinned]), device)
    leaves = (
        hooked(snapshot.walk, run.effects.changes, slots)
        if forward is None
        else forward.pair.direct
    )
    modes = [*run.modes, *([(distributed.initialized, False)] if forward and leaves else [])]
    asks = snapshot.walk.asks("requires_grad")
    slots += [
        pair for attributes in snapshot.walk.leaf_attributes.values() for pair in attributes.slots()
    ]
    guard = StateGuard(slots, unmoved, _sized(run, snapshot), modes, leaves, asks)
    if is_beside():  # other threads may have moved it before the guard was made, or since
        kept = snapshot.walk.is_current() and guard.check() and snapshot.relocated() is None
        if not kept:
            raise CaptureError("OL109", "its state has moved")
    return guard, guard.untraced([t for t in external if not any(t is p for p in pinned)])


def _sized(run: CaptureRun, snapshot: StateSnapshot) -> list[Any]:
    """Return the containers whose sizes matter, with their names."""
    # A scheduler writes to the groups at each step, and each would be checked again then.
    groups = {id(group) for o in run.steps.optimizers for group in o.param_groups}
    replaced = {change.slot.id for change in run.effects.changes}
    sized = {id(c): (c, names) for c, names in snapshot.walk.sized(replaced)}
    for key in groups | run.staged.gone:
        sized.pop(key, None)
    return [*sized.values(), *((hooks, None) for hooks in snapshot.walk.hooks)]


def _writes(run: CaptureRun) -> Writes:
    driver, plan, observer = run.job.driver, run.plan, run.observer
    tensors = [t for t in observer.memory.written.values() if not observer.memory.is_own(t)]
    bumped = [t for t in tensors if driver.storage(t) in observer.memory.version_bumped]
    inputs, bumped_inputs = (
        sorted(i for group in written_groups(driver, plan, storages) for i in group.members)
        for storages in (observer.memory.written, observer.memory.version_bumped)
    )
    return Writes(tensors, inputs, bumped, bumped_inputs)


def _is_written(run: CaptureRun) -> Callable[[Tensor], bool]:
    device, driver, written = run.job.device, run.job.driver, run.observer.memory.written
    return lambda t: lies_on(t, device) and driver.storage(t) in written


def _stepped(run: CaptureRun) -> list[Optimizer]:
    """Return the optimizers that step in compiled code, as their written parameters show."""
    held, writes = run.snapshot.walk.slots.values(), _is_written(run)
    optimizers = {id(o): o for _, o in held if isinstance(o, Optimizer)}
    return [o for o in optimizers.values() if any(map(writes, parameters_of(o)))]
