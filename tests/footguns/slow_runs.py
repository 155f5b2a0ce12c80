"""Runs of callables and of the rules' programs, and what of them is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.finding import Finding
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.run import watch
from onelaunch.tools.doctor.slow.listener import Slow
from onelaunch.tools.rules.slow import SLOW

BY_CODE = {rule.code: rule for rule in SLOW}
IMAGES = (2, 4, 8, 8)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The examples change settings of the whole process."""
    torch.manual_seed(0)
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.benchmark
    yield
    cudnn.benchmark = before
    torch.set_float32_matmul_precision(precision)


def program(text: str, folder: Path, change: Callable[[str], str] = str) -> tuple[Any, Any]:
    """Run a rule's program from a file; return its callable and arguments."""
    path = folder / "program.py"
    path.write_text(change(text))
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["model"], names["args"]


def slow(fn: Callable[..., Any], *args: Any, grad: bool = False, **kwargs: Any) -> list[Finding]:
    """Find what is slow in a call, under `no_grad` unless it is to record."""
    listener = Slow()
    with nullcontext() if grad else torch.no_grad():
        watch(Workload(fn, args, kwargs).copy(), [listener], backward=False)
    return listener.findings()


def codes(fn: Callable[..., Any], *args: Any, grad: bool = False, **kwargs: Any) -> set[str]:
    return {finding.code for finding in slow(fn, *args, grad=grad, **kwargs)}


def what(code: str, fn: Callable[..., Any], *args: Any, grad: bool = False) -> str:
    (finding,) = (f for f in slow(fn, *args, grad=grad) if f.code == code)
    return finding.what


def conv(bias: bool = True, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 8, 3, bias=bias, **kwargs)


def separable(inputs: int, outputs: int, *between: nn.Module) -> nn.Module:
    depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
    return nn.Sequential(depthwise, *between, nn.Conv2d(inputs, outputs, 1)).eval()
