"""Whole programs of a field: policies, experts, forces, beams, adversaries, threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.device.drop_in import on_cpu_and_cuda
from tests.device.steps import small_model

from .side_by_side import side_by_side

Rand = Callable[..., Tensor]


def mlp(seed: int, device: torch.device, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device)


def weights(*models: nn.Module) -> list[Any]:
    return [[t.clone() for t in model.state_dict().values()] for model in models]


def test_a_target_network(device: torch.device, rand: Rand) -> None:
    """https://github.com/takuseno/d3rlpy/pull/428

    Q-learning with a target network, moved on inside of the step and replaced between steps."""

    def program(graph: Any) -> Iterator[Any]:
        net, target = mlp(1, device, 4, 8, 3), mlp(1, device, 4, 8, 3)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05, fused=True)

        @graph
        def step(s: Tensor, a: Tensor, r: Tensor, after: Tensor) -> Tensor:
            with torch.no_grad():
                y = r + 0.9 * target(after).amax(1)
            loss = F.smooth_l1_loss(net(s).gather(1, a[:, None])[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(target.parameters(), net.parameters(), strict=True):
                    t.lerp_(p, 0.1)
            return loss.detach()

        for i in range(11):
            a = torch.tensor([i % 3, 1, 2, 0, 1], device=device)
            yield step(rand(i, 5, 4), a, rand(i, 5), rand(i + 50, 5, 4)), weights(net, target)
            if i == 6:
                target.load_state_dict(net.state_dict())

    side_by_side(program, device, captures=1)


def test_experts_by_sorting(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/3373

    Tokens are sorted to their experts by `argsort`, where `masked_select` has no fixed size."""

    def program(graph: Any) -> Iterator[Any]:
        experts, router = rand(90, 3, 4, 4), rand(91, 4, 3)

        def forward(x: Tensor) -> Tensor:
            gate, chosen = (x @ router).softmax(-1).topk(2, -1)
            flat = chosen.reshape(-1)
            order = flat.argsort(stable=True)
            rows = x.repeat_interleave(2, 0)[order]
            out = torch.einsum("nd,nde->ne", rows, experts[flat[order]])
            back = torch.empty_like(out).index_copy(0, order, out)
            return (back.view(-1, 2, 4) * gate[..., None]).sum(1)

        fast = graph(forward)
        for i in range(8):
            yield fast(rand(i, 6, 4))

    side_by_side(program, device, captures=1)


def test_forces_of_positions(device: torch.device, rand: Rand) -> None:
    """https://github.com/openmm/openmm-torch/pull/120

    Forces as gradients of the energy, of the positions alone, within a graph."""

    def program(graph: Any) -> Iterator[Any]:
        net = mlp(1, device, 3, 8, 1)

        def forces(positions: Tensor) -> tuple[Tensor, Tensor]:
            positions = positions.detach().requires_grad_()
            gaps = positions[:, None] - positions[None]
            energy = net(gaps).square().sum()
            (force,) = torch.autograd.grad(-energy, positions)
            return energy.detach(), force

        fast, x = graph(forces), rand(0, 5, 3)
        for _ in range(8):
            energy, force = fast(x)
            yield energy, force, [p.grad for p in net.parameters()]
            x = x + 0.01 * force

    side_by_side(program, device)


def test_training_on_forces(device: torch.device, rand: Rand) -> None:
    """https://github.com/aiqm/torchani/pull/238

    A loss of forces, whose graph is needed again: a whole step captures it."""

    def program(graph: Any) -> Iterator[Any]:
        net = mlp(1, device, 3, 8, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

        @graph
        def step(x: Tensor, target: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            loss = F.mse_loss(force, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 3), rand(i + 50, 5, 3)), weights(net)

    side_by_side(program, device, captures=1)


@pytest.mark.parametrize("inside", [False, True])
def test_beams_that_change_places(device: torch.device, rand: Rand, inside: bool) -> None:
    """https://github.com/huggingface/transformers/issues/46612

    Beam search reorders the state of a model, in new memory; a cache that is missed goes stale."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        cache = SimpleNamespace(keys=[rand(90, 3, 2, 4), rand(91, 3, 2, 4)])

        def reorder(order: Tensor) -> None:
            cache.keys = [k.index_select(0, order) for k in cache.keys]

        def step(x: Tensor, order: Tensor) -> Tensor:
            if inside:
                reorder(order)
            for k in cache.keys:
                k[:, 0].add_(x)
            return x + sum(k.sum(1) for k in cache.keys)

        fast = graph(step)
        for i in range(20):
            order = torch.tensor([i % 3, 2, 0], device=device)
            if not inside and i % 5 == 4:
                reorder(order)
            yield fast(rand(i, 3, 4), order), [k.clone() for k in cache.keys]

    side_by_side(program, device)


def test_positions_beyond_the_table(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/transformers/issues/27226

    Rotary embeddings whose table grows with the longest prompt so far."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.tensor([1.0, 0.1]), persistent=False)
            self.longest = 0

        def grow(self, n: int) -> None:
            angles = torch.arange(n, device=self.frequencies.device)[:, None] * self.frequencies
            self.cos, self.sin, self.longest = angles.cos(), angles.sin(), n

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            if x.shape[1] > self.longest:
                self.grow(2 * x.shape[1])
            return x * self.cos[positions] + x.flip(-1) * self.sin[positions]

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        rotary = Rotary().to(device)
        fast = graph(rotary)
        for i, n in enumerate([3] * 5 + [7] * 5 + [3, 3, 15, 15, 15, 15, 15, 3, 7, 3]):
            yield fast(rand(i, 1, n, 2), torch.arange(n, device=device)), rotary.longest

    side_by_side(program, device)


@on_cpu_and_cuda
def test_a_loader_that_pins_meanwhile(device: torch.device, rand: Rand) -> None:
    """https://github.com/LibreYOLO/libreyolo/pull/681

    A loader's thread pins batches while a step is captured, and both die."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def load() -> None:
        try:
            while not stop.is_set():
                batch = torch.ones(64, 64)
                if device.type == "cuda":
                    batch = batch.pin_memory()
                batch.sum()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(10):
            yield step(rand(i, 5 + i // 5, 4)), weights(model)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        side_by_side(program, device)
    finally:
        stop.set()
        loader.join()
    assert not failed
