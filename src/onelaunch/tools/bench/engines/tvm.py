"""TVM: Relax, with its default schedules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import absent
from onelaunch.tools.bench.engines.flat import Exported, FlatModule


def tvm_program(model: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Export `model`, and compile it with TVM for the device of its tensors."""
    tvm: Any = importlib.import_module("tvm")
    frontend: Any = importlib.import_module("tvm.relax.frontend.torch")
    flat = FlatModule(model, args, kwargs)
    tensors = flat.take(args, kwargs)
    on_gpu = next((t for t in [*tensors, *flat(*tensors)] if t.is_cuda), None)
    device = tvm.cpu() if on_gpu is None else tvm.cuda(on_gpu.device.index)
    set_threads = tvm.get_global_func("runtime.config_threadpool", allow_missing=True)
    if set_threads is not None:
        set_threads(-2, torch.get_num_threads())  # -2: on any cores
    module = frontend.from_exported_program(torch.export.export(flat, tuple(tensors)))
    built = tvm.compile(module, tvm.target.Target.from_device(device))
    main = tvm.relax.VirtualMachine(built, device)["main"]

    def fast(*args: Any, **kwargs: Any) -> Any:
        given = [tvm.runtime.from_dlpack(t.contiguous()) for t in flat.take(args, kwargs)]
        return flat.give([torch.from_dlpack(array) for array in main(*given)])

    return fast


def _lacks(device: torch.device) -> str | None:
    if why := absent("apache-tvm", "tvm"):
        return why
    if device.type == "cpu":
        return None
    tvm: Any = importlib.import_module("tvm")
    if device.type == "cuda" and tvm.cuda(device.index or 0).exist:
        return None
    return f"this tvm has no {device.type} device"


TVM = Exported("tvm", "TVM", tvm_program, _lacks, notes=("TVM's default schedules, not tuned",))
