"""Captures that fail."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.errors import CaptureError
from tests.gpu.recorded import (
    DEVICE,
    Recorded,
    works,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]


def fails_item(x: Tensor) -> Tensor:
    return x + x.sum().item()


def fails_memory(x: Tensor) -> Tensor:
    return x + torch.empty(1 << 42, device=DEVICE)[0]


def fails_itself(x: Tensor) -> Tensor:
    torch.rand_like(x)
    raise ValueError("mine")


def fails_unjoined(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return x + 1


def swallows(x: Tensor) -> Tensor:
    try:
        x.sum().item()
    except RuntimeError:
        return x + 1
    raise AssertionError("not captured")


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (fails_item, "OL109"),
        (fails_memory, "OL111"),
        (fails_itself, None),
        (fails_unjoined, "OL109"),
        (swallows, "OL109"),
    ],
)
def test_after_a_failed_capture_all_goes_on(driver, pool, fn, code) -> None:
    kept = Recorded(driver, lambda x: x * 3, [torch.randn(64, device=DEVICE)], pool)
    x = torch.randn(64, device=DEVICE)
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()

    def body(capture):
        buffer = driver.empty(x.nbytes, DEVICE)
        capture.input(x, buffer, "node")
        return fn(torch.rand_like(x) + driver.alias(buffer, x.dtype, x.shape, x.stride(), 0))

    with pytest.raises(ValueError if code is None else CaptureError) as caught:
        driver.capture(body, pool)
    if code is None:
        assert str(caught.value) == "mine"
        assert caught.value.__cause__ is None
    else:
        assert caught.value.code == code
        assert isinstance(caught.value.__cause__, RuntimeError)
        if fn in (fails_item, fails_memory):
            assert "test_cuda_failures.py" in caught.value.where
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.equal(kept(x), x * 3)
    works(driver, pool)
    other = driver.new_pool(DEVICE)
    works(driver, other)
    assert other.memory_bytes == 0


def test_a_collection_in_a_capture_destroys_no_older_graph() -> None:
    """Nor an event, a stream or memory of another pool that garbage holds."""

    class Held:
        def __init__(self) -> None:
            self.itself = self
            self.graph, self.event = torch.cuda.CUDAGraph(), torch.cuda.Event()
            self.stream = torch.cuda.Stream()
            x = torch.ones(1 << 22, device=DEVICE)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.y = x * 2
            self.event.record()
            self.large = torch.ones(1 << 24, device=DEVICE)

    def f(x: Tensor) -> Tensor:
        gc.collect()
        return x * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            Held()
            x = torch.full((3,), float(i), device=DEVICE)
            assert torch.equal(fast(x), x * 2)
    assert len(fast.recordings) == 1
    assert fast.recordings[0].replays == 4
