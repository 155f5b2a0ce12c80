"""The `mode` and `options` of ``torch.compile(f, backend="onelaunch")``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from onelaunch.capture.compilation import OWN_MEMORY, Backend, backend_of, eager_aten
from onelaunch.driver.protocol import Driver
from onelaunch.errors import ArgumentError
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import Pool, PoolManager
from onelaunch.sizes.buckets import Buckets
from onelaunch.sizes.ragged import Ragged

_SHARED = PoolManager()  # the pool of all regions, unless the options name another
_RECORDED = "gradients", "inputs", "max_in_flight", "max_recordings", "parallel", "warmup"
_OURS = frozenset({"buckets", *_RECORDED})
_NAMES = (*_OURS, "codegen", "on_refusal", "pool")


@dataclass(frozen=True)
class CompileSettings:
    """The options of one `torch.compile`. `mode`, `inductor`: the mode and options for Inductor."""

    codegen: Literal["inductor", "eager"]  # Inductor's kernels, or torch's own
    mode: str | None
    inductor: Mapping[str, Any]
    graph: Options  # the options of the recordings
    pool: PoolManager

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> CompileSettings:
        """Return the settings; options that are not ours are Inductor's. Raises `ArgumentError`:
        OL401, an unknown option, or a value that an option of ours cannot have."""
        given = dict(options or {})
        codegen = given.pop("codegen", "inductor")
        if codegen not in ("inductor", "eager"):
            raise ArgumentError("OL401", f"codegen={codegen!r}", fix='"inductor" or "eager"')
        refusal = given.pop("on_refusal", "eager")
        if refusal == "split":  # a graph has no modules to split by
            raise ArgumentError("OL401", f"on_refusal={refusal!r}", fix='"eager" or "raise"')
        pool = given.pop("pool", None)
        if pool is not None and not isinstance(pool, Pool):
            raise ArgumentError("OL401", f"pool={pool!r}", fix="pool=ol.Pool(), or none")
        buckets = given.get("buckets")
        if isinstance(buckets, Buckets):
            _check_names(buckets)
        ours = {name: given.pop(name) for name in _OURS & given.keys()}
        _refuse_unknown(given)
        shared = _SHARED if pool is None else pool._manager
        return cls(codegen, mode, given, Options(on_refusal=refusal, **ours), shared)

    @classmethod
    def of_graph(cls, options: Options, pool: PoolManager) -> CompileSettings:
        """Return the settings for the pieces of a callable that `graph` made."""
        mode = "max-autotune-no-cudagraphs" if options.compile == "max-autotune" else None
        pieces = replace(options, compile=False, on_refusal="eager")
        return cls("inductor" if options.compile else "eager", mode, {}, pieces, pool)

    def compiler(self, driver: Driver) -> Backend:
        """Return the backend that compiles graphs for a driver."""
        if self.codegen == "eager":
            return eager_aten
        own = OWN_MEMORY if self.graph.parallel else {}
        return backend_of(driver, self.mode, {**own, **self.inductor})


def _refuse_unknown(options: Iterable[str]) -> None:
    """Refuse options that Inductor lacks too, as its own check is not always reached."""
    if not options:
        return
    names: list[str] = importlib.import_module("torch._inductor").list_options()
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, [*_NAMES, *names], 1)
            fix = near[0] if near else f"one of {', '.join(sorted(_NAMES))}; or one of Inductor's"
            raise ArgumentError("OL401", f"there is no option {name!r}", fix=fix)


def _check_names(buckets: Buckets) -> None:
    """Refuse positions of arguments and numbers of results, which no graph has, and `Ragged`."""
    if isinstance(buckets, Ragged):
        fix = "ol.graph(f, buckets=ol.Ragged(...))"
        raise ArgumentError("OL401", "Ragged buckets of a compiled function", fix=fix)
    for key in (*buckets.dims, *buckets.pad):
        if not str(key).isidentifier():
            what = f"buckets of a compiled function name an argument {key!r}"
            raise ArgumentError("OL401", what, fix='the name of a parameter: dims={"mask": 1}')
    if buckets.outputs:
        fix = "leave out outputs={...}: it is found out, for each graph"
        raise ArgumentError("OL401", "buckets of a compiled function name results", fix=fix)
