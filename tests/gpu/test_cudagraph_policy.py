"""``mode="reduce-overhead"`` with `onelaunch.dynamo.cudagraph_policy`: what only Inductor shows.

Its contract is in tests/device: test_backend_worlds.py and test_policy.py, which run on CUDA too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees, cudagraph_utils
from torch._inductor.utils import fresh_cache

import onelaunch as ol
from onelaunch.dynamo import cudagraph_policy
from tests.device.regions import recordings, replays, same_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(cudagraph_utils, "CUDAGraphPolicy"), reason="the hook is torch 2.12's"
    ),
]


@pytest.fixture
def policy() -> Iterator[Any]:
    """The policy in force, with nothing compiled so far."""
    torch._dynamo.reset()
    made = cudagraph_policy()
    with config.patch(cudagraph_policy=made):
        yield made
    torch._dynamo.reset()
    made.reset()


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def test_inductor_makes_no_graphs_of_its_own(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    fast = torch.compile(model, mode="reduce-overhead")
    for i in range(8):
        fast(random(i, 16, 32)).square().mean().backward()
    assert replays() >= 2 * 4
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is None or manager.current_node is None
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("partition", [False, True])
def test_inductors_parts(policy: Any, partition: bool) -> None:
    """A part for the host in the middle: two recordings, or none where Inductor does not cut."""

    def f(x: Tensor) -> Tensor:
        y = x.sin() * 2
        scale = y.cpu().abs().sum()
        return (y * scale.to(x.device)).cos()

    with torch.no_grad(), config.patch(graph_partition=partition):
        fast = torch.compile(f, mode="reduce-overhead")
        with pytest.warns(ol.GraphWarning, match="OL312"):
            fast(random(0, 8, 8))
        same_calls(f, fast, lambda i: (random(i, 8, 8),))
    assert len(recordings()) == (2 if partition else 0)


def test_code_of_the_cache(policy: Any) -> None:
    """It is found with and without the policy, for a forward, its backward, and a forward alone."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()

    def run() -> list[Tensor]:
        fast = torch.compile(model, mode="reduce-overhead")
        found: list[Tensor] = []
        for i in range(7):
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            fast(random(i, 16, 32)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            found += [fast(random(i, 16, 32)).clone() for i in range(7)]
        return found

    with fresh_cache():
        with config.patch(cudagraph_policy=None):
            expected = run()
        torch._dynamo.reset()
        counters.clear()
        got = run()
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    assert any(hits)
    torch.testing.assert_close(got, expected)
    assert replays() >= 3 * 3


def test_a_policy_as_the_process_sets_it(policy: Any) -> None:
    """A setting without a context is seen where a backward is compiled, in a thread of its own."""
    config.cudagraph_policy = policy
    weight = random(1, 8, 8).requires_grad_()
    fast = torch.compile(lambda x: (x @ weight).tanh(), mode="reduce-overhead")
    for i in range(8):
        weight.grad = None
        fast(random(i, 4, 8)).sum().backward()
        got = weight.grad
        (expected,) = torch.autograd.grad((random(i, 4, 8) @ weight).tanh().sum(), weight)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert {r.callable.endswith("backward") for r in recordings()} == {False, True}


def test_streams(policy: Any) -> None:
    """Launches from two streams by turns, each result used on its own."""

    def f(x: Tensor) -> Tensor:
        return (x @ x).relu() + 1

    fast = torch.compile(f, mode="reduce-overhead")
    streams = [torch.cuda.Stream() for _ in range(2)]
    current = torch.cuda.current_stream()
    found: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        for i in range(24):
            x, stream = random(i, 128, 128), streams[i % 2]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append((i, fast(x) * 2))
            x.record_stream(stream)
        for stream in streams:
            current.wait_stream(stream)
        for i, got in found:
            torch.testing.assert_close(got, f(random(i, 128, 128)) * 2, rtol=1e-4, atol=1e-3)
    assert replays() >= 18
