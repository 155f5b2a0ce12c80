"""One captured graph: what is known of it, and what the call path needs of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.autograd.pair import AutogradPair
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Flat, Tree
from onelaunch.capture.io_plan import Inputs, Outputs
from onelaunch.driver.protocol import Driver, Graph
from onelaunch.optimizers.scalars import PatchedScalars
from onelaunch.state.guard import StateGuard
from onelaunch.state.walk import Slot
from onelaunch.watch.ledger import Difference, Ledger


@dataclass(slots=True)
class Recording:
    """What was captured, why, and what it has done since.

    `inputs` maps each tensor of the call to how it travels: ``"node"`` (a copy inside the graph; of
    plain CPU tensors none where nothing writes the input),
    ``"copy"`` (a strided copy before the launch), ``"fill"`` (a 0-dim host tensor), ``"rebind"``
    (kernels read the caller's memory), ``"address"`` (the very memory of the capture), ``"host"``
    (not used by the device). `hooks` are those inside, whose Python no replay runs.
    """

    spec: CallSpec
    why: str
    inputs: dict[str, str]
    outputs: list[str]
    by_address: list[str]
    untraced: list[str]
    memory_bytes: int
    capture_seconds: float
    nodes: int
    kept_bytes: int = 0
    driver_bytes: int = 0
    hooks: tuple[str, ...] = ()
    _counter: Callable[[], int] = field(default=lambda: 0, repr=False)

    @property
    def replays(self) -> int:
        """Launches so far, with those of recordings that it took the place of."""
        return self._counter()


class StateOutput(NamedTuple):
    """A slot that the callable rebinds, and the tree of what it puts there."""

    slot: Slot
    tree: Tree
    numbers: tuple[int, ...]
    """The places of its tensors in `Outputs.made`."""
    step: int | None = None
    """How far a number is counted up from where it is, in place of what the tree says."""


@dataclass(slots=True)
class Bucket:
    """The calls that a recording serves.

    Attributes:
        sizes: what it was recorded at, for each bucketed dimension.
        least: the smallest sizes that are padded to it.
        places: for each argument that may be smaller, the bucketed dimensions that its varying ones
            follow.
        way: calls it with arguments that were padded before; None where there is no other way.
    """

    sizes: tuple[int, ...]
    least: tuple[int, ...]
    places: dict[int, tuple[int, ...]]
    way: Callable[..., Any] | None = None


@dataclass(slots=True)
class CapturedCall:
    """All that the call path needs of a recording."""

    driver: Driver
    device: torch.device
    graph: Graph
    inputs: Inputs
    hidden: list[Slot]
    """Slots whose tensors are inputs, after the arguments."""
    outputs: Outputs
    tree: Tree
    numbers: tuple[int, ...]
    state: list[StateOutput]
    guard: StateGuard
    written: list[Tensor]
    """Tensors outside the arguments that the graph writes."""
    written_inputs: list[int]
    version_bumped: list[Tensor]
    bumped_inputs: list[int]
    """Those of both whose version counters eager advances."""
    scalars: PatchedScalars
    optimizers: list[Optimizer]
    """Those that step in the call."""
    draws: list[Callable[[], object]]
    """What the call draws from the host's default generator, and does not use."""
    statics: list[Tensor]
    """Under ``outputs="static"``: the captured tensors themselves."""
    lasting: list[Tensor]
    """Gradients that stay the recording's own memory."""
    untraced: list[Tensor]
    hooks: tuple[str, ...]
    """Those that ran inside, whose Python no replay runs."""
    moves: tuple[str, ...]
    """Numbers that the callable reads and moves on: a recording serves one value of each."""
    grown: tuple[str, ...]
    """Containers that the callable adds to, and replays do not."""
    seconds: float
    pair: AutogradPair | None = None
    """What joins the results to autograd, where they require grad."""
    bucket: Bucket | None = None
    """The bucket that it serves, of a callable that has any."""
    unlike: Callable[[Sequence[Tensor]], str | None] = lambda tensors: None
    """How tensors differ from the arguments that it was captured for: in type, layout, or what this
    thread has torch do with them."""
    launches: list[int] = field(default_factory=lambda: [0, 0])
    """How many, counted up by the call path; and when the last one was, by the `clock`."""
    clock: Callable[[], int] | None = None
    values: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """The elements of host arguments that the host read, by number."""
    ledger: Ledger | None = None
    """Its operations."""
    reads_more: bool = False
    """Whether it read what no run before it did, so that the guard does not tell all of it."""
    differs: Difference | None = None
    """How it differs from the run before it, if nothing that is guarded explains that."""


class NeedsGrad(Exception):
    """The outputs require grad: the capture is to be one of a forward."""


def describe(
    captured: CapturedCall,
    spec: CallSpec,
    flat: Flat,
    why: str,
    kept_bytes: int,
) -> Recording:
    """What is told of a recording."""
    names = [*flat.paths, *(slot.name for slot in captured.hidden)]
    travels = list(captured.inputs.travels)
    for group, how in zip(captured.inputs.groups, captured.graph.travels, strict=True):
        for member in group.members:
            travels[member] = how
    return Recording(
        spec=spec,
        why=why,
        inputs=dict(zip(names, travels, strict=True)),
        outputs=[output.source for output in captured.outputs.made],
        by_address=captured.guard.names(),
        untraced=[str(TensorSpec.of(t)) for t in captured.untraced],
        memory_bytes=captured.graph.memory_bytes,
        capture_seconds=captured.seconds,
        nodes=captured.graph.nodes,
        kept_bytes=kept_bytes,
        driver_bytes=captured.graph.driver_bytes,
        hooks=captured.hooks,
        # Not of `captured`: who keeps this keeps no memory.
        _counter=functools.partial(operator.getitem, captured.launches, 0),
    )
