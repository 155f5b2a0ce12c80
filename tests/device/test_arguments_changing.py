"""Arguments and state that are others at each call: what is said of them, and when."""

from __future__ import annotations

import random
import re
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, replays


class Data:
    """A plain object with tensors, as a batch of torch-geometric is."""

    def __init__(self, x: Tensor, size: int = 3) -> None:
        self.x, self.size = x, size


def warned(fast: Any, calls: list[tuple[Any, ...]]) -> list[tuple[int, str]]:
    """The warnings of these calls, by the number of the call."""
    found: list[tuple[int, str]] = []
    with torch.no_grad():
        for i, args in enumerate(calls):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fast(*args)
            found += [(i, str(w.message)) for w in caught]
    return found


def named_early(fast: Any, calls: list[tuple[Any, ...]], *words: str) -> str:
    """The one warning of these calls, which comes soon and has these words."""
    ((number, text),) = warned(fast, calls)
    assert number < 10
    for part in words:
        assert part in text
    return text


@pytest.mark.parametrize("value", [lambda i: i / 7, lambda i: i], ids=["float", "int"])
def test_a_number_that_changes_is_named_early(rand: Rand, value: Callable[[int], Any]) -> None:
    def f(x: Tensor, options: dict[str, Any]) -> Tensor:
        scale = options["scale"]
        return x * (scale if isinstance(scale, Tensor) else float(scale))  # which reads it

    fast = ol.graph(f, warmup=1)
    calls = [(rand(i, 3), {"scale": value(i), "mode": "a"}) for i in range(30)]
    named_early(fast, calls, "[OL301]", "`args[1]['scale']`", "0-dim tensor")
    for k in range(4):  # as the warning says
        scale = torch.tensor(k / 7)
        alike(lambda x, s=scale: fast(x, {"scale": s}), lambda x, s=scale: x * s, rand, 3, calls=1)
    assert replays(fast) >= 2


class Store:
    """What knows the object that it is in."""

    def __init__(self, data: Any, **values: Any) -> None:
        self.data, self.values = weakref.ref(data), values


class Graph:
    """Tensors two objects down, and attributes that are none, as in torch-geometric."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["store"] = Store(self, **values)
        self.itself = self

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"].values[name]


MADE: dict[str, Callable[[Tensor], Any]] = {
    "plain": Data,
    "namespace": lambda x: types.SimpleNamespace(x=x, size=3),
    "nested": lambda x: Graph(x=x, size=3),
}


@pytest.mark.parametrize("kind", MADE)
def test_an_object_made_anew_at_each_call_is_graphed(rand: Rand, kind: str) -> None:
    def f(data: Any, k: int) -> tuple[Any, Tensor]:
        return data, data.x * k + data.x.mean(0)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(20):
            data = MADE[kind](rand(i, 3, 2))
            same, result = fast(data, 2)
            assert same is data
            assert_same(result, f(data, 2)[1])
    assert len(fast.recordings) == 1
    assert replays(fast) >= 8


class Hetero:
    """A table of stores, and one more that holds no tensor: each knows the object that it is in."""

    def __init__(self, **tables: Any) -> None:
        self.tables = {name: Store(self, **values) for name, values in tables.items()}
        self.whole = Store(self)

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.tables[name].values


def test_an_object_without_tensors_in_one_that_is_taken_apart(rand: Rand) -> None:
    def f(data: Hetero) -> Tensor:
        return data["a"]["x"] * data["b"]["x"] + len(data.whole.values)

    fast = ol.graph(f, warmup=1)
    held = [Hetero(a={"x": rand(i, 3)}, b={"x": rand(i + 1, 3)}) for i in range(25)]
    with torch.no_grad():
        for data in held:
            assert_same(fast(data), f(data))
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4


@pytest.mark.parametrize("kind", ["plain", "hetero"])  # no namespace: it takes no weak reference
def test_an_object_that_is_gone_by_the_next_call_is_soon_taken_apart(rand: Rand, kind: str) -> None:
    """As the batches of a loader. It can never come again, so one recording of it is no use."""

    def f(data: Any) -> Tensor:
        return (data["a"]["x"] if isinstance(data, Hetero) else data.x) * 2

    fast = ol.graph(f)
    make = MADE.get(kind, lambda x: Hetero(a={"x": x}))
    alike(lambda x: fast(make(x)), lambda x: x * 2, rand, 3, 2, calls=14)
    assert len(fast.recordings) == 1
    assert replays(fast) >= 3


def test_objects_that_come_again_stay_state_although_others_are_gone(rand: Rand) -> None:
    """A request makes a cache, and calls with it several times: the next one brings another."""

    def f(cache: Data, x: Tensor) -> Tensor:
        cache.x = cache.x + x
        return cache.x * cache.size

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for request in range(4):
            cache, mine = Data(rand(request, 3)), Data(rand(request, 3))
            for i in range(6):
                assert_same(fast(cache, rand(i, 3)), f(mine, rand(i, 3)))
                assert_same(cache.x, mine.x)
    assert replays(fast) >= 12


def test_what_refers_to_an_object_refers_to_it_in_a_capture(rand: Rand) -> None:
    def f(graph: Any) -> Tensor:
        assert graph.itself is graph
        assert graph.store.data() is graph
        return graph.store.data().x * graph.itself.size

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(20):
            graph = Graph(x=rand(i, 3), size=2 + i // 15)
            assert_same(fast(graph), f(graph))
    assert len(fast.recordings) == 2


def test_the_tensors_of_such_an_object_are_written(rand: Rand) -> None:
    fast = ol.graph(lambda data: data.x.mul_(2).sum(), warmup=1)
    with torch.no_grad():
        for i in range(20):
            data, expected = Data(rand(i, 3)), rand(i, 3) * 2
            assert_same(fast(data), expected.sum())
            assert_same(data.x, expected)
    assert replays(fast) >= 8


def test_an_object_that_the_callable_changes_is_named_early(rand: Rand) -> None:
    def f(data: Data, k: int) -> Tensor:
        data.x = data.x * k
        return data.x + 1

    fast = ol.graph(f, warmup=1)
    data = [Data(rand(i, 3)) for i in range(30)]
    named_early(fast, [(each, 2) for each in data], "[OL302]", "another Data")
    assert all(torch.equal(each.x, rand(i, 3) * 2) for i, each in enumerate(data))


def test_an_object_that_cannot_be_taken_apart_is_named_early(rand: Rand) -> None:
    class Held(Data):
        def __del__(self) -> None:
            pass

    fast = ol.graph(lambda data, x: data.x * x, warmup=1)
    calls = [(Held(rand(i, 3)), rand(i, 3)) for i in range(30)]
    said = "ol.register(Held, flatten, unflatten)"
    named_early(fast, calls, "[OL302]", "a Held", "args[0]", said)


def test_one_object_that_comes_at_each_call_is_state(rand: Rand) -> None:
    """It is not taken apart: what the callable stores there is there."""

    def f(data: Data, x: Tensor) -> Tensor:
        data.x = data.x + x
        return data.x * data.size

    fast, data, mine = ol.graph(f, warmup=1), Data(rand(0, 3)), Data(rand(0, 3))
    alike(lambda x: fast(data, x), lambda x: f(mine, x), rand, 3, calls=12)
    assert replays(fast) >= 8


def test_a_function_made_anew_at_each_call_is_named_early(rand: Rand) -> None:
    fast = ol.graph(lambda f, x: f(x), warmup=1)
    calls = [(lambda x: x * 2, rand(i, 3)) for i in range(30)]
    named_early(fast, calls, "[OL302]", "make it once")


def past(rand: Rand, i: int, layers: int = 2) -> Any:
    return [(rand(i, 2, 3, i, 4), rand(i, 2, 3, i, 4)) for _ in range(layers)]


@pytest.mark.parametrize("counted", [False, True])
def test_a_cache_that_grows_is_named_early(rand: Rand, counted: bool) -> None:
    def f(x: Tensor, past: Any, *length: int) -> Any:
        return [tuple(torch.cat([t, x], 2) for t in layer) for layer in past]

    fast = ol.graph(f, warmup=1)
    calls = [(rand(i, 2, 3, 1, 4), past(rand, i), *([i] if counted else [])) for i in range(30)]
    text = named_early(fast, calls, "[OL301]", "`args[1][0][0]`, dim 2")
    assert "static cache" in text or "StaticCache" in text


def test_a_text_that_grows_is_named_early_and_buckets_serve_it(rand: Rand) -> None:
    fast = ol.graph(torch.sin, warmup=1)
    calls = [(rand(i, 2, 3 + i),) for i in range(60)]
    text = named_early(fast, calls, "`args[0]`, dim 1")
    (written,) = re.findall(r"buckets=(ol\.Buckets\(.*?\)\))", text)
    served = ol.graph(torch.sin, warmup=1, buckets=eval(written))
    assert not warned(served, calls)
    assert replays(served) >= 40


def test_a_number_beside_sizes_that_come_again_is_named_early(rand: Rand) -> None:
    fast = ol.graph(lambda x, s: x * float(s), warmup=1)
    named_early(fast, [(rand(i, 3 + i % 4), i / 7) for i in range(30)], "`args[1]`")


@pytest.mark.parametrize("order", ["random", "one after another"])
def test_a_server_of_twenty_sizes_is_not_warned(rand: Rand, order: str) -> None:
    fast = ol.graph(lambda x, mask: x * mask, warmup=1)
    sizes = [1 + i % 20 for i in range(80)]
    if order == "random":
        random.Random(0).shuffle(sizes)
    assert not warned(fast, [(rand(i, n, 4), rand(i, n, 1)) for i, n in enumerate(sizes)])
    assert len(fast.recordings) == 20


def test_lengths_that_grow_in_steps_are_not_named(rand: Rand) -> None:
    fast = ol.graph(torch.sin, warmup=1)
    assert not warned(fast, [(rand(i, 2, 16 * i),) for i in range(1, 21)])


def test_numbers_that_come_again_are_not_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3), i // 2) for i in range(40)])
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3), i % 5) for i in range(40)])


def test_sizes_and_other_arguments_that_change_are_not_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, s: x * s, warmup=1)
    assert not warned(fast, [(rand(i, 3 + i), i) for i in range(12)])
    fast = ol.graph(lambda x, *s: x * s[0] + s[1], warmup=1)
    assert not warned(fast, [(rand(i, 3), i, -i) for i in range(12)])


# State.


class Scaled(torch.nn.Module):
    """A model that is told of each call beforehand."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale: Any = torch.ones(3, device=device)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * float(self.factor)  # no recording follows what `float` reads


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("what", ["scale", "factor"])
def test_state_that_is_set_at_each_call(
    device: torch.device, rand: Rand, what: str, trains: bool
) -> None:
    """A tensor becomes an input. A number that no recording follows is named early."""
    model = Scaled(device).requires_grad_(trains)
    fast = ol.graph(model, warmup=1)
    texts: list[tuple[int, str]] = []
    for i in range(70):
        setattr(model, what, rand(i, 3) if what == "scale" else i / 7)
        x = rand(i, 3).requires_grad_(trains)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = fast(x)
        assert_same(y.detach(), (x * model.scale * model.factor).detach())
        if trains:
            y.sum().backward()
            assert_same(x.grad, (model.scale * model.factor).expand(3))
        texts += [(i, str(w.message)) for w in caught]
    if what == "scale":
        assert not texts
        assert fast.stats().captures == 2
        return
    ((number, text),) = texts
    assert "[OL301] `Scaled` was recorded 8 times in a row for one call each" in text
    assert what in text
    assert "copy_" in text
    assert number < 20


def test_a_tensor_that_is_set_now_and_then(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    fast = ol.graph(model, warmup=1)
    for i in range(90):
        if i % 3 == 0:
            model.scale = rand(i, 3)
        assert warned(fast, [(rand(i, 3),)]) == []
    assert fast.stats().captures <= 3


OF_LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "is_leaf": lambda x: x * 2 if x.is_leaf else x * 3,
    "grad_fn": lambda x: x * 2 if x.grad_fn is None else x * 3,
    "retains_grad": lambda x: x * 3 if x.retains_grad else x * 2,
}


@pytest.mark.filterwarnings("ignore:.*OL307")  # in a capture, an argument is a leaf
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("leaf_first", [True, False])
@pytest.mark.parametrize("name", OF_LEAVES)
def test_a_leaf_or_a_result(
    device: torch.device, rand: Rand, name: str, leaf_first: bool, trains: bool
) -> None:
    f = OF_LEAVES[name]
    fast = ol.graph(f)
    for i, leaf in enumerate([leaf_first] * 5 + [not leaf_first] * 5 + [True, False] * 3):
        with torch.enable_grad():
            x = rand(i, 3).requires_grad_()
            x = x if leaf else x * 1
            if not leaf:
                x.retain_grad()
        with torch.set_grad_enabled(trains):
            assert_same(fast(x), f(x))
    assert replays(fast) > 0
