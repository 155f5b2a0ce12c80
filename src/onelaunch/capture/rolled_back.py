"""Runs of a callable whose effects are undone: a warm-up ahead of the first call, say."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onelaunch.driver.protocol import Driver
from onelaunch.driver.seeding import HostGenerators
from onelaunch.driver.select import preserved_random_state
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.state.rollback import RunRollback
from onelaunch.state.slots import gradient_of
from onelaunch.state.snapshot import ReachableState, tensors_by_storage
from onelaunch.state.walk import Change, StateWalk
from onelaunch.unwinding import TorchSettings, same_modes
from onelaunch.watch.compiled_accesses import watching
from onelaunch.watch.observer import Observer


@dataclass(slots=True, eq=False)
class Effects:
    """The effects of a run under `observer`."""

    observer: Observer
    restore: Callable[[], StateWalk | None]
    """Puts Python's state back, before another run for the same call. Returns the walk of the state
    by the reads of the run, where it was needed."""
    changes: list[Change] = field(default_factory=list)
    """The changed slots, known and restored after the run."""
    left: StateWalk | None = None  # the last walk that `restore` returned


@contextmanager
def rolled_back(
    driver: Driver,
    device: torch.device,
    inputs: Sequence[Tensor],
    reached: ReachableState,
    reads: Callable[[], Reads | None],
) -> Generator[Effects]:
    """Return a context for a run on `inputs` that restores everything at its end. `reads`: returns
    the reads of the callable, this run included."""
    before = reached.walk()
    rollback = RunRollback(before)
    tensors = tensors_by_storage(driver, device, before)
    observer = watching(driver, device, inputs, tensors, save=True)
    observer.filled_sets = before.filled_sets()
    effects = Effects(observer, lambda: rollback.restore(reached.roots, reads()))
    generators = HostGenerators((slot.name, value) for slot, value in before.slots.values())
    settings = TorchSettings()
    with same_modes(), preserved_random_state(device):
        try:
            yield effects
        finally:
            settings.restore()
            generators.restore()
            effects.observer.memory.restore()
            _, effects.changes = reached.changed(before)
            effects.left = effects.restore()
            # The tensors of a backward keep AccumulateGrad nodes on this stream.
            effects.observer.release()


def refuse_lasting(changes: Sequence[Change]) -> None:
    """Refuse (OL110) lasting changes of a run in Python's state: a capture ahead of the first call
    could not undo them."""
    lasting = [c for c in changes if c.slot.key is not gradient_of]
    if lasting:
        names = ", ".join(f"`{c.slot.name}`" for c in lasting[:3])
        raise CaptureError("OL110", f"the callable rebinds {names}")
