"""One suite, three devices: plain CPU tensors, the emulated device, and CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from . import overlaps
from .drop_in import random_tensor


@pytest.fixture(
    params=["cpu", "tape", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's tensors live."""
    if request.param == "tape":
        from onelaunch import testing

        testing.install()
    return (
        torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)
    )


@pytest.fixture
def no_overlaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each graph with branches is checked: see overlaps.py."""
    checked = overlaps.watch(monkeypatch)
    yield
    assert checked


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled so far."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["backend", "policy", "whole", "plain"])
def world(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Any]:
    """A way to record compiled code: see worlds.py."""
    from . import worlds  # it imports Inductor

    if request.param == "policy" and not worlds.HAS_HOOK:
        pytest.skip("the hook is torch 2.12's")
    with worlds.entered(request.param, device) as entered:
        yield entered


@pytest.fixture
def compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled so far. On plain CPU tensors, where nothing compiles, the callable of
    ``compile=True`` stands for code that hides its operations."""
    from onelaunch.capture.callee import Callee

    if device.type != "cpu":
        torch._dynamo.reset()
        return

    def captured_form(callee: Any, driver: Any) -> Any:
        if not callee.compile:
            return callee.fn
        if callee._compiled is None:
            callee._compiled = lambda *args, **kwargs: callee.fn(*args, **kwargs)
        return callee._compiled

    monkeypatch.setattr(Callee, "captured_form", captured_form)


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies of host values each attempt at a capture lacked."""
    from onelaunch.watch.device_constants import DeviceConstants

    found: list[int] = []
    make = DeviceConstants.make

    def made(self: DeviceConstants) -> None:
        found.append(len(self.missing))
        make(self)

    monkeypatch.setattr(DeviceConstants, "make", made)
    return found


@pytest.fixture
def whole_numbers() -> None:
    """Has `rand` make small whole numbers, with which whatever Inductor fuses is exact."""


@pytest.fixture
def rand(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., Tensor]:
    """`rand(seed, *shape, dtype=)` on the device."""
    made = functools.partial(random_tensor, device=device)
    if "whole_numbers" in request.fixturenames:
        return lambda seed, *shape: made(seed, *shape).mul(4).round()
    return made


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """One thread, one seed, and every global mode as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
