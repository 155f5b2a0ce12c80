"""The graphed callable for some options, with buckets or without."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from onelaunch.capture.callee import Callee
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager

P = ParamSpec("P")
R = TypeVar("R")


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
    if options.buckets is not None:
        kind = importlib.import_module("onelaunch.padding.bucketed").Bucketed
    return kind(fn, options, pool, root, callee)
