"""TorchScript, and the traces of it that are refused."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from onelaunch.call import tree
from onelaunch.tools.bench.engines.engine import Built, Mode, snippet, warm
from onelaunch.tools.bench.workload import Workload, resample


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
        module = isinstance(workload.fn, nn.Module)
        model = "model.eval()" if module else "model"
        if self.how == "script":
            made = f"torch.jit.script({model})"
        elif workload.kwargs:
            by_name = _by_parameter_text(workload)
            made = f"torch.jit.trace({model}, example_kwarg_inputs={by_name}, strict=False)"
        else:
            made = f"torch.jit.trace({model}, {workload.args_text}, strict=False)"
        made = f"torch.jit.freeze({made})" if module else made
        return snippet(f"y = fast({workload.call_text})", f"fast = {made}")


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


def _by_parameter_text(workload: Workload) -> str:
    """Write the dict of the arguments by parameter as code."""
    names, keyword = workload.names
    try:
        parameters = _by_parameter(workload.fn, names, {name: name for name in keyword})
    except (TypeError, ValueError):  # no signature, or one that these do not fit
        parameters = {name: name for name in [*names, *keyword]}
    given = ", ".join(f'"{key}": {name}' for key, name in parameters.items())
    return f"{{{given}}}"
