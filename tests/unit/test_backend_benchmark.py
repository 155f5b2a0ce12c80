"""The workloads of the backend's benchmark, as far as no GPU is needed for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.backend_workloads import made


@pytest.mark.parametrize("name", ["sine", "breaks", "host", "decode", "train-sine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_repeats(name: str, dtype: torch.dtype) -> None:
    begun: list[int] = []
    work = made(name, dtype)
    step = work.step(lambda fn: fn, lambda: begun.append(1))
    first, second = step(), step()
    assert len(begun) == 2
    torch.testing.assert_close(first, second)
    given = first[0] if work.train else first
    assert isinstance(given, Tensor)
    assert given.isfinite().all()
    assert given.requires_grad is False
