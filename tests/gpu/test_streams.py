"""Recordings called from several streams, while the GPU is still at work on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

pytestmark = pytest.mark.gpu

LONG = 40_000_000
"""Cycles, some 20 ms: longer than the host takes for all that follows."""


class Slow(torch.autograd.Function):
    """The identity, whose backward takes long, and begins before what it saved is read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return grads[0] * 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply((self.inner(x) * x).exp())


def streams(kind: str) -> list[torch.cuda.Stream]:
    made = [torch.cuda.Stream() for _ in range(2)]
    if kind == "torch's":
        return made
    return [torch.cuda.ExternalStream(stream.cuda_stream) for stream in made]


@pytest.mark.parametrize("kind", ["torch's", "foreign"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_forward_waits_for_the_backward_that_reads_what_it_overwrites(
    kind: str, before: int
) -> None:
    torch.manual_seed(0)
    model = Model().cuda()
    fast = ol.graph(model, warmup=1)
    xs = [torch.randn(32, 64, device="cuda") for _ in range(2)]
    a, b = streams(kind)
    for _ in range(4):
        fast(xs[0]).sum().backward()
    for stream in (a, b) * before:  # from then on launches are marked
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            fast(xs[0]).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        fast(xs[0]).sum().backward()
    with torch.cuda.stream(b):
        fast(xs[1] * 3)
    torch.cuda.synchronize()
    got = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(model(xs[0]).sum(), list(model.parameters()))
    assert fast.stats().replays >= 3
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_a_backward_waits_for_the_optimizer_that_reads_its_gradients() -> None:
    """Which are memory of the recording, and dropped as soon as the step is queued."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    fast = ol.graph(model, warmup=1)
    xs = [torch.randn(32, 64, device="cuda") for _ in range(2)]
    a, b = streams("torch's")
    for stream in (a, b) * 3:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            model.zero_grad()
            fast(xs[0]).sum().backward()
    read = torch.zeros(64, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        model.zero_grad()
        fast(xs[0]).sum().backward()
        torch.cuda._sleep(LONG)
        read.copy_(model.weight.grad)
        model.zero_grad()
    with torch.cuda.stream(b):
        fast(xs[1]).sum().backward()
    torch.cuda.synchronize()
    expected = torch.autograd.grad(model(xs[0]).sum(), model.weight)[0]
    torch.testing.assert_close(read, expected)


def test_the_workspaces_of_other_graphs_stay_where_they_are() -> None:
    """A graph by hand, warmed up on the stream that captures it, as vLLM's are, uses by address the
    workspace that cuBLAS has there; torch frees all workspaces or none."""
    weight, x = torch.randn(4096, 64, device="cuda"), torch.randn(32, 4096, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def blocks() -> set[int]:
        return {
            block["address"]
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == stream.cuda_stream
            and tuple(segment["segment_pool_id"]) == (0, 0)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    torch._C._cuda_clearCublasWorkspaces()  # that of an earlier test on the same stream
    with torch.cuda.stream(stream):
        (x @ weight).sum()
    with torch.cuda.graph(graph, stream=stream):
        y = x @ weight
    there = blocks()
    assert there
    fast = ol.graph(nn.Linear(4096, 64).cuda(), warmup=1)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
    assert fast.stats().replays == 3
    assert blocks() == there
    torch.cuda.empty_cache()
    graph.replay()
    torch.testing.assert_close(y, x @ weight, rtol=1e-4, atol=1e-3)
    allocated = torch.cuda.memory_allocated()
    with torch.no_grad():
        for n in range(1, 6):  # and not one more for each capture
            for _ in range(3):
                fast(x[:n])
    assert blocks() == there
    fast.reset()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated
