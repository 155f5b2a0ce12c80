"""A function that cannot be captured whole: the graphs that Dynamo finds in it are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from onelaunch.capture.compilation import eager_aten
from onelaunch.dynamo.backend import driver_and_device, record_graph
from onelaunch.dynamo.region import Regions
from onelaunch.dynamo.settings import CompileSettings
from onelaunch.runtime.options import Options
from onelaunch.runtime.stats import GraphStats, SplitModule
from onelaunch.split.in_pieces import InPieces, Told

P = ParamSpec("P")
R = TypeVar("R")


class SplitFunction(InPieces[P, R]):
    """A function, graphed whole where it can be captured. Made by `graph`. A signature that is
    refused runs as `torch.compile` runs it. Dynamo follows its Python and breaks off where it
    cannot; the graphs between the breaks are recorded."""

    PIECES = "what Dynamo compiles of it"

    def __init__(self, fn: Callable[P, R], options: Options, *rest: Any, **named: Any) -> None:
        super().__init__(fn, options, *rest, **named)
        self._refusals = {}
        self._told = Told()
        self._regions = Regions()
        backend = _backend(CompileSettings.of_graph(options, self._pool), self._regions)
        self._pieces: Callable[..., R] = torch.compile(fn, backend=backend)
        weakref.finalize(self, self._regions.reset)  # Dynamo keeps them as long as the code

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self._pieces(*args, **kwargs)

    def _watches(self) -> bool:
        return True

    def _figures(self) -> Iterable[GraphStats]:
        pieces = self._regions.graphs()
        return [super(InPieces, self).stats(), *(graphed.stats() for graphed in pieces)]

    def _refused_parts(self) -> Iterable[SplitModule]:
        return self._refusals.values()

    def reset(self) -> None:
        """Free every recording of the whole and its pieces, and forget every signature and refusal;
        see `Graphed.reset`."""
        super().reset()
        self._regions.reset()
        self._refusals.clear()
        self._told.reset()


def _backend(settings: CompileSettings, regions: Regions) -> Callable[..., Any]:

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        driver, device = driver_and_device(graph, inputs)
        compiler = eager_aten if driver.compiler is None else settings.compiler(driver)
        return record_graph(graph, inputs, device, compiler, settings, regions)

    return compile_graph
