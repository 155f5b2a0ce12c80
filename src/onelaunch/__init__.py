"""onelaunch: a PyTorch callable as one CUDA-graph launch, right, and measured."""

from onelaunch.api import graph
from onelaunch.bench import Comparison, compare
from onelaunch.capture.recording import Recording
from onelaunch.compat import make_graphed_callables
from onelaunch.errors import CaptureError, GraphError, GraphWarning, ReplayError
from onelaunch.optimizers.capturable import capturable
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.pool import Pool
from onelaunch.runtime.stats import GraphStats, PoolStats
from onelaunch.sizes.buckets import Buckets

__all__ = [
    "Buckets",
    "CaptureError",
    "Comparison",
    "GraphError",
    "GraphStats",
    "GraphWarning",
    "Graphed",
    "Pool",
    "PoolStats",
    "Recording",
    "ReplayError",
    "capturable",
    "compare",
    "graph",
    "make_graphed_callables",
]
