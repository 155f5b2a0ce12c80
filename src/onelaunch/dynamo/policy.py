"""Recordings for ``mode="reduce-overhead"``: Inductor's own hook for CUDA graphs (torch 2.12).

Inductor compiles, and decides what can be captured. It would give its CUDA graph trees a function
of a list of inputs, without autograd: this is a region here.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.driver.select import select
from onelaunch.dynamo.backend import regions
from onelaunch.dynamo.nodes import function_in, line_in
from onelaunch.dynamo.region import CompiledRegion, Regions
from onelaunch.dynamo.settings import CompileSettings
from onelaunch.errors import ArgumentError, CaptureError
from onelaunch.runtime.pool import Pool
from onelaunch.source import levels_to_user

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Code of Inductor's: it empties the list that holds its inputs."""


def cudagraph_policy(*, pool: Pool | None = None, warmup: int = 3, max_recordings: int = 64) -> Any:
    """Make a policy for ``torch._inductor.config.cudagraph_policy``: code that Inductor compiles
    with ``mode="reduce-overhead"`` replays through onelaunch.

    Set it for the whole process: a backward is compiled when it first runs. Inductor's caches hold
    the same code with and without it.

    Args:
        pool: the pool of the recordings; by default they share that of the backend ``"onelaunch"``.
        warmup: calls of a signature before its capture, at least 3.
        max_recordings: the most of each compiled graph; beyond that it runs as it is, with one
            warning.

    Raises:
        ArgumentError: OL401, this torch has no such hook, or a value that an option cannot have.

    Example:
        >>> import torch, onelaunch.dynamo
        >>> import torch._inductor.config as config
        >>> with config.patch(cudagraph_policy=onelaunch.dynamo.cudagraph_policy()):
        ...     f = torch.compile(lambda x: x.sin().cos(), mode="reduce-overhead")
        ...     f(torch.zeros(2))
        tensor([1., 1.])
    """
    options = {"pool": pool, "warmup": warmup, "max_recordings": max_recordings}
    return _policy_class()(CompileSettings.of(None, options))


@functools.cache
def _policy_class() -> type[Any]:
    utils: Any = importlib.import_module("torch._inductor.cudagraph_utils")
    base = getattr(utils, "CUDAGraphPolicy", None)
    if base is None:
        what = f"torch {torch.__version__} has no torch._inductor.config.cudagraph_policy"
        fix = 'torch 2.12 or later, or torch.compile(f, backend="onelaunch")'
        raise ArgumentError("OL401", what, fix=fix)
    return type("RecordingPolicy", (_Hooks, base), {})


class _Hooks:
    """The methods of the policy that are not torch's own."""

    def __init__(self, settings: CompileSettings) -> None:
        self._settings = settings
        self._regions = Regions()
        self._compiled = threading.local()
        """`graph`: the graph that this thread compiles. Inductor shows it before it asks to wrap
        its code."""

    def __deepcopy__(self, memo: object) -> _Hooks:
        """Return itself: torch copies its settings when it reads them."""
        return self

    def should_wrap(self, compiled_graph: Any) -> bool:
        self._compiled.graph = weakref.ref(compiled_graph)
        reason = _refused(compiled_graph)
        if reason is not None and _wanted(compiled_graph):
            _warn(f"Inductor captures none of a graph: {reason.splitlines()[0]}", line_in(reason))
        return reason is None

    def cudagraphify(
        self,
        model: Boxed,
        example_inputs: Sequence[Any],
        static_input_idxs: Sequence[int],
        *,
        is_backward: bool,
        stack_traces: Sequence[str | None] = (),
        mutated_input_idxs: Collection[int] = (),
        **unused: Any,
    ) -> Boxed:
        """Return the code of a graph with its recordings, or the code itself if its parts do."""
        graph = self._compiled.graph()
        name = function_in(stack_traces) + (" backward" if is_backward else "")
        static, written = set(static_input_idxs), set(mutated_input_idxs)
        make = functools.partial(RecordedCode, self._settings, self._regions, name, is_backward)
        if not graph.partition_maps:
            return make(model, static, written)
        if [part.id for part in graph.partition_maps] != [0]:
            _warn(f"Inductor captures `{name}` in parts", fix=_NAMED)
        parts: list[Callable[[Boxed], Boxed]] = []
        for part in graph.partition_maps:
            # A part may write what another one computed, or use its memory again.
            places = dict(enumerate(part.input_index_mapping))
            of_graph = {i for i, place in places.items() if place in static}
            changed = {i for i, place in places.items() if place is None or place in written}
            parts.append(functools.partial(make, static=of_graph, written=changed))
        graph.recursively_apply_fns(parts)
        return model

    def reset(self) -> None:
        self._regions.reset()


@dataclass(slots=True, eq=False)
class RecordedCode:
    """Compiled code, and its recordings."""

    _settings: CompileSettings
    _own: Regions  # gets the region, which the first call makes
    _name: str
    _is_backward: bool
    _model: Boxed
    static: Collection[int]  # places of inputs that are read where they are, as far as they stay
    written: Collection[int]  # places of inputs that the code writes, for the caller to see
    _region: CompiledRegion | None = None
    _making: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Replay, warm up, capture or run, and empty the list."""
        given = tuple(inputs)
        inputs.clear()
        driver, device = select(t for t in given if isinstance(t, Tensor))
        if not self._is_backward:
            return self._recorded(given, device)
        # The holder of the lock may be waiting for this thread, if it is the engine's.
        if not driver.lock.acquire(blocking=False):
            return list(self._code(given)(list(given)))
        try:
            return self._recorded(given, device)
        finally:
            driver.lock.release()

    def _recorded(self, given: tuple[Any, ...], device: torch.device) -> list[Any]:
        region = self._region
        if region is None:
            with self._making:
                region = self._region = self._region or self._new_region(given, device)
        return [given[r[0]] if type(r) is tuple else r for r in region.call(*given)]

    def _new_region(self, given: Sequence[Any], device: torch.device) -> CompiledRegion:
        # Of what a forward has saved only parameters are where they were.
        kind = nn.Parameter if self._is_backward else Tensor
        static = {i: f"input {i}" for i in sorted(self.static) if isinstance(given[i], kind)}
        written = [i for i in sorted(self.written) if isinstance(given[i], Tensor)]
        run = functools.partial(self._run, self._code(given), static)
        shown = functools.partial(_shown, run, written)
        count = len(given)
        region = CompiledRegion(
            self._name, run, shown, static, (), None, count, device, self._settings
        )
        self._own.add(region)
        regions.add(region)
        return region

    def _code(self, given: Sequence[Any]) -> Boxed:
        """Return the code for unaligned inputs too, although it is made for aligned memory."""
        utils: Any = importlib.import_module("torch._inductor.utils")
        tensors = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        return utils.align_inputs_from_check_idxs(self._model, tensors, self.written)

    def _run(self, model: Boxed, static: Collection[int], *args: Any) -> list[Any]:
        """Run the code. A result that is an input is its place, in a tuple of one. A backward may
        make its results in memory saved for it (AOTAutograd's donated buffers). A recording has
        copies of the saved memory, and such a result is its own."""
        results = model(list(args))
        given = {i: t for i, t in enumerate(args) if isinstance(t, Tensor)}
        if self._is_backward:
            driver, _ = select(given.values())
            kept = {*static, *self.written}
            reused = {driver.storage(t) for i, t in given.items() if i not in kept}
            return [
                r.clone() if isinstance(r, Tensor) and driver.storage(r) in reused else r
                for r in results
            ]
        places = {id(t): i for i, t in given.items()}
        return [(places[id(r)],) if id(r) in places else r for r in results]


def _shown(run: Callable[..., list[Any]], written: Sequence[int], *args: Any) -> list[Any]:
    """Run the code, whose operations are hidden, and show its writes."""
    with _disable_current_modes():
        results = run(*args)
    for place in written:
        args[place].copy_(args[place])
    return results


def _refused(compiled_graph: Any) -> str | None:
    reason = compiled_graph.disabled_cudagraphs_reason
    if reason is not None or compiled_graph.cudagraph_info is None:
        return reason
    return next(iter(compiled_graph.cudagraph_info.cudagraph_fail_reasons), None)


def _wanted(compiled_graph: Any) -> bool:
    """Return whether a graph was to be captured: it is for a device, and the mode asks for it."""
    config: Any = importlib.import_module("torch._inductor.config")
    return config.triton.cudagraphs and bool({*compiled_graph.device_types} - {"cpu", "meta"})


_NAMED = "move what is between them to the device; TORCH_LOGS=+cudagraphs names it, with its line"


def _warn(what: str, where: str | None = None, fix: str | None = None) -> None:
    error = CaptureError("OL312", what, where=where, fix=fix)
    warnings.warn(error.warning("a part runs as it is"), stacklevel=levels_to_user())
