"""Captures that fail, and machines without bindings."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.driver.cuda import Capabilities, graph, memory
from onelaunch.driver.cuda import capture as record
from onelaunch.driver.cuda import driver as driver_module
from onelaunch.driver.cuda import streams as order
from onelaunch.errors import CaptureError
from tests.gpu.recorded import (
    DEVICE,
    Recorded,
    check_displaced_and_empty_ports,
    check_random_numbers,
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


# Without bindings, as on ROCm.


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Capabilities(False, False, "for a test", "")
    stream = torch.cuda.Stream()
    for module in (record, graph, order, memory, driver_module):
        monkeypatch.setattr(module, "capabilities", lambda: nothing)
    for module in (record, driver_module):
        monkeypatch.setattr(module, "capture_stream", lambda index: stream)


@pytest.mark.usefixtures("plain")
class TestWithoutBindings:
    """The same protocol, with copies before and after the replay."""

    def test_launches(self, driver, pool) -> None:
        base = torch.randn(33, 257, device=DEVICE)
        graphed = Recorded(driver, lambda x: (x * 2 + 1).relu(), [base.t()], pool)
        assert graphed.graph.travels == ("copy",)
        inputs = torch.randn(200, 33, 257, device=DEVICE)
        for x, y in zip(inputs, [graphed(x.t()) for x in inputs], strict=True):
            assert torch.equal(y, (x.t() * 2 + 1).relu())
        assert graphed.rebind().travels == ("copy",)

    def test_displaced_and_empty_ports(self, driver, pool) -> None:
        check_displaced_and_empty_ports(driver, pool)

    @pytest.mark.parametrize("fn", [fails_item, fails_memory, fails_itself, swallows])
    def test_after_a_failed_capture_all_goes_on(self, driver, pool, fn) -> None:
        x = torch.randn(64, device=DEVICE)
        with pytest.raises((CaptureError, ValueError)):
            driver.capture(lambda capture: fn(torch.rand_like(x)), pool)
        works(driver, pool)

    def test_random_numbers_are_those_of_eager(self, driver, pool) -> None:
        check_random_numbers(driver, pool)


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
