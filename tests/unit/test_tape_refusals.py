"""What the tape refuses, by which code and at which line."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch import testing
from onelaunch.driver.select import driver_of
from onelaunch.errors import CaptureError
from tests.unit.captured import Captured, Program, assert_same


@pytest.fixture(params=["cpu", "tape"])
def device(request: pytest.FixtureRequest) -> torch.device:
    testing.install()
    return torch.device(request.param)


READS: dict[str, Program] = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x + 1 if x.sum() else x,
    "int": lambda x: x + int(x[0, 0]),
    "float": lambda x: x + float(x[0, 0]),
    "index": lambda x: [x, x + 1][(x[0, 0] > 9).long()],
    "tolist": lambda x: x + x.tolist()[0][0],
    "index of tensors": lambda x: x[[x[0, 0].long(), 0], :],
    "index of lists of tensors": lambda x: x[[[x[0, 0].long(), 0], [0, 1]]],
    "tensor of tensors": lambda x: x + torch.tensor([x[0, 0]], device=x.device),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "dlpack": lambda x: torch.from_dlpack(x),
    "repr": lambda x: (repr(x), x)[1],
    "print": lambda x: (str(x), x)[1],
    "format": lambda x: (f"{x.sum():.3f}", x)[1],
    "equal": lambda x: x if torch.equal(x, x) else x + 1,
    "allclose": lambda x: x if torch.allclose(x, x) else x + 1,
    "inverse": lambda x: torch.linalg.inv(x),
}

SHAPES: dict[str, Program] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "unique": lambda x: torch.unique(x),
    "masked select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "repeat": lambda x: torch.repeat_interleave(x, torch.ones_like(x[0]).long(), dim=0),
    "bincount": lambda x: torch.bincount(x.long().abs().view(-1)),
    "mask assigned": lambda x: x.clone().index_put_((x > 0,), x[x > 0]),
}

INSIDE: dict[str, Program] = {
    "masked fill": lambda x: x.masked_fill(x > 0, x.sum()),
    "masked fill in place": lambda x: x.clone().masked_fill_(x > 0, x.sum()),
}
"""Reads of CUDA's kernels, which only the stream refuses."""

SEEDS: dict[str, Program] = {
    "seed": lambda x: (torch.manual_seed(0), x + 1)[1],
    "last": lambda x: (x + 1, torch.manual_seed(0))[0],
    "state": lambda x: seeded_by_state(x),
}
PROGRAMS = {"OL101": READS, "OL102": SHAPES, "OL106": SEEDS, "OL109": INSIDE}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("code", "name"),
    [(code, name) for code, programs in PROGRAMS.items() for name in programs],
)
def test_refused(code: str, name: str, mode: Callable[[], Any], device: torch.device) -> None:
    program = PROGRAMS[code][name]
    x = torch.eye(4).to(device) + 0.5
    pool = driver_of(device.type).new_pool(device)
    with mode():
        with pytest.raises(CaptureError) as refused:
            Captured(program, x, pool=pool)
        assert refused.value.code == code
        assert refused.value.where is not None
        assert "test_tape_refusals.py" in refused.value.where
        assert_same(Captured(lambda x: x + 1, x, pool=pool)(x), [x + 1])


def seeded_by_state(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = torch.rand_like(x)
    torch.set_rng_state(state)
    return y + x


def test_a_profiler_keeps_its_hook() -> None:
    """A seed is then found by comparing states."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        hook = sys.getprofile()
        with pytest.raises(CaptureError, match="OL106"):
            Captured(SEEDS["seed"], torch.ones(2))
        assert sys.getprofile() is hook
    finally:
        profiler.disable()
