"""State behind methods of C that the callable keeps: `draw = random.Random(5).random`."""

from __future__ import annotations

import collections
import contextvars
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, random_tensor, right_or_refused

Draw = Callable[[], float]
Place = tuple[Callable[..., float], Callable[[float], object]]
"""A method that gives a number, and a function that changes the number."""


def bits_of(generator: random.Random) -> Draw:
    get = generator.getrandbits
    return lambda: get(8) / 256


DRAWS: dict[str, Callable[[], Draw]] = {
    "random": lambda: random.Random(5).random,
    "uniform": lambda: functools.partial(random.Random(5).uniform, 0, 1),
    "bits": lambda: bits_of(random.Random(5)),
    "numpy": lambda: np.random.default_rng(5).random,
    "numpy of old": lambda: np.random.RandomState(5).random_sample,
    "bit generator": lambda: functools.partial(np.random.Generator(np.random.PCG64(5)).random),
    "partial": lambda: functools.partial(functools.partial(random.Random(5).random)),
}


def flipping(draw: Draw) -> Callable[[Tensor], Tensor]:
    return lambda x: x.flip(-1) if draw() < 0.15 else x + 0


def as_a_default(draw: Draw) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor, *, draw: Draw = draw) -> Tensor:
        return x.flip(-1) if draw() < 0.15 else x + 0

    return f


class Keeping(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draws = {"flip": [draw]}

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) if self.draws["flip"][0]() < 0.15 else x + 0


def as_an_argument(draw: Draw) -> Callable[[Tensor], Tensor]:
    return functools.partial(lambda draw, x: flipping(draw)(x), draw)


def under_a_name_of_the_call(draw: Any) -> Callable[[Tensor], Tensor]:
    generator = draw.__self__

    def f(x: Tensor) -> Tensor:
        current = generator.random
        return x.flip(-1) if current() < 0.15 else x + 0

    return f


def refused_as_drawn(make: Callable[[], Any], device: torch.device) -> None:
    """Each call flips or not, as the generator of its world has it; or none is recorded."""

    def world() -> tuple[Any, Any]:
        return make(), lambda i: (random_tensor(i, 3, device=device),)

    assert right_or_refused(world, "OL117", calls=30) == "OL117"


@pytest.mark.parametrize("draw", DRAWS)
def test_a_generator_behind_a_method(device: torch.device, draw: str) -> None:
    refused_as_drawn(lambda: flipping(DRAWS[draw]()), device)


@pytest.mark.parametrize(
    "kept",
    [as_a_default, Keeping, as_an_argument, under_a_name_of_the_call],
    ids=lambda kept: kept.__name__,
)
def test_where_the_method_is_kept(device: torch.device, kept: Callable[[Draw], Any]) -> None:
    refused_as_drawn(lambda: kept(random.Random(5).random), device)


class Own:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def draw(self) -> float:
        return self.rng.random()  # drawn inside


class Drawing(nn.Module):
    def __init__(self, pick: Callable[[], float]) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return y * float(self.pick())  # drawn here


NAMED: dict[str, tuple[Callable[[], Callable[[], float]], str, str]] = {
    "method": (lambda: random.Random(3).random, "pick.__self__", "drawn here"),
    "numpy": (lambda: np.random.default_rng(3).random, "pick.__self__", "drawn here"),
    "partial": (
        lambda: functools.partial(np.random.default_rng(3).choice, 3),
        "pick.__self__",
        "drawn here",
    ),
    "method in Python": (lambda: Own().draw, "self.rng", "drawn inside"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_generator_is_named_where_it_is_drawn_from(device: torch.device, name: str) -> None:
    make, generator, line = NAMED[name]
    fast = ol.graph(Drawing(make()), warmup=1)
    x = random_tensor(0, 3, device=device)
    with torch.no_grad():
        fast(x)
        with pytest.raises(ol.CaptureError, match="OL117") as caught:
            fast(x)
    assert f"the generator `{generator}` is advanced" in caught.value.what
    assert f"# {line}" in str(caught.value.where)


def of_a_dict() -> Place:
    table = {"scale": 2.0}
    return functools.partial(table.get, "scale"), lambda v: table.update(scale=v)


def of_a_large_dict() -> Place:
    table = {f"scale {i}": 2.0 for i in range(200)}
    get = table.get
    return lambda: get("scale 7", 0.0), lambda v: table.update({"scale 7": v})


def of_an_item() -> Place:
    table = {"scale": 2.0}
    return functools.partial(table.__getitem__, "scale"), lambda v: table.update(scale=v)


def of_a_list() -> Place:
    scales = [2.0]
    return functools.partial(scales.__getitem__, 0), lambda v: scales.__setitem__(0, v)


def of_a_deque() -> Place:
    scales = collections.deque([2.0])
    return functools.partial(scales.__getitem__, 0), lambda v: scales.__setitem__(0, v)


def of_a_proxy() -> Place:
    table = {"scale": 2.0}
    get = types.MappingProxyType(table).get
    return lambda: get("scale", 0.0), lambda v: table.update(scale=v)


def of_a_context_variable() -> Place:
    scale = contextvars.ContextVar("scale", default=2.0)
    return scale.get, scale.set


def of_a_context_variable_in_the_call() -> Place:
    scale = contextvars.ContextVar("scale", default=2.0)

    def read() -> float:
        current = scale.get
        return current()

    return read, scale.set


def of_an_object_in_a_dict() -> Place:
    table = {"layer": types.SimpleNamespace(scale=2.0)}
    get = table.get

    def read() -> float:
        return get("layer").scale  # type: ignore[union-attr]

    return read, lambda v: setattr(table["layer"], "scale", v)


def of_an_attribute() -> Place:
    layer = types.SimpleNamespace(scale=2.0)
    return functools.partial(layer.__getattribute__, "scale"), functools.partial(
        setattr, layer, "scale"
    )


def of_a_partial_getattr() -> Place:
    layer = types.SimpleNamespace(scale=2.0)
    return functools.partial(getattr, layer, "scale"), functools.partial(setattr, layer, "scale")


def of_an_array() -> Place:
    scales = np.full(1, 2.0)
    return lambda sum=scales.sum: float(sum()), lambda v: scales.__setitem__(0, v)


PLACES = {name: place for name, place in globals().items() if name.startswith("of_")}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_method_reads(device: torch.device, place: str) -> None:
    def world() -> tuple[Any, Any]:
        read, change = PLACES[place]()

        def f(x: Tensor) -> Tensor:
            return x * read()

        f.change = change  # type: ignore[attr-defined]
        return f, lambda i: (random_tensor(i, 3, device=device),)

    def between(i: int, f: Any) -> None:
        f = f.fn if isinstance(f, ol.Graphed) else f
        f.change(2.0 if i < 4 else 3.0)

    drop_in_worlds(world, calls=8, recordings=None, min_replays=4, between=between)


def test_a_weight_behind_a_method(device: torch.device) -> None:
    """Its memory may move, and kernels write into it, as into any other's."""
    eager, weight = torch.ones(3, device=device), torch.ones(3, device=device)
    expected, fast = eager.mul, ol.graph(functools.partial(weight.mul), warmup=1)
    with torch.no_grad():
        for i in range(9):
            if i == 3:
                eager.add_(1)
                weight.add_(1)
            if i == 6:
                eager.data, weight.data = torch.zeros_like(eager), torch.zeros_like(weight)
            x = random_tensor(i, 3, device=device)
            assert_same(fast(x), expected(x), f"call {i}")
    assert fast.stats().replays >= 5


@pytest.mark.parametrize("taken", ["popleft", "pop"])
def test_what_a_method_takes_away_is_refused(device: torch.device, taken: str) -> None:
    def world() -> tuple[Any, Any]:
        take = getattr(collections.deque(map(float, range(50))), taken)
        return lambda x: x * take(), lambda i: (random_tensor(i, 3, device=device),)

    assert right_or_refused(world, "OL118", calls=12) == "OL118"


def test_what_a_method_adds_is_refused_where_it_is_read(device: torch.device) -> None:
    def world() -> tuple[Any, Any]:
        log: list[float] = []
        add, count = log.append, log.__len__

        def f(x: Tensor) -> Tensor:
            add(1.0)
            return x * count()

        return f, lambda i: (random_tensor(i, 3, device=device),)

    assert right_or_refused(world, "OL118", calls=12) == "OL118"
