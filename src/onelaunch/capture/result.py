"""The findings of a run under capture, and the `CapturedCall` made from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.autograd.graph_walk import is_freed
from onelaunch.autograd.pair import ForwardGraph
from onelaunch.call.ambient import readers
from onelaunch.call.spec import lies_on
from onelaunch.call.tree import Tree, unique
from onelaunch.capture import distributed
from onelaunch.capture.counts import Counts
from onelaunch.capture.forward import Forward
from onelaunch.capture.hooks import hooks_inside
from onelaunch.capture.io_plan import Inputs, Outputs, varying_group
from onelaunch.capture.recording import CapturedCall, NeedsGrad, StateOutput
from onelaunch.driver.protocol import Capture, Driver, Graph, Travel
from onelaunch.errors import CaptureError
from onelaunch.optimizers.capturable import parameters_of
from onelaunch.optimizers.scalars import PatchedScalars
from onelaunch.optimizers.steps import Steps
from onelaunch.state.guard import StateGuard
from onelaunch.state.host_values import slots_of
from onelaunch.state.relied import hooked_leaves, relied_on
from onelaunch.state.snapshot import StateSnapshot
from onelaunch.state.walk import Change, Slot, StateWalk, restore
from onelaunch.watch.ledger import Difference
from onelaunch.watch.observer import Observer


@dataclass(slots=True)
class CaptureRun:
    """One run of the callable under capture: its inputs and its effects.

    Attributes:
        before: the state before the run.
        plan: how the inputs reach it.
        state_inputs: slots whose tensors are the last of these inputs.
        steps: the optimizer steps in it.
        counts: the numbers that it counts.
        result, tree, numbers: the tensors that it returned, their tree, and the number of the
            output for each tensor in it.
        after, found: the state after it, and the changes.
        state: the slots that each replay writes, with their values.
        lasting: gradients that each replay writes in place.
        again: slots that have to be inputs; the next attempt passes them as such.
        grown: see `effects.grown`.
        stored: ids of slots that it surely stored to, as it was seen.
    """

    before: StateSnapshot
    plan: Inputs
    state_inputs: tuple[Slot, ...]
    steps: Steps
    counts: Counts
    observer: Observer = field(init=False)
    outputs: Outputs | None = None
    result: Any = None
    tree: Tree | None = None
    numbers: tuple[int, ...] = ()
    after: StateWalk | None = None
    found: list[Change] = field(default_factory=list[Change])
    state: list[StateOutput] = field(default_factory=list[StateOutput])
    lasting: list[Tensor] = field(default_factory=list[Tensor])
    again: list[Slot] = field(default_factory=list[Slot])
    grown: tuple[str, ...] = ()
    stored: set[tuple[int, object]] = field(default_factory=set[tuple[int, object]])

    @property
    def differs(self) -> Difference | None:
        """The difference from the run before it, as far as its operations were seen."""
        ledger = self.observer.ledger
        return None if ledger is None else ledger.difference


def written_groups(driver: Driver, plan: Inputs, observer: Observer) -> list[int]:
    """Return the groups of inputs that the callable wrote into."""
    return [
        index
        for index, group in enumerate(plan.groups)
        if group.buffer is not None and driver.storage(group.buffer) in observer.written
    ]


def output_ports(
    driver: Driver,
    capture: Capture,
    plan: Inputs,
    outputs: Outputs,
    observer: Observer,
    static: bool,
) -> None:
    """Add the ports that copy results to fresh memory, and written inputs back to the caller's.

    Args:
        static: whether the results stay in the recording's own memory.
    """
    for index, group in enumerate(() if static else outputs.groups):
        size = (group.stop - group.start,)
        buffer = driver.alias(group.example, torch.uint8, size, (1,), 0)
        capture.output(buffer, 0, varying_group(outputs, index))
    for index in written_groups(driver, plan, observer):
        group = plan.groups[index]
        if group.travel == Travel.FILL:
            raise CaptureError("OL104", "a 0-dim host argument is written")
        assert group.buffer is not None
        example = plan.tensors[group.members[0]]
        displacement = driver.region(example).start - group.region.start
        if group.travel == Travel.COPY:
            displacement = 0
        capture.output(group.buffer, displacement)


def captured_call(
    run: CaptureRun,
    graph: Graph,
    statics: list[Tensor],
    scalars: PatchedScalars,
    driver: Driver,
    device: torch.device,
    forward: Forward | None,
    watched: bool,
    static_outputs: bool,
    started: float,
) -> CapturedCall:
    """Return all that the call path needs of a capture that succeeded.

    Args:
        watched: whether the operations of the run were seen; compiled code hides them.
        started: when the capture began, by `time.perf_counter`.
    """
    before, plan, observer = run.before, run.plan, run.observer
    assert run.outputs is not None
    assert run.tree is not None
    # The slots are as before the call until a launch rebinds them.
    rebound = {state.slot.id for state in run.state}
    restore(change for change in run.found if change.slot.id in rebound)
    pinned = [t for t, how in zip(plan.tensors, plan.travels, strict=True) if how == Travel.ADDRESS]
    external = [t for tensors in observer.external.values() for t in tensors]
    inputs = {slot.id for slot in run.state_inputs}
    rebound |= inputs
    slots = relied_on(
        before.walk, run.found, rebound, inputs, observer.external, driver, device, run.stored
    )
    slots = [(slot, value) for slot, value in slots if slot.id not in run.counts.followed]
    slots += slots_of(observer.host.read_state(), before.walk.tensors())
    external += [value for _, value in slots if isinstance(value, Tensor)]
    writes = _writes(observer, driver, device)
    if watched:  # of compiled code no step is seen
        slots = run.steps.relied_on(slots, before.walk, writes)
    unmoved = [t for t in unique([*external, *pinned]) if lies_on(t, device)]
    if forward is None:
        leaves = hooked_leaves(before.walk, run.found, slots)
    else:
        leaves = forward.pair.direct
    modes = [*readers(), *([(distributed.initialized, False)] if forward and leaves else [])]
    asks = before.walk.asks("requires_grad")
    guard = StateGuard(slots, unmoved, _sized(run, before), modes, leaves, asks)
    written = [t for t in observer.written.values() if not observer.known(t)]
    version_bumped = [t for t in written if driver.storage(t) in observer.version_bumped]
    written_inputs, bumped_inputs = _written_inputs(driver, plan, observer)
    plan.release()
    for own in run.outputs.groups:
        own.example = own.example.new_empty(0) if not static_outputs else own.example
    pair = None
    if forward is not None:
        pair = forward.pair
        graph, statics = ForwardGraph(graph, pair), []
    optimizers = run.steps.optimizers if watched else _stepped(before.walk, writes)
    roots = before.reached.roots
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
        draws=observer.draws,
        scalars=scalars,
        values=observer.host.read_arguments(),
        optimizers=optimizers,
        statics=statics,
        lasting=run.lasting,
        untraced=guard.untraced([t for t in external if not any(t is p for p in pinned)]),
        hooks=hooks_inside(roots, before.walk, run.found, optimizers, forward is not None),
        moves=tuple(
            s.slot
            for s in run.state
            if not s.numbers
            and before.walk.is_read(s.slot)
            and s.slot.id not in run.counts.followed
        ),
        counts=list(run.counts.followed.values()),
        grown=run.grown,
        ledger=observer.ledger,
        seconds=time.perf_counter() - started,
        pair=pair,
    )


def _sized(run: CaptureRun, before: StateSnapshot) -> list[Any]:
    """Return the containers whose sizes matter, with their names."""
    # A scheduler writes to the groups at each step, and each would be checked again then.
    groups = {id(group) for o in run.steps.optimizers for group in o.param_groups}
    replaced = {change.slot.id for change in run.found}
    every = before.walk.sized(replaced)
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


def mark_spent(outputs: Outputs, results: Sequence[Tensor]) -> None:
    """Mark results whose backward has run inside.

    Raises:
        NeedsGrad: a result still needs a backward.
    """
    for t in results:
        output = outputs.made[outputs.numbers[id(t)]]
        output.spent = output.source == "own" and is_freed(t)
        if output.source == "own" and output.spec.requires_grad and not output.spent:
            raise NeedsGrad
