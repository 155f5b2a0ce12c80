"""What a callable stores and does not read: functions, objects, variables of the environment."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
from collections import OrderedDict, UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays
from .states import World, as_eager


@dataclasses.dataclass
class Size:
    rows: int


class Plain:
    def __init__(self, rows: int) -> None:
        self.rows = rows


class Closed:
    """Has slots, so that nobody can make one from its attributes."""

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows


class Last:
    stored: ClassVar[Any] = None


def doubled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


CONFIG = SimpleNamespace(scale=2.0)
STORED: dict[str, Callable[[Tensor], Any]] = {
    "a function of C": lambda x: torch.relu,
    "a function": lambda x: doubled,
    "a method": lambda x: CONFIG.__eq__,
    "a class": lambda x: nn.Linear,
    "a module": lambda x: math,
    "an object": lambda x: CONFIG,
    "a list": lambda x: [x.shape[0], "rows"],
    "a dict": lambda x: {"rows": x.shape[0]},
    "a dataclass": lambda x: Size(x.shape[0]),
    "an object of the call": lambda x: Plain(x.shape[0]),
    "an object with slots": lambda x: Closed(x.shape[0]),
    "a function of the call": lambda x: _reader(x.shape[0]),
    "a partial": lambda x: functools.partial(max, x.shape[0]),
    "objects in a tuple": lambda x: (CONFIG, torch.relu, [x.shape[0]]),
}


def _reader(rows: int) -> Callable[[], int]:
    return lambda: rows


def shown(value: Any) -> Any:
    """Return what of a value is the same in both worlds."""
    if isinstance(value, (Plain, Closed, Size)):
        return type(value).__name__, value.rows
    if isinstance(value, functools.partial):
        return value(0)
    if getattr(value, "__name__", "") == "<lambda>":
        return value()
    return value if isinstance(value, list | dict) else repr(value)


@pytest.mark.parametrize("place", ["object", "module", "class", "dict", "closure", "global"])
@pytest.mark.parametrize("kind", STORED)
def test_what_is_only_stored(device: torch.device, rand: Rand, kind: str, place: str) -> None:
    """Others set it to None between the calls, and two sizes take turns."""
    make = STORED[kind]

    def world() -> tuple[Callable[[Tensor], Tensor], Callable[..., Any]]:
        last: Any = nn.Module() if place == "module" else SimpleNamespace()
        last = type("Last", (Last,), {}) if place == "class" else last
        table: dict[str, Any] = {}
        held: Any = None

        def step(x: Tensor) -> Tensor:
            nonlocal held
            match place:
                case "dict":
                    table["stored"] = make(x)
                case "closure":
                    held = make(x)
                case "global":
                    global _stored
                    _stored = make(x)
                case _:
                    last.stored = make(x)
            return x * CONFIG.scale

        def stored(*new: Any) -> Any:
            nonlocal held
            global _stored
            if new:
                held = _stored = last.stored = table["stored"] = new[0]
            places = {"closure": held, "global": _stored, "dict": table["stored"]}
            return places.get(place, last.stored)

        return step, stored

    (eager, stored), (step, stored_too) = world(), world()
    fast = ol.graph(step)
    stored(None), stored_too(None)
    for i in range(12):
        if i in (6, 7, 10):
            stored(None), stored_too(None)
        x = rand(i, 3 if i < 4 or i % 2 else 2)
        if place == "global":  # both have one
            expected, got = (eager(x), shown(stored())), (fast(x), shown(stored_too()))
        else:
            got, expected = (fast(x), shown(stored_too())), (eager(x), shown(stored()))
        assert_same(got, expected, f"call {i}")
    assert replays(fast)


_stored: Any = None


@pytest.mark.parametrize("made", [True, False])
def test_a_stored_object_is_another_of_each_call(
    device: torch.device, rand: Rand, made: bool
) -> None:
    """An object that is kept from one call is not the next one's, unless the callable has it."""
    kept = Plain(3)
    last = SimpleNamespace(stored=None)

    def step(x: Tensor) -> Tensor:
        last.stored = Plain(x.shape[0]) if made else kept
        return x * (2 if made else kept.rows)

    fast = ol.graph(step)
    seen: list[Any] = []
    for i in range(6):
        fast(rand(i, 3))
        seen.append(last.stored)
    assert len({id(value) for value in seen}) == (6 if made else 1)
    assert replays(fast) >= 2


def test_a_variable_of_the_environment(device: torch.device, rand: Rand) -> None:
    """C has a copy of its own, which `os.environ[...] = ...` writes too."""
    libc: Any = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p

    def step(x: Tensor) -> Tensor:
        os.environ["ONELAUNCH_STORED"] = "1"
        return x * 2

    fast = ol.graph(step)
    try:
        for i in range(8):
            if i == 5:
                del os.environ["ONELAUNCH_STORED"]
            else:
                os.environ["ONELAUNCH_STORED"] = "0"
            fast(rand(i, 3))
            assert os.environ["ONELAUNCH_STORED"] == "1"
            assert libc.getenv(b"ONELAUNCH_STORED") == b"1"
    finally:
        os.environ.pop("ONELAUNCH_STORED", None)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
@pytest.mark.parametrize("view", ["keys", "values", "items"])
@pytest.mark.parametrize("place", ["closure", "attribute", "argument"])
def test_a_view_of_a_dict(
    device: torch.device, rand: Rand, place: str, view: str, kind: Any
) -> None:
    def total(x: Tensor, found: Any) -> Tensor:
        for value in found:
            if view == "keys":
                value = float(ord(value))
            elif view == "items":
                value = value[1] * ord(value[0])
            x = x * value
        return x

    def world() -> World:
        table: Any = kind(a=rand(90, 3), b=rand(91, 3))
        seen = getattr(table, view)()
        if place == "argument":
            return table, lambda x, fn=total: fn(x, seen)
        if place == "closure":
            return table, lambda x: total(x, seen)
        module: Any = nn.Module()
        module.seen = seen
        module.forward = lambda x: total(x, module.seen)
        return table, module

    def between(table: Any, i: int) -> None:
        if i in (5, 9):
            table["a" if i == 5 else "c"] = rand(92 + i, 3)
        if i == 12:
            del table["b"]

    assert replays(as_eager(device, world, between, calls=16, shown=list, warmup=3))


@pytest.mark.parametrize("kind", [SimpleNamespace, nn.Module])
def test_a_note_that_the_call_takes(device: torch.device, rand: Rand, kind: Any) -> None:
    """No replay deletes it."""
    box = kind()

    def f(x: Tensor) -> Tensor:
        if hasattr(box, "note"):
            x = x * box.note
            del box.note
        return x + 1

    fast = ol.graph(f)
    for i in range(16):
        noted = i % 4 == 0
        if noted:
            box.note = 4.0
        assert_same(fast(rand(i, 3)), rand(i, 3) * (4 if noted else 1) + 1)
        assert not hasattr(box, "note")
    assert replays(fast) > 0


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("kind", [SimpleNamespace, nn.Module])
def test_a_note_that_the_call_makes_and_takes(device: torch.device, rand: Rand, kind: Any) -> None:
    """No replay puts another value there."""
    box = kind()

    def f(x: Tensor) -> Tensor:
        box.note = 3.0
        x = x * 2
        del box.note
        return x + 1

    fast = ol.graph(f)
    for i in range(24):
        noted = i in (6, 10) or i > 12
        if noted:
            box.note = 4.0
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2 + 1)
        assert not hasattr(box, "note"), f"call {i}"
    assert replays(fast) > 0


class Slotted:
    __slots__ = ("note",)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("place", ["global", "slot"])
def test_a_place_without_a_dict_that_the_call_fills_and_empties(
    device: torch.device, rand: Rand, place: str
) -> None:
    """Where the caller filled it, eager leaves it empty."""
    box = Slotted()
    names: dict[str, Any] = {"box": box}
    store, delete = (
        ("note = 1", "del note") if place == "global" else ("box.note = 1", "del box.note")
    )
    exec(f"def f(x):\n    global note\n    {store}\n    {delete}\n    return x * 2", names)
    fast: Any = ol.graph(names["f"])
    for i in range(12):
        if i > 6 and place == "global":
            names["note"] = 4
        elif i > 6:
            box.note = 4
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
        assert "note" not in names, f"call {i}"
        assert not hasattr(box, "note"), f"call {i}"
    assert replays(fast) > 0
