"""Writes to places that are counts: the same as by plain numbers, at any index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onelaunch.capture.counted_places import CountedPlaces
from onelaunch.capture.number import Node, Number
from onelaunch.capture.numbers import NumberStandIns, NumbersToFollow
from onelaunch.state.slots import Slot

BASE = 3
SIZE = 5


class Places(CountedPlaces):
    """The mode, on a device that has the numbers by their values."""

    def on_device(self, node: Node) -> Tensor:
        return self._filled.setdefault(node.term, torch.tensor(node.value))


def counted() -> tuple[NumberStandIns, Any]:
    """A number that is moved on; the recording serves others while it is not fixed."""
    holder = {"n": BASE}
    slot = Slot("item", holder, "n", "n", holder)
    numbers = NumberStandIns(NumbersToFollow(incremented=(slot,)), torch.device("cpu"))
    numbers.begin(lambda: False)
    return numbers, holder["n"]


def plain(part: Any) -> Any:
    if type(part) is Number:
        return part.node.value
    if type(part) is slice:
        return slice(plain(part.start), plain(part.stop), part.step)
    return part


part = st.one_of(
    st.integers(-SIZE, SIZE - 1),
    st.just(slice(None)),
    st.builds(slice, st.integers(0, 2), st.integers(2, 5), st.sampled_from([None, 1, 2])),
    st.just(None),
)


@settings(max_examples=400, deadline=None)
@given(
    before=st.lists(part, max_size=2),
    after=st.lists(part, max_size=2),
    dots=st.sampled_from(["none", "before", "after"]),
    offset=st.integers(-BASE - 1, 3),
    rows=st.integers(0, 3),
    fill=st.booleans(),
    data=st.data(),
)
def test_as_by_numbers(
    before: list[Any],
    after: list[Any],
    dots: str,
    offset: int,
    rows: int,
    fill: bool,
    data: st.DataObject,
) -> None:
    counts, n = counted()
    n = n + offset
    place = n if rows == 0 else slice(n, n + rows)
    index = (
        *([...] if dots == "before" else []),
        *(*before, place, *after),
        *([...] if dots == "after" else []),
    )
    x = torch.arange(float(SIZE**4)).reshape(SIZE, SIZE, SIZE, SIZE)
    assume(sum(i is not None and i is not ... for i in index) <= x.dim())
    numbers = tuple(map(plain, index))
    try:
        target = x[numbers].shape
    except IndexError:
        target = torch.Size()
    value: Tensor | float = -1.0
    if not fill:
        ones = data.draw(st.sets(st.integers(0, 9)))
        sizes = [1 if i in ones else size for i, size in enumerate(target)]
        value = -torch.rand(sizes[data.draw(st.integers(0, 1)) :])

    def put(t: Tensor, at: Any) -> str:
        try:
            t[at] = value
        except (IndexError, RuntimeError) as error:
            return type(error).__name__
        return "done"

    mine, theirs = x.clone(), x.clone()
    with Places(counts):
        found = put(mine, index)
    expected = put(theirs, numbers)
    assert found == expected
    assert torch.equal(mine, theirs)
    if counts.counted():  # then for each value that the recording serves
        serves = counts.trace.compiled([], ())
        served = [number for number in range(-9, 9) if serves(number) is not None]
        assert served == list(range(-offset, SIZE - max(rows, 1) - offset + 1))


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nest", [lambda n: n, lambda n: [n], lambda n: [[n, n + 1], [n - 1, n]]])
def test_tensors_of_counts(nest: Any, dtype: torch.dtype | None) -> None:
    counts, n = counted()
    mode = Places(counts)
    with mode:
        made = torch.tensor(nest(n), device="cpu", dtype=dtype)
    expected = torch.tensor(nest(BASE), device="cpu", dtype=dtype)
    assert made.dtype == expected.dtype
    assert made.shape == expected.shape
    assert torch.equal(made, expected)
    assert counts.counted()
    made.add_(1)
    assert mode.on_device(n.node) == BASE


def test_tensors_of_other_numbers_too_take_the_value() -> None:
    counts, n = counted()
    with Places(counts):
        assert torch.tensor([n, 1.5], device="cpu").tolist() == [3.0, 1.5]
    assert not counts.counted()
