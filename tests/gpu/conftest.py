"""The CUDA driver, for the tests of that driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from onelaunch.driver.cuda import CudaDriver
from onelaunch.driver.cuda.memory import CudaPool
from tests.gpu.recorded import DEVICE


@pytest.fixture
def driver() -> CudaDriver:
    return CudaDriver()


@pytest.fixture
def pool(driver: CudaDriver) -> CudaPool:
    return driver.new_pool(DEVICE)


@pytest.fixture
def settled() -> Iterator[None]:
    """Seeds torch, and sees that nothing is left under way."""
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
