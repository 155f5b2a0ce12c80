"""Rolled-back runs at any size, which show the effects of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.call.tree import Flat, Tree, flatten, unflatten
from onelaunch.call_events import is_profiled
from onelaunch.capture.rolled_back import refuse_lasting, rolled_back
from onelaunch.driver.protocol import Driver
from onelaunch.driver.seeding import watching_seeds
from onelaunch.errors import CaptureError
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.gc_pause import no_collection
from onelaunch.state.snapshot import ReachableState, tensors_by_storage
from onelaunch.state.walk import Change


@dataclass(slots=True)
class DryRun:
    """Rolled-back runs of a callable, at any size."""

    driver: Driver
    device: torch.device
    fn: Callable[..., Any]  # the callable, as the user wrote it
    reached: ReachableState  # the state that it reaches; learns what the runs read
    tree: Tree  # the tree of the arguments
    ahead: bool = False  # whether this is before the first call: no lasting state may be made
    found: list[Change] = field(default_factory=list)
    """The changes of the last run, which are undone."""
    written: frozenset[int] = frozenset()  # the tensors that the last run wrote into, by index
    used: frozenset[int] = frozenset()
    """The storages from before the last run that it used, but for its arguments."""

    def run(self, inputs: Sequence[Tensor], mode: TorchDispatchMode | None) -> Flat:
        """Run on these tensors, restore everything, and return the result, flattened. What the run
        reads is added to the reads of `reached`: the recording must guard it for all its sizes."""
        args, kwargs = unflatten(self.tree, list(inputs))
        known, before = self.reached.reads, self.reached.walk()
        held = before.ids()
        reads = Reads() if known is None else known.copy()
        watch = None if is_profiled() else FrameWatch(reads, self.device)
        seen = nullcontext() if watch is None else watch.active()
        undone = rolled_back(
            self.driver, self.device, inputs, self.reached, lambda: watch and watch.reads
        )
        with undone as effects, torch.no_grad(), mode or nullcontext(), effects.observer:
            refuse_draw, refuse_taken = effects.observer.refuse_draw, effects.observer.refuse_taken
            draws = watching_seeds(None, draw=refuse_draw, take=refuse_taken, frames=watch)
            with no_collection(), seen, draws:
                result = self.fn(*args, **kwargs)
            used = effects.observer.memory.external.keys()
            self.used = frozenset(
                used & tensors_by_storage(self.driver, self.device, before).keys()
            )
            storages = effects.observer.memory.written.keys()
            self.written = frozenset(
                i for i, t in enumerate(inputs) if self.driver.storage(t) in storages
            )
        self.found = effects.changes
        seen = watch and watch.seen
        if seen is None or known is None or seen.exceeds(known, held):
            if seen is not None and known is not None:
                seen.follow(known, held)
            self.reached.know(seen)
        if self.ahead:
            refuse_lasting(effects.changes)
        for change in effects.changes:
            if isinstance(change.before, Tensor) or isinstance(change.after, Tensor):
                what = f"`{change.slot.name}` is given a tensor of the padded size"
                raise CaptureError("OL140", what, fix="return the tensor instead of storing it")
        return flatten(result, "result", objects=True)
