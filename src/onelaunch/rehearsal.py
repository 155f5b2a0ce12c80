"""Runs of a callable without the call happening."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.driver.driver import Driver
from onelaunch.driver.select import preserved_random_state
from onelaunch.errors import CaptureError
from onelaunch.observe import Observer
from onelaunch.state import Walk, changes, walk
from onelaunch.tree import Flat, Tree, flatten, unflatten


@dataclass(slots=True)
class Rehearsal:
    """Runs a callable without the call happening.

    Args:
        fn: the callable, as the user wrote it.
        roots: where the state that it reaches begins, named.
        tree: of the arguments.
    """

    driver: Driver
    device: torch.device
    fn: Callable[..., Any]
    roots: Sequence[tuple[str, object]]
    tree: Tree
    before: Walk | None = None
    """The state before the first run, and before each: every run puts it back."""

    def run(self, inputs: Sequence[Tensor], mode: TorchDispatchMode | None) -> Flat:
        """Run on these tensors; the result, flattened. Everything is put back as it was."""
        args, kwargs = unflatten(self.tree, list(inputs))
        here = [t for t in inputs if t.device.type == self.device.type]
        before = self.before = self.before or walk(self.roots)
        observer = Observer(self.driver, self.device, here, save=True, refuse=False)
        watched = contextlib.nullcontext() if mode is None else mode
        with torch.no_grad(), preserved_random_state(self.device):
            try:
                with watched, observer:
                    result = self.driver.warmup(lambda: self.fn(*args, **kwargs), self.device)
            finally:
                observer.restore()
                found = changes(before, walk(self.roots))
                for change in reversed(found):
                    change.slot.write(change.before)
        observer.release()
        stored = [c for c in found if isinstance(c.before, Tensor) or isinstance(c.after, Tensor)]
        if stored:
            what = f"`{stored[0].slot.name}` is given a tensor of the padded size"
            raise CaptureError("OL140", what, fix="return the tensor instead of storing it")
        return flatten(result, "result", objects=True)
