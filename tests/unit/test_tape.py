"""The tape through its protocol: plain CPU tensors, and the emulated device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onelaunch import testing
from onelaunch.driver.protocol import Capture, Driver
from onelaunch.driver.select import driver_of
from onelaunch.errors import CaptureError
from tests.unit.captured import Captured, assert_same


@pytest.fixture(params=["cpu", "tape"])
def device(request: pytest.FixtureRequest) -> torch.device:
    testing.install()
    return torch.device(request.param)


@pytest.fixture
def driver(device: torch.device) -> Driver:
    return driver_of(device.type)


def test_displacement(device: torch.device, driver: Driver) -> None:
    """A port may copy more than the tensor: the region around it."""
    base = torch.arange(8.0).to(device)
    other = base + 10

    def body(capture: Capture) -> None:
        block = driver.empty(32, device)
        capture.input(base[3:5], block, "node", 12)
        x = driver.alias(block, torch.float32, (8,), (1,), 0)
        y = x * 2
        capture.output(driver.alias(y, torch.uint8, (32,), (1,), 0), 4)

    graph, _ = driver.capture(body, driver.new_pool(device))
    target = torch.empty(8, device=device)
    graph.launch([other[3:5]], [target[1:]])
    assert_same([target], [other * 2])


def test_alias_and_region(device: torch.device, driver: Driver) -> None:
    x = torch.arange(12.0).view(3, 4).to(device)
    whole, part = driver.region(x), driver.region(x[1:, 1])
    assert whole.stop - whole.start == 48
    assert (part.start - whole.start, part.stop - whole.start) == (20, 40)
    assert whole.overlaps(part)
    assert not driver.region(x[0]).overlaps(driver.region(x[1]))
    assert driver.region(x[:0]).start == driver.region(x[:0]).stop
    again = driver.alias(x[1], torch.int32, (2, 2), (4, 1), 0)
    assert again.data_ptr() == x[1].data_ptr()
    assert_same([again.view(torch.float32)], [x[1:3, :2]])
    assert driver.empty(100, device).data_ptr() % 64 == 0
    assert driver.empty(0, device).shape == (0,)


def test_a_storage_that_the_program_resizes() -> None:
    """As FSDP frees a parameter and has it again: repeated, and put back after the capture."""
    whole, kept = torch.zeros(4, 4), torch.ones(4, 4)
    whole.untyped_storage().resize_(0)

    def program(x: Tensor) -> Tensor:
        whole.untyped_storage().resize_(whole.nbytes)
        whole.copy_(x)
        y = whole * 2 + kept
        kept.add_(1)
        whole.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(2 * kept.nbytes)
        return y

    captured = Captured(program, torch.randn(4, 4))
    assert whole.untyped_storage().nbytes() == 0
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert kept.eq(1).all()
    for i in range(3):
        x = torch.randn(4, 4)
        assert_same(captured(x), [x * 2 + (1 + i)])
        assert whole.untyped_storage().nbytes() == 0
    assert kept.eq(4).all()
    assert kept.untyped_storage().nbytes() == 2 * kept.nbytes
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_storage_of_the_recording_cannot_be_resized() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.untyped_storage().resize_(0)
        return x + 1

    with pytest.raises(CaptureError) as caught:
        Captured(program, torch.randn(4, 4))
    assert caught.value.code == "OL107"


def test_nested_captures_and_launches_are_refused(device: torch.device) -> None:
    x = torch.ones(2).to(device)
    inner = Captured(lambda x: x + 1, x)
    with pytest.raises(CaptureError, match="OL109"):
        Captured(lambda x: Captured(lambda x: x + 1, x)(x), x)
    with pytest.raises(CaptureError, match="OL109"):
        Captured(lambda x: inner(x), x)


def test_constants_of_the_body_start_anew() -> None:
    """`torch.tensor` inside a body, then changed in place: each replay finds it as it was made."""

    def program(x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0])
        total += x
        return total * 2

    x = torch.ones(2)
    captured = Captured(program, x)
    for _ in range(2):
        assert_same(captured(x), [program(x)])
