"""onelaunch: a PyTorch callable as one CUDA-graph launch, right, and measured.

Each name is imported when it is first used: most need torch, which takes seconds to import, and
`onelaunch --version` needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onelaunch.api import graph
    from onelaunch.call.registered import register
    from onelaunch.capture.recording import Recording
    from onelaunch.compat import make_graphed_callables
    from onelaunch.errors import ArgumentError, CaptureError, GraphError, GraphWarning, ReplayError
    from onelaunch.finding import Finding
    from onelaunch.optimizers.capturable import capturable
    from onelaunch.runtime.batcher import Batcher
    from onelaunch.runtime.graphed import Graphed
    from onelaunch.runtime.metrics import Metrics
    from onelaunch.runtime.pool import Pool
    from onelaunch.runtime.readiness import Readiness
    from onelaunch.runtime.stats import GraphStats, PoolStats
    from onelaunch.sizes.buckets import Buckets
    from onelaunch.sizes.ragged import Ragged
    from onelaunch.tools.bench import Comparison, compare
    from onelaunch.tools.checklist.optimize import Optimized, optimize
    from onelaunch.tools.checklist.plan import Plan
    from onelaunch.tools.doctor.diagnose import diagnose
    from onelaunch.tools.doctor.diagnosis import Diagnosis
    from onelaunch.tools.profiler.measure import profile
    from onelaunch.tools.profiler.profile import Profile

__all__ = [
    "ArgumentError",
    "Batcher",
    "Buckets",
    "CaptureError",
    "Comparison",
    "Diagnosis",
    "Finding",
    "GraphError",
    "GraphStats",
    "GraphWarning",
    "Graphed",
    "Metrics",
    "Optimized",
    "Plan",
    "Pool",
    "PoolStats",
    "Profile",
    "Ragged",
    "Readiness",
    "Recording",
    "ReplayError",
    "capturable",
    "compare",
    "diagnose",
    "graph",
    "make_graphed_callables",
    "optimize",
    "profile",
    "register",
]

_MODULES = {
    "ArgumentError": "onelaunch.errors",
    "Batcher": "onelaunch.runtime.batcher",
    "Buckets": "onelaunch.sizes.buckets",
    "CaptureError": "onelaunch.errors",
    "Comparison": "onelaunch.tools.bench",
    "Diagnosis": "onelaunch.tools.doctor.diagnosis",
    "Finding": "onelaunch.finding",
    "GraphError": "onelaunch.errors",
    "GraphStats": "onelaunch.runtime.stats",
    "GraphWarning": "onelaunch.errors",
    "Graphed": "onelaunch.runtime.graphed",
    "Metrics": "onelaunch.runtime.metrics",
    "Optimized": "onelaunch.tools.checklist.optimize",
    "Plan": "onelaunch.tools.checklist.plan",
    "Pool": "onelaunch.runtime.pool",
    "PoolStats": "onelaunch.runtime.stats",
    "Profile": "onelaunch.tools.profiler.profile",
    "Ragged": "onelaunch.sizes.ragged",
    "Readiness": "onelaunch.runtime.readiness",
    "Recording": "onelaunch.capture.recording",
    "ReplayError": "onelaunch.errors",
    "capturable": "onelaunch.optimizers.capturable",
    "compare": "onelaunch.tools.bench",
    "diagnose": "onelaunch.tools.doctor.diagnose",
    "graph": "onelaunch.api",
    "make_graphed_callables": "onelaunch.compat",
    "optimize": "onelaunch.tools.checklist.optimize",
    "profile": "onelaunch.tools.profiler.measure",
    "register": "onelaunch.call.registered",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with importlib.import_module("onelaunch.gc_pause").importing():
            value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
