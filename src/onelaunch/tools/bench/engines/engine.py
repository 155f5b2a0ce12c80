"""The interface of an engine: one way to run a callable."""

from __future__ import annotations

import contextlib
import importlib.util
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from onelaunch.tools.bench.workload import Workload

WARM_CALLS = 4  # enough for compiled CUDA graphs: warm up, record, replay, replay
Mode = Literal["grad", "no_grad", "inference_mode"]
OVERWRITTEN = "  # overwritten by the next call"


def snippet(call: str, setup: str = "", head: str = "", mode: Mode = "no_grad") -> str:
    """Write the code of an engine, for `model` and the arguments of a call.

    Args:
        call: sets ``y``; what is timed.
        setup: makes what `call` uses, in the same grad mode.
        head: imports and functions.
        mode: the grad mode of both.
    """
    body = "\n".join(part for part in (setup, call) if part)
    if mode != "grad":
        body = f"with torch.{mode}():\n{textwrap.indent(body, '    ')}"
    return "\n".join(part for part in (head, body) if part)


@dataclass
class Built:
    """An engine at work on one workload.

    Attributes:
        call: takes the arguments of the workload's callable.
        bare: timed instead of `call`, where that is less than a whole call; takes nothing.
        memory_bytes: the memory held between calls, where the engine itself knows it.
        notes: remarks for a reader of its row, asked for after the timing.
        close: frees its memory.
        outside: True if it holds device memory that torch's allocator does not know of.
    """

    call: Callable[..., Any]
    bare: Callable[[], object] | None = None
    memory_bytes: Callable[[], int] | None = None
    notes: Callable[[], list[str]] = field(default=list)
    close: Callable[[], None] = field(default=lambda: None)
    outside: bool = False


@runtime_checkable
class Engine(Protocol):
    """One way to run a callable.

    Attributes:
        name: the name in ``--engines``.
        title: the name in the table.
        mode: the grad mode in which it is built and called.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def mode(self) -> Mode: ...

    def missing(self, device: torch.device) -> str | None:
        """Say why it cannot run here a callable on this device, or None if it can."""
        ...

    def build(self, workload: Workload) -> Built:
        """Make it ready, warm-up included; the workload is the engine's own copy.

        Raises:
            Exception: anything; its message goes to the row.
        """
        ...

    def code(self, workload: Workload) -> str:
        """Write the code that does the same, for `model` and its arguments."""
        ...


def grad_mode(mode: Mode) -> AbstractContextManager[object]:
    """Enter the grad mode in which an engine is built and called."""
    if mode == "no_grad":
        return torch.no_grad()
    if mode == "inference_mode":
        return torch.inference_mode()
    return contextlib.nullcontext()


def needs_cuda(device: torch.device) -> str | None:
    """Say why CUDA graphs cannot run a callable on `device`, or None if they can."""
    if device.type == "cuda":
        return None
    if torch.cuda.is_available():
        return f"needs CUDA, and the callable is on {device.type}"
    return "needs an NVIDIA GPU"


def absent(install: str, *packages: str) -> str | None:
    """Say which package is not installed, and what pip installs for it; None if all are."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {install}"
    return None


def warm(call: Callable[..., Any], workload: Workload) -> None:
    """Call the engine until its calls no longer compile or record."""
    for _ in range(WARM_CALLS):
        call(*workload.args, **workload.kwargs)
