"""The order in which hooks of different leaves run, which Python may notice: eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Put = Callable[[list[Tensor], list[Any], list[Any]], list[Any]]


def edge_of(t: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(t).node


def on_nodes(leaves: list[Tensor], seen: list[Any], kept: list[Any]) -> list[Any]:
    kept += map(edge_of, leaves)
    return [
        node.register_hook(lambda *_, i=i: seen.append(i))
        for i, node in enumerate(kept[-len(leaves) :])
    ]


def grads_so_far(leaves: list[Tensor], seen: list[Any], kept: list[Any]) -> list[Any]:
    """One hook, which looks at the other leaves."""

    def look(_: Tensor) -> None:
        seen.append([t.grad is None for t in leaves])

    return [leaves[2].register_post_accumulate_grad_hook(look)]


several: Any = torch.autograd.graph.register_multi_grad_hook
PUTS: dict[str, Put] = {
    "tensors": lambda leaves, seen, kept: [
        t.register_hook(lambda g, i=i: seen.append(i)) for i, t in enumerate(leaves)
    ],
    "accumulated": lambda leaves, seen, kept: [
        t.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i))  # pyright: ignore
        for i, t in enumerate(leaves)
    ],
    "nodes": on_nodes,
    "any": lambda leaves, seen, kept: [
        several(leaves, lambda g: seen.append(tuple(g.shape)), mode="any")
    ],
    "all": lambda leaves, seen, kept: [several(leaves, lambda gs: seen.append([*gs]))],
    "one that looks": grads_so_far,
}


class Model(nn.Module):
    """Layers, a stack of parameters at one node, and two results without a node in common."""

    def __init__(self, device: torch.device, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
        self.scales = nn.ParameterList(torch.full((3,), 1.0 + i) for i in range(5))
        self.apart = apart
        self.to(device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack(list(self.scales)).sum(0)
        if self.apart:
            return self.layers(x.detach()), (x * stacked).square()
        return self.layers(x * stacked), x * 2


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", PUTS)
def test_hooks_of_several_leaves(
    device: torch.device, rand: Rand, name: str, apart: bool, first: int
) -> None:
    """Put there before the warm-up, or on a recording; of the parameters and an argument."""

    def world(graph: Callable[[Any], Any]) -> Callable[[int], Any]:
        model, kept, seen, handles = Model(device, apart), list[Any](), list[Any](), list[Any]()
        x = rand(0, 2, 3).requires_grad_()
        run = graph(model)

        def call(i: int) -> Any:
            leaves = [*model.parameters(), x]
            if i == first:
                handles.extend(PUTS[name](leaves, seen, kept))
            if i == first + 4:
                for handle in handles:
                    handle.remove()
            for t in leaves:
                t.grad = None
            a, b = run(x)
            (a.square().sum() + b.sum()).backward()
            found, seen[:] = list(seen), []
            return found, [t.grad for t in leaves]

        return call

    made: list[Any] = []
    eager = world(lambda f: f)
    fast = world(lambda f: made.append(ol.graph(f, warmup=1)) or made[0])
    for i in range(10):
        assert_same(fast(i), eager(i), f"call {i}")
    assert replays(made[0]) == 9


@pytest.mark.parametrize("seed", range(20))
def test_the_engines_order_of_random_graphs(seed: int) -> None:
    from onelaunch.autograd.order import leaves_in_order

    generator = torch.Generator().manual_seed(seed)

    def one_of(values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(1 + seed % 9)]
    pool = list(leaves)
    for _ in range(12):
        chosen = [one_of(pool) for _ in range(one_of([1, 2, 3, 5, 7]))]
        pool.append(torch.stack(chosen).mean(0) if one_of([0, 1]) else chosen[0] @ chosen[-1])
    seen: list[int] = []
    for i, leaf in enumerate(leaves):
        leaf.register_hook(lambda g, i=i: seen.append(i))
    outputs = [pool[-1], pool[-2], pool[-5]]
    expected = [next(i for i, t in enumerate(leaves) if t is u) for u in leaves_in_order(outputs)]
    sum(t.sum() for t in outputs).backward()  # pyright: ignore
    assert seen == expected
