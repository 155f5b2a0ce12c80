"""The engines that run a model: eager, and what makes launches fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onelaunch as ol
from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions

ENGINES = (
    *("eager", "onelaunch", "onelaunch split", "onelaunch backend", "reduce-overhead", "by hand"),
)
"""In the order in which they run: a capture by hand that fails may leave the device in disorder."""
COMPILED = ("onelaunch backend", "reduce-overhead")
"""Those with Inductor's kernels, which take many times the others' time to build."""
ON_CUDA = ("reduce-overhead", "by hand")
WARMUP = 3


class Skipped(Exception):
    """An engine that cannot run here at all; the message says why."""


class Engine(Protocol):
    """One model as an engine runs it.

    Attributes:
        warmup: the calls before those that all engines make.
    """

    warmup: int

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the model."""

    def launches(self) -> int:
        """The launches until now that ran a recording."""
        ...

    def figures(self) -> dict[str, Any]:
        """What else is to be noted, after the last call."""
        ...


class Eager:
    """The model itself."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.model(*args, **kwargs)

    def launches(self) -> int:
        return 0

    def figures(self) -> dict[str, Any]:
        return {}


class Onelaunch:
    """`ol.graph` of the model."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool, **options: Any) -> None:
        try:
            self.fast: Any = ol.graph(model, **options)
        except ol.ArgumentError as error:
            raise Skipped(error.what) from error

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.fast(*args, **kwargs)

    def launches(self) -> int:
        return self.fast.stats().replays

    def figures(self) -> dict[str, Any]:
        return {"recordings": self.fast.stats().captures}


class Split(Onelaunch):
    """`ol.graph` of the model, in pieces where it cannot be captured whole: each level of modules
    then warms up anew."""

    warmup = 24

    def __init__(self, model: nn.Module, training: bool) -> None:
        super().__init__(model, training, on_refusal="split")


class Backend:
    """`torch.compile` with ours."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool) -> None:
        torch._dynamo.reset()
        random = {"fallback_random": True}  # eager's random numbers
        self.fast: Any = torch.compile(model, backend=onelaunch, options=random)

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.fast(*args, **kwargs)

    def launches(self) -> int:
        return sum(graphed.stats().replays for graphed in regions.graphs())

    def figures(self) -> dict[str, Any]:
        return {"recordings": sum(graphed.stats().captures for graphed in regions.graphs())}


class ReduceOverhead:
    """`torch.compile` with its own CUDA graphs."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool) -> None:
        import torch._inductor.config

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._inductor.config.fallback_random = True  # eager's random numbers
        self.fast: Any = torch.compile(model, mode="reduce-overhead")
        self._calls = 0

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        torch.compiler.cudagraph_mark_step_begin()
        return self.fast(*args, **kwargs)

    def launches(self) -> int:
        """As its graphs do not count: a warm-up, a recording, then one for each call."""
        return 0 if self._skips() else max(0, self._calls - 2)

    def _skips(self) -> int:
        return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]

    def figures(self) -> dict[str, Any]:
        counters = torch._dynamo.utils.counters
        breaks = sum(counters["graph_break"].values())
        graphs = counters["stats"]["unique_graphs"]
        skips = self._skips()
        why = next(iter(counters["graph_break"]), "")
        return {
            "breaks": breaks,
            "graphs": graphs,
            "skips": skips,
            "one_graph": breaks == 0 and graphs == 1 and skips == 0,
            **({"break": why.strip().splitlines()[0][:160]} if why else {}),
        }


class ByHand:
    """`torch.cuda.graph` around a call, with inputs and results copied."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self._calls = self._replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._result: Any = None

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        if self._calls <= WARMUP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = self.model(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        given, structure = pytree.tree_flatten((args, kwargs))
        if self._graph is None:
            self._inputs = [g.clone() if isinstance(g, Tensor) else g for g in given]
            static_args, static_kwargs = pytree.tree_unflatten(self._inputs, structure)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._result = self.model(*static_args, **static_kwargs)
            self._graph = graph
        for static, value in zip(self._inputs, given, strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        self._graph.replay()
        self._replays += 1
        return self._result  # the caller copies it before the next call

    def launches(self) -> int:
        return self._replays

    def figures(self) -> dict[str, Any]:
        return {}


class PairByHand:
    """`torch.cuda.make_graphed_callables` of the forward, for training."""

    warmup = 0

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self._fast: Callable[..., Any] | None = None
        self._calls = 0

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tensors, others, structure = _taken_apart(args, kwargs)
        if self._fast is None:
            flat = _Flat(self.model, others, structure)
            samples = tuple(t.clone() for t in tensors)
            self._fast = torch.cuda.make_graphed_callables(flat, samples, allow_unused_input=True)
        self._calls += 1
        assert self._fast is not None
        return self._fast(*tensors)

    def launches(self) -> int:
        return self._calls

    def figures(self) -> dict[str, Any]:
        return {}


class _Flat(nn.Module):
    """A model as `make_graphed_callables` takes it: tensors in, tensors with a gradient out."""

    def __init__(self, model: nn.Module, others: Mapping[int, Any], structure: Any) -> None:
        super().__init__()
        self.model = model
        self._others = others
        self._structure = structure

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        count = len(tensors) + len(self._others)
        leaves = [self._others[i] if i in self._others else next(rest) for i in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return tuple(differentiable(self.model(*args, **kwargs)))


def _taken_apart(args: Any, kwargs: Any) -> tuple[list[Tensor], dict[int, Any], Any]:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}, structure


def differentiable(value: Any) -> list[Tensor]:
    """The tensors of a result that a loss may be made of."""
    return [t for t in tensors_of(value) if t.requires_grad]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a result, in the order of its fields."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def leaves_of(value: Any, depth: int = 8) -> list[Any]:
    """The tensors and numbers of a result: containers, and objects of libraries by their fields."""
    if isinstance(value, (Tensor, bool, int, float, str, type(None))):
        return [value]
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        children = [v for _, v in sorted(vars(value).items())]
    else:
        return []
    return [] if depth == 0 else [leaf for c in children for leaf in leaves_of(c, depth - 1)]


def engine(name: str, model: nn.Module, training: bool) -> Engine:
    """Make an engine.

    Raises:
        Skipped: it cannot run here.
    """
    kinds: dict[str, Any] = {
        "eager": Eager,
        "onelaunch": Onelaunch,
        "onelaunch split": Split,
        "onelaunch backend": Backend,
        "reduce-overhead": ReduceOverhead,
        "by hand": PairByHand if training else ByHand,
    }
    return kinds[name](model, training)
