"""`torch.compile(f, backend="onelaunch")`: what people meet under reduce-overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onelaunch as ol
from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions
from tests.device.drop_in import on_accelerators
from tests.device.steps import small_model

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
def test_a_block_in_a_loop(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/152887

    Blocks that are compiled one by one: each takes the last one's result."""

    def program(graph: Any) -> Iterator[Any]:
        blocks = [graph(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)) for _ in range(3)]
        for block in blocks:
            for p in block.parameters():
                p.data = rand(p.numel(), *p.shape)
        for i in range(8):
            x = rand(i, 2, 4)
            for block in blocks:
                x = block(x)
            yield x.detach()

    compiled(program, device)


@on_accelerators
def test_accumulated_gradients(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/169545

    Gradient accumulation: "overwritten by a subsequent run", cloned or not."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        model = nn.Linear(10, 1).to(device)
        fast = graph(model, fullgraph=True)
        for i in range(9):
            x = rand(i, 10).requires_grad_()
            fast(x).sum().backward()
            yield x.grad, [p.grad.clone() for p in model.parameters()]

    compiled(program, device)


@on_accelerators
def test_results_of_two_calls(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/158551

    Results that are kept, although cloned and although a step was marked, are overwritten."""

    def program(graph: Any) -> Iterator[Any]:
        fast, kept = graph(lambda x: (x @ x).relu()), list[Any]()
        for i in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            kept.append(fast(rand(i, 4, 4)))
            yield list(kept)

    compiled(program, device)


@on_accelerators
def test_a_mask_is_written_with_dynamic_sizes_allowed(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/170103

    `y[m] *= 2` where Dynamo may trace sizes that data decides."""

    def program(graph: Any) -> Iterator[Any]:
        def f(x: Tensor) -> Tensor:
            y = x.clone()
            y[y > 0.5] *= 2
            return y

        fast = graph(f)
        for i in range(9):
            yield fast(rand(i, 6, 8))

    told = r"(?s)OL312.*OL102.*y\[y > 0.5\] \*= 2.*torch\.where"
    allowed = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with allowed, pytest.warns(ol.GraphWarning, match=told):
        compiled(program, device, replayed=0)


@on_accelerators
def test_an_input_is_mutated(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/117281

    "skipping cudagraphs due to mutated inputs": of which, and where?"""

    def program(graph: Any) -> Iterator[Any]:
        def f(cache: Tensor, x: Tensor, i: Tensor) -> Tensor:
            cache.index_copy_(0, i, x)
            return cache.sum(0)

        fast, cache = graph(f), torch.zeros(8, 3, device=device)
        for i in range(8):
            yield fast(cache, rand(i, 1, 3), torch.tensor([i], device=device)), cache.clone()

    compiled(program, device)


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
def test_many_sizes(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/128424

    A long compilation and growing memory for each of many sizes."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Linear(4, 4).to(device)
        fast = graph(lambda x: net(x).relu() * x.shape[0])
        for i in range(30):
            yield fast(rand(i, 2 + i % 6, 4)).detach()

    compiled(program, device)


@on_accelerators
def test_an_optimizer_step_is_compiled(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/107853

    A compiled step of an optimizer, with gradients that `zero_grad` drops in between."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        update = graph(lambda: optimizer.step())
        for i in range(9):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            model(rand(i, 5, 4)).square().mean().backward()
            update()
            schedule.step()
            yield [p.detach().clone() for p in model.parameters()]

    compiled(program, device, replayed=0)


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


@on_accelerators
def test_a_graph_break_between(device: torch.device, rand: Rand) -> None:
    """https://github.com/hao-ai-lab/FastVideo/pull/1365

    Hooks that Dynamo may not trace break each layer's graph."""

    def program(graph: Any) -> Iterator[Any]:
        model, seen = small_model(device).eval(), list[Any]()
        hook = torch.compiler.disable(lambda m, args: seen.append(args[0].shape[0]))
        for layer in model:
            layer.register_forward_pre_hook(hook)
        fast = graph(model)
        for i in range(8):
            yield fast(rand(i, 5, 4)).detach(), list(seen)

    # Before torch 2.13, Dynamo compiles nothing of a module with such hooks.
    compiled(program, device, replayed=int(torch.__version__ >= (2, 13)))
