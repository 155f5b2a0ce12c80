"""State behind methods of C that the callable keeps: `draw = random.Random(5).random`."""

from __future__ import annotations

import builtins
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

from .drop_in import assert_same, random_tensor, right_or_refused
from .states import Place, reads_anew

Draw = Callable[[], float]
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


def called(make: Callable[[Any], Callable[..., Any]], *args: Any) -> Callable[[Any], Any]:
    """A method of a box, kept with its arguments."""
    return lambda box: functools.partial(make(box), *args)


def by_get(get: Callable[..., float]) -> Callable[[], float]:
    return lambda: get("scale", 0.0)


def of_an_object(get: Callable[..., Any]) -> Callable[[], float]:
    return lambda: get("layer").scale


def made_in_the_call(scale: Any) -> Callable[[], float]:
    def read() -> float:
        current = scale.get
        return current()

    return read


def table() -> Any:
    return {"scale": 2.0}


def layer() -> Any:
    return types.SimpleNamespace(scale=2.0)


def variable() -> Any:
    return contextvars.ContextVar("scale", default=2.0)


def put(box: Any, value: float) -> None:
    box["scale" if isinstance(box, dict) else 0] = value


def put_on(box: Any, value: float) -> None:
    box.scale = value


PLACES: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Callable[[], float]], Callable[[Any, float], Any]]
] = {
    "a dict": (table, called(lambda t: t.get, "scale"), put),
    "a large dict": (
        lambda: {**{f"scale {i}": 2.0 for i in range(200)}, "scale": 2.0},
        lambda t: by_get(t.get),
        put,
    ),
    "an item": (table, called(lambda t: t.__getitem__, "scale"), put),
    "a list": (lambda: [2.0], called(lambda t: t.__getitem__, 0), put),
    "a deque": (lambda: collections.deque([2.0]), called(lambda t: t.__getitem__, 0), put),
    "a proxy": (table, lambda t: by_get(types.MappingProxyType(t).get), put),
    "a context variable": (variable, lambda scale: scale.get, lambda scale, v: scale.set(v)),
    "a context variable in the call": (variable, made_in_the_call, lambda scale, v: scale.set(v)),
    "an object in a dict": (
        lambda: {"layer": layer()},
        lambda t: of_an_object(t.get),
        lambda t, v: put_on(t["layer"], v),
    ),
    "an attribute": (layer, called(lambda box: box.__getattribute__, "scale"), put_on),
    "a partial getattr": (layer, lambda box: functools.partial(getattr, box, "scale"), put_on),
    "an array": (lambda: np.full(1, 2.0), lambda array: lambda sum=array.sum: float(sum()), put),
}
"""A box, what reads a number of it, and what changes that."""


@pytest.mark.parametrize("place", PLACES)
def test_what_a_method_reads(device: torch.device, place: str) -> None:
    def made() -> Place:
        make, read, change = PLACES[place]
        box = make()
        return read(box), functools.partial(change, box)

    reads_anew(device, made)


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


class Box:
    def __init__(self) -> None:
        self.scale = 2.0


class Kept:
    """Functions of C that are kept as attributes, and so no methods of who keeps them."""

    get = getattr

    def __init__(self, box: Box) -> None:
        self.own, self.of_dict = getattr, dict.get
        self.bound = functools.partial(getattr, box)
        self.method = box.__getattribute__
        self.text = "{0.scale}".format


KEPT: dict[str, Callable[[Kept, Box], float]] = {
    "of a class": lambda kept, box: kept.get(box, "scale"),
    "of the object": lambda kept, box: kept.own(box, "scale"),
    "spread": lambda kept, box: kept.own(*(box, "scale")),
    "partial": lambda kept, box: kept.bound("scale"),
    "method": lambda kept, box: kept.method("scale"),
    "dict": lambda kept, box: kept.of_dict(vars(box), "scale"),
    "default": lambda kept, box: kept.own(box, "none", kept.own(box, "scale")),
    "format": lambda kept, box: float(kept.text(box)),
    "module": lambda kept, box: builtins.getattr(box, "scale"),  # noqa: B009
}


@pytest.mark.parametrize("how", KEPT)
def test_functions_that_are_kept_as_attributes(device: torch.device, how: str) -> None:
    read = KEPT[how]
    box = Box()
    kept = Kept(box)

    def f(x: Tensor) -> Tensor:
        return x * read(kept, box)

    fast = ol.graph(f)
    with torch.no_grad():
        for scale in (2.0, 2.0, 2.0, 2.0, 2.0, 5.0, 5.0, 2.0):
            box.scale = scale
            x = random_tensor(1, 4, device=device)
            assert_same(fast(x), f(x))
