"""onelaunch: a PyTorch callable as one CUDA-graph launch, right, and measured.

Each name is imported when it is first used: most need torch, which takes seconds to import, and
`onelaunch --version` needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onelaunch.api import graph as graph
    from onelaunch.call.registered import register as register
    from onelaunch.capture.recording import Recording as Recording
    from onelaunch.compat import make_graphed_callables as make_graphed_callables
    from onelaunch.errors import ArgumentError as ArgumentError
    from onelaunch.errors import CaptureError as CaptureError
    from onelaunch.errors import GraphError as GraphError
    from onelaunch.errors import GraphWarning as GraphWarning
    from onelaunch.errors import ReplayError as ReplayError
    from onelaunch.finding import Finding as Finding
    from onelaunch.optimizers.capturable import capturable as capturable
    from onelaunch.runtime.batcher import Batcher as Batcher
    from onelaunch.runtime.graphed import Graphed as Graphed
    from onelaunch.runtime.metrics import Metrics as Metrics
    from onelaunch.runtime.pool import Pool as Pool
    from onelaunch.runtime.readiness import Readiness as Readiness
    from onelaunch.runtime.stats import GraphStats as GraphStats
    from onelaunch.runtime.stats import PoolStats as PoolStats
    from onelaunch.sizes.buckets import Buckets as Buckets
    from onelaunch.sizes.ragged import Ragged as Ragged
    from onelaunch.tools.bench import Comparison as Comparison
    from onelaunch.tools.bench import compare as compare
    from onelaunch.tools.checklist.optimize import Optimized as Optimized
    from onelaunch.tools.checklist.optimize import optimize as optimize
    from onelaunch.tools.checklist.plan import Plan as Plan
    from onelaunch.tools.doctor.diagnose import diagnose as diagnose
    from onelaunch.tools.doctor.diagnosis import Diagnosis as Diagnosis
    from onelaunch.tools.profiler.measure import profile as profile
    from onelaunch.tools.profiler.profile import Profile as Profile

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
    __all__ = [*_MODULES]

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
    return [*_MODULES]
