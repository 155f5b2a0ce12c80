"""What changes between requests, each with a cache of its own.

The recordings of the last request are handed to the next one with all that they expect, and none of
it is taken anew from what is there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.state import guard as guards
from onelaunch.state.native_guard import NativeGuard

from .drop_in import assert_same


@pytest.fixture(params=["native", "python"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The guard checks in C, or in Python."""
    if request.param == "python":
        monkeypatch.setattr(guards, "native_guard", lambda: NativeGuard(None, "not wanted"))
    return request.param


class Layer:
    """A layer's part of a cache: keys of a fixed size, as a static cache of transformers has."""

    def __init__(self, device: torch.device) -> None:
        self.keys = torch.zeros(2, 16, 4, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)


class Cache:
    def __init__(self, device: torch.device) -> None:
        self.layers = [Layer(device) for _ in range(2)]
        self.total = torch.zeros(2, 4, device=device)


class Block(nn.Module):
    """Attention to the cache, a recurrent state in the module, as RecurrentGemma has it, and what
    programs put into modules: adapters, flags, hooks, functions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.lin, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.adapters: list[nn.Module] = [nn.Linear(4, 4)]
        self.factors = {"a": 1.5}
        self.gain = 2.0
        self.last: Tensor | None = None
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        layer = cache.layers[self.number]
        layer.keys.index_copy_(1, layer.length.reshape(1), self.lin(x)[:, None])
        layer.length.add_(1)
        h = self.act(layer.keys.sum(1)) * self.scale.to(x.dtype) * self.gain
        for adapter in self.adapters:
            h = h + adapter(x)
        for factor in self.factors.values():
            h = h * factor
        if self.training:
            h = h + 1
        self.last = h if self.last is None else self.last.to(x.dtype) * 0.5 + h
        cache.total += self.last
        return self.down(self.last) + cache.total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(2))
        self.offset = torch.zeros(4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return x + self.offset


def made(device: torch.device) -> Model:
    torch.manual_seed(1)
    model = Model().to(device).eval()
    model.offset = model.offset.to(device)
    for block in model.blocks:
        for adapter in block.adapters:  # a plain list: `to` does not see them
            adapter.to(device)
    return model


def new_weights(model: Model, n: int) -> None:
    for p in model.parameters():
        p.data = p.data * 1.25


def weights_of_other_strides(model: Model, n: int) -> None:
    p = model.blocks[0].lin.weight
    p.data = p.data.t().contiguous().t() if n % 2 else p.data.contiguous()


@torch.no_grad()
def weights_in_place(model: Model, n: int) -> None:
    for p in model.parameters():
        p.mul_(1.25)


def another_layer(model: Model, n: int) -> None:
    torch.manual_seed(n)
    model.blocks[n % 2].lin = nn.Linear(4, 4).to(model.offset.device)


def hook_on_and_off(model: Model, n: int) -> None:
    hooks = model.blocks[0].lin._forward_hooks
    if hooks:
        hooks.clear()
    else:
        model.blocks[0].lin.register_forward_hook(lambda module, args, result: result * 3)


def adapters(model: Model, n: int) -> None:
    torch.manual_seed(n)
    if n % 3 == 2:
        model.blocks[0].adapters.pop()
    else:
        model.blocks[0].adapters.append(nn.Linear(4, 4).to(model.offset.device))


def forward_of_an_instance(model: Model, n: int) -> None:
    layer = model.blocks[0].lin
    if n % 2:
        del layer.forward
    else:
        layer.forward = types.MethodType(lambda self, x: x * 2 + self.bias, layer)


def function(model: Model, n: int) -> None:
    factor = float(n)
    model.blocks[1].act = lambda h: torch.sin(h) * factor


def state(by: Callable[[Tensor, int], Tensor | None]) -> Callable[[Model, int], None]:
    """Put a tensor made of eight numbers, or None, into each block."""

    def change(model: Model, n: int) -> None:
        for block in model.blocks:
            block.last = by(torch.arange(8.0).to(model.offset.device), n)

    return change


def block_added(model: Model, n: int) -> None:
    if n % 2:
        model.blocks.append(model.blocks[0])
    else:
        del model.blocks[-1]


DTYPES = (torch.float32, torch.float64)
CHANGES: dict[str, Callable[[Model, int], object]] = {
    "new weights": new_weights,
    "weights of other strides": weights_of_other_strides,
    "weights in place": weights_in_place,
    "another layer": another_layer,
    "a hook on and off": hook_on_and_off,
    "hooks that stay": lambda model, n: model.blocks[1].register_forward_pre_hook(
        lambda module, args: (args[0] + n, *args[1:])
    ),
    "adapters": adapters,
    "factors": lambda model, n: model.blocks[0].factors.update({f"b{n}": 0.5 + n}),
    "forward of an instance": forward_of_an_instance,
    "gain": lambda model, n: setattr(model.blocks[0], "gain", 1.0 + n % 2),
    "mode": lambda model, n: model.train(not model.training),
    "function": function,
    "a buffer of another dtype": lambda model, n: setattr(
        model.blocks[0], "scale", model.blocks[0].scale.to(DTYPES[n % 2]) * 1.5
    ),
    "a plain tensor": lambda model, n: setattr(model, "offset", model.offset + 1),
    "requires_grad": lambda model, n: model.requires_grad_(bool(n % 2)),
    "state emptied": state(lambda t, n: None),
    "state of another dtype": state(
        lambda t, n: torch.ones_like(t.view(2, 4), dtype=DTYPES[n % 2])
    ),
    "state of other strides": state(lambda t, n: t.view(4, 2).t() if n % 2 else t.view(2, 4)),
    "a block added": block_added,
}


def served(
    device: torch.device, fast: Any, models: tuple[Model, Model], change: Any, requests: int = 5
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each token of several requests, graphed and eager, with a change between requests."""
    for request in range(requests):
        for model in models:
            change(model, request)
        caches = Cache(device), Cache(device)
        for i in range(6):
            x = (torch.arange(8.0).view(2, 4) / (8 + request + i)).to(device)
            yield fast(x, caches[0]), models[1](x, caches[1])
        assert_same(caches[0].total, caches[1].total, "total")
        for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            assert_same(mine.keys, theirs.keys, "keys")
            assert_same(mine.length, theirs.length, "length")


@pytest.mark.filterwarnings("ignore:.*OL308")  # a hook's Python is not repeated
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_requests(device: torch.device, change: str) -> None:
    models = made(device), made(device)
    fast = ol.graph(models[0])
    with torch.no_grad():
        for got, expected in served(device, fast, models, CHANGES[change]):
            assert_same(got, expected)
    assert fast.stats().replays > 0


def test_recordings_whose_weights_went_are_freed(device: torch.device) -> None:
    models = made(device), made(device)
    fast = ol.graph(models[0])
    with torch.no_grad():
        for _ in served(device, fast, models, new_weights, 12):
            pass
    assert len(fast.recordings) <= 2
    assert fast.stats().captures >= 12


class Window(nn.Module):
    """Keeps the newest rows, of which a prompt may have had fewer; it works on other sizes then."""

    last: Tensor | None = None

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        rows = x if self.last is None or x.shape[1] > 1 else torch.cat([self.last, x], 1)[:, 1:]
        self.last = rows[:, -3:].clone()
        cache.total += self.last.sum(1)
        return cache.total * 1


def test_state_of_the_size_that_a_prompt_had(device: torch.device) -> None:
    mine, theirs = Window(), Window()
    fast = ol.graph(mine)
    with torch.no_grad():
        for prompt in (5, 2, 5, 2, 4, 2):
            caches = Cache(device), Cache(device)
            for step in range(8):
                x = torch.rand(2, prompt if step == 0 else 1, 4).to(device)
                assert_same(fast(x, caches[0]), theirs(x, caches[1]))
                assert_same(mine.last, theirs.last, "last")
    assert fast.stats().captures <= 3


class Ema(nn.Module):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.mean = x.clone() if cache.mean is None else cache.mean * 0.5 + x
        cache.total += cache.mean
        return cache.total * 1


def test_a_cache_that_begins_empty(device: torch.device) -> None:
    """The first call of each request finds None where the others find a tensor."""
    fast = ol.graph(Ema())
    with torch.no_grad():
        for _ in range(6):
            caches = Cache(device), Cache(device)
            caches[0].mean = caches[1].mean = None  # pyright: ignore
            for _ in range(8):
                x = torch.rand(2, 4).to(device)
                assert_same(fast(x, caches[0]), Ema()(x, caches[1]))
    assert fast.stats().captures <= 2


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        h = self.lin(x)
        cache.mean = cache.mean * 0.9 + h
        cache.seen = h[:, :2]  # shares memory with a result
        return h, cache.mean + cache.total


def test_what_is_stored_is_no_static_result(device: torch.device) -> None:
    """Recordings of several requests in one pool: each would overwrite what another has stored."""
    mine, theirs = Stored().to(device), Stored().to(device)
    fast = ol.graph(mine, outputs="static")
    pairs = [(Cache(device), Cache(device)) for _ in range(2)]
    for cache in (cache for pair in pairs for cache in pair):
        cache.mean = torch.zeros(2, 4).to(device)  # pyright: ignore
    with torch.no_grad():
        for j in [0] * 4 + [1] * 4 + [0, 0, 1, 0, 1]:
            x = torch.rand(2, 4).to(device)
            got = [t.clone() for t in fast(x, pairs[j][0])]
            assert_same(got, [t.clone() for t in theirs(x, pairs[j][1])])
            for a, b in pairs:
                assert_same(a.mean, b.mean, "mean")  # pyright: ignore
                assert_same(getattr(a, "seen", None), getattr(b, "seen", None), "seen")
    assert fast.stats().replays > 4


class Rows:
    def __init__(self, device: torch.device) -> None:
        self.rows, self.length = torch.zeros(16, 4, device=device), 0

    def append(self, x: Tensor) -> Tensor:
        self.rows[self.length : self.length + 1] = x
        place = torch.arange(16, device=x.device) <= self.length
        self.length += 1
        return torch.where(place[:, None], self.rows, 0.0).sum(0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_that_is_written_through_a_view(device: torch.device, inference: bool) -> None:
    """The first recording has a single length, and is taken over all the same."""

    def f(x: Tensor, cache: Rows) -> Tensor:
        return cache.append(x)

    fast = ol.graph(f)
    with torch.inference_mode(inference):
        for seed in range(8):
            caches = Rows(device), Rows(device)
            for call in range(5):
                x = torch.full((1, 4), float(seed + call), device=device)
                assert_same(fast(x, caches[0]), f(x, caches[1]))
            assert_same(caches[0].rows, caches[1].rows)
    assert fast.stats().captures == 2


class Decoder(nn.Module):
    cache: Rows

    def forward(self, x: Tensor) -> Tensor:
        return self.cache.append(x)


def test_a_cache_that_the_module_keeps(device: torch.device) -> None:
    """Each request has recordings of its own. Its count is no number without end."""
    mine, theirs = Decoder(), Decoder()
    fast = ol.graph(mine)
    with torch.no_grad():
        for _ in range(9):
            mine.cache, theirs.cache = Rows(device), Rows(device)
            for _ in range(6):
                x = torch.rand(1, 4).to(device)
                assert_same(fast(x), theirs(x))
    assert fast.stats().replays > 20
