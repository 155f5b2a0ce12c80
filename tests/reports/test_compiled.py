"""`torch.compile(f, backend="onelaunch")`: what people meet under reduce-overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions
from tests.device.drop_in import on_accelerators

from .side_by_side import Program, side_by_side

Rand = Callable[..., Tensor]
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo looks at it
]


def compiled(program: Program, device: torch.device, *, replayed: int = 1) -> None:
    """The program with its callables compiled, to torch's own kernels, which round as eager's."""

    def by(fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend=onelaunch, options={"codegen": "eager"}, **options)

    side_by_side(program, device, by=by)
    launches = sum(r.replays for graph in regions.graphs() for r in graph.recordings)
    assert launches >= replayed, [r.why for graph in regions.graphs() for r in graph.recordings]


@on_accelerators
def test_a_state_that_comes_back_and_is_written(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/193294

    A result of the last step is written in this one: SIGSEGV in cudagraph trees."""

    def program(graph: Any) -> Iterator[Any]:
        def f(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            out = state * 2
            state.mul_(0.5).add_(x)
            return out, state + 1

        fast, state = graph(f), torch.zeros(3, device=device)
        for i in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            before = state
            out, state = fast(state, rand(i, 3))
            yield out, before, state

    compiled(program, device)


@on_accelerators
def test_a_static_cache_of_an_encoder_and_decoder(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/transformers/pull/48199

    Keys that the first decode step computes are made inside of the graph, and overwritten."""

    class Cross(nn.Module):
        keys: Any = None

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.k = nn.Linear(4, 4)

        def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
            if self.keys is None:
                self.keys = self.k(encoded)
            return F.scaled_dot_product_attention(x[None], self.keys[None], self.keys[None])[0]

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        net = Cross().to(device)
        fast = graph(net)
        for request in range(3):
            net.keys = None
            encoded = rand(50 + request, 5, 4)
            for i in range(6):
                yield fast(rand(request * 6 + i, 2, 4), encoded), net.keys

    compiled(program, device)


@on_accelerators
def test_weight_norm_is_compiled(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/121304

    A parametrized convolution does not compile."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)).to(device)
        fast = graph(conv)
        for i in range(8):
            conv.zero_grad()
            fast(rand(i, 2, 3, 8)).square().mean().backward()
            yield [p.grad.clone() for p in conv.parameters()]

    compiled(program, device)
