"""A function that cannot be captured whole: the graphs that Dynamo finds in it are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from onelaunch.capture.compilation import eager_aten
from onelaunch.dynamo.backend import driver_and_device, record_graph
from onelaunch.dynamo.region import Regions
from onelaunch.dynamo.settings import CompileSettings
from onelaunch.gc_pause import when_gone
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.split.in_pieces import InPieces

P = ParamSpec("P")
R = TypeVar("R")


class SplitFunction(InPieces[P, R]):
    """A function, graphed whole where it can be captured. Made by `graph`. A signature that is
    refused runs as `torch.compile` runs it. Dynamo follows its Python and breaks off where it
    cannot; the graphs between the breaks are recorded."""

    PIECES = "what Dynamo compiles of it"

    def __init__(self, fn: Callable[P, R], options: Options, *rest: Any, **named: Any) -> None:
        super().__init__(fn, options, *rest, **named)
        self._regions = Regions()
        backend = _backend(CompileSettings.of_graph(options, self._pool), self._regions)
        self._pieces: Callable[..., R] = torch.compile(fn, backend=backend)
        when_gone(self, self._regions.reset)  # Dynamo keeps them as long as the code

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self._pieces(*args, **kwargs)

    def _every_piece(self) -> Iterable[Graphed[..., Any]]:
        return [self, *self._regions.graphs()]

    def reset(self) -> None:
        """Free every recording, and forget every signature and refusal; see `InPieces.reset`."""
        self._regions.reset()
        super().reset()


def _backend(settings: CompileSettings, regions: Regions) -> Callable[..., Any]:

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        driver, device = driver_and_device(graph, inputs)
        compiler = eager_aten if driver.compiler is None else settings.compiler(driver)
        return record_graph(graph, inputs, device, compiler, settings, regions)

    return compile_graph
