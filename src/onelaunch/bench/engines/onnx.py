"""ONNX Runtime."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.bench.engines.engine import Built, Mode, absent, as_module, tuple_text, warm
from onelaunch.bench.workload import Workload
from onelaunch.call import tree


@dataclass(frozen=True)
class OnnxRuntime:
    """The exported ONNX program in ONNX Runtime, on the CPU."""

    name: str = "onnxruntime"
    title: str = "ONNX Runtime"
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        for package in ("onnxruntime", "onnxscript"):
            if why := absent(package):
                return why
        if device.type != "cpu":
            return f"compared on the CPU only, and the callable is on {device.type}"
        return None

    def build(self, workload: Workload) -> Built:
        onnxruntime: Any = importlib.import_module("onnxruntime")
        program: Any = torch.onnx.export(
            as_module(workload.fn),
            workload.args,
            kwargs=workload.kwargs,
            dynamo=True,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(
            program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        names = [port.name for port in session.get_inputs()]

        def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            tensors = tree.flatten((args, kwargs)).tensors
            feed = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
            return [torch.from_numpy(array) for array in session.run(None, feed)]

        warm(call, workload)
        return Built(call)

    def code(self, workload: Workload) -> str:
        names, keyword = workload.names
        positional = tuple_text(names)
        given = ", ".join(f'"{name}": {name}' for name in keyword)
        tensors = ", ".join([*names, *keyword])
        return (
            "import onnxruntime\n"
            f"program = torch.onnx.export(model, {positional}, kwargs={{{given}}}, dynamo=True)\n"
            "session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())\n"
            "names = [port.name for port in session.get_inputs()]\n"
            f"feed = {{name: t.numpy() for name, t in zip(names, [{tensors}])}}\n"
            "y = torch.from_numpy(session.run(None, feed)[0])"
        )
