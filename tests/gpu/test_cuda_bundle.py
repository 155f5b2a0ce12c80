"""Small tensors that travel together: one kernel for many copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [t * 2 for t in tensors]


def of_every_kind(seed: int) -> list[Tensor]:
    """150 tensors of a byte to 600 KB, of several types, aligned to an element or to more."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    made: list[Tensor] = []
    for i in range(150):
        count = (1, 3, 16, 1000, 4097, 65_536)[i % 6] + i
        whole = torch.randint(100, (count + 7,), device=DEVICE, generator=generator)
        made.append(whole.to(dtypes[i % 5])[i % 7 : i % 7 + count])
    return made


def test_tensors_of_every_size_and_alignment() -> None:
    fast: Any = ol.graph(doubled)
    with torch.no_grad():
        for seed in range(4):
            fast(*of_every_kind(seed))
        # Queued without a wait in between, each with its own tensors.
        calls = [of_every_kind(seed) for seed in range(10, 40)]
        results = [fast(*call) for call in calls]
        for call, result in zip(calls, results, strict=True):
            for x, y in zip(call, result, strict=True):
                assert torch.equal(y, x * 2)
    (recording,) = fast.recordings
    assert set(recording.inputs.values()) == {"node"}
    large = sum(t.nbytes > 256 << 10 for t in of_every_kind(0))
    small = 150 - large
    bundles = -(-small // 64)
    assert recording.nodes == 150 + 2 * (large + bundles)


def test_one_tensor_travels_by_a_memcpy() -> None:
    fast: Any = ol.graph(lambda x: x * 2)
    x = torch.randn(16, device=DEVICE)
    for _ in range(5):
        assert torch.equal(fast(x), x * 2)
    assert fast.recordings[0].nodes == 3


def test_a_backward_gives_its_gradients_together() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(24, 24), nn.Tanh())]
    model = nn.Sequential(*layers).to(DEVICE)
    fast: Any = ol.graph(model)
    for i in range(6):
        x = torch.randn(8, 24, device=DEVICE, requires_grad=True)
        model(x).sum().backward()
        expected = [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
        again = x.detach().requires_grad_()
        fast(again).sum().backward()
        found = [again.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b), i
    assert fast.recordings[0].replays == 3


def test_arguments_written_in_place_go_back_together() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a += 1
        b *= 2
        return a.sum() + b.sum() + c.sum()

    fast: Any = ol.graph(step)
    for i in range(7):
        mine = [torch.full((n,), float(i), device=DEVICE) for n in (5, 33, 1)]
        theirs = [t.clone() for t in mine]
        assert torch.equal(fast(*mine), step(*theirs))
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_a_launch_that_is_refused_points_at_nobodys_memory() -> None:
    """After it the next call is right, and the tensors of the refused one can go."""
    fast: Any = ol.graph(doubled)
    pair = [torch.randn(16, device=DEVICE), torch.randn(40, device=DEVICE)]
    for _ in range(5):
        fast(*pair)
    graph = fast._table.entries[0].captured.graph
    kept = torch.zeros(40, device=DEVICE)
    with pytest.raises((IndexError, AttributeError)):
        graph.launch(pair, (kept,))  # of two results
    words = [(word.value, address) for rest, _ in graph.wiring.own for word, address in rest]
    assert all(value == address for value, address in words)
    for x, y in zip(pair, fast(*pair), strict=True):
        assert torch.equal(y, x * 2)
    torch.cuda.synchronize()
    assert not kept.any()
