"""The backend that Dynamo calls with each graph of a program.

Dynamo finds it by its name: an entry point in pyproject.toml, `torch_dynamo_backends`.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.capture.compilation import Backend
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import select
from onelaunch.dynamo.nodes import example
from onelaunch.dynamo.numbers import split_numbers
from onelaunch.dynamo.region import Regions, region_of
from onelaunch.dynamo.settings import CompileSettings
from onelaunch.dynamo.split import (
    code_of_dynamo,
    compiled_parts,
    inspected,
    refused_in,
    refused_operators,
)
from onelaunch.errors import CaptureError
from onelaunch.source import levels_to_user

regions = Regions()  # the compiled graphs that are there, but for those of `SplitFunction`


def onelaunch(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile and record a graph: the backend ``"onelaunch"`` of `torch.compile`.

    On a device without CUDA graphs the compiled code runs as it is.

    Args:
        mode: Inductor's, as `torch.compile` takes it; its own CUDA graphs stay off.
        options: ``codegen``: ``"inductor"``, or ``"eager"`` for torch's own kernels, which takes
            seconds less. ``on_refusal``: ``"eager"`` runs parts that cannot be captured between
            recordings, with one warning; or ``"raise"``. ``buckets``, for sizes that Dynamo takes
            as symbolic, ``pool``, ``warmup``, ``max_recordings``, ``max_in_flight``, ``inputs`` and
            ``gradients`` as for `ol.graph`. Recordings share one pool unless another is given. All
            others are Inductor's.

    Raises:
        ArgumentError: OL401, an option with a value that it cannot have.

    Example:
        >>> import torch
        >>> f = torch.compile(lambda x: x.sin().cos(), backend="onelaunch")
        >>> f(torch.zeros(2))
        tensor([1., 1.])
    """
    settings = CompileSettings.of(mode, options)
    # For the next `torch._dynamo.reset`, which forgets a backend: functions compile again.
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    frames.cached_backends.setdefault(id(onelaunch), onelaunch)
    driver, device = driver_and_device(graph, inputs)
    compiler = settings.compiler(driver)
    if driver.compiler is None:
        return compiler(graph, inputs)
    return record_graph(graph, inputs, device, compiler, settings, regions)


def driver_and_device(
    graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Driver, torch.device]:
    values = [*inputs, *map(example, graph.graph.nodes)]
    return select(t for t in values if isinstance(t, Tensor))


def record_graph(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device,
    compiler: Backend,
    settings: CompileSettings,
    own: Regions,
) -> Callable[..., Any]:
    """Compile and record a graph. `own`: gets the compiled graphs that this makes."""

    split = split_numbers(graph, inputs, device)
    if split is not None:
        rest = record_graph(split.graph, split.inputs, device, compiler, settings, own)
        return split.around(rest)

    def compile_part(part: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        region = region_of(part, given, device, compiler, settings)
        own.add(region)
        return region.call

    inspection = inspected(graph, device, refused_in(code_of_dynamo()))
    refused = list(inspection.refused.values())
    if not refused:
        return compile_part(graph, inputs)
    if settings.graph.on_refusal == "raise":
        return _raising(refused[0])
    _warn(refused)
    return compiled_parts(graph, inspection, compile_part)


def reset() -> None:
    """Free the recordings of all compiled graphs: `torch._dynamo.reset` calls it."""
    regions.reset()
    regions.clear()
    refused_operators.clear()


setattr(onelaunch, "reset", reset)  # noqa: B010


def _raising(error: CaptureError) -> Callable[..., Any]:
    """Return a callable that raises the error: raised in a compilation, Dynamo would wrap it."""

    def refuse(*args: Any) -> Any:
        raise copy.copy(error)

    return refuse


def _warn(refused: Sequence[CaptureError]) -> None:
    """Name the first operation that is not recorded."""
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    warning = refused[0].warning(f"a part runs as it is{more}", "OL312")
    warnings.warn(warning, stacklevel=levels_to_user())
