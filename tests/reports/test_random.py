"""Random numbers: dropout, samplers, generators of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from tests.device.drop_in import on_cpu_and_cuda

from .side_by_side import side_by_side

Rand = Callable[..., Tensor]


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
