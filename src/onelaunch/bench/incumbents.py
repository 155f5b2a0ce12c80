"""The other ways to run a PyTorch callable, each as its documentation says to use it."""

from __future__ import annotations

import importlib.util
import inspect
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from onelaunch.bench.engine import Built, Mode, needs_cuda
from onelaunch.bench.workload import Workload, resample
from onelaunch.call import tree

WARM_CALLS = 4  # enough for compiled CUDA graphs: warm up, record, replay, replay


def warm(call: Callable[..., Any], workload: Workload) -> None:
    """Call the engine until its calls no longer compile or record."""
    for _ in range(WARM_CALLS):
        call(*workload.args, **workload.kwargs)


class AsModule(nn.Module):
    """A callable as a module, for the exporters that take nothing else."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def as_module(fn: Callable[..., Any]) -> nn.Module:
    return fn if isinstance(fn, nn.Module) else AsModule(fn).eval()


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
        call = f"y = model({workload.call_text})"
        return call if self.mode == "grad" else f"with torch.{self.mode}():\n    {call}"


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
        names, _ = workload.names
        samples = tuple_text([f"{name}.clone()" for name in names])
        return (
            "with torch.no_grad():\n"
            f"    fast = torch.cuda.make_graphed_callables(model, {samples})\n"
            f"    y = fast({workload.call_text})  # overwritten by the next call"
        )


@dataclass(frozen=True)
class Compile:
    """`torch.compile` with a mode or a backend."""

    name: str
    title: str
    options: tuple[tuple[str, str], ...] = ()
    cuda_only: str | None = None
    package: str | None = None
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        if self.package and (why := absent(self.package)):
            return why
        why = needs_cuda(device) if self.cuda_only else None
        return f"{why}; {self.cuda_only}" if why else None

    def build(self, workload: Workload) -> Built:
        if self.package:
            importlib.import_module(self.package)  # registers its backend
        options: dict[str, Any] = dict(self.options)
        compiled: Callable[..., Any] = torch.compile(workload.fn, **options)
        warm(compiled, workload)
        return Built(compiled)

    def code(self, workload: Workload) -> str:
        options = "".join(f', {key}="{value}"' for key, value in self.options)
        head = f"import {self.package}\n" if self.package else ""
        return (
            f"{head}fast = torch.compile(model{options})\n"
            f"with torch.no_grad():\n    y = fast({workload.call_text})"
        )


@dataclass(frozen=True)
class TorchScript:
    """A traced or scripted module, frozen."""

    name: str
    title: str
    how: Literal["trace", "script"]
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return None

    def build(self, workload: Workload) -> Built:
        script = self._scripted(workload)
        if isinstance(script, torch.jit.ScriptModule):
            script = torch.jit.freeze(script.eval())
        call: Callable[..., Any] = script
        warm(call, workload)
        return Built(call)

    def _scripted(self, workload: Workload) -> Any:
        if self.how == "script":
            return torch.jit.script(workload.fn)
        if not workload.kwargs:
            return traced(workload, example_inputs=workload.args)
        by_name = _by_parameter(workload.fn, workload.args, workload.kwargs)
        return traced(workload, example_kwarg_inputs=by_name)

    def code(self, workload: Workload) -> str:
        names, keyword = workload.names
        module = isinstance(workload.fn, nn.Module)
        model = "model.eval()" if module else "model"
        if self.how == "script":
            made = f"torch.jit.script({model})"
        elif keyword:
            try:
                parameters = _by_parameter(workload.fn, names, {name: name for name in keyword})
            except (TypeError, ValueError):  # no signature, or one that these do not fit
                parameters = {name: name for name in [*names, *keyword]}
            given = ", ".join(f'"{key}": {name}' for key, name in parameters.items())
            made = f"torch.jit.trace({model}, example_kwarg_inputs={{{given}}}, strict=False)"
        else:
            made = f"torch.jit.trace({model}, {tuple_text(names)}, strict=False)"
        made = f"torch.jit.freeze({made})" if module else made
        return f"with torch.no_grad():\n    fast = {made}\n    y = fast({workload.call_text})"


def traced(workload: Workload, **inputs: Any) -> Any:
    """Trace with `torch.jit.trace`, and refuse a trace that has frozen a part of the inputs.

    Raises:
        TracerWarning: torch warned of it.
        ValueError: the trace holds a constant in place of an input.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        script: Any = torch.jit.trace(workload.fn, **inputs, check_trace=False, strict=False)
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning):
            raise torch.jit.TracerWarning(str(warning.message).partition(". ")[0])
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    for name in _unread(script, workload):
        raise ValueError(f"the trace holds a constant in place of the input {name}")
    return script


def _unread(script: Any, workload: Workload) -> Iterator[str]:
    """Find the inputs that the callable reads and its traced graph does not."""
    given = [*workload.args, *workload.kwargs.values()]
    ports = list(script.inlined_graph.inputs())[-len(given) :] if given else []
    generator = torch.Generator().manual_seed(0)
    expected = None
    for i, port in enumerate(ports):
        if port.uses() or not isinstance(given[i], torch.Tensor):
            continue
        expected = expected or _results(workload, given)
        changed = resample(generator, given[i])
        found = _results(workload, [*given[:i], changed, *given[i + 1 :]])
        if not all(map(torch.equal, expected, found)):
            yield port.debugName().partition(".")[0]  # x, or x.1


def _results(workload: Workload, values: list[Any]) -> list[torch.Tensor]:
    args = values[: len(workload.args)]
    kwargs = dict(zip(workload.kwargs, values[len(args) :], strict=True))
    copied = Workload(workload.fn, tuple(args), kwargs).copy()
    return tree.flatten(copied()).tensors


def _by_parameter(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Name each argument after the parameter that it goes to."""
    forward = fn.forward if isinstance(fn, nn.Module) else fn
    return dict(inspect.signature(forward).bind(*args, **kwargs).arguments)


def tuple_text(names: Sequence[str]) -> str:
    """Write a tuple of these as code."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


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


def absent(package: str) -> str | None:
    """Say that a package is not installed; None if it is."""
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


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
EXPORTED = (
    TorchScript("torchscript", "TorchScript trace, frozen", "trace"),
    TorchScript("torchscript-script", "TorchScript script, frozen", "script"),
    AOTInductor(),
    OnnxRuntime(),
    Compile(
        "tensorrt",
        "TensorRT",
        (("backend", "tensorrt"),),
        cuda_only="TensorRT runs on CUDA",
        package="torch_tensorrt",
    ),
    Compile("openxla", "OpenXLA", (("backend", "openxla"),), package="torch_xla"),
    Compile("tvm", "TVM", (("backend", "tvm"),), package="tvm"),
)
