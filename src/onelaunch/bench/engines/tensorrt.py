"""TensorRT, by Torch-TensorRT, and with CUDA graphs of its own."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.bench.engines.engine import Built, Code, Mode, absent, needs_cuda, warm
from onelaunch.bench.engines.flat import Flat, with_flat
from onelaunch.bench.workload import Workload


def tensorrt_engine(
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    cuda_graphs: contextlib.ExitStack | None = None,
) -> Callable[..., Any]:
    """Export `model`, and compile it with TensorRT in its own dtypes.

    With `cuda_graphs` its calls are CUDA graphs until that is closed, as are those of every other
    engine of TensorRT in the process.
    """
    torch_tensorrt: Any = importlib.import_module("torch_tensorrt")
    flat = Flat(model, args, kwargs)
    tensors = flat.take(args, kwargs)
    engine = torch_tensorrt.compile(
        torch.export.export(flat, tuple(tensors)),
        ir="dynamo",
        arg_inputs=tensors,
        use_explicit_typing=True,
        disable_tf32=not torch.backends.cuda.matmul.allow_tf32,
        min_block_size=1,
    )
    if cuda_graphs is not None:
        engine = cuda_graphs.enter_context(torch_tensorrt.runtime.enable_cudagraphs(engine))

    def fast(*args: Any, **kwargs: Any) -> Any:
        found = engine(*flat.take(args, kwargs))
        return flat.give([found] if isinstance(found, torch.Tensor) else list(found))

    return fast


@dataclass(frozen=True)
class TensorRT:
    """The exported program, compiled by Torch-TensorRT.

    Attributes:
        cuda_graphs: within `torch_tensorrt.runtime.enable_cudagraphs`, its own option.
    """

    name: str = "tensorrt"
    title: str = "TensorRT"
    cuda_graphs: bool = False
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        if why := needs_cuda(device):
            return f"{why}: TensorRT runs on CUDA"
        return absent("tensorrt", "torch_tensorrt")

    def build(self, workload: Workload) -> Built:
        entered = contextlib.ExitStack()
        fast = tensorrt_engine(
            workload.fn, workload.args, workload.kwargs, entered if self.cuda_graphs else None
        )
        warm(fast, workload)
        return Built(fast, close=entered.close, outside=True)

    def code(self, workload: Workload) -> Code:
        given = f"model, {workload.args_text}, {workload.kwargs_text}"
        graphs = ", contextlib.ExitStack()" if self.cuda_graphs else ""
        return Code(
            f"y = fast({workload.call_text})",
            f"fast = tensorrt_engine({given}{graphs})",
            f"import contextlib\n{with_flat(tensorrt_engine)}",
        )


TENSORRT = (
    TensorRT(),
    TensorRT("tensorrt-cudagraphs", "TensorRT, CUDA graph", cuda_graphs=True),
)
