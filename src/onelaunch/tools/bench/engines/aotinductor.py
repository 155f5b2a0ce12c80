"""AOTInductor: the exported program as a shared library."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import Built, warm
from onelaunch.tools.bench.engines.flat import Exported, FlatModule
from onelaunch.tools.bench.workload import Workload


def aot_library(
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    load: Callable[[str], Any] | None = None,
) -> Callable[..., Any]:
    """Export `model`, compile it with Inductor into a shared library, and load that."""
    inductor: Any = importlib.import_module("torch._inductor")
    flat = FlatModule(model, args, kwargs)
    exported = torch.export.export(flat, tuple(flat.take(args, kwargs)))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt2"
        inductor.aoti_compile_and_package(exported, package_path=path)
        library = (load or inductor.aoti_load_package)(path)

    def fast(*args: Any, **kwargs: Any) -> Any:
        return flat.give(list(library(*flat.take(args, kwargs))))

    return fast


def _survives(what: str, code: str) -> None:
    """Run `code`, which does `what`, in a process of its own, where it may crash.

    Raises:
        RuntimeError: that process died of a signal.
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise RuntimeError(f"`{what}` of this build of PyTorch dies of {name}")


def _load(path: str) -> Any:
    """Load a library, once a process of its own has done so."""
    _survives("aoti_load_package", f"import torch; torch._inductor.aoti_load_package({path!r})")
    return importlib.import_module("torch._inductor").aoti_load_package(path)


class AOTInductor(Exported):
    """The exported program as a shared library, which must not end this process as it is loaded."""

    def build(self, workload: Workload) -> Built:
        fast = self.recipe(workload.fn, workload.args, workload.kwargs, _load)
        warm(fast, workload)
        return Built(fast)


AOT_INDUCTOR = AOTInductor(
    "aotinductor", "AOTInductor", aot_library, lambda device: None, imports="import tempfile\n"
)
