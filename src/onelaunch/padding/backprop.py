"""A callable with its backward, to compare gradients with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onelaunch.autograd.engine import gradients
from onelaunch.autograd.graph_walk import CapturedGraph
from onelaunch.call.tree import flatten, unique


class Backprop:
    """A callable that runs `fn` and the backward from the real rows of its results, and returns the
    gradients. The first call is at the real size. Later calls send the same gradients back from
    real rows, and 0 from all others."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._shapes: list[torch.Size] = []
        self._parameters: list[Tensor] | None = None
        self.inputs: list[Tensor] = []  # the arguments whose gradients the next call returns

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        with torch.enable_grad():
            results = flatten(self._fn(*args, **kwargs), "result", objects=True).tensors
            roots = [t for t in results if t.requires_grad]
            if self._parameters is None:
                self._shapes = [t.shape for t in roots]
                given = {id(t) for t in self.inputs}
                self._parameters = [
                    t for t in unique(CapturedGraph(roots).leaves) if id(t) not in given
                ]
            wanted = [*self.inputs, *self._parameters]
            if not roots or not wanted:
                return []
            sent = [
                _sent(t, s, i) for i, (t, s) in enumerate(zip(roots, self._shapes, strict=True))
            ]
            pairs = zip(gradients(roots, wanted, sent), wanted, strict=True)
            return [torch.zeros_like(t) if g is None else g for g, t in pairs]


def _sent(t: Tensor, real: torch.Size, seed: int) -> Tensor:
    """Return the gradient that a result sends back: random numbers for its real rows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    random = torch.randn(real, generator=generator, device="cpu").to(t.device, t.dtype)
    sent = torch.zeros_like(t)
    sent[tuple(slice(0, n) for n in real)] = random
    return sent
