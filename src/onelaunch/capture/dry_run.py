"""Runs of a callable that are rolled back: to warm it up, and to show the effect of padding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.call.tree import Flat, Tree, flatten, unflatten
from onelaunch.driver.protocol import Driver
from onelaunch.driver.random_state import HostGenerators
from onelaunch.driver.select import preserved_random_state
from onelaunch.errors import CaptureError
from onelaunch.state.rollback import Rollback
from onelaunch.state.slots import gradient_of
from onelaunch.state.snapshot import ReachableState, held_by
from onelaunch.state.walk import Change
from onelaunch.unwinding import same_modes
from onelaunch.watch.compiled import watching
from onelaunch.watch.observer import Observer


@dataclass(slots=True)
class Effects:
    """The effects of a run, which is to happen under `observer`.

    Attributes:
        rollback: puts Python's state back, before another run for the same call.
        found: the slots that it changed; known, and restored, after the run.
    """

    observer: Observer
    rollback: Rollback
    found: list[Change] = field(default_factory=list[Change])


@contextmanager
def rolled_back(
    driver: Driver, device: torch.device, inputs: Sequence[Tensor], reached: ReachableState
) -> Generator[Effects]:
    """Return a context for a run on `inputs` that restores everything at its end."""
    before = reached.walk()
    rollback = Rollback(before)
    held = held_by(driver, device, before)
    effects = Effects(watching(driver, device, inputs, held, save=True), rollback)
    generators = HostGenerators((slot.name, value) for slot, value in before.held.values())
    with same_modes(), preserved_random_state(device):
        try:
            yield effects
        finally:
            if generators.sure():
                generators.restore()
            effects.observer.restore()
            _, effects.found = reached.changed(before)
            rollback.restore()
            # The tensors of a backward keep AccumulateGrad nodes on this stream.
            effects.observer.release()


def refuse_lasting(found: Sequence[Change]) -> None:
    """Refuse lasting changes of a run: a capture ahead of the first call could not undo them.

    Raises:
        CaptureError: OL110, the callable stores something in Python state.
    """
    lasting = [c for c in found if c.slot.key is not gradient_of]
    if lasting:
        names = ", ".join(f"`{c.slot.name}`" for c in lasting[:3])
        raise CaptureError("OL110", f"the callable rebinds {names}")


@dataclass(slots=True)
class DryRun:
    """Rolled-back runs of a callable, at any size.

    Args:
        fn: the callable, as the user wrote it.
        reached: the state that it reaches.
        tree: the tree of the arguments.
        ahead: whether this runs before the first call, so that no lasting state may be made.

    Attributes:
        found: the changes of the last run, which are undone.
    """

    driver: Driver
    device: torch.device
    fn: Callable[..., Any]
    reached: ReachableState
    tree: Tree
    ahead: bool = False
    found: list[Change] = field(default_factory=list[Change])

    def run(self, inputs: Sequence[Tensor], mode: TorchDispatchMode | None) -> Flat:
        """Run on these tensors, restore everything, and return the result, flattened."""
        args, kwargs = unflatten(self.tree, list(inputs))
        undone = rolled_back(self.driver, self.device, inputs, self.reached)
        with undone as effects, torch.no_grad(), mode or nullcontext(), effects.observer:
            result = self.fn(*args, **kwargs)
        self.found = effects.found
        if self.ahead:
            refuse_lasting(effects.found)
        for change in effects.found:
            if isinstance(change.before, Tensor) or isinstance(change.after, Tensor):
                what = f"`{change.slot.name}` is given a tensor of the padded size"
                raise CaptureError("OL140", what, fix="return the tensor instead of storing it")
        return flatten(result, "result", objects=True)
