"""The `mode` and `options` of ``torch.compile(f, backend="onelaunch")``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onelaunch.errors import ArgumentError
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import Pool, PoolManager, manager_of

_SHARED = PoolManager()
"""The pool of all regions, unless the options name another."""
_OURS = frozenset(("gradients", "inputs", "max_in_flight", "max_recordings", "warmup"))


@dataclass(frozen=True)
class Settings:
    """The options of one `torch.compile`.

    Attributes:
        codegen: Inductor's kernels, or torch's own.
        mode, inductor: what Inductor is told.
        graph: the options of the recordings.
    """

    codegen: Literal["inductor", "eager"]
    mode: str | None
    inductor: Mapping[str, Any]
    graph: Options
    pool: PoolManager

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> Settings:
        """Return the settings; options that are not ours are Inductor's.

        Raises:
            ArgumentError: OL401, a value that an option of ours cannot have.
        """
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
        ours = {name: given.pop(name) for name in _OURS & given.keys()}
        shared = _SHARED if pool is None else manager_of(pool)
        return cls(codegen, mode, given, Options(on_refusal=refusal, **ours), shared)
