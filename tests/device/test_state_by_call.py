"""State that is read and stored by calls: a dict's methods, functions of C, `setattr`."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same

Table = dict[str, float]
Scales = list[float]
KEY = ("scale", 0.0)


def _named(*, scale: float, **_: float) -> float:
    return scale


def _moved(table: Table) -> float:
    table["scale"] = found = table.pop("scale")
    return found


READ_TABLE: dict[str, Callable[[Table], float]] = {
    "get": lambda t: t.get("scale", 0.0),
    "get of a computed key": lambda t: t.get("SCALE".lower(), 0.0),
    "item of a computed key": lambda t: t["SCALE".lower()],
    "get of spread arguments": lambda t: t.get(*KEY),
    "get of the class": lambda t: dict.get(t, *KEY),
    "__getitem__": lambda t: t.__getitem__(*KEY[:1]),
    "map": lambda t: next(map(t.get, ["scale"])) or 0.0,
    "map over a generator": lambda t: next(map(t.get, (k for k in ["scale"]))) or 0.0,
    "max by a key": lambda t: t[max(("scale 0", "scale"), key=t.get)],  # pyright: ignore
    "setdefault": lambda t: t.setdefault("scale", 1.0),
    "pop": _moved,
    "itemgetter": operator.itemgetter("scale"),
    "getitem": lambda t: operator.getitem(t, "scale"),
    "values": lambda t: sum(t.values()),
    "items": lambda t: sum(v for k, v in t.items() if k == "scale"),
    "one key and all values": lambda t: t["scale 0"] + sum(t.values()),
    "format": lambda t: float("{scale}".format(**t)),
    "dict": lambda t: dict(t)["scale"],
    "display": lambda t: {**t}["scale"],
    "union": lambda t: (t | {})["scale"],
    "copy": lambda t: t.copy()["scale"],
    "keywords": lambda t: _named(**t),
    "comparison": lambda t: float(t == {**t, "scale": 2.0}),
}


def _last(scales: Scales) -> float:
    *_, last = scales
    return last


READ_LIST: dict[str, Callable[[Scales], float]] = {
    "sum": sum,
    "loop": lambda t: functools.reduce(operator.add, (s for s in t)),
    "max": max,
    "spread": lambda t: max(*t),
    "last": lambda t: t[-1],
    "slice": lambda t: sum(t[-3:]),
    "range": lambda t: sum(t[i] for i in range(len(t))),
    "copy": lambda t: t.copy()[-1],
    "count": lambda t: float(t.count(2.0)),
    "sorted": lambda t: sorted(t)[-1],
    "in": lambda t: float(3.0 in t),
    "comparison": lambda t: float(t == t[:1] * len(t)),
    "unpacked": _last,
    "zip": lambda t: sum(a * b for a, b in zip(t, t, strict=True)),
}


def _follows(f: Callable[[Tensor], Tensor], change: Callable[[], object], rand: Rand) -> None:
    """Assert that calls see a change made between two replays."""
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(8):
            if i == 4:
                change()
            x = rand(i, 3)
            assert_same(fast(x), f(x), f"call {i}")
    assert fast.stats().replays == 6


@pytest.mark.parametrize("count", [200, 5])
@pytest.mark.parametrize("how", READ_TABLE)
def test_what_a_dict_gives(rand: Rand, how: str, count: int) -> None:
    table = {**{f"scale {i}": 2.0 for i in range(count)}, "scale": 2.0}
    read = READ_TABLE[how]
    _follows(lambda x: x * read(table), lambda: table.update(scale=3.0), rand)


@pytest.mark.parametrize("count", [200, 5])
@pytest.mark.parametrize("how", READ_LIST)
def test_what_a_list_gives(rand: Rand, how: str, count: int) -> None:
    scales, read = [2.0] * count, READ_LIST[how]
    _follows(lambda x: x * read(scales), lambda: operator.setitem(scales, -1, 3.0), rand)


class Cell:
    def __init__(self) -> None:
        self.a, self.last = 1.0, 0.0


PLACE = ("a", 0.0)

READ_OBJECT: dict[str, Callable[[Cell], float]] = {
    "getattr": lambda c: getattr(c, *PLACE),
    "map": lambda c: next(map(getattr, [c], ["a"])),
    "starmap": lambda c: next(itertools.starmap(getattr, [(c, "a")])),
    "vars": lambda c: vars(c).get(*PLACE),
    "format": lambda c: float(f"{c.a}"),
    "format of a path": lambda c: float(f"{SimpleNamespace(cell=c).cell.a}"),
    "percent": lambda c: float("%(a)s" % vars(c)),  # noqa: UP031
    "globals": lambda c: globals().get(*("CELL",)).a,  # pyright: ignore
}


@pytest.mark.parametrize("how", READ_OBJECT)
def test_what_an_object_gives(rand: Rand, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, read = Cell(), READ_OBJECT[how]
    monkeypatch.setitem(globals(), "CELL", cell)
    _follows(lambda x: x * read(cell), lambda: setattr(cell, "a", 3.0), rand)


class Own(Cell):
    def __setattr__(self, name: str, value: float) -> None:
        super().__setattr__(name, value + 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = 1.0, 0.0


def _each(cell: Any) -> None:
    for name in ("a", "last"):
        setattr(cell, name, 5.0)


STORE: dict[str, Callable[[Any], object]] = {
    "setattr": lambda c: setattr(c, "last", 5.0),
    "name in a loop": _each,
    "computed name": lambda c: setattr(c, "LAST".lower(), 5.0),
    "spread arguments": lambda c: setattr(c, *("last", 5.0)),
    "partial": lambda c: functools.partial(setattr, c, "last")(5.0),
    "map": lambda c: list(map(functools.partial(setattr, c), ["last"], [5.0])),
    "__setattr__": lambda c: c.__setattr__("last", 5.0),
    "of object": lambda c: object.__setattr__(c, "last", 5.0),
    "vars": lambda c: vars(c).update(last=5.0),
    "setitem": lambda c: operator.setitem(vars(c), "last", 5.0),
    "item of vars": lambda c: vars(c).__setitem__("last", 5.0),
}


@pytest.mark.parametrize("how", STORE)
@pytest.mark.parametrize("kind", [Cell, Own, Layer])
def test_an_attribute_that_is_stored_by_name(rand: Rand, how: str, kind: type) -> None:
    """Each call stores it, whatever it held before."""
    cells, store = [kind(), kind()], STORE[how]

    def f(cell: Any, x: Tensor) -> Tensor:
        store(cell)
        return x * 2

    fast = ol.graph(functools.partial(f, cells[0]), warmup=1)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 3)
            for cell in cells:
                vars(cell)["last"] = float(i % 3)
            assert_same(fast(x), f(cells[1], x), f"call {i}")
            assert (cells[0].a, cells[0].last) == (cells[1].a, cells[1].last)
    assert fast.stats().replays >= 5


def test_a_global_that_is_stored_by_a_method(rand: Rand) -> None:
    names: dict[str, Any] = {"TOTAL": 0.0, "torch": torch}
    exec("def f(x):\n    globals().update(TOTAL=5.0)\n    return x * 2", names)
    fast = ol.graph(names["f"], warmup=1)
    with torch.no_grad():
        for i in range(8):
            names["TOTAL"] = float(i % 3)
            assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
            assert names["TOTAL"] == 5.0


def test_a_new_dict_of_attributes_is_refused(rand: Rand) -> None:
    cell = Cell()

    def f(x: Tensor) -> Tensor:
        cell.__dict__ = {**cell.__dict__, "last": 5.0}
        return x * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for _ in range(2):
            fast(rand(0, 3))
        with pytest.raises(ol.CaptureError, match=r"OL118.*`__dict__` of a Cell"):
            fast(rand(0, 3))


N = 200


def _others(names: set[int]) -> None:
    names.discard(3)
    names.add(10_000)


Made = Callable[[], Any]
LARGE: dict[str, tuple[Made, Callable[[Any], float], Callable[[Any], object]]] = {
    "objects of a list": (
        lambda: [Cell() for _ in range(N)],
        lambda t: sum(c.a for c in t),
        lambda t: setattr(t[150], "a", 3.0),
    ),
    "another object": (
        lambda: [Cell() for _ in range(N)],
        lambda t: sum(c.a for c in t),
        lambda t: operator.setitem(t, 150, SimpleNamespace(a=3.0)),
    ),
    "functions": (
        lambda: [float] * N,
        lambda t: sum(f(1) for f in t),
        lambda t: operator.setitem(t, 150, lambda v: v * 3.0),
    ),
    "a deque": (lambda: deque([2.0] * N), sum, lambda t: operator.setitem(t, -1, 3.0)),
    "a deque that turns": (
        lambda: deque([2.0] * N + [3.0]),
        lambda t: t[0],
        lambda t: t.rotate(1),
    ),
    "the order of a dict": (
        lambda: {i: 2.0 + i for i in range(N)},
        lambda t: next(iter(t.values())),
        lambda t: t.update({0: t.pop(0)}),
    ),
    "the order of an OrderedDict": (
        lambda: OrderedDict((i, 2.0 + i) for i in range(N)),
        lambda t: next(iter(t.values())),
        lambda t: t.move_to_end(N - 1, last=False),
    ),
    "a counter": (
        lambda: Counter(dict.fromkeys(range(N), 2)),
        lambda t: t.most_common(1)[0][1],
        lambda t: t.update([3]),
    ),
    "a set": (lambda: set(range(N)), lambda t: float(10_000 in t), _others),
    "a set of thousands": (lambda: set(range(5_000)), lambda t: float(max(t)), _others),
    "a list of thousands": (
        lambda: [2.0] * 5_000,
        lambda t: sum(t[i] for i in range(len(t))),
        lambda t: operator.setitem(t, 4_000, 3.0),
    ),
    "a computed key of thousands": (
        lambda: {str(i): 2.0 for i in range(5_000)},
        lambda t: t["".join(["40", "00"])],
        lambda t: operator.setitem(t, "4000", 3.0),
    ),
    "lists in a list": (
        lambda: [[2.0] for _ in range(N)],
        lambda t: sum(map(sum, t)),
        lambda t: operator.setitem(t[150], 0, 3.0),
    ),
    "dicts in a dict": (
        lambda: {i: {"a": 2.0} for i in range(N)},
        lambda t: max(v for d in t.values() for v in d.values()),
        lambda t: operator.setitem(t[150], "a", 3.0),
    ),
}


@pytest.mark.parametrize("how", LARGE)
def test_what_a_large_container_gives(rand: Rand, how: str) -> None:
    make, read, change = LARGE[how]
    held = make()
    _follows(lambda x: x * read(held), lambda: change(held), rand)
