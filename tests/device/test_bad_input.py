"""Bad input to every public entry point, and what recordings and errors say."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, drop_in


def kind(target: object) -> str:
    """The name of a test, the same in each process."""
    return type(target).__name__


@pytest.mark.parametrize("target", [3, "model", None, [1], torch.ones(2), object()], ids=kind)
def test_a_target_that_is_not_callable(target: Any) -> None:
    if target is None:
        return  # graph(None, ...) is graph(...): the decorator with options
    with pytest.raises(ol.ArgumentError) as caught:
        ol.graph(target)
    assert "callable" in str(caught.value)


@pytest.mark.parametrize("target", [3, "model", None], ids=repr)
def test_a_decorated_thing_that_is_not_callable(target: Any) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        ol.graph(warmup=1)(target)
    assert "callable" in str(caught.value)


def test_a_class_is_not_a_model() -> None:
    with pytest.raises(ol.ArgumentError):
        ol.graph(nn.Linear)(4, 4)(torch.ones(4))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("warmup", -1),
        ("warmup", 0),
        ("warmup", 2.5),
        ("warmup", "3"),
        ("warmup", None),
        ("warmup", True),
        ("outputs", "Fresh"),
        ("outputs", None),
        ("outputs", 1),
        ("inputs", "node"),
        ("inputs", None),
        ("compile", "yes"),
        ("compile", None),
        ("pool", 3),
        ("pool", "pool"),
        ("pool", (0, 1)),
        ("max_recordings", -1),
        ("max_recordings", 0),
        ("max_recordings", 1.5),
        ("max_recordings", None),
        ("on_mismatch", "error"),
        ("on_mismatch", None),
        ("on_refusal", "error"),
        ("on_refusal", None),
    ],
)
def test_bad_options(option: str, value: Any) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        ol.graph(lambda x: x, **{option: value})
    assert option in str(caught.value)
    assert repr(value) in str(caught.value)
    assert caught.value.code == "OL401"


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"graph\(\) got an unexpected keyword argument 'warm_up'"):
        ol.graph(lambda x: x, warm_up=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("max_bytes", [-1, 0, 1.5, "1 GB", True])
def test_bad_pools(max_bytes: Any) -> None:
    with pytest.raises(ol.ArgumentError) as caught:
        ol.Pool(max_bytes=max_bytes)
    assert "max_bytes" in str(caught.value)


def test_an_unused_pool_is_empty() -> None:
    assert ol.Pool().memory_bytes == 0
    assert ol.Pool(max_bytes=1 << 20).memory_bytes == 0


def test_bad_capture_arguments_raise_what_the_callable_raises(rand: Rand) -> None:
    fast = ol.graph(lambda x: x @ x)
    with torch.no_grad():
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            fast.capture()
        with pytest.raises(RuntimeError):
            fast.capture(rand(0, 3, 4))
        fast.capture(rand(0, 3, 3))
    assert len(fast.recordings) == 1


def test_recordings_cannot_be_changed(rand: Rand) -> None:
    fast = drop_in(lambda x: x * 2, lambda i: (rand(i, 3),))
    (recording,) = fast.recordings
    assert isinstance(recording, ol.Recording)
    with pytest.raises((AttributeError, TypeError)):
        recording.replays = 0
    with pytest.raises((AttributeError, TypeError)):
        fast.recordings = []


def test_what_a_recording_says(rand: Rand) -> None:
    def f(x: Tensor, pair: tuple[Tensor, Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale + pair[0], pair[1]

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 3), (rand(i, 3), rand(i, 2)), scale=2.0)
    (recording,) = fast.recordings
    assert len(recording.inputs) >= 3
    assert all(isinstance(name, str) for name in recording.inputs)
    assert len(recording.outputs) == 2
    assert recording.capture_seconds > 0
    assert recording.pool_bytes >= 0
    assert recording.nodes >= 1
    assert recording.replays == 3
    assert isinstance(recording.why, str)
    assert recording.why
    assert "spec" not in recording.why
    assert fast.memory_bytes >= recording.pool_bytes
    assert hash(recording.spec) is not None


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_an_argument_on_a_device_without_a_driver() -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1)
    with torch.no_grad():
        for _ in range(4):
            assert fast(torch.empty(3, device="meta")).device.type == "meta"


async def coroutine(x: Tensor) -> Tensor:
    return x + 1


async def stream(x: Tensor) -> AsyncIterator[Tensor]:
    yield x + 1


def rows(x: Tensor) -> Iterator[Tensor]:
    yield from x


class Served:
    async def __call__(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("fn", "made"),
    [
        (coroutine, "`coroutine` only makes a coroutine"),
        (functools.partial(coroutine), "makes a coroutine"),
        (Served(), "makes a coroutine"),
        (stream, "asynchronous generator"),
        (rows, "`rows` only makes a generator"),
    ],
    ids=["coroutine", "partial", "object", "asynchronous generator", "generator"],
)
def test_a_function_whose_call_runs_nothing(fn: Any, made: str) -> None:
    with pytest.raises(ol.ArgumentError, match=made):
        ol.graph(fn)
