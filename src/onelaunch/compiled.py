"""Inductor's kernels, to be captured whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(fn: Callable[..., Any], mode: bool | str) -> Callable[..., Any]:
    """`fn` compiled by Inductor, its own CUDA graphs off: the recording takes their place.

    Args:
        mode: True or ``"default"``, or ``"max-autotune"`` (slow to build).
    """
    if mode == "max-autotune":
        return torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=False)
    return torch.compile(fn, options={"triton.cudagraphs": False}, dynamic=False)
