"""The rollback of containers, in C and in Python alike."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest

from onelaunch.native import compiled
from onelaunch.state.rollback import Rollback, _copy_set, _set_copier
from onelaunch.state.walk import walk


class Own(set):  # type: ignore[type-arg]
    def clear(self) -> None:
        raise TypeError

    def __iter__(self) -> Any:
        raise TypeError


def taken(held: set[object]) -> list[object]:
    """What `pop` takes, one after the other."""
    return [set.pop(held) for _ in range(set.__len__(held))]


def worn(n: int) -> set[object]:
    """A set with places where elements were, and from which some were popped."""
    held: set[object] = {*range(3 * n), *map(str, range(n))}
    held -= set(range(n, 2 * n))
    for _ in range(n):
        held.pop()
    return held


@pytest.mark.parametrize("n", [0, 1, 2, 5, 40, 1000])
@pytest.mark.parametrize("kind", [set, Own])
def test_a_set_is_copied_with_its_order(n: int, kind: type) -> None:
    copy = compiled("sets").copy
    held, twin = worn(n), worn(n)
    kept: set[object] = kind()
    copy(kept, held)
    assert list(set.__iter__(kept)) == list(held)
    held.update(range(7 * n, 9 * n))
    held -= set(range(2 * n, 3 * n))
    copy(held, kept)
    for one in (held, twin):
        one.update(range(5 * n, 5 * n + 3))
    assert taken(held) == taken(twin)


def test_a_copied_set_owns_its_elements() -> None:
    copy = compiled("sets").copy
    elements = [object() for _ in range(50)]
    counts = [sys.getrefcount(e) for e in elements]
    held, kept = set(elements), set(elements[:20])
    held.discard(elements[3])
    copy(kept, held)
    copy(kept, kept)
    copy(held, set())
    assert held == set()
    assert kept == {*elements} - {elements[3]}
    kept.clear()
    assert [sys.getrefcount(e) for e in elements] == counts
    del kept, held
    gc.collect()
    assert [sys.getrefcount(e) for e in elements] == counts
    with pytest.raises(TypeError):
        copy(set(), frozenset())


def test_a_finalizer_that_adds_to_the_set() -> None:
    class Element:
        def __del__(self) -> None:
            if len(added) < 3:
                added.append(1)
                held.update(range(100))

    added: list[int] = []
    held: set[object] = {Element() for _ in range(2)}
    compiled("sets").copy(held, {"a", "b"})
    assert held == {"a", "b"}
    assert len(added) == 2


@pytest.mark.parametrize("native", [True, False])
def test_containers_within_containers(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setenv("ONELAUNCH_NATIVE", "0")
    compiled.cache_clear()
    _set_copier.cache_clear()
    assert (_set_copier() is _copy_set) is not native
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
    compiled.cache_clear()
    _set_copier.cache_clear()


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
