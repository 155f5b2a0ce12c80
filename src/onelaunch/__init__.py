"""onelaunch: a PyTorch callable as one CUDA-graph launch, right, and measured."""

from onelaunch.bench import Comparison, compare
from onelaunch.buckets import Buckets
from onelaunch.callables import make_graphed_callables
from onelaunch.entry import graph
from onelaunch.errors import CaptureError, GraphError, GraphWarning, ReplayError
from onelaunch.graphed import Graphed
from onelaunch.optimizers import capturable
from onelaunch.pool import Pool
from onelaunch.prefetch import prefetch
from onelaunch.recording import Recording
from onelaunch.stats import GraphStats, PoolStats, RecordingStats

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
    "RecordingStats",
    "ReplayError",
    "capturable",
    "compare",
    "graph",
    "make_graphed_callables",
    "prefetch",
]
