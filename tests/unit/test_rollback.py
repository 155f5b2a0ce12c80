"""The rollback of containers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest

from onelaunch.state.rollback import Rollback
from onelaunch.state.walk import walk


def test_containers_within_containers() -> None:
    inner: list[Any] = [{1, 2}, deque([1])]
    root = OrderedDict(a=inner, b={"c": inner})
    before = Rollback(walk([("root", root)]))
    root.move_to_end("a")
    root["b"] = root["d"] = {}
    inner[0].add(3)
    inner[1].rotate()
    inner[1].append(2)
    inner.reverse()
    inner.append(inner)
    before.restore()
    assert list(root.items()) == [("a", inner), ("b", {"c": inner})]
    assert root["b"]["c"] is inner
    assert inner == [{1, 2}, deque([1])]


def test_an_entry_that_stays_is_there_all_the_time() -> None:
    """Another thread may be reading it."""
    seen: list[bool] = []

    class Watching:
        def __del__(self) -> None:
            seen.append(table.keys() >= {"a", "b"})

    table: dict[str, object] = {"a": 1, "b": 2}
    before = Rollback(walk([("table", table)]))
    table["b"] = Watching()
    table["c"] = Watching()
    before.restore()
    assert table == {"a": 1, "b": 2}
    assert seen == [True, True]


@pytest.mark.parametrize("change", [lambda raw: raw.append(1), lambda raw: raw.__setitem__(0, 9)])
def test_bytes_in_use(change: Callable[[bytearray], object]) -> None:
    """One that a view keeps from its former size stays as it is, and nothing is raised."""
    raw = bytearray(b"abc")
    before = Rollback(walk([("box", [raw])]))
    change(raw)
    view = memoryview(raw)
    before.restore()
    assert bytes(view) in (b"abc\x01", b"abc")


def test_a_class_whose_metaclass_minds() -> None:
    class Minding(type):
        def __setattr__(cls, key: str, value: object) -> None:
            raise TypeError

    class Counted(metaclass=Minding):
        count = 1

    before = Rollback(walk([("box", [Counted()])]))
    type.__setattr__(Counted, "count", 2)
    type.__setattr__(Counted, "more", 3)
    before.restore()
    assert Counted.count == 1
    assert not hasattr(Counted, "more")
