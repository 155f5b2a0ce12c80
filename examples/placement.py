"""Where the examples run."""

from __future__ import annotations

import torch

Call = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ready(module: torch.nn.Module, *args: torch.Tensor) -> Call:
    """The module in eval mode, and its arguments, on `device()`."""
    where = device()
    return module.to(where).eval(), tuple(arg.to(where) for arg in args)
