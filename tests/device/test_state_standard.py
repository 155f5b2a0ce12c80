"""State in objects of the standard library, whose classes are written in Python."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import fractions
import queue
import string
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, replays

Read = Callable[[Any], Any]


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Case(NamedTuple):
    """What is held, what a call reads of it, and what changes it."""

    make: Callable[[], Any]
    read: Read
    change: Read


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser["model"] = {"scale": "1"}
    return parser


def filled(kind: Callable[[], Any]) -> Any:
    waiting = kind()
    waiting.put(1)
    return waiting


KEY = Box(0.0)
FIRST, SECOND = Box(1.0), Box(11.0)
"""Kept here, so that what refers to them weakly still does."""


def tried(held: dict[str, float]) -> float:
    try:
        return held["late"]
    except KeyError:
        return 2.0


def put(key: object, value: object) -> Read:
    return lambda held: held.__setitem__(key, value)


def values(held: Any) -> float:
    return sum(held.values())


CASES = {
    "ChainMap": Case(lambda: ChainMap({"z": 1.0}, {"z": 2.0}), lambda h: h["z"], put("z", 11.0)),
    "ChainMap, more maps": Case(
        lambda: ChainMap({"z": 1.0}), lambda h: h["z"], lambda h: h.maps.insert(0, {"z": 11.0})
    ),
    "ChainMap, another map": Case(
        lambda: ChainMap({}, {"z": 2.0}), lambda h: h.get("z"), lambda h: h.maps[1].update(z=11.0)
    ),
    "UserDict": Case(lambda: UserDict(z=1.0), lambda h: h["z"], put("z", 11.0)),
    "UserDict of a new key": Case(lambda: UserDict(z=1.0), lambda h: h.get("y", 2), put("y", 11.0)),
    "UserDict gone through": Case(lambda: UserDict(z=1.0), values, put("y", 11.0)),
    "UserDict inside": Case(
        lambda: UserDict(a=UserDict(z=1.0)), lambda h: h["a"]["z"], lambda h: h["a"].update(z=11.0)
    ),
    "UserList": Case(lambda: UserList([1.0]), lambda h: h[0], put(0, 11.0)),
    "UserList, its length": Case(lambda: UserList([1.0]), len, lambda h: h.append(1.0)),
    "UserString": Case(
        lambda: UserString("a"),
        lambda h: 2.0 if h == "a" else 3.0,
        lambda h: setattr(h, "data", "b"),
    ),
    "ConfigParser": Case(
        settings, lambda h: h.getfloat("model", "scale"), lambda h: h.set("model", "scale", "11")
    ),
    "ConfigParser, a section": Case(
        settings, lambda h: float(h["model"]["scale"]), lambda h: h.set("model", "scale", "11")
    ),
    "Queue": Case(lambda: filled(queue.Queue), lambda h: h.qsize(), lambda h: h.put(2)),
    "Template": Case(
        lambda: string.Template("$a"),
        lambda h: len(h.substitute(a="ab")),
        lambda h: setattr(h, "template", "$a$a"),
    ),
    "Counter of a new key": Case(
        lambda: Counter("aab"), lambda h: h["c"] + 1, lambda h: h.update("c")
    ),
    "dict of a new key": Case(lambda: {"z": 1.0}, tried, put("late", 11.0)),
    "OrderedDict, its order": Case(
        lambda: OrderedDict(z=1.0, y=2.0), lambda h: h[next(iter(h))], lambda h: h.move_to_end("z")
    ),
    "SimpleNamespace": Case(
        lambda: types.SimpleNamespace(z=1.0), lambda h: h.z, lambda h: setattr(h, "z", 11.0)
    ),
    "WeakValueDictionary": Case(
        lambda: weakref.WeakValueDictionary(a=FIRST), lambda h: h["a"].value, put("a", SECOND)
    ),
    "WeakKeyDictionary": Case(
        lambda: weakref.WeakKeyDictionary({KEY: 1.0}), lambda h: h[KEY], put(KEY, 11.0)
    ),
    "WeakSet": Case(
        lambda: weakref.WeakSet([FIRST]),
        lambda h: sum(box.value for box in h),
        lambda h: h.add(SECOND),
    ),
    "set of others": Case(
        lambda: {FIRST},
        lambda h: sum(box.value for box in h),
        lambda h: (h.remove(FIRST), h.add(SECOND)),
    ),
    "Event": Case(threading.Event, lambda h: 2.0 if h.is_set() else 3.0, lambda h: h.set()),
    "Subset, of torch": Case(
        lambda: torch.utils.data.Subset([1, 2, 3], [0, 1]),  # type: ignore[arg-type]
        lambda h: len(h.indices),
        lambda h: h.indices.append(2),
    ),
    "set of classes": Case(
        lambda: {Box}, lambda h: 2.0 if Box in h else 3.0, lambda h: (h.remove(Box), h.add(Case))
    ),
    "list of many, from its end": Case(lambda: [1.0] * 200, lambda h: h[-1] + h[-7], put(-7, 11.0)),
    "deque of many, from its end": Case(
        lambda: collections.deque([1.0] * 200, maxlen=200),
        lambda h: h[-1],
        lambda h: h.append(11.0),
    ),
    "weakref": Case(
        lambda: weakref.ref(KEY),
        lambda h: h().value + 1,
        lambda h: setattr(KEY, "value", KEY.value + 1),
    ),
    "array of objects": Case(
        lambda: np.array([[1.0], "a"], dtype=object),
        lambda h: h[0][0],
        lambda h: h[0].__setitem__(0, 11.0),
    ),
    "array of objects, another object": Case(
        lambda: np.array([Box(1.0), Box(2.0)], dtype=object),
        lambda h: h[1].value,
        put(1, Box(11.0)),
    ),
    "array of another shape": Case(
        lambda: np.arange(4.0), len, lambda h: setattr(h, "shape", (2, 2))
    ),
    "array of another dtype": Case(
        lambda: np.arange(4.0),
        lambda h: 2.0 if h.dtype.kind == "f" else 3.0,
        lambda h: setattr(h, "dtype", np.int64),
    ),
    "array that becomes read-only": Case(
        lambda: np.arange(4.0),
        lambda h: 2.0 if h.flags.writeable else 3.0,
        lambda h: h.setflags(write=False),
    ),
    "slots of a library's class": Case(
        lambda: fractions.Fraction(1, 2),
        lambda h: float(h._numerator),
        lambda h: setattr(h, "_numerator", 11),
    ),
    "memoryview": Case(lambda: memoryview(bytearray(b"a")), lambda h: h[0], put(0, 11)),
}


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype) on a NumPy array")  # from 2.5 on
@pytest.mark.parametrize("case", CASES)
def test_state_in_what_the_standard_library_holds(
    case: str, device: torch.device, rand: Rand
) -> None:
    make, read, change = CASES[case]
    box = Box(make())

    def f(x: Tensor) -> Tensor:
        return x * read(box.value)

    fast = ol.graph(f)
    compare(fast, f, lambda i: (rand(i, 3),), 6, torch.enable_grad)
    before = f(rand(0, 3))
    assert replays(fast) > 0
    change(box.value)
    assert not torch.equal(f(rand(0, 3)), before)
    compare(fast, f, lambda i: (rand(i, 3),), 6, torch.enable_grad)


def test_a_tensor_in_what_the_standard_library_holds(device: torch.device, rand: Rand) -> None:
    box = Box(collections.UserDict(z=rand(0, 3)))

    def f(x: Tensor) -> Tensor:
        return x * box.value["z"]

    fast = ol.graph(f)
    for seed in range(3):
        box.value["z"] = rand(seed, 3)
        compare(fast, f, lambda i: (rand(i, 3),), 6, torch.enable_grad)
    assert replays(fast) > 0


COUNTERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [0],
    "numpy": lambda: np.zeros(1, int),
    "array": lambda: array.array("l", [0]),
    "bytearray": lambda: bytearray(1),
    "memoryview": lambda: memoryview(bytearray(1)),
    "numpy, transposed": lambda: np.zeros((2, 3)).T,
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_call_is_counted_once(kind: str, device: torch.device, rand: Rand) -> None:
    """What a capture counted is taken back where the call runs again."""
    counter = COUNTERS[kind]()
    place = (0, 0) if "transposed" in kind else 0

    def f(x: Tensor) -> Tensor:
        counter[place] += 1
        return x * 2

    fast = ol.graph(f)
    for i in range(12):
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
        assert counter[place] == i + 1


def test_a_call_is_counted_once_in_a_context_variable(device: torch.device, rand: Rand) -> None:
    counter = contextvars.ContextVar("counter", default=1000)

    def f(x: Tensor) -> Tensor:
        counter.set(counter.get() + 1)
        return x * 2

    fast = ol.graph(f)
    for i in range(12):
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
        assert counter.get() == 1001 + i
