"""Table of calls: constants by type and bits, and what happens when there are too many."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import types
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, replays

# What fits: constants.


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Point = collections.namedtuple("Point", "x y")


def as_number(c: Any) -> float:
    """A different number for each constant below."""
    if isinstance(c, bool):
        return 11.0 + c
    if isinstance(c, float):
        return 25.0 if c != c else math.copysign(1.0, c) * (abs(c) + 5)
    return float(sum(ord(ch) * (k + 1) for k, ch in enumerate(f"{type(c).__name__}:{c!r}")) % 8191)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (2, 3),
        (2, 2.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (1.0, math.nan),
        (math.inf, -math.inf),
        (1.0, 1.0 + 2**-52),
        (2**70, 2**70 + 1),
        (1.0, 1 + 0j),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ("mean", "sum"),
        ("a", b"a"),
        (None, 0),
        (None, False),
        ((), None),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2.0)),
        ({"k": 1}, {"k": True}),
        (Point(1, 2), (1, 2)),
        (slice(0, 2), slice(0, 3)),
        (slice(0, 2), slice(0, 2.0)),
        (Color.RED, Color.BLUE),
        (torch.float16, torch.float32),
        (torch.Size([1, 2]), (1, 2)),
        (torch.device("cpu"), torch.device("meta")),
        (torch.channels_last, torch.contiguous_format),
        (int, float),
        (..., None),
        (np.float64(2.0), 2.0),
        (np.float64(2.0), np.float32(2.0)),
        (np.float64(0.0), np.float64(-0.0)),
        (np.float32(1.0), np.float32(math.nan)),
        (np.int64(2), np.int32(2)),
        (np.bool_(True), np.bool_(False)),
        (np.complex64(1j), np.complex64(1 + 1j)),
        (np.datetime64("2026-01-01"), np.datetime64("2026-01-01", "s")),
        (Decimal("2"), Decimal("2.0")),
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
    ],
    ids=repr,
)
def test_constants_by_type_and_bits(rand: Rand, a: Any, b: Any) -> None:
    def f(x: Tensor, c: Any) -> Tensor:
        return x * as_number(c)

    arguments = lambda i: (rand(i, 3), b if i % 2 else a)  # noqa: E731
    fast = drop_in(f, arguments, calls=8, recordings=2, min_replays=4)
    assert all(r.replays > 0 for r in fast.recordings)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (range(3), range(4)),
        (frozenset({1}), frozenset({2})),
        (math.sin, math.cos),
        (np.arange(3), np.arange(4)),
    ],
    ids=lambda c: type(c).__name__,
)
def test_other_constants_are_told_apart_or_run_eagerly(rand: Rand, a: Any, b: Any) -> None:
    arguments = lambda i: (rand(i, 3), b if i % 2 else a)  # noqa: E731
    drop_in(lambda x, c: x * as_number(c), arguments, calls=8, recordings=None, min_replays=0)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int64, np.bool_])
def test_a_number_of_numpy_that_is_made_anew_fits(rand: Rand, kind: Any) -> None:
    fast = drop_in(lambda x, n: (x * float(n), n), lambda i: (rand(i, 3), kind(3)))
    assert fast.recordings[0].replays == 4


def test_a_number_of_numpy_that_changes_is_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, n: x * float(n), warmup=1)
    with torch.no_grad():
        for i in range(8):
            assert_same(fast(rand(i, 3), np.float32(i)), rand(i, 3) * i)
        with pytest.warns(ol.GraphWarning, match=r"(?s)OL301.*0-dim tensor"):
            fast(rand(8, 3), np.float32(8))


class Settable:
    """It says what is equal, and its parts may be set all the same."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settable)

    def __hash__(self) -> int:
        return 0


def test_an_object_with_slots_is_no_value(rand: Rand) -> None:
    held = Settable(2.0)
    fast = ol.graph(lambda x: x * held.scale, warmup=1)
    with torch.no_grad():
        for i in range(9):
            held.scale = 2.0 + i // 3  # equal numbers, which are other objects
            assert_same(fast(rand(i, 3)), rand(i, 3) * held.scale)


def test_nan_fits_nan(rand: Rand) -> None:
    drop_in(lambda x, c: x * c, lambda i: (rand(i, 3), float("nan")), recordings=1)


def test_equal_strings_and_tuples_fit_by_value(rand: Rand) -> None:
    def f(x: Tensor, how: str, size: tuple[int, ...]) -> Tensor:
        return x.reshape(size).sum() if how == "sum" else x.reshape(size)

    drop_in(f, lambda i: (rand(i, 6), "".join(["s", "um"]), (2, 3)), recordings=1)


def test_a_mutable_constant_changed_by_the_caller(rand: Rand) -> None:
    sizes: list[int] = [2]
    fast = ol.graph(lambda x, sizes: x * sizes[0], warmup=1)
    for sizes[0] in (2, 3):
        alike(lambda x: fast(x, sizes), lambda x: x * sizes[0], rand, 3, calls=4)
    assert replays(fast) >= 4


class Config:
    scale = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


@pytest.mark.parametrize("kind", [Config, Slotted, types.SimpleNamespace])
def test_an_object_is_compared_or_runs_eagerly_with_one_warning(
    rand: Rand, kind: type[Any]
) -> None:
    config, twin = kind(), kind()

    def f(x: Tensor, config: Any) -> Tensor:
        return x * config.scale

    fast = ol.graph(f, warmup=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(9):
            config.scale = twin.scale = 2.0 + i // 3
            assert_same(fast(rand(i, 3), config), f(rand(i, 3), twin))
    ours = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) <= 1, ours
    assert all("OL302" in m and kind.__name__ in m for m in ours), ours
    assert bool(ours) or replays(fast) > 0


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_generators_of_values_are_not_consumed(rand: Rand) -> None:
    fast = ol.graph(lambda x, numbers: x * next(numbers), warmup=1)
    ours, eagers = iter(range(1, 10)), iter(range(1, 10))
    alike(lambda x: fast(x, ours), lambda x: x * next(eagers), rand, 3)


# Too many signatures.


def test_max_recordings_warns_once_and_names_the_argument(rand: Rand) -> None:
    def f(x: Tensor, scale: int) -> Tensor:
        return x * float(scale)  # which reads it

    fast = ol.graph(f, warmup=1, max_recordings=2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(20):
            assert_same(fast(rand(i, 3), i % 5), rand(i, 3) * (i % 5))
        assert len(fast.recordings) == 2
        before = [r.replays for r in fast.recordings]
        assert_same(fast(rand(1, 3), 0), rand(1, 3) * 0)
    ours = [w for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1, [str(w.message) for w in ours]
    message = str(ours[0].message)
    assert "OL301" in message
    assert "scale" in message or "args[1]" in message
    assert "args[0]" not in message
    assert sum(r.replays for r in fast.recordings) == sum(before) + 1


def test_max_recordings_names_the_dimension_that_varies(rand: Rand) -> None:
    fast = ol.graph(lambda x, y: x * 2 + y.sum(), warmup=1, max_recordings=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            n = 2 + i // 2
            assert_same(fast(rand(i, n, 3), rand(i, 2)), rand(i, n, 3) * 2 + rand(i, 2).sum())
    ours = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1
    assert "x" in ours[0] or "args[0]" in ours[0]


def test_max_recordings_counts_each_callable_on_its_own(rand: Rand) -> None:
    first = ol.graph(lambda x: x + 1, warmup=1, max_recordings=1)
    second = ol.graph(lambda x: x + 2, warmup=1, max_recordings=1)
    alike(first, lambda x: x + 1, rand, 3)
    alike(second, lambda x: x + 2, rand, 4)
    assert len(first.recordings) == len(second.recordings) == 1


def test_on_mismatch_raise_names_the_argument(rand: Rand) -> None:
    def decode(x: Tensor, scale: float) -> Tensor:
        return x * scale

    fast = ol.graph(decode, warmup=1, on_mismatch="raise")
    with torch.no_grad():
        for i in range(4):
            assert_same(fast(rand(i, 8, 4), 2.0), rand(i, 8, 4) * 2)
        with pytest.raises(ol.ReplayError) as caught:
            fast(rand(0, 9, 4), 2.0)
        error = caught.value
        assert error.code == "OL201"
        assert "decode" in str(error)
        assert "8" in str(error)
        assert "9" in str(error)
        assert "x" in (error.where or "") or "args[0]" in (error.where or "")
        with pytest.raises(ol.ReplayError) as caught:
            fast(rand(0, 8, 4), 3.0)
        assert caught.value.where is not None
        assert "scale" in caught.value.where or "args[1]" in caught.value.where
        assert_same(fast(rand(9, 8, 4), 2.0), rand(9, 8, 4) * 2)
    assert len(fast.recordings) == 1


def test_on_mismatch_raise_sees_modes(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1, on_mismatch="raise")
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    with torch.inference_mode(), pytest.raises(ol.ReplayError, match="inference"):
        fast(rand(0, 3))
