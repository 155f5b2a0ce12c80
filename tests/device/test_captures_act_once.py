"""A captured run acts in Python once for its call, or not at all: also where it serves no call."""

from __future__ import annotations

import array
import contextlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Step = Callable[[Any], object]
pytestmark = pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")


def _bounded(held: Any) -> None:
    held["queue"].append(len(held["queue"]) + sum(held["queue"]))


def _of_strings(held: Any) -> None:
    held["seen"].add(f"call {len(held['seen'])}")


def _toggled(held: Any) -> None:
    held["seen"] ^= {len(held["seen"])}


def _popped(held: Any) -> None:
    held["left"].discard(max(held["left"], default=0))


def _both(held: Any) -> None:
    held["seen"].add(len(held["seen"]))
    held["calls"].n += 1


def _in_a_bytearray(held: Any) -> None:
    held["bytes"][0] += 1


STEPS: dict[str, Step] = {
    "set": lambda held: held["seen"].add(len(held["seen"])),
    "set of strings": _of_strings,
    "set that is made anew": _toggled,
    "set that shrinks": _popped,
    "set and a count": _both,
    "bounded queue": _bounded,
    "module's set": lambda held: held["module"].seen.add(len(held["module"].seen)),
    "inner set": lambda held: held["inner"][0].add(len(held["inner"][0])),
    "bytearray": _in_a_bytearray,
    "array": lambda held: held["array"].append(len(held["array"])),
}


def stepping(step: str, held: Any) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        STEPS[step](held)
        return x * 2

    return f


def made() -> dict[str, Any]:
    module = nn.Identity()
    module.seen = {0}  # pyright: ignore
    return {
        "seen": {0},
        "left": set(range(30)),
        "queue": deque([1, 2], maxlen=3),
        "calls": SimpleNamespace(n=0),
        "module": module,
        "inner": ({0},),
        "bytes": bytearray(4),
        "array": array.array("l", [0]),
    }


def shown(held: dict[str, Any]) -> list[Any]:
    return [
        sorted(map(str, held["seen"])),
        sorted(held["left"]),
        list(held["queue"]),
        held["calls"].n,
        sorted(held["module"].seen),
        sorted(held["inner"][0]),
        bytes(held["bytes"]),
        list(held["array"]),
    ]


@pytest.mark.parametrize("inputs", ["copy", "rebind"])
def test_state_that_is_written_in_part_first(rand: Rand, inputs: Any) -> None:
    """A proof by launches puts all of it back."""

    def program(table: Tensor) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            table[0] = 1
            table.mul_(2).add_(x)
            return table.unbind()[1] + x

        return f

    tables = rand(50, 64, 64), rand(50, 64, 64)
    fast, eager = ol.graph(program(tables[0]), warmup=1, inputs=inputs), program(tables[1])
    with torch.no_grad():
        for i in range(6):
            assert_same(fast(rand(i, 64, 64)), eager(rand(i, 64, 64)), f"call {i}")
            assert_same(*tables, f"call {i}")
    assert replays(fast) == 5


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("inputs", ["copy", "rebind"])
@pytest.mark.parametrize("step", STEPS)
def test_a_recording_that_does_not_fit_its_call(
    rand: Rand, step: str, inputs: Any, warmup: int
) -> None:
    """Each call leaves the state as eager does, until a refusal, which leaves it as it was."""
    ours, theirs = made(), made()
    fast = ol.graph(stepping(step, ours), warmup=warmup, inputs=inputs)
    eager = stepping(step, theirs)
    with torch.no_grad():
        for i in range(8):
            try:
                got = fast(rand(i, 3))
            except ol.CaptureError:
                break
            assert_same(got, eager(rand(i, 3)))
            assert shown(ours) == shown(theirs), f"call {i}"
        assert shown(ours) == shown(theirs)


@pytest.mark.parametrize("step", STEPS)
def test_a_capture_ahead_of_the_first_call(rand: Rand, step: str) -> None:
    held = made()
    with torch.no_grad(), contextlib.suppress(ol.CaptureError):
        ol.graph(stepping(step, held), warmup=1).capture(rand(0, 3))
    assert shown(held) == shown(made())


def test_a_pool_without_room(rand: Rand) -> None:
    """A capture that does not fit into the pool is freed, and its call runs eagerly."""
    seen, theirs = [0], [0]

    def program(held: list[int]) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            held[0] += len(x.shape)
            return (x @ x).relu() @ x

        return f

    pool = ol.Pool(max_bytes=1 << 10)
    fast, eager = ol.graph(program(seen), warmup=1, pool=pool), program(theirs)
    with torch.no_grad():
        for i in range(5):
            assert_same(fast(rand(i, 64, 64)), eager(rand(i, 64, 64)))
            assert seen == theirs, f"call {i}"
