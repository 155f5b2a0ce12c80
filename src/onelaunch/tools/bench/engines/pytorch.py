"""PyTorch's own engines, each as its documentation says to use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import (
    OVERWRITTEN,
    Built,
    Mode,
    needs_cuda,
    snippet,
    warm,
)
from onelaunch.tools.bench.workload import Workload


@dataclass(frozen=True)
class Eager:
    """The callable as it is, in one of the grad modes."""

    name: str
    title: str
    mode: Mode

    def missing(self, device: torch.device) -> str | None:
        return None

    def build(self, workload: Workload) -> Built:
        warm(workload.fn, workload)
        return Built(workload.fn)

    def code(self, workload: Workload) -> str:
        return snippet(f"y = model({workload.call_text})", mode=self.mode)


@dataclass(frozen=True)
class MakeGraphedCallables:
    """PyTorch's own wrapper around a forward graph."""

    name: str = "make_graphed_callables"
    title: str = "torch.cuda.make_graphed_callables"
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return needs_cuda(device)

    def build(self, workload: Workload) -> Built:
        if workload.kwargs:
            raise TypeError("make_graphed_callables takes no keyword arguments")
        # Its sample arguments become the static inputs, and a call with them skips the copy: not
        # what a caller with new data sees, so the calls that are timed come with others.
        samples, _ = workload.copy_inputs()
        graphed: Callable[..., Any] = torch.cuda.make_graphed_callables(workload.fn, samples)
        warm(graphed, workload)
        return Built(graphed)

    def code(self, workload: Workload) -> str:
        samples = f"copy.deepcopy({workload.args_text})"
        return snippet(
            f"y = fast({workload.call_text}){OVERWRITTEN}",
            f"fast = torch.cuda.make_graphed_callables(model, {samples})",
            "import copy",
        )


@dataclass(frozen=True)
class Compile:
    """`torch.compile` with a mode or a backend."""

    name: str
    title: str
    options: tuple[tuple[str, str], ...] = ()
    cuda_only: str | None = None
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        why = needs_cuda(device) if self.cuda_only else None
        return f"{why}; {self.cuda_only}" if why else None

    def build(self, workload: Workload) -> Built:
        options: dict[str, Any] = dict(self.options)
        compiled: Callable[..., Any] = torch.compile(workload.fn, **options)
        warm(compiled, workload)
        return Built(compiled)

    def code(self, workload: Workload) -> str:
        options = "".join(f', {key}="{value}"' for key, value in self.options)
        return snippet(f"y = fast({workload.call_text})", f"fast = torch.compile(model{options})")


EAGER = (
    Eager("eager", "eager", "grad"),
    Eager("no_grad", "eager, no_grad", "no_grad"),
    Eager("inference_mode", "eager, inference_mode", "inference_mode"),
)
COMPILED = (
    Compile("compile", "torch.compile"),
    Compile(
        "reduce-overhead",
        "torch.compile reduce-overhead",
        (("mode", "reduce-overhead"),),
        cuda_only="on a CPU this mode is torch.compile's default",
    ),
    Compile("max-autotune", "torch.compile max-autotune", (("mode", "max-autotune"),)),
    Compile(
        "cudagraphs",
        "torch.compile backend cudagraphs",
        (("backend", "cudagraphs"),),
        cuda_only="this backend is CUDA graphs alone",
    ),
)
