"""TensorRT, by Torch-TensorRT."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import absent, needs_cuda
from onelaunch.tools.bench.engines.flat import Exported, FlatModule


def tensorrt_engine(model: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Export `model`, and compile it with TensorRT in its own dtypes."""
    torch_tensorrt: Any = importlib.import_module("torch_tensorrt")
    flat = FlatModule(model, args, kwargs)
    tensors = flat.take(args, kwargs)
    engine = torch_tensorrt.compile(
        torch.export.export(flat, tuple(tensors)),
        ir="dynamo",
        arg_inputs=tensors,
        use_explicit_typing=True,
        disable_tf32=not torch.backends.cuda.matmul.allow_tf32,
        min_block_size=1,
    )

    def fast(*args: Any, **kwargs: Any) -> Any:
        found = engine(*flat.take(args, kwargs))
        return flat.give([found] if isinstance(found, torch.Tensor) else list(found))

    return fast


def _lacks(device: torch.device) -> str | None:
    if why := needs_cuda(device):
        return f"{why}: TensorRT runs on CUDA"
    return absent("torch-tensorrt", "torch_tensorrt")


TENSORRT = Exported("tensorrt", "TensorRT", tensorrt_engine, _lacks)
