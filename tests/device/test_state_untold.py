"""What is read of objects that no variable holds when the code that read it has run."""

from __future__ import annotations

import collections
import functools
import heapq
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, compare, replays

Place = tuple[Callable[[Tensor], Tensor], Callable[[], object]]
"""A callable, and a change after which it computes something else."""


class First:
    scale = 2.0


class Second:
    scale = 1.5


class Third:
    scale = 1.25


def three() -> list[Any]:
    """Objects of three classes, so that what is read of one says nothing of the others."""
    made = [First(), Second(), Third()]
    for one in made:
        one.scale = type(one).scale
    return made


def by_a_computed_index() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        for i in range(len(layers)):
            k = len(layers) - 1 - i
            x = x * layers[k].scale
        return x

    return f, lambda: setattr(layers[2], "scale", 3.0)


def by_a_computed_key() -> Place:
    layers = {f"layer{i}": one for i, one in enumerate(three())}

    def f(x: Tensor) -> Tensor:
        for i in range(3):
            key = f"layer{i}"
            x = x * layers[key].scale
        return x

    return f, lambda: setattr(layers["layer0"], "scale", 3.0)


def of_a_list_that_is_emptied(take: Callable[[Any], Any], make: Callable[[Any], Any]) -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        waiting = make(layers)
        while waiting:
            one = take(waiting)
            x = x * one.scale
        return x

    return f, lambda: [setattr(layers[i], "scale", 3.0) for i in (0, 2)]


def of_a_heap() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        waiting = [(i, one) for i, one in enumerate(layers)]
        while waiting:
            _, one = heapq.heappop(waiting)
            x = x * one.scale
        return x

    return f, lambda: setattr(layers[0], "scale", 3.0)


def by_next() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        left = iter(layers)
        one = next(left)
        x = x * one.scale
        one = next(left)
        return x * one.scale

    return f, lambda: setattr(layers[0], "scale", 3.0)


def of_a_zip_in_a_comprehension() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        scales = [one.scale * y for one, y in zip(layers, (1, 2, 3), strict=True)]
        return x * scales[0] * scales[1]

    return f, lambda: setattr(layers[0], "scale", 3.0)


def of_the_rest_of_a_list() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        _, *rest = layers
        one = rest[0]
        x = x * one.scale
        one = rest[1]
        return x * one.scale

    return f, lambda: setattr(layers[1], "scale", 3.0)


def of_lists_made_in_a_loop() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        for pair in (layers[:1], layers[1:]):
            chosen: list[Any] = []
            chosen += pair
            for one in chosen:
                x = x * one.scale
        return x

    return f, lambda: setattr(layers[0], "scale", 3.0)


def of_an_exception() -> Place:
    first, *_ = three()

    class Found(Exception):
        def __init__(self, one: Any) -> None:
            super().__init__()
            self.one = one

    def f(x: Tensor) -> Tensor:
        try:
            raise Found(first)
        except Found as found:
            return x * found.one.scale

    return f, lambda: setattr(first, "scale", 3.0)


def by_attrgetter() -> Place:
    layers = three()

    def f(x: Tensor) -> Tensor:
        first = sorted(layers, key=operator.attrgetter("scale"))[0]
        return x * (2 if first is layers[0] else 3)

    return f, lambda: setattr(layers[0], "scale", 0.5)


def by_names_in_a_loop() -> Place:
    config = types.SimpleNamespace(scale0=2.0, scale1=1.5)

    def f(x: Tensor) -> Tensor:
        for i in range(3):
            name = f"scale{i}"
            if hasattr(config, name):
                x = x * getattr(config, name)
        return x

    return f, lambda: setattr(config, "scale2", 3.0)


class Renamed:
    def __init__(self) -> None:
        self._scale = 2.0

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_" + name]


def by_a_key_made_for_its_attributes() -> Place:
    config = Renamed()
    return lambda x: x * config.scale, lambda: setattr(config, "_scale", 3.0)


def by_globals() -> Place:
    namespace: dict[str, Any] = {"scale": 2.0}
    exec("def f(x): return x * globals()['scale']", namespace)
    return namespace["f"], lambda: namespace.update(scale=3.0)


def of_a_global_with_two_underscores() -> Place:
    namespace: dict[str, Any] = {"__scale": 2.0}
    exec("def f(x): return x * __scale", namespace)
    return namespace["f"], lambda: namespace.update(__scale=3.0)


def of_a_function_without_the_attribute() -> Place:
    def marked(x: Tensor) -> Tensor:
        return x * 2

    def f(x: Tensor) -> Tensor:
        return marked(x) * getattr(marked, "scale", 1.0)

    return f, lambda: setattr(marked, "scale", 3.0)


def of_what_a_decorator_wraps() -> Place:
    def plain(x: Tensor) -> Tensor:
        return x * 2

    @functools.wraps(plain)
    def wrapper(x: Tensor) -> Tensor:
        return wrapper.__wrapped__(x)  # pyright: ignore

    def other(x: Tensor) -> Tensor:
        return x * 3

    return lambda x: wrapper(x), lambda: setattr(wrapper, "__wrapped__", other)


def of_a_large_table(keys: list[Any], read: Callable[[Any, Tensor], Any]) -> Place:
    table = {**dict.fromkeys(range(100, 200), 1.0), **dict.fromkeys(keys, 2.0)}
    return lambda x: x * read(table, x), lambda: table.update(dict.fromkeys(keys, 3.0))


def of_a_long_list() -> Place:
    table = [2.0] * 100

    def f(x: Tensor) -> Tensor:
        for i in range(3):
            x = x * table[i]
        return x

    return f, lambda: table.__setitem__(0, 3.0)


def what_a_large_dict_has() -> Place:
    table = dict.fromkeys(range(100), 1.0)

    def change() -> None:
        table["scale"] = table.pop(50)

    return lambda x: x * (3 if "scale" in table else 2), change


def what_a_large_set_has() -> Place:
    names = set(map(str, range(100)))

    def change() -> None:
        names.remove("50")
        names.add("scale")

    return lambda x: x * (3 if "scale" in names else 2), change


PLACES: dict[str, Callable[[], Place]] = {
    "a computed index": by_a_computed_index,
    "a computed key": by_a_computed_key,
    "a stack": lambda: of_a_list_that_is_emptied(list.pop, list),
    "a queue": lambda: of_a_list_that_is_emptied(collections.deque.popleft, collections.deque),
    "a heap": of_a_heap,
    "next": by_next,
    "zip in a comprehension": of_a_zip_in_a_comprehension,
    "the rest of a list": of_the_rest_of_a_list,
    "lists made in a loop": of_lists_made_in_a_loop,
    "an exception": of_an_exception,
    "attrgetter": by_attrgetter,
    "names in a loop": by_names_in_a_loop,
    "a key made for __dict__": by_a_key_made_for_its_attributes,
    "globals()": by_globals,
    "two underscores": of_a_global_with_two_underscores,
    "a function's missing attribute": of_a_function_without_the_attribute,
    "what a decorator wraps": of_what_a_decorator_wraps,
    "a table by a tuple": lambda: of_a_large_table([(4, 1)], lambda t, x: t[x.shape[0], x.dim()]),
    "a table by a dtype": lambda: of_a_large_table([torch.float32], lambda t, x: t[x.dtype]),
    "a table by a class": lambda: of_a_large_table([First], lambda t, _: t[First]),
    "a table by a computed key": lambda: of_a_large_table(["a1"], lambda t, x: t[f"a{x.dim()}"]),
    "a long list in a loop": of_a_long_list,
    "what a large dict has": what_a_large_dict_has,
    "what a large set has": what_a_large_set_has,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_change_is_seen(device: torch.device, place: Callable[[], Place]) -> None:
    f, change = place()
    fast = ol.graph(f)
    x = torch.arange(4.0, device=device)
    compare(fast, f, lambda _: (x,), 6, torch.enable_grad)
    assert replays(fast) == 3
    before = f(x)
    change()
    assert not torch.equal(f(x), before)
    compare(fast, f, lambda _: (x,), 6, torch.enable_grad)


class AnswersToAll(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return 2


def test_a_module_that_has_every_attribute(device: torch.device) -> None:
    """Its `__file__` is no path."""
    settings = AnswersToAll("settings")
    fast = ol.graph(lambda x: x * settings.scale)
    x = torch.arange(4.0, device=device)
    for _ in range(6):
        assert_same(fast(x), x * 2)
    assert replays(fast) == 3


def test_an_attribute_that_only_shares_a_name_and_is_counted(device: torch.device) -> None:
    """One whose uses were seen keeps them: it is not read for its name."""
    layers = three()
    first = layers[0]
    first.calls = 0

    def f(x: Tensor) -> Tensor:
        first.calls += 1
        waiting = layers[1:]
        while waiting:
            one = waiting.pop()
            x = x * getattr(one, "calls", 1) * one.scale
            one.calls = 1
        return x

    fast = ol.graph(f)
    x = torch.arange(4.0, device=device)
    for _ in range(20):
        fast(x)
    assert first.calls == 20
    assert len(fast.recordings) == 1
