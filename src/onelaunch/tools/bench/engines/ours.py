"""onelaunch's own ways to run a callable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.api import graph
from onelaunch.capture.recording import Recording
from onelaunch.tools.bench.engines.engine import OVERWRITTEN, Built, Mode, snippet
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.report.units import memory

WARM_CALLS = 3


@dataclass(frozen=True)
class OneLaunch:
    """`ol.graph` with some of its options."""

    name: str
    title: str
    options: tuple[tuple[str, object], ...] = ()
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return None

    def build(self, workload: Workload) -> Built:
        options: dict[str, Any] = dict(self.options)
        # A refusal belongs in the row: a capture that quietly ran eagerly would be timed as ours.
        fast: Any = graph(workload.fn, warmup=WARM_CALLS, on_refusal="raise", **options)
        for _ in range(WARM_CALLS + 2):
            fast(*workload.args, **workload.kwargs)
        return Built(
            fast,
            memory_bytes=lambda: fast.memory_bytes,
            notes=lambda: self._notes(fast, workload.device),
            close=fast.reset,
        )

    def _notes(self, fast: Any, device: torch.device) -> list[str]:
        lines = [_line(recording) for recording in fast.recordings]
        if device.type == "cpu" and dict(self.options).get("compile"):
            lines.append("on a CPU the tape records eager's operations, whatever compile says")
        return lines

    def code(self, workload: Workload) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        static = dict(self.options).get("outputs") == "static"
        return snippet(
            f"y = fast({workload.call_text}){OVERWRITTEN if static else ''}",
            f"fast = ol.graph(model{options})",
            "import onelaunch as ol",
        )


def _line(recording: Recording) -> str:
    """Describe a recording in a line: its calls and nodes, the way of each input, its memory."""
    inputs = ", ".join(f"{name} by {travel}" for name, travel in recording.inputs.items())
    held = f"{memory(recording.pool_bytes)} in the pool"
    if recording.driver_bytes:
        held += f", {memory(recording.driver_bytes)} taken by the driver"
    if recording.parallel is not None:
        held += f"; {str(recording.parallel).splitlines()[0]}"
    return f"{recording.spec}: {recording.nodes} nodes; inputs: {inputs or 'none'}; {held}"


OURS = (
    OneLaunch("onelaunch", "onelaunch"),
    OneLaunch("onelaunch-rebind", "onelaunch rebind", (("inputs", "rebind"),)),
    OneLaunch("onelaunch-static", "onelaunch static outputs", (("outputs", "static"),)),
    OneLaunch("onelaunch-parallel", 'onelaunch parallel="auto"', (("parallel", "auto"),)),
    OneLaunch("onelaunch-compile", "onelaunch compile=True", (("compile", True),)),
)
AUTOTUNED = OneLaunch(
    "onelaunch-max-autotune", 'onelaunch compile="max-autotune"', (("compile", "max-autotune"),)
)
