"""Table of tensors: state read by address that moves, or changes in place."""

from __future__ import annotations

import copy
import functools
import gc
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, drop_in, drop_in_worlds, follows, replays


class Model(nn.Module):
    scale: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.register_buffer("scale", torch.full((4,), 2.0, device=device))
        self.plain = torch.full((4,), 3.0, device=device)
        self.listed = [torch.full((4,), 5.0, device=device)]
        self.named = {"shift": torch.full((4,), 7.0, device=device)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + self.plain
        return y + self.listed[0] * self.named["shift"]


def new(t: Tensor, i: int) -> Tensor:
    """Another tensor of the same kind, other values, other memory."""
    return torch.full_like(t, 0.25 * i + 1).add_(t.detach())


def junk(device: torch.device) -> None:
    """Reuse memory that was freed, so that a stale read shows."""
    gc.collect(1)  # what became garbage just now
    for _ in range(8):
        torch.full((4, 4), float("nan"), device=device)
        torch.full((4,), float("nan"), device=device)


def set_storage(m: Any, i: int) -> None:
    with torch.no_grad():
        m.linear.bias.set_(new(m.linear.bias, i))


def new_submodule(m: Any, i: int) -> None:
    linear = copy.deepcopy(m.linear)
    with torch.no_grad():
        linear.weight.add_(i)
    m.linear = linear


def to_and_back(m: Any, i: int) -> None:
    m.to(torch.float64)
    m.linear.weight.data.add_(i)
    m.to(torch.float32)


def fewer(m: Any, i: int) -> None:
    bias = nn.Parameter(torch.full((4,), float(i), device=m.scale.device))
    m.linear.bias = None if i % 4 else bias


def put(owner: str, name: str, by: Callable[[Tensor, int], Any]) -> Callable[[Any, int], None]:
    """Assign to an attribute what is made of the tensor in it."""
    owner_of = operator.attrgetter(owner)
    return lambda m, i: setattr(owner_of(m), name, by(getattr(owner_of(m), name), i))


MOVES: dict[str, Callable[[Any, int], object]] = {
    "load_state_dict": lambda m, i: m.load_state_dict(
        {k: new(v, i) for k, v in m.state_dict().items()}, assign=True
    ),
    "data": put("linear.weight", "data", new),
    "other strides": put("linear.weight", "data", lambda t, i: new(t, i).t().contiguous().t()),
    "parameter": put("linear", "weight", lambda t, i: nn.Parameter(new(t, i))),
    "swapped": lambda m, i: torch.utils.swap_tensors(
        m.linear.bias, nn.Parameter(new(m.linear.bias, i))
    ),
    "storage": set_storage,
    "buffer": lambda m, i: setattr(m, "scale", new(m.scale, i)),
    "attribute": lambda m, i: setattr(m, "plain", new(m.plain, i)),
    "in a list": lambda m, i: m.listed.__setitem__(0, new(m.listed[0], i)),
    "list": lambda m, i: setattr(m, "listed", [new(m.listed[0], i)]),
    "in a dict": lambda m, i: m.named.update(shift=new(m.named["shift"], i)),
    "submodule": new_submodule,
    "to and back": to_and_back,
    "fewer": fewer,
    "two that were apart in one": lambda m, i: setattr(m, "plain", m.scale),
}


def world_of_model(device: torch.device, rand: Rand) -> Any:
    torch.manual_seed(3)
    model = Model(device)
    return model, lambda i: (rand(i, 2, 4),)


@pytest.mark.parametrize("move", MOVES)
def test_state_that_moved(device: torch.device, rand: Rand, move: str) -> None:
    def between(i: int, model: Any) -> None:
        if i in (4, 8):
            MOVES[move](model, i)
            junk(device)

    fast = drop_in_worlds(
        lambda: world_of_model(device, rand),
        calls=12,
        recordings=None,
        # Of the recordings that are left: the last move is before call 8.
        min_replays=3,
        between=between,
    )
    assert len(fast.recordings) < 6


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("move", MOVES)
def test_state_that_moves_before_every_call(device: torch.device, rand: Rand, move: str) -> None:
    drop_in_worlds(
        lambda: world_of_model(device, rand),
        calls=6,
        recordings=None,
        min_replays=0,
        between=lambda i, model: MOVES[move](model, i),
    )


def test_moved_and_moved_back(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 4, device=device)
    a, b = model.weight.data, new(model.weight, 3)
    changes = [lambda to=to: setattr(model.weight, "data", to) for to in (b, a, b)]
    fast = follows(model, lambda i: (rand(i, 2, 4),), *changes, calls=3)
    assert replays(fast) >= 2


def test_what_a_recording_reads_stays_alive(device: torch.device, rand: Rand) -> None:
    """The weights live in the closure of a function that the caller dropped."""

    def build() -> Any:
        weight = rand(5, 4, 4)
        return ol.graph(lambda x: x @ weight, warmup=1)

    def eager(x: Tensor) -> Tensor:
        junk(device)
        return x @ rand(5, 4, 4)

    fast = build()
    compare(fast, eager, lambda i: (rand(i, 2, 4),), 4)
    assert replays(fast) >= 3


def test_functional_call(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4, device=device)
    fast = ol.graph(model, warmup=1)
    state = {k: v.detach() for k, v in model.named_parameters()}
    with torch.no_grad():
        for i in range(8):
            given = {k: new(v, i) for k, v in state.items()} if i % 2 else state
            x = rand(i, 2, 4)
            assert_same(
                torch.func.functional_call(fast, given, (x,)),
                torch.nn.functional.linear(x, given["weight"], given["bias"]),
            )


def test_functional_call_inside(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4, device=device)

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))

    drop_in(f, lambda i: (rand(i, 2, 4), rand(40 + i, 4, 4), rand(60 + i, 4)))


class Engine:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def step(self, x: Tensor) -> Tensor:
        return x * self.weight


GLOBAL_WEIGHT: Any = None


def reads_global(x: Tensor) -> Tensor:
    return x * GLOBAL_WEIGHT


Rebound = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]


def a_cell(weight: Tensor) -> Rebound:
    def rebind(new: Tensor) -> None:
        nonlocal weight
        weight = new

    return lambda x: x * weight, rebind


def an_object_in_a_cell(weight: Tensor) -> Rebound:
    engine = Engine(weight)
    return lambda x: x * engine.weight, lambda new: setattr(engine, "weight", new)


def the_object_of_a_method(weight: Tensor) -> Rebound:
    engine = Engine(weight)
    return engine.step, lambda new: setattr(engine, "weight", new)


def a_global(weight: Tensor) -> Rebound:
    globals().update(GLOBAL_WEIGHT=weight)
    return reads_global, lambda new: globals().update(GLOBAL_WEIGHT=new)


def a_default(weight: Tensor) -> Rebound:
    def f(x: Tensor, w: Tensor = weight) -> Tensor:
        return x * w

    return f, lambda new: setattr(f, "__defaults__", (new,))


@pytest.mark.parametrize(
    "place", [a_cell, an_object_in_a_cell, the_object_of_a_method, a_global, a_default]
)
def test_a_place_that_is_rebound(
    device: torch.device, rand: Rand, place: Callable[[Tensor], Rebound]
) -> None:
    f, rebind = place(rand(0, 4))

    def change(seed: int) -> None:
        rebind(rand(seed, 4))
        junk(device)

    fast = follows(f, lambda i: (rand(i, 4),), lambda: change(40), lambda: change(70))
    assert replays(fast) >= 3


def test_a_default_argument_and_a_partial(rand: Rand) -> None:
    weight = rand(0, 4)

    def f(x: Tensor, w: Tensor = weight) -> Tensor:
        return x * w

    drop_in(f, lambda i: (rand(i, 4),))
    drop_in(functools.partial(f, w=rand(1, 4)), lambda i: (rand(i, 4),))


def test_a_tensor_that_no_slot_holds_is_named(rand: Rand) -> None:
    """An iterator hands it out: no attribute, cell or global leads to it."""
    hidden = {"weight": rand(0, 4)}

    class Opaque:
        __slots__ = ("get",)

        def __init__(self, get: Callable[[], Tensor]) -> None:
            self.get = get

    opaque = Opaque(iter(lambda: hidden["weight"], None).__next__)
    fast = drop_in(lambda x: x * opaque.get(), lambda i: (rand(i, 4),))
    assert len(fast.recordings[0].untraced) == 1


def test_traced_state_is_not_named_as_untraced(device: torch.device, rand: Rand) -> None:
    fast = drop_in_worlds(lambda: world_of_model(device, rand))
    assert list(fast.recordings[0].untraced) == []


def test_tied_weights_untied(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        torch.manual_seed(3)
        a, b = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
        b.weight = a.weight
        return nn.Sequential(a, b), lambda i: (rand(i, 2, 4),)

    def between(i: int, model: Any) -> None:
        if i == 4:
            model[1].weight = nn.Parameter(new(model[1].weight, i))

    drop_in_worlds(world, calls=9, recordings=None, min_replays=4, between=between)


# What a library keeps for a recording; tests/gpu/test_libraries.py frees plans of cuFFT.


@pytest.mark.parametrize("device", ["cpu", "tape"], indirect=True)
def test_what_a_library_kept_is_lost(device: torch.device, rand: Rand) -> None:
    net = nn.Linear(4, 4).to(device)
    fast = ol.graph(lambda x: net(x), warmup=2)
    x = rand(0, 2, 4)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
        fast._table.entries[0].captured.graph.lost = "the library freed its tables"
        compare(fast, net, lambda _: (x,), 3)
    stats = fast.stats()
    assert (stats.captures, stats.warmup_calls, stats.replays) == (2, 3, 4)
    assert stats.recordings[0].why == "the library freed its tables"


@pytest.mark.parametrize("device", ["cpu", "tape"], indirect=True)
def test_what_a_library_kept_is_lost_before_the_backward(device: torch.device, rand: Rand) -> None:
    net, other = (nn.Linear(4, 4, device=device) for _ in range(2))
    other.load_state_dict(net.state_dict())
    fast = ol.graph(lambda x: net(x).sin(), warmup=1)
    for i in range(8):
        net.zero_grad()
        other.zero_grad()
        y, z = fast(rand(i, 2, 4)), other(rand(i, 2, 4)).sin()
        if i == 5:
            captured: Any = fast._table.entries[0].captured
            for graph in (captured.graph._graph, *(b.graph for b in captured.pair.backwards())):
                graph.lost = "the library freed its tables"
        y.sum().backward()
        z.sum().backward()
        assert_same(y, z)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in other.parameters()])
    assert fast.stats().captures == 2
