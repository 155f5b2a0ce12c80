"""Random numbers: dropout, samplers, generators of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from tests.device.drop_in import on_cpu_and_cuda

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


@on_cpu_and_cuda
def test_masks_differ_from_call_to_call(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/84614

    The dropout mask of `make_graphed_callables` is not updated between iterations."""

    def program(graph: Any) -> Iterator[Any]:
        fast, x = graph(nn.Dropout2d(0.4)), rand(0, 4, 5, 2, 2)
        for _ in range(7):
            yield fast(x)

    side_by_side(program, device, captures=1)


@on_cpu_and_cuda
def test_a_stochastic_policy(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/rl/issues/3002

    The actions of a graphed policy lose their variance: the same numbers at each step."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Linear(3, 4).to(device)

        @torch.no_grad()
        def act(x: Tensor) -> tuple[Tensor, Tensor]:
            mean, scale = net(x).chunk(2, -1)
            policy = distributions.Normal(mean, F.softplus(scale) + 0.1, validate_args=False)
            action = policy.rsample()
            return action, policy.log_prob(action).sum(-1)

        fast, x = graph(act), rand(0, 2, 3)
        for _ in range(8):
            yield fast(x)

    side_by_side(program, device, captures=1)


@on_cpu_and_cuda
def test_gamma_of_a_beta_distribution(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/rl/pull/4143

    A Beta policy: rejection sampling, whose draws are a number that data decides."""

    def program(graph: Any) -> Iterator[Any]:
        def act(a: Tensor, b: Tensor) -> Tensor:
            return distributions.Beta(a, b, validate_args=False).rsample()

        fast = graph(act)
        for i in range(7):
            yield fast(rand(i, 6).abs() + 0.5, rand(i + 9, 6).abs() + 0.5)

    side_by_side(program, device)


@on_cpu_and_cuda
def test_multinomial_sampling(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/134442

    `torch.multinomial` fails to be captured."""

    def program(graph: Any) -> Iterator[Any]:
        def sample(logits: Tensor) -> Tensor:
            return torch.multinomial((logits / 0.7).softmax(-1), 1)

        fast = graph(sample)
        for i in range(8):
            yield fast(rand(i % 3, 4, 9))

    side_by_side(program, device, captures=1)


def test_arguments_of_a_distribution_are_checked(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/108122

    A Categorical that validates its arguments reads them on the host."""

    def program(graph: Any) -> Iterator[Any]:
        def entropy(logits: Tensor) -> Tensor:
            return distributions.Categorical(logits=logits, validate_args=True).entropy()  # here

        fast = graph(entropy)
        for i in range(6):
            yield fast(rand(i, 4, 9))

    assert "validate_args=False" in refused(program, device, "OL101", "# here")


@on_cpu_and_cuda
def test_a_penalty_for_tokens_seen(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang-omni/pull/279

    Sampling inside the graph differs from that outside while no token was sampled yet."""

    def program(graph: Any) -> Iterator[Any]:
        seen = torch.zeros(2, 16, dtype=torch.long, device=device)
        count = torch.zeros((), dtype=torch.long, device=device)

        def sample(logits: Tensor) -> Tensor:
            scores = logits.gather(1, seen)
            penalised = torch.where(scores < 0, scores * 1.2, scores / 1.2)
            valid = torch.arange(16, device=logits.device) < count
            logits = logits.scatter(1, seen, torch.where(valid, penalised, scores))
            values, indices = logits.topk(5, -1)
            cut = values.softmax(-1).cumsum(-1) - values.softmax(-1) > 0.8
            chosen = torch.multinomial(values.masked_fill(cut, -torch.inf).softmax(-1), 1)
            token = indices.gather(1, chosen)
            seen.index_copy_(1, (count % 16)[None], token)
            count.add_(1)
            return token

        fast = graph(sample)
        for i in range(20):
            yield fast(rand(i % 4, 2, 30)), seen.clone(), count.clone()

    side_by_side(program, device, captures=1)


@on_cpu_and_cuda
def test_a_generator_of_a_request(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm-omni/pull/5253

    The seed of a request is not applied to what is sampled within the graph."""

    def program(graph: Any) -> Iterator[Any]:
        generator = torch.Generator(device).manual_seed(5)

        def sample(logits: Tensor) -> Tensor:
            noise = torch.empty_like(logits).exponential_(generator=generator)
            return (logits.softmax(-1) / noise).argmax(-1)

        fast, x = graph(sample), rand(0, 3, 20)
        for i in range(12):
            if i in (5, 9):
                generator.manual_seed(5)
            yield fast(x)

    side_by_side(program, device)


@on_cpu_and_cuda
def test_seeds_between_replays(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/46148

    A graph keeps the offset of the generator of its capture, whatever is drawn between replays."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x: F.dropout(x, 0.5) + torch.randn_like(x))
        x = rand(0, 6)
        for i in range(14):
            if i in (6, 10):
                torch.manual_seed(11)
            if i % 2:
                yield torch.rand(3, device=device)
            yield fast(x)

    side_by_side(program, device, captures=1)


@on_cpu_and_cuda
def test_two_graphs_draw_in_turn(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/173421

    Two captures of one generator: each must go on where the other stopped."""

    def program(graph: Any) -> Iterator[Any]:
        f, g = graph(lambda x: x + torch.rand_like(x)), graph(lambda x: F.dropout(x, 0.3) * 2)
        x = rand(0, 5)
        for i in range(12):
            yield f(x)
            if i % 3:
                yield g(x)

    side_by_side(program, device)


@on_cpu_and_cuda
def test_attention_with_dropout(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/100196

    Attention kernels keep the seed of their dropout on the host for the backward."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).to(device)

        @graph
        def step(x: Tensor) -> Tensor:
            layer.zero_grad()
            y, _ = layer(x, x, x, need_weights=False)
            loss = y.square().mean()
            loss.backward()
            return loss.detach()

        for i in range(7):
            yield step(rand(i, 2, 5, 8)), [p.grad.clone() for p in layer.parameters()]

    side_by_side(program, device)


def test_the_state_is_forked_inside(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/113541

    Tensor parallelism sets another random state for a part of the layer, within the call."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                y = x + torch.rand_like(x)
            return y * torch.rand_like(x)

        fast, x = graph(forward), rand(0, 4)
        for _ in range(7):
            yield fast(x)

    right_or_refused(program, device, "OL106")


@pytest.mark.parametrize("way", ["global", "generator", "method"])
def test_numbers_of_numpy(device: torch.device, rand: Rand, way: str) -> None:
    """https://github.com/pytorch/torchdynamo/pull/505

    A seed that the host draws for the kernel at each call."""

    def program(graph: Any) -> Iterator[Any]:
        generator = np.random.default_rng(5)
        draw: Any = np.random.default_rng(6).random

        def forward(x: Tensor) -> Tensor:
            match way:
                case "global":
                    n = np.random.rand()
                case "generator":
                    n = generator.random()
                case _:
                    n = draw()
            return x * float(n)

        fast, x = graph(forward), rand(0, 4)
        np.random.seed(3)
        for _ in range(9):
            yield fast(x)

    if way == "global":  # one state for both worlds: each by itself
        refused(program, device, "OL117", "np.random.rand()")
    else:
        right_or_refused(program, device, "OL117")
