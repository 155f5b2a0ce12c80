"""Table of tensors: every kind of slot that can lead to a tensor, rebound in every way.

A slot that onelaunch cannot see keeps the tensor that it held, so what is read must be traced or
named in `recordings[0].untraced`: never read stale without a word.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, replays

Rand = Callable[..., Tensor]
WEIGHT: Any = None
SCALE: Any = 2.0


def by_helper(x: Tensor) -> Tensor:
    return x * WEIGHT


def scaled_by_global(x: Tensor) -> Tensor:
    return by_helper(x) * SCALE


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Box:
    value: Any


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holder(nn.Module):
    """Reads one tensor, out of whatever `get` finds in `box`."""

    shared: Any = None

    def __init__(self, box: Any, get: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.box = box
        self.get = get

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get(self.box)


def at_once(fast: Any, eager: Callable[[Tensor], Tensor], rand: Rand, calls: int = 4) -> None:
    with torch.no_grad():
        for i in range(calls):
            assert_same(fast(rand(i, 3)), eager(rand(i, 3)))


def set_in(box: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        box = box[key] if not isinstance(key, str) or isinstance(box, dict) else getattr(box, key)
    if isinstance(path[-1], str) and not isinstance(box, dict):
        setattr(box, path[-1], value)
    else:
        box[path[-1]] = value


BOXES: dict[str, tuple[Callable[[Tensor], Any], tuple[Any, ...]]] = {
    "list": (lambda t: [0, t], (1,)),
    "dict": (lambda t: {"w": t}, ("w",)),
    "dict in list": (lambda t: [{"w": t}], (0, "w")),
    "list in dict": (lambda t: {"w": [t]}, ("w", 0)),
    "deep": (lambda t: {"a": {"b": [{"c": t}]}}, ("a", "b", 0, "c")),
    "object": (lambda t: Box(t), ("value",)),
    "object in list": (lambda t: [Box(t)], (0, "value")),
    "object in object": (lambda t: Box(Box(t)), ("value", "value")),
    "object with slots": (lambda t: Slots(t), ("value",)),
    "list in tuple": (lambda t: (1, [t]), (1, 0)),
    "named tuple of lists": (lambda t: Pair(1, [t]), (1, 0)),
    "deque": (lambda t: collections.deque([t]), (0,)),
    "ordered dict": (lambda t: collections.OrderedDict(w=t), ("w",)),
    "default dict": (lambda t: collections.defaultdict(list, w=t), ("w",)),
}


def get_in(box: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        named = isinstance(key, str) and not isinstance(box, dict)
        box = getattr(box, key) if named else box[key]
    return box


@pytest.mark.parametrize("kind", BOXES)
def test_a_tensor_in_a_container_of_a_module(rand: Rand, kind: str) -> None:
    make, path = BOXES[kind]
    box = make(rand(50, 3))
    model = Holder(box, lambda b: get_in(b, path))
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    assert replays(fast) > 0
    if not fast.recordings[0].untraced:
        set_in(box, path, rand(51, 3))
        at_once(fast, model, rand)
        set_in(box, path, rand(52, 3))
        at_once(fast, model, rand)


@pytest.mark.parametrize("kind", [k for k in BOXES if k not in ("object with slots", "deque")])
def test_a_number_in_a_container_of_a_module(rand: Rand, kind: str) -> None:
    """Constants that forward reads are in the recording as tensors are."""
    make, path = BOXES[kind]
    box: Any = make(2.0)  # type: ignore[arg-type]
    model = Holder(box, lambda b: get_in(b, path))
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    for value in (3.0, 3, True, 2.0):
        set_in(box, path, value)
        at_once(fast, model, rand)


@pytest.mark.parametrize("kind", BOXES)
def test_a_container_replaced_whole(rand: Rand, kind: str) -> None:
    make, path = BOXES[kind]
    model = Holder(make(rand(50, 3)), lambda b: get_in(b, path))
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    if not fast.recordings[0].untraced:
        for seed in (51, 52):
            model.box = make(rand(seed, 3))
            at_once(fast, model, rand)


def assign(m: Any, value: Any) -> None:
    m.box = value


def through_dict(m: Any, value: Any) -> None:
    m.__dict__["box"] = value


def through_vars(m: Any, value: Any) -> None:
    vars(m).update(box=value)


def through_object(m: Any, value: Any) -> None:
    object.__setattr__(m, "box", value)


def deleted_and_set(m: Any, value: Any) -> None:
    del m.box
    m.box = value


def popped(m: Any, value: Any) -> None:
    m.__dict__.pop("box")
    m.__dict__.setdefault("box", value)


def many_changes(m: Any, value: Any) -> None:
    for i in range(100):
        setattr(m, f"other_{i}", i)
        if i % 2:
            delattr(m, f"other_{i}")
    m.box = value


WAYS = [
    assign,
    through_dict,
    through_vars,
    through_object,
    deleted_and_set,
    popped,
    many_changes,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["tensor", "number"])
def test_an_attribute_set_in_every_way(
    rand: Rand, way: Callable[[Any, Any], None], what: str
) -> None:
    values: list[Any] = [rand(50 + i, 3) if what == "tensor" else 2.0 + i for i in range(4)]
    model = Holder(values[0], lambda b: b)
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    for value in values[1:]:
        way(model, value)
        at_once(fast, model, rand)
    assert replays(fast) > 0


@pytest.mark.parametrize("dictionary", ["_parameters", "_buffers", "_modules"])
def test_the_dicts_of_a_module_written_directly(
    device: torch.device, rand: Rand, dictionary: str
) -> None:
    model = nn.BatchNorm1d(3).to(device).eval()
    outer = nn.Sequential(model)
    fast = ol.graph(outer, warmup=1)
    x = rand(0, 4, 3)
    with torch.no_grad():
        for i in range(9):
            if i == 4 and dictionary == "_parameters":
                model._parameters["weight"] = nn.Parameter(rand(50, 3))
            elif i == 4 and dictionary == "_buffers":
                model._buffers["running_mean"] = rand(50, 3)
            elif i == 4:
                outer._modules["0"] = nn.Tanh()
            assert_same(fast(x), outer(x))
    assert replays(fast) > 0


def test_a_class_attribute_rebound(rand: Rand) -> None:
    class Model(nn.Module):
        weight = rand(50, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = Model()
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    if not fast.recordings[0].untraced:
        Model.weight = rand(51, 3)
        at_once(fast, model, rand)
        model.weight = rand(52, 3)
        at_once(fast, model, rand)


def test_a_global_that_a_helper_reads(rand: Rand) -> None:
    global WEIGHT, SCALE
    WEIGHT, SCALE = rand(50, 3), 2.0
    fast = ol.graph(scaled_by_global, warmup=1)
    at_once(fast, scaled_by_global, rand)
    if not fast.recordings[0].untraced:
        WEIGHT = rand(51, 3)
        at_once(fast, scaled_by_global, rand)


def test_a_number_in_a_global(rand: Rand) -> None:
    global WEIGHT, SCALE
    WEIGHT, SCALE = rand(50, 3), 2.0
    fast = ol.graph(scaled_by_global, warmup=1)
    at_once(fast, scaled_by_global, rand)
    for value in (3.0, 2.0, 3):
        SCALE = value
        at_once(fast, scaled_by_global, rand)
    SCALE = 2.0


def test_a_number_in_a_closure(rand: Rand) -> None:
    k = 2.0

    def f(x: Tensor) -> Tensor:
        return x * k

    fast = ol.graph(f, warmup=1)
    at_once(fast, f, rand)
    for value in (3.0, 2.0, 3):
        k = value
        at_once(fast, f, rand)


def test_a_function_in_a_closure_with_its_own_closure(rand: Rand) -> None:
    weight = rand(50, 3)

    def first(x: Tensor) -> Tensor:
        return x * weight

    def second(x: Tensor) -> Tensor:
        return x + weight

    inner = first

    def f(x: Tensor) -> Tensor:
        return inner(x) + 1

    fast = ol.graph(f, warmup=1)
    at_once(fast, f, rand)
    weight = rand(51, 3)
    at_once(fast, f, rand)

    inner = second
    at_once(fast, f, rand)


def test_a_partial_among_the_attributes(rand: Rand) -> None:
    scale = functools.partial(torch.mul, rand(50, 3))
    model = Holder(scale, lambda p: p(torch.ones_like(p.args[0])))
    fast = ol.graph(model, warmup=1)
    at_once(fast, model, rand)
    model.box = functools.partial(torch.mul, rand(51, 3))
    at_once(fast, model, rand)
