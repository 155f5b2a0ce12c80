"""The graphed callable for some options, with buckets or without."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, ParamSpec, TypeVar

from onelaunch.capture.callee import Callee
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = {
    (True, "call"): "onelaunch.padding.bucketed:Bucketed",
    (False, "background"): "onelaunch.runtime.background:CapturesBeside",
    (True, "background"): "onelaunch.padding.background:BucketedBeside",
}
"""(with buckets, the option `capture`) -> the class, imported where it is asked for."""


def graphed(
    fn: Callable[P, R],
    options: Options,
    pool: PoolManager | None = None,
    root: tuple[str, object] | None = None,
    callee: Callee | None = None,
) -> Graphed[P, R]:
    """Return the graphed callable for these options. Padding takes 20 ms to import: it is imported
    for buckets alone."""
    kind: Any = Graphed
    where = _KINDS.get((options.buckets is not None, options.capture))
    if options.compile == "later":
        where = "onelaunch.runtime.later:CompilesLater"
    if where is not None:
        kind = resolve_name(where)
    return kind(fn, options, pool, root, callee)
