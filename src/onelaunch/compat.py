"""`make_graphed_callables`: torch's interface, this library's recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.autograd.chain import Chain
from onelaunch.autograd.engine import gradients
from onelaunch.autograd.graph_walk import CapturedGraph
from onelaunch.autograd.pair import AutogradPair
from onelaunch.call.tree import flatten, unique
from onelaunch.errors import ArgumentError
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import Pool, PoolManager
from onelaunch.split.forward import ModuleForward

_POOLS: dict[object, PoolManager] = {}  # Torch's pool id -> the pool in its place


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Pool | tuple[int, int] | None = None,
    *,
    sample_kwargs: Any = None,
) -> Any:
    """Graph functions and modules ahead of time, as `torch.cuda.make_graphed_callables` does.

    It takes the same arguments as torch's function and raises in the same cases. It differs where
    torch's is wrong: a call that the sample does not fit gets its own recording; the capture does
    not advance statistics and random state; gradients accumulate; outputs belong to the caller.

    Args:
        callables: a function or module, or a tuple of callables in the order in which they run. The
            callables of a tuple share memory. Another order of calls is right too, but needs
            further recordings.
        sample_args: the arguments of a call, any values; a tuple of them for each callable of a
            tuple.
        num_warmup_iters: number of eager calls of each other signature before its capture.
        allow_unused_input: False to raise if an argument that requires grad gets none.
        pool: the pool that counts the memory: an `ol.Pool`, a result of
            `torch.cuda.graph_pool_handle()`, or a `torch.cuda.MemPool`.
        sample_kwargs: the keyword arguments of a call; a dict for each callable of a tuple.

    Returns:
        For a function, its graphed form. For a module, the module itself with its `forward`
        replaced. For a tuple, a tuple.

    Raises:
        ArgumentError: OL401, under an autocast with its cache on; a module with hooks or with
            buffers that require grad; samples that do not match the callables.
        CaptureError: a callable or its backward cannot be captured as written.

    Costs two runs of each callable and its backward, whose effects are undone. Backwards are
    captured for one gradient of each result that requires grad, laid out as the result is; other
    gradients (expanded, or of some results only) have a recording from their second time on.

    Example:
        >>> import torch, onelaunch as ol
        >>> model = torch.nn.Linear(4, 2)
        >>> fast = ol.make_graphed_callables(model, (torch.ones(3, 4),))
        >>> fast is model, tuple(fast(torch.zeros(3, 4)).shape)
        (True, (3, 2))
    """
    kinds = {"cuda", *(t.device.type for t in flatten(sample_args).tensors)} & {"cuda", "cpu"}
    if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds)):
        what = "make_graphed_callables under an autocast that caches weights"
        fix = "torch.autocast(..., cache_enabled=False) around the call, or call it outside"
        raise ArgumentError("OL401", what, fix=fix)
    several = isinstance(callables, tuple)
    chosen = cast(tuple[Any, ...], callables if several else (callables,))
    args = cast(tuple[Any, ...], sample_args if several else (sample_args,))
    kwargs = sample_kwargs if several and sample_kwargs is not None else (sample_kwargs,)
    if several and sample_kwargs is None:
        kwargs = (None,) * len(chosen)
    args = args[: len(chosen)]  # torch ignores the rest, too
    _check(chosen, args, kwargs)
    shared = _pool(pool)
    chain = Chain(shared.separate)
    options = Options(warmup=max(1, num_warmup_iters))
    every = [_graphed(fn, options, shared) for fn in chosen]
    modules = [(fn, g) for fn, g in zip(chosen, every, strict=True) if isinstance(fn, nn.Module)]
    before = [(fn, vars(fn).get("forward")) for fn, _ in modules]
    try:
        for fn, graphed in modules:  # before any capture: recordings rely on the attributes
            fn.forward = graphed
        for fn, graphed, arguments, named in zip(chosen, every, args, kwargs, strict=True):
            parameters = fn.parameters() if isinstance(fn, nn.Module) else ()
            given = (*flatten((arguments, named or {})).tensors, *parameters)
            wanting = unique([t for t in given if t.requires_grad])
            then = partial(
                _rehearse_backward, wanting=wanting, allow_unused_input=allow_unused_input
            )
            graphed._recorder.capture_ahead(
                graphed, tuple(arguments), named or {}, chain=chain, then=then
            )
        for graphed in reversed(every):
            newest = graphed._table.entries[:1]  # another thread may have reset it
            if newest and newest[0].captured.pair is not None:
                capture_backward(newest[0].captured.pair)
    except BaseException:  # from a callable, or Ctrl-C: every module gets its forward back
        for fn, forward in before:
            del fn.forward
            if forward is not None:
                fn.forward = forward
        raise
    results = [
        fn if isinstance(fn, nn.Module) else graphed
        for fn, graphed in zip(chosen, every, strict=True)
    ]
    return tuple(results) if several else results[0]


def _check(chosen: Sequence[Any], args: Sequence[Any], kwargs: Sequence[Any]) -> None:
    if len(args) != len(chosen) or len(kwargs) != len(chosen):
        counts = f"{len(chosen)} callables, {len(args)} sample_args, {len(kwargs)} sample_kwargs"
        raise ArgumentError("OL401", counts, fix="one tuple of arguments for each callable")
    for fn, arguments, named in zip(chosen, args, kwargs, strict=True):
        if not isinstance(arguments, tuple | list) or not isinstance(named, Mapping | None):
            what = f"sample_args {type(arguments).__name__}, sample_kwargs {type(named).__name__}"
            raise ArgumentError("OL401", what, fix="a tuple of arguments, and a dict of named ones")
        if not isinstance(fn, nn.Module):
            continue
        name = type(fn).__name__
        if fn._backward_hooks or fn._forward_hooks or fn._forward_pre_hooks:
            fix = "register hooks after make_graphed_callables"
            raise ArgumentError("OL401", f"{name} has hooks", fix=fix)
        if any(b.requires_grad for b in fn.buffers()):
            fix = "make it a parameter: only parameters may be trained"
            raise ArgumentError("OL401", f"a buffer of {name} requires grad", fix=fix)


def _pool(given: Any) -> PoolManager:
    if given is None:
        return PoolManager()
    if isinstance(given, Pool):
        return given._manager
    return _POOLS.setdefault(getattr(given, "id", given), PoolManager())


def _graphed(fn: Any, options: Options, pool: PoolManager) -> Graphed[..., Any]:
    if isinstance(fn, nn.Module):
        return Graphed(ModuleForward(fn, vars(fn).get("forward")), options, pool, root=("", fn))
    return Graphed(fn, options, pool)


def _rehearse_backward(result: Any, wanting: Sequence[Tensor], allow_unused_input: bool) -> None:
    """Run the backward of a callable's result, and drop the gradients. Raise if one of `wanting`,
    arguments and parameters that require grad, gets none. Hooks do not run: a tensor that has one
    is left out."""
    outputs = unique([t for t in flatten(result).tensors if t.requires_grad])
    if not outputs:
        return
    graph = CapturedGraph(outputs, wanting)
    reached = unique([*wanting, *(t for t in graph.leaves if t.requires_grad)])
    inputs = [t for t in reached if not (t._backward_hooks or t.retains_grad)]
    seeds = [torch.zeros_like(t) for t in outputs]
    # A new thread of the engine has no CUDA context before its first kernel. Torch warns if that is
    # a product of matrices (pytorch#120131).
    last = [t * 1 for t in outputs]
    grads = gradients(last, inputs, seeds) if inputs else ()
    empty = {id(t) for t, g in zip(inputs, grads, strict=True) if g is None}
    unused = sum(id(t) in empty for t in wanting)
    if unused and not allow_unused_input:
        what = f"{unused} of {len(wanting)} tensors that require grad are not used"
        fix = "make_graphed_callables(..., allow_unused_input=True)"
        raise ArgumentError("OL401", what, fix=fix)


def capture_backward(pair: AutogradPair) -> None:
    """Capture the backward of the usual gradients; see `AutogradPair.capture_ahead`. It runs
    outside of autocast, as backwards should. If another thread captures at this moment, the capture
    is left to the first backward."""
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        with torch.enable_grad(), torch._C._DisableAutocast():
            seed = torch.zeros((), device=pair.static.device, requires_grad=True)
            torch.autograd.grad(_Ahead.apply(seed, pair), seed, allow_unused=True)
    finally:
        torch.set_autocast_cache_enabled(cache)


class _Ahead(torch.autograd.Function):
    """A node whose backward captures another backward: so the capture runs in the engine."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, pair: AutogradPair) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.pair = pair
        return seed.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.pair.capture_ahead()
        return None, None
