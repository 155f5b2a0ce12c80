"""Callables of one tuple share memory, and are right in whatever order they run."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.autograd.backward import StaticGraph

from .drop_in import assert_same, on_accelerators
from .training import Rand, state_of

SIZE = 16


class Block(nn.Module):
    """Saves some of what it computes, and frees as much before the next block runs."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(SIZE, SIZE)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        h = ((x + 1) * 2 - 1) * 0.5
        return torch.tanh(self.inner(h) + 3) * 2 + h.sin()


class World:
    """Blocks, eager or graphed, and what a program has done with them so far."""

    def __init__(self, blocks: tuple[nn.Module, ...], rand: Rand) -> None:
        self.blocks = blocks
        self.waiting: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
        self.seen: list[Tensor] = []
        self._rand = rand
        self._calls = 0

    def forward(self, i: int) -> None:
        self._calls += 1
        x = self._rand(self._calls, 8, SIZE).requires_grad_()
        y = self.blocks[i](x)
        self.seen.append(y.detach())
        self.waiting[i].append((x, y))

    def backward(self, i: int, retain: bool = False) -> None:
        self._calls += 1
        x, y = self.waiting[i][0] if retain else self.waiting[i].pop(0)
        y.backward(self._rand(self._calls, 8, SIZE), retain_graph=retain)
        assert x.grad is not None
        self.seen.append(x.grad)

    def drop(self, i: int) -> None:
        self.waiting[i].pop(0)

    def clear(self, to_none: bool) -> None:
        for block in self.blocks:
            block.zero_grad(set_to_none=to_none)

    def hold(self, i: int) -> None:
        """As a program that logs gradients does."""
        self.seen += [p.grad for p in self.blocks[i].parameters() if p.grad is not None]


class Both:
    """One program, eager and graphed."""

    def __init__(self, number: int, device: torch.device, rand: Rand) -> None:
        eager = tuple(Block(i, device) for i in range(number))
        blocks = tuple(copy.deepcopy(block) for block in eager)
        samples = tuple((rand(i, 8, SIZE).requires_grad_(),) for i in range(number))
        graphed = ol.make_graphed_callables(blocks, samples)
        self.worlds = World(eager, rand), World(graphed, rand)

    def do(self, what: str, *args: Any) -> None:
        for world in self.worlds:
            getattr(world, what)(*args)
        eager, fast = self.worlds
        for a, b in zip(fast.blocks, eager.blocks, strict=True):
            assert_same(state_of(a), state_of(b), what)
        assert_same(fast.seen, eager.seen, what)

    @property
    def recordings(self) -> list[int]:
        return [len(block.forward.recordings) for block in self.worlds[1].blocks]


@pytest.fixture
def eager_backwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each backward that runs operation by operation."""
    found: list[int] = []
    run = StaticGraph.run

    def counted(*args: Any, **options: Any) -> Any:
        found.append(len(found))
        return run(*args, **options)

    monkeypatch.setattr(StaticGraph, "run", counted)
    return found


def test_the_first_backward_is_a_launch(
    device: torch.device, rand: Rand, eager_backwards: list[int]
) -> None:
    both = Both(3, device, rand)
    for _ in range(3):
        for i in range(3):
            both.do("forward", i)
        for i in reversed(range(3)):
            both.do("backward", i)
        both.do("clear", True)
    assert not eager_backwards
    assert both.recordings == [1, 1, 1]
    replays = [r.replays for b in both.worlds[1].blocks for r in b.forward.recordings]
    assert replays == [3, 3, 3]


def test_other_gradients_at_their_second_backward(
    device: torch.device, rand: Rand, eager_backwards: list[int]
) -> None:
    """An expanded one, as the sum of a result hands on."""
    block = Block(0, device)
    fast = ol.make_graphed_callables(copy.deepcopy(block), (rand(0, 8, SIZE),))
    for i in range(4):
        for b in (fast, block):
            b.zero_grad()
            b(rand(i, 8, SIZE)).sum().backward()
        assert_same(state_of(fast), state_of(block))
    assert len(eager_backwards) == 1


@on_accelerators
@pytest.mark.filterwarnings(r"ignore:\[OL304\] the backward runs eagerly")
@pytest.mark.parametrize("share", [0.5, 1, 2])  # of what one needs: its forward, or all of it
def test_a_pool_with_a_budget(device: torch.device, rand: Rand, share: float) -> None:
    """Where not all find room, those that were evicted come back alone."""
    alone = ol.Pool()
    held = ol.make_graphed_callables(Block(0, device), (rand(0, 8, SIZE),), pool=alone)
    pool = ol.Pool(max_bytes=int(alone.memory_bytes * share))
    del held
    blocks = tuple(Block(i, device) for i in range(3))
    others = copy.deepcopy(blocks)
    samples = tuple((rand(i, 8, SIZE),) for i in range(3))
    ol.make_graphed_callables(blocks, samples, pool=pool)
    for i in range(6):
        for b, other in zip(blocks, others, strict=True):
            for block in (b, other):
                block.zero_grad()
                block(rand(i, 8, SIZE)).backward(rand(i, 8, SIZE))
            assert_same(state_of(b), state_of(other))
        assert pool.max_bytes is not None
        assert pool.memory_bytes <= pool.max_bytes


@on_accelerators
def test_a_budget_for_one_of_them(device: torch.device) -> None:
    """Evicted ones leave no memory behind that the next could not use."""

    def activations(number: int) -> Any:
        return tuple(nn.Sequential(nn.Hardtanh(-9, 9), nn.ELU()).to(device) for _ in range(number))

    # 1.5 MiB, and on CUDA 12, as it puts less together in 20.
    elements = 3 << (20 if device.type == "cuda" else 17)
    sample = (torch.ones(elements, device=device).requires_grad_(),)
    alone = ol.Pool()
    held = ol.make_graphed_callables(activations(1), (sample,), pool=alone)
    pool = ol.Pool(max_bytes=alone.memory_bytes)
    held += ol.make_graphed_callables(activations(3), (sample,) * 3, pool=pool)
    assert [len(module.forward.recordings) for module in held] == [1, 0, 0, 1]


def test_one_after_another_as_one_model(
    device: torch.device, rand: Rand, eager_backwards: list[int]
) -> None:
    """What a backward hands to the one before lies in its memory until that has run."""
    eager = nn.Sequential(*[Block(i, device) for i in range(4)])
    fast = copy.deepcopy(eager)
    samples = tuple((rand(i, 8, SIZE).requires_grad_(i > 0),) for i in range(4))
    ol.make_graphed_callables(tuple(fast), samples)
    for step in range(6):
        for model in (eager, fast):
            if step % 3 == 0:  # otherwise they are added up
                model.zero_grad(set_to_none=step == 3)
            loss = nn.functional.mse_loss(model(rand(step, 8, SIZE)), rand(-step, 8, SIZE))
            loss.backward()
        assert_same(state_of(fast), state_of(eager), f"step {step}")
    assert not eager_backwards
    assert [len(block.forward.recordings) for block in fast] == [1] * 4


def _orders(number: int) -> list[tuple[tuple[str, int], ...]]:
    """All orders of so many forwards and their backwards."""
    events = [(what, i) for what in ("forward", "backward") for i in range(number)]
    return [
        order
        for order in itertools.permutations(events)
        if all(order.index(("forward", i)) < order.index(("backward", i)) for i in range(number))
    ]


@on_accelerators
@pytest.mark.parametrize("order", [*_orders(2), *_orders(3)[::13]])
def test_orders_of_forwards_and_backwards(
    device: torch.device, rand: Rand, order: tuple[tuple[str, int], ...]
) -> None:
    """Of three callables every 13th order of 90: each takes a second, and all were right."""
    both = Both(len(order) // 2, device, rand)
    for _ in range(2):
        for event in order:
            both.do(*event)


@on_accelerators
@pytest.mark.parametrize("seed", range(12))
def test_programs_at_random(device: torch.device, rand: Rand, seed: int) -> None:
    """Forwards repeated, dropped, retained; gradients added up, held, cleared."""
    dice = random.Random(seed)
    both = Both(3, device, rand)
    for _ in range(40):
        i = dice.randrange(3)
        waiting = len(both.worlds[0].waiting[i])
        what = dice.choice(["forward"] * 4 + ["backward"] * 4 + ["retain", "drop", "clear", "hold"])
        if what == "forward" and waiting < 3:
            both.do("forward", i)
        elif what in ("backward", "retain") and waiting:
            both.do("backward", i, what == "retain")
        elif what == "drop" and waiting:
            both.do("drop", i)
        elif what == "clear":
            both.do("clear", dice.random() < 0.5)
        elif what == "hold":
            both.do("hold", i)


@on_accelerators
def test_one_of_them_is_reset(device: torch.device, rand: Rand) -> None:
    """The others go on, and gradients that it gave stay as they are."""
    both = Both(3, device, rand)
    for reset in (1, 0, 2, None):
        for i in range(3):
            both.do("forward", i)
        for i in reversed(range(3)):
            both.do("backward", i)
        both.do("hold", 0)
        both.do("clear", True)
        if reset is not None:
            both.worlds[1].blocks[reset].forward.reset()
            gc.collect()


def test_two_threads(device: torch.device, rand: Rand) -> None:
    """Each its own callable of the tuple, forwards of the one while the other's is waiting."""
    both = Both(2, device, rand)
    xs = [rand(i, 8, SIZE) for i in range(6)]

    def work(number: int) -> None:
        eager, fast = (world.blocks[number] for world in both.worlds)
        for x in xs:
            results = []
            for block in (eager, fast):
                block.zero_grad()
                block(x).backward(x)
                results.append(state_of(block))
            assert_same(results[1], results[0])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


@on_accelerators
def test_memory_is_shared_and_given_back(device: torch.device) -> None:
    """A callable needs memory for what it keeps; the rest is one for all."""

    def blocks() -> tuple[nn.Module, ...]:
        return tuple(nn.Sequential(nn.Hardtanh(-9, 9), nn.ELU()).to(device) for _ in range(4))

    def sample() -> tuple[Tensor]:
        return (torch.ones(1 << 18, device=device).requires_grad_(),)  # 1 MiB

    together, apart = ol.Pool(), ol.Pool()
    first = ol.make_graphed_callables(blocks(), tuple(sample() for _ in range(4)), pool=together)
    second = [ol.make_graphed_callables(b, sample(), pool=apart) for b in blocks()]
    assert 0 < together.memory_bytes < 0.8 * apart.memory_bytes
    for block in (*first, *second):
        block.forward.reset()
    assert together.memory_bytes == apart.memory_bytes == 0
