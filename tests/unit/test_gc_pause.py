"""What is done once an object is gone."""

from __future__ import annotations

import gc
import weakref

from onelaunch.gc_pause import when_gone


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


def test_a_function_is_called_once_an_object_is_gone() -> None:
    tables = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    owner, other, gone = Unhashable(), Unhashable(), list[int]()
    when_gone(owner, gone.append, 1)
    when_gone(other, gone.append, 2)
    assert len(weakref.finalize._registry) == tables  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert gone == [1]
    del other
    gc.collect()
    assert gone == [1, 2]
