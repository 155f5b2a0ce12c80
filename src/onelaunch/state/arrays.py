"""The slots of arrays in host memory: NumPy's, `array.array` and `memoryview`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from onelaunch.state.slots import Slot

MOST_BYTES = 1 << 14  # largest array that is compared at each call, at 0.1 us for a KB


class ArrayItem(NamedTuple):
    """A reader of one object in a NumPy array of objects."""

    place: int

    def __call__(self, array: Any) -> object:
        return array.flat[self.place]

    def write(self, array: Any, value: object) -> None:
        array.flat[self.place] = value


def is_array(value: object) -> bool:
    return isinstance(value, memoryview) or type(value).__module__ in ("numpy", "array")


def slots_of_array(name: str, array: Any) -> Iterator[Slot]:
    """Return the slots of an array: its bytes, its layout and the objects in it. A large array has
    none."""
    if _nbytes(array) > MOST_BYTES:
        return
    yield Slot("contents", array, type(array).tobytes, name, None)
    if type(array).__hash__ is None:  # an array, and no number of NumPy's
        yield Slot("contents", array, _layout_of, f"the layout of {name}", None)
    holds = getattr(getattr(array, "dtype", None), "hasobject", False)
    for index in range(array.size) if holds else ():
        yield Slot("contents", array, ArrayItem(index), f"{name}.flat[{index}]", None)


def _layout_of(array: Any) -> str:
    """Describe the layout of an array, which code may set in place."""
    view = memoryview(array)
    return f"{view.format} {view.shape} {view.strides} {view.readonly}"


def _nbytes(value: Any) -> int:
    try:
        return memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return MOST_BYTES + 1
