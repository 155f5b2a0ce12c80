"""AOTInductor: the exported program as a shared library."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onelaunch.bench.engines.engine import Built, Mode, as_module, tuple_text, warm
from onelaunch.bench.workload import Workload


def _survives(what: str, code: str) -> None:
    """Run `code`, which does `what`, in a process of its own, where it may crash.

    Raises:
        RuntimeError: that process died of a signal.
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise RuntimeError(f"`{what}` of this build of PyTorch dies of {name}")


@dataclass(frozen=True)
class AOTInductor:
    """The exported program, compiled ahead of time into a shared library."""

    name: str = "aotinductor"
    title: str = "AOTInductor"
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return None

    def build(self, workload: Workload) -> Built:
        import torch._inductor as inductor

        exported = torch.export.export(as_module(workload.fn), workload.args, workload.kwargs)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.pt2")
            inductor.aoti_compile_and_package(exported, package_path=path)
            load = f"import torch; torch._inductor.aoti_load_package({path!r})"
            _survives("aoti_load_package", load)
            call: Callable[..., Any] = inductor.aoti_load_package(path)
        warm(call, workload)
        return Built(call)

    def code(self, workload: Workload) -> str:
        names, keyword = workload.names
        given = ", ".join(f'"{name}": {name}' for name in keyword)
        return (
            "with torch.no_grad():\n"
            f"    exported = torch.export.export(model, {tuple_text(names)}, {{{given}}})\n"
            '    torch._inductor.aoti_compile_and_package(exported, package_path="model.pt2")\n'
            '    fast = torch._inductor.aoti_load_package("model.pt2")\n'
            f"    y = fast({workload.call_text})"
        )
