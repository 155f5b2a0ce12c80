"""What the core makes of a driver, in a few lines: for the tests of the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.protocol import Capture, DevicePool
from onelaunch.driver.select import driver_of

Program = Callable[..., Any]


class Captured:
    """What the core makes of a driver: fresh outputs, inputs by address, called like the program.

    The program's own result is dropped, as the core drops it: its memory is free for others.
    """

    def __init__(self, program: Program, *examples: Tensor, pool: DevicePool | None = None) -> None:
        device = examples[0].device
        driver = driver_of(device.type)
        self.pool = pool or driver.new_pool(device)
        self.layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]] = []

        def body(capture: Capture) -> None:
            buffers: list[Tensor] = []
            for x in examples:
                n = driver.region(x).stop - driver.region(x).start
                block = driver.empty(n, device)
                capture.input(x, block, "node")
                buffers.append(driver.alias(block, x.dtype, x.shape, x.stride(), 0))
            for y in flat(program(*buffers)):
                n = driver.region(y).stop - driver.region(y).start
                self.layouts.append((y.dtype, y.shape, y.stride()))
                capture.output(driver.alias(y, torch.uint8, (n,), (1,), 0))

        self.graph, _ = driver.capture(body, self.pool)
        self.device = device

    def __call__(self, *sources: Tensor) -> list[Tensor]:
        targets = [
            torch.empty_strided(size, stride, dtype=dtype, device=self.device)
            for dtype, size, stride in self.layouts
        ]
        self.graph.launch(sources, targets)
        return targets


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in flat(v)]


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        torch.testing.assert_close(
            a.detach().cpu(), b.detach().cpu(), rtol=0, atol=0, equal_nan=True
        )
