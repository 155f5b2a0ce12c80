"""The workloads of `benchmarks.backend`: a callable without arguments that is one step, per engine.

A step of training is a forward, its backward and fresh gradients; of inference a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from examples import bert, resnet
from examples.placement import device

Compile = Callable[[Any], Any]


class Breaks(nn.Module):
    """Three linear layers, with a graph break after the first two: not in a loop, which Dynamo
    would leave to eager as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        x = self.second(x).relu()
        torch._dynamo.graph_break()
        return self.third(x)


class OnHost(nn.Module):
    """Eight linear layers, and in their middle an operator on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = layer(x).relu()
        ramp = torch.arange(512, dtype=x.dtype).cumsum(0) / 1e5
        x = x + ramp.to(x.device)
        for layer in self.layers[4:]:
            x = layer(x).relu()
        return x


class Decoder(nn.Module):
    """One token through six layers of attention over a cache that is written in place."""

    WIDTH, HEADS, LAYERS, LENGTH = 512, 8, 6, 256

    def __init__(self) -> None:
        super().__init__()
        width, heads = self.WIDTH, self.HEADS
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(self.LAYERS)
        )
        shape = (self.LAYERS, 2, 1, heads, self.LENGTH, width // heads)
        self.register_buffer("cache", torch.zeros(shape))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        heads = self.HEADS
        keep = (torch.arange(self.LENGTH, device=x.device) <= at)[None, None, None]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            parts: Any = layer
            q, k, v = parts["qkv"](parts["norm"](x)).view(1, 1, 3 * heads, -1).chunk(3, dim=2)
            cache[0].index_copy_(2, at, k.transpose(1, 2))
            cache[1].index_copy_(2, at, v.transpose(1, 2))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), cache[0], cache[1], keep)
            x = x + parts["out"](y.transpose(1, 2).reshape(1, 1, -1))
            x = x + parts["down"](F.gelu(parts["up"](x)))
        return x


def sin_of_cos(x: Tensor) -> Tensor:
    return x.cos().sin()


def broken(x: Tensor) -> Tensor:
    """Little work on much memory, which is handed from graph to graph."""
    x = x.sin() + 1
    torch._dynamo.graph_break()
    x = x.cos() * 2
    torch._dynamo.graph_break()
    return x.exp()


@dataclass
class Work:
    """A callable and its arguments.

    Attributes:
        train: its steps run a backward.
    """

    fn: Any
    args: tuple[Tensor, ...]
    train: bool = False

    def step(self, compile: Compile, begin: Callable[[], object] | None) -> Callable[[], Any]:
        """Return one step; `begin` is called at the start of each."""
        run = compile(self.fn)
        leaves = list(self.fn.parameters()) if isinstance(self.fn, nn.Module) else []
        leaves += [t for t in self.args if t.requires_grad]

        def forward() -> Any:
            if begin is not None:
                begin()
            with torch.no_grad():
                return run(*self.args)

        def train() -> Any:
            if begin is not None:
                begin()
            for leaf in leaves:
                leaf.grad = None
            result = run(*self.args)
            # Of all results: a leaf that only others lead to has no gradient in eager alone.
            losses = [y.float().square().mean() for y in tree_leaves(result)]
            loss = torch.stack(losses).sum()
            loss.backward()
            return [loss.detach(), *(t.grad for t in leaves[-2:])]

        return train if self.train else forward


def _sine(train: bool) -> Work:
    return Work(sin_of_cos, (torch.randn(10_000, device=device(), requires_grad=train),), train)


def _large(train: bool) -> Work:
    return Work(broken, (torch.randn(8192, 2048, device=device(), requires_grad=train),), train)


def _of(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], train: bool) -> Work:
    model, args = make()
    if train and not any(isinstance(m, nn.Dropout) for m in model.modules()):
        model.train()  # with dropout, no two engines would draw the same numbers
    return Work(model, args, train)


def _module(module: nn.Module, *args: Tensor) -> Work:
    return Work(module.to(device()).eval(), tuple(t.to(device()) for t in args))


WORKLOADS: dict[str, Callable[[], Work]] = {
    "sine": lambda: _sine(False),
    "resnet50": lambda: _of(resnet.model, False),
    "bert": lambda: _of(bert.model, False),
    "resnext": lambda: _of(resnet.resnext, False),
    "breaks": lambda: _module(Breaks(), torch.randn(32, 512)),
    "large": lambda: _large(False),
    "host": lambda: _module(OnHost(), torch.randn(32, 512)),
    "decode": lambda: _module(Decoder(), torch.randn(1, 1, 512), torch.tensor([100])),
    "train-sine": lambda: _sine(True),
    "train-resnet50": lambda: _of(resnet.model, True),
    "train-bert": lambda: _of(bert.model, True),
    "train-resnext": lambda: _of(resnet.resnext, True),
    "train-large": lambda: _large(True),
}


def made(name: str, dtype: torch.dtype) -> Work:
    """Build a workload: the same weights and arguments each time."""
    torch.manual_seed(0)
    work = WORKLOADS[name]()
    if dtype != torch.float32:
        work.args = tuple(
            t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for t in work.args
        )
        if isinstance(work.fn, nn.Module):
            work.fn.to(dtype)
    return work
