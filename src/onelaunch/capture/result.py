"""The `CapturedCall` made from the findings of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.autograd.pair import ForwardGraph
from onelaunch.call.ambient import readers
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import unique
from onelaunch.capture import distributed
from onelaunch.capture.hooks import hooks_inside
from onelaunch.capture.io_plan import Inputs, written_groups
from onelaunch.capture.recording import CapturedCall
from onelaunch.capture.run import CaptureRun
from onelaunch.driver.protocol import Driver, Graph, Travel
from onelaunch.optimizers.capturable import parameters_of
from onelaunch.optimizers.scalars import PatchedScalars
from onelaunch.state.dependencies import dependencies, hooked_leaves, laid_out
from onelaunch.state.guard import StateGuard
from onelaunch.state.host_values import slots_of
from onelaunch.state.snapshot import StateSnapshot
from onelaunch.state.walk import StateWalk, restore
from onelaunch.watch.observer import Observer


def captured_call(
    run: CaptureRun, graph: Graph, statics: list[Tensor], scalars: PatchedScalars, started: float
) -> CapturedCall:
    """Return all that the call path needs of a capture that succeeded.

    Args:
        started: when the capture began, by `time.perf_counter`.
    """
    job = run.job
    driver, device, forward = job.driver, job.device, job.forward
    watched = job.known is None  # compiled code hides its operations
    snapshot, plan, observer = run.snapshot, run.plan, run.observer
    assert run.outputs is not None
    assert run.tree is not None
    # The slots are as before the call until a launch rebinds them.
    rebound = {state.slot.id for state in run.state}
    restore(change for change in run.found if change.slot.id in rebound)
    pinned = [t for t, how in zip(plan.tensors, plan.travels, strict=True) if how == Travel.ADDRESS]
    external = [t for tensors in observer.external.values() for t in tensors]
    inputs = {slot.id for slot in run.state_inputs}
    rebound |= inputs
    slots = dependencies(
        snapshot.walk,
        run.found,
        rebound,
        inputs,
        observer.external,
        driver,
        device,
        run.stored,
        run.outputs.from_before(),
    )
    followed = {*run.counts.followed, *(slot.id for slot in run.varied.following.slots)}
    slots = [(slot, value) for slot, value in slots if slot.id not in followed]
    slots += slots_of(observer.host.read_state(), snapshot.walk.tensors())
    external += [value for _, value in slots if isinstance(value, Tensor)]
    writes = _writes(observer, driver, device)
    if watched:  # of compiled code no step is seen
        slots = run.steps.dependencies(slots, snapshot.walk, writes)
    unmoved = laid_out(unique([*external, *pinned]), device)
    if forward is None:
        leaves = hooked_leaves(snapshot.walk, run.found, slots)
    else:
        leaves = forward.pair.direct
    modes = [*readers(), *([(distributed.initialized, False)] if forward and leaves else [])]
    asks = snapshot.walk.asks("requires_grad")
    guard = StateGuard(slots, unmoved, _sized(run, snapshot), modes, leaves, asks)
    written = [t for t in observer.written.values() if not observer.known(t)]
    version_bumped = [t for t in written if driver.storage(t) in observer.version_bumped]
    written_inputs, bumped_inputs = _written_inputs(driver, plan, observer)
    plan.release()
    for own in run.outputs.groups:
        own.example = own.example.new_empty(0) if not job.static_outputs else own.example
    pair = None
    if forward is not None:
        pair = forward.pair
        graph, statics = ForwardGraph(graph, pair), []
    optimizers = run.steps.optimizers if watched else _stepped(snapshot.walk, writes)
    roots = snapshot.reached.roots
    return CapturedCall(
        driver=driver,
        device=device,
        graph=graph,
        inputs=plan,
        hidden=list(run.state_inputs),
        outputs=run.outputs,
        tree=run.tree,
        numbers=run.numbers,
        state=run.state,
        guard=guard,
        written=written,
        written_inputs=written_inputs,
        version_bumped=version_bumped,
        bumped_inputs=bumped_inputs,
        draws=observer.admission.draws,
        scalars=scalars,
        values=observer.host.read_arguments(),
        lifted=list(run.lifted.used.values()) if run.lifted else [],
        told_capturing=job.asking.answer,
        optimizers=optimizers,
        statics=statics,
        lasting=run.lasting,
        untraced=guard.untraced([t for t in external if not any(t is p for p in pinned)]),
        hooks=hooks_inside(roots, snapshot.walk, run.found, optimizers, forward is not None),
        changed_numbers=tuple(
            s.slot
            for s in run.state
            if not s.numbers
            and snapshot.walk.is_read(s.slot)
            and s.slot.id not in run.counts.followed
        ),
        counts=list(run.counts.followed.values()),
        grown=run.grown,
        ledger=observer.ledger,
        seconds=time.perf_counter() - started,
        pair=pair,
    )


def _sized(run: CaptureRun, snapshot: StateSnapshot) -> list[Any]:
    """Return the containers whose sizes matter, with their names."""
    # A scheduler writes to the groups at each step, and each would be checked again then.
    groups = {id(group) for o in run.steps.optimizers for group in o.param_groups}
    replaced = {change.slot.id for change in run.found}
    every = snapshot.walk.sized(replaced)
    sized = {id(c): (c, names) for c, names in every if id(c) not in groups}
    return list(sized.values())


def _written_inputs(
    driver: Driver, plan: Inputs, observer: Observer
) -> tuple[list[int], list[int]]:
    """Return the inputs that the callable wrote into, and the inputs whose version counters eager
    advances."""
    written: list[int] = []
    counted: list[int] = []
    for index in written_groups(driver, plan, observer):
        group = plan.groups[index]
        written += group.members
        if group.buffer is not None and driver.storage(group.buffer) in observer.version_bumped:
            counted += group.members
    return sorted(written), sorted(counted)


def _writes(observer: Observer, driver: Driver, device: torch.device) -> Callable[[Tensor], bool]:
    return lambda t: lies_on(t, device) and driver.storage(t) in observer.written


def _stepped(before: StateWalk, writes: Callable[[Tensor], bool]) -> list[Optimizer]:
    """Return the optimizers that step in compiled code: it wrote their parameters."""
    found = {id(o): o for _, o in before.held.values() if isinstance(o, Optimizer)}
    return [o for o in found.values() if any(map(writes, parameters_of(o)))]
