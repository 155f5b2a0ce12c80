"""`graph`, the one verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, Unpack, get_type_hints, overload

from torch import nn

from onelaunch.errors import ArgumentError, describe_type
from onelaunch.module import graph_module
from onelaunch.runtime.graphed import Graphed, graphed
from onelaunch.runtime.options import GraphOptions, Options
from onelaunch.runtime.pool import Pool, PoolManager

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Decorator:
    """The decorator that ``@ol.graph(...)`` makes."""

    _options: Options
    _pool: PoolManager | None

    @overload
    def __call__(self, fn: M) -> M: ...
    @overload
    def __call__(self, fn: Callable[P, R]) -> Graphed[P, R]: ...
    def __call__(self, fn: Any) -> Any:
        return _graphed(fn, self._options, self._pool)


def _listing_options(function: F) -> F:
    """Have `help` list the options of `graph`, with types and defaults."""
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(Options, name, None),
            annotation=kind,
        )
        for name, kind in get_type_hints(GraphOptions).items()
    ]
    fn = inspect.Parameter("fn", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    setattr(function, "__signature__", inspect.Signature([fn, *options]))  # noqa: B010
    return function


@overload
def graph(fn: None = None, **options: Unpack[GraphOptions]) -> _Decorator: ...
@overload
def graph(fn: M, **options: Unpack[GraphOptions]) -> M: ...
@overload
def graph(fn: Callable[P, R], **options: Unpack[GraphOptions]) -> Graphed[P, R]: ...
@_listing_options
def graph(fn: Any = None, **options: Unpack[GraphOptions]) -> Any:
    """Return the same callable, its device work as one launch.

    The first `warmup` calls of a signature run `fn` itself, the next captures, and later calls
    replay. A signature is everything that the captured kernels depend on: sizes, strides, dtypes,
    devices, constants, torch's modes, and the state that `fn` reads. A call that fits no recording
    warms up and gets its own.

    Args:
        fn: a function, bound method or `nn.Module`; without it, a decorator is returned. A module
            gives a module: an instance of a subclass of its class that shares its state.
        warmup: calls of each signature that run eagerly first. With `buckets` that is for the first
            bucket; for another size one call is enough, unless its capture finds more.
        outputs: ``"fresh"``: results are new memory, as in eager. ``"static"``: the captured
            buffers themselves, overwritten by the next call of this or of another callable of the
            pool; saves an allocation and a copy.
        inputs: ``"copy"``: inputs are copied by nodes of the graph. ``"rebind"``: kernels read the
            caller's memory where that is proven right, else as ``"copy"``.
        gradients: how parameters get gradients in training. ``"autograd"``: parameters are inputs
            of the result's node, as in eager. ``"direct"``: `backward()` adds to `.grad` itself,
            which saves the engine's 3 us or so for each parameter.
        capturable: True to call `ol.capturable(optimizer)` for each optimizer that steps in `fn`
            and could not be captured, at its first step. It stays capturable.
        compile: capture Inductor's kernels instead of eager's, in training for the backward too;
            ``"max-autotune"`` for its slow search. The second call of a signature compiles.
            ``"later"``: eager's kernels are captured, and a thread compiles meanwhile; its
            recording takes over once its result agrees with eager's (inference only). On a CPU
            none has an effect.
        parallel: let kernels run at the same time that need not wait for each other: branches of a
            network, the gradients of a layer. The kernels and the bits are the same. Takes up to 64
            MiB more memory, or a workspace of cuDNN for each branch, and more time to capture.
            ``"auto"``: only if a trial shows that it pays, when it is recorded.
        pool: memory to share with other graphed callables; its own by default.
        capture: ``"background"``: calls without a recording run eagerly at once, and a thread
            captures their signatures meanwhile, what was asked for most first. The first call of a
            signature is watched, which slows it down. A callable that changes state, draws random
            numbers or has a backward is captured in its calls, as by ``"call"``. With
            `buckets` a larger bucket that is recorded serves calls meanwhile.
        max_recordings: signatures beyond so many run eagerly, with one warning.
        max_in_flight: in training, forwards of one signature that wait for their backward at the
            same time; each holds a recording with its saved tensors. Beyond so many a call runs
            eagerly, with one warning.
        on_mismatch: ``"raise"``: any signature but the first is a `ReplayError`.
        on_refusal: where `fn` cannot be captured, ``"raise"`` the `CaptureError`; run the signature
            ``"eager"`` with one warning; or ``"split"`` it, with one warning that has the lines and
            the cost. A split module runs as it is, with graphed children, which are split in turn.
            A split function is graphed between the lines that Dynamo cannot trace.
        buckets: sizes of a changing dimension that each get a recording; other sizes are padded to
            the next, and the results cut back. See `Buckets`.

    Returns:
        A `Graphed`, or for a module its graphed twin. Both have `capture`, `recordings`,
        `memory_bytes` and `reset`, and for a service `warm_up`, `ready` and `metrics`.

    Raises:
        ArgumentError: OL401, an option or callable of the wrong kind.
        CaptureError: at the call that captures, if `fn` cannot be captured as written.

    What a replay costs the host is in docs/benchmarks.md, for five models. Python effects of `fn`
    (prints, files) happen in warm-up and capture only; a number that it only counts up
    (`self.n += 1`) is counted by replays too.

    Example:
        >>> import torch, onelaunch as ol
        >>> fast = ol.graph(torch.nn.Linear(4, 2).requires_grad_(False).eval())
        >>> [tuple(fast(torch.ones(1, 4)).shape) for _ in range(5)][-1]
        (1, 2)
    """
    settings: dict[str, Any] = dict(options)
    for name in settings.keys() - GraphOptions.__annotations__.keys():
        raise TypeError(f"graph() got an unexpected keyword argument '{name}'")
    pool = settings.pop("pool", None)
    checked = Options(**settings)
    if pool is not None and not isinstance(pool, Pool):
        raise ArgumentError("OL401", f"pool={pool!r}", fix="pool=ol.Pool(), or None")
    shared = None if pool is None else pool._manager
    return _Decorator(checked, shared) if fn is None else _graphed(fn, checked, shared)


def _graphed(fn: Any, options: Options, pool: PoolManager | None) -> Any:
    if isinstance(fn, nn.Module):
        return graph_module(fn, options, pool)
    if isinstance(fn, Graphed):
        raise ArgumentError("OL401", f"{fn!r} is graphed already", fix="use it as it is")
    if not callable(fn) or isinstance(fn, type):
        shown = repr(fn)[:60]
        fix = "pass a function, a bound method or a module"
        raise ArgumentError(
            "OL401", f"expected a callable, got {describe_type(fn)}: {shown}", fix=fix
        )
    for what, is_one in _WITHOUT_A_RUN.items():
        if is_one(fn) or is_one(type(fn).__call__):
            name = getattr(fn, "__qualname__", describe_type(fn))
            fix = "graph a plain function that returns tensors, and call it from there"
            raise ArgumentError("OL401", f"a call of `{name}` only makes a {what}", fix=fix)
    return graphed(fn, options, pool)


_WITHOUT_A_RUN: dict[str, Callable[[object], bool]] = {
    "coroutine": inspect.iscoroutinefunction,
    "generator": inspect.isgeneratorfunction,
    "asynchronous generator": inspect.isasyncgenfunction,
}
"""The result of a call that runs no code yet -> whether a function has such calls."""
