"""``compile=True`` and operators of the user's that write an argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from tests.device.drop_in import assert_same, replays

pytestmark = pytest.mark.gpu


@torch.library.custom_op("onelaunch_tests::scale_", mutates_args=("x",))
def scale_(x: Tensor, by: float) -> None:
    x.mul_(by)


@scale_.register_fake
def _(x: Tensor, by: float) -> None:
    return None


def by_triton() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < n)
        tl.store(x + at, values * 2, mask=at < n)

    @torch.library.triton_op("onelaunch_tests::twice_", mutates_args=("x",))
    def twice_(x: Tensor) -> None:
        torch.library.wrap_triton(kernel)[(1,)](x, x.numel(), BLOCK=64)

    return twice_


@pytest.mark.parametrize("kind", ["custom", "triton"])
def test_operators_that_write(kind: str, settled: None) -> None:
    torch._dynamo.reset()
    twice = by_triton() if kind == "triton" else (lambda x: scale_(x, 2.0))

    def f(x: Tensor, y: Tensor) -> Tensor:
        twice(x)
        return x + y

    fast = ol.graph(f, compile=True, warmup=2)
    with torch.no_grad():
        for i in range(7):
            x = torch.full((2, 16), float(i), device="cuda")
            other, y = x.clone(), torch.ones_like(x)
            assert_same(fast(x, y), f(other, y), f"call {i}")
            assert_same(x, other, f"call {i}, argument")
    assert replays(fast) >= 3
