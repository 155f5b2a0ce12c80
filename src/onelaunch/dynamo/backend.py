"""The backend that Dynamo calls with each graph of a program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.capture.compilation import Backend, eager_aten, inductor
from onelaunch.driver.select import select
from onelaunch.dynamo.region import Region, region_of
from onelaunch.dynamo.settings import Settings

_regions: weakref.WeakSet[Region] = weakref.WeakSet()


def onelaunch(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph, and record what it becomes: the backend ``"onelaunch"`` of `torch.compile`.

    On a device without CUDA graphs the compiled code runs as it is.

    Args:
        mode: of Inductor, as `torch.compile` takes it; its own CUDA graphs stay off.
        options: ``codegen``: ``"inductor"``, or ``"eager"`` for torch's own kernels, which takes
            seconds less. ``on_refusal``: ``"eager"``, or ``"raise"`` where a graph cannot be
            captured. ``pool``, ``warmup``, ``max_recordings``, ``max_in_flight``, ``inputs`` and
            ``gradients`` as for `ol.graph`. All others are Inductor's.

    Raises:
        ArgumentError: OL401, an option with a value that it cannot have.

    Example:
        >>> import torch
        >>> f = torch.compile(lambda x: x.sin().cos(), backend="onelaunch")
        >>> f(torch.zeros(2))
        tensor([1., 1.])
    """
    settings = Settings.of(mode, options)
    driver, device = select(t for t in inputs if isinstance(t, Tensor))
    if driver.compiler is None:
        return _compiler(settings, driver.compiler)(graph, inputs)
    region = region_of(graph, inputs, device, _compiler(settings, driver.compiler), settings)
    _regions.add(region)
    return region


def reset() -> None:
    """Free the recordings of all compiled graphs: `torch._dynamo.reset` calls it."""
    for region in list(_regions):
        region.reset()
    _regions.clear()


setattr(onelaunch, "reset", reset)  # noqa: B010


def _compiler(settings: Settings, compiler: str | None) -> Backend:
    if settings.codegen == "eager" or compiler == "aten":
        return eager_aten
    return inductor(settings.mode, settings.inductor)
