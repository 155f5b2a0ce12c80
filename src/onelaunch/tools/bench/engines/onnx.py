"""ONNX Runtime, on the CPU and on CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.tools.bench.engines.engine import Built, absent
from onelaunch.tools.bench.engines.flat import Exported, FlatModule
from onelaunch.tools.bench.workload import Workload


def onnx_session(model: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Export `model`, and run it in ONNX Runtime on the CPU."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    flat = FlatModule(model, args, kwargs)
    program: Any = torch.onnx.export(
        flat, tuple(flat.take(args, kwargs)), dynamo=True, verbose=False
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [port.name for port in session.get_inputs()]

    def fast(*args: Any, **kwargs: Any) -> Any:
        given = [t.numpy() for t in flat.take(args, kwargs)]
        found = session.run(None, dict(zip(names, given, strict=True)))
        return flat.give([torch.from_numpy(array) for array in found])

    return fast


def onnx_cuda_session(model: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Export `model`, and run it in ONNX Runtime on CUDA; tensors go in and out by address."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    flat = FlatModule(model, args, kwargs)
    tensors = flat.take(args, kwargs)
    results = list(flat(*tensors))
    program: Any = torch.onnx.export(flat, tuple(tensors), dynamo=True, verbose=False)
    proto = program.model_proto
    stream = torch.cuda.Stream()  # the default stream cannot be given
    settings = {
        "device_id": str(stream.device.index),
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": str(int(torch.backends.cuda.matmul.allow_tf32)),
    }
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=[("CUDAExecutionProvider", settings)]
    )
    binding = session.io_binding()
    options = onnxruntime.RunOptions()
    # The two streams wait for each other, and the host for neither.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def bind(bind_one: Callable[..., object], ports: Any, tensors: list[torch.Tensor]) -> None:
        for port, t in zip(ports, tensors, strict=True):
            kind, place = port.type.tensor_type.elem_type, (t.device.type, t.device.index or 0)
            bind_one(port.name, *place, kind, tuple(t.shape), t.data_ptr())

    def fast(*args: Any, **kwargs: Any) -> Any:
        given = [t.contiguous() for t in flat.take(args, kwargs)]
        made = [torch.empty_like(t) for t in results]
        bind(binding.bind_input, proto.graph.input, given)
        bind(binding.bind_output, proto.graph.output, made)
        stream.wait_stream(torch.cuda.current_stream())
        session.run_with_iobinding(binding, options)
        torch.cuda.current_stream().wait_stream(stream)
        return flat.give(made)

    return fast


def _lacks(device: torch.device) -> str | None:
    if why := absent("onnxruntime onnxscript", "onnxruntime", "onnxscript"):
        return why
    if device.type == "cpu":
        return None
    onnxruntime: Any = importlib.import_module("onnxruntime")
    if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    return (
        f"this onnxruntime has no {device.type} device: pip install onnxruntime-gpu "
        "in an environment of its own, and name its Python with --python onnxruntime=PATH"
    )


class OnnxRuntime(Exported):
    """The exported ONNX program in ONNX Runtime, on the device of the callable."""

    def build(self, workload: Workload) -> Built:
        return (super() if workload.device.type == "cpu" else _ON_CUDA).build(workload)

    def code(self, workload: Workload) -> str:
        return (super() if workload.device.type == "cpu" else _ON_CUDA).code(workload)


ONNX_RUNTIME = OnnxRuntime("onnxruntime", "ONNX Runtime", onnx_session, _lacks, outside=False)
_ON_CUDA = Exported("onnxruntime", "ONNX Runtime", onnx_cuda_session, _lacks)
