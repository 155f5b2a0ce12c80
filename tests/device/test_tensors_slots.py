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

from .drop_in import Rand, compare, follows, replays

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


def holder_of(kind: str, value: Any) -> tuple[Any, Callable[[Any], Callable[[], None]]]:
    """A module that reads a value in a container, and what puts another one there."""
    make, path = BOXES[kind]
    model = Holder(make(value), lambda box: get_in(box, path))
    return model, lambda new: lambda: set_in(model.box, path, new)


@pytest.mark.parametrize("kind", BOXES)
def test_a_tensor_in_a_container_of_a_module(rand: Rand, kind: str) -> None:
    """It is replaced in its container, and then with it."""
    model, put = holder_of(kind, rand(50, 3))
    changes = [put(rand(51, 3)), put(rand(52, 3))]
    for seed in (53, 54):
        changes.append(lambda seed=seed: setattr(model, "box", BOXES[kind][0](rand(seed, 3))))
    fast = follows(model, lambda i: (rand(i, 3),), *changes)
    assert replays(fast) > 0
    assert not fast.recordings[0].untraced


@pytest.mark.parametrize("kind", [k for k in BOXES if k not in ("object with slots", "deque")])
def test_a_number_in_a_container_of_a_module(rand: Rand, kind: str) -> None:
    """Constants that forward reads are in the recording as tensors are."""
    model, put = holder_of(kind, 2.0)
    follows(model, lambda i: (rand(i, 3),), *map(put, (3.0, 3, True, 2.0)))


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


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "assigned": lambda m, value: setattr(m, "box", value),
    "through __dict__": lambda m, value: m.__dict__.__setitem__("box", value),
    "through vars": lambda m, value: vars(m).update(box=value),
    "through object": lambda m, value: object.__setattr__(m, "box", value),
    "deleted and set": deleted_and_set,
    "popped": popped,
    "among many changes": many_changes,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["tensor", "number"])
def test_an_attribute_set_in_every_way(rand: Rand, way: str, what: str) -> None:
    values: list[Any] = [rand(50 + i, 3) if what == "tensor" else 2.0 + i for i in range(4)]
    model = Holder(values[0], lambda b: b)
    changes = [lambda value=value: WAYS[way](model, value) for value in values[1:]]
    assert replays(follows(model, lambda i: (rand(i, 3),), *changes)) > 0


@pytest.mark.parametrize("dictionary", ["_parameters", "_buffers", "_modules"])
def test_the_dicts_of_a_module_written_directly(
    device: torch.device, rand: Rand, dictionary: str
) -> None:
    model = nn.BatchNorm1d(3).to(device).eval()
    outer = nn.Sequential(model)

    def change() -> None:
        if dictionary == "_parameters":
            model._parameters["weight"] = nn.Parameter(rand(50, 3))
        elif dictionary == "_buffers":
            model._buffers["running_mean"] = rand(50, 3)
        else:
            outer._modules["0"] = nn.Tanh()

    assert replays(follows(outer, lambda i: (rand(0, 4, 3),), change)) > 0


def test_a_class_attribute_rebound(rand: Rand) -> None:
    class Model(nn.Module):
        weight = rand(50, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = Model()
    changes = [
        lambda i=i, of=of: setattr(of, "weight", rand(51 + i, 3))
        for i, of in enumerate((Model, model))
    ]
    assert not follows(model, lambda i: (rand(i, 3),), *changes).recordings[0].untraced


@pytest.mark.parametrize("name", ["WEIGHT", "SCALE"])
def test_a_global_that_a_helper_or_the_callable_reads(
    rand: Rand, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(f"{__name__}.WEIGHT", rand(50, 3))
    values = (3.0, 2.0, 3) if name == "SCALE" else (rand(51, 3), rand(52, 3))
    changes = [lambda v=v: monkeypatch.setattr(f"{__name__}.{name}", v) for v in values]
    fast = follows(scaled_by_global, lambda i: (rand(i, 3),), *changes)
    assert not fast.recordings[0].untraced


def test_a_number_in_a_closure(rand: Rand) -> None:
    k = 2.0

    def change(value: float) -> Callable[[], None]:
        def to() -> None:
            nonlocal k
            k = value

        return to

    follows(lambda x: x * k, lambda i: (rand(i, 3),), *map(change, (3.0, 2.0, 3)))


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
    compare(fast, f, lambda i: (rand(i, 3),), 4)
    weight = rand(51, 3)
    compare(fast, f, lambda i: (rand(i, 3),), 4)
    inner = second
    compare(fast, f, lambda i: (rand(i, 3),), 4)


def test_a_partial_among_the_attributes(rand: Rand) -> None:
    def scale(seed: int) -> Any:
        return functools.partial(torch.mul, rand(seed, 3))

    model = Holder(scale(50), lambda p: p(torch.ones_like(p.args[0])))
    follows(model, lambda i: (rand(i, 3),), lambda: setattr(model, "box", scale(51)))
