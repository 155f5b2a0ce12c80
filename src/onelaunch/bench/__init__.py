"""Every way to run a callable, side by side: checked, then timed."""

from onelaunch.bench.comparison import ENGINES, choose, compare
from onelaunch.bench.rows import Comparison, Row
from onelaunch.bench.timers import Timing

__all__ = ["ENGINES", "Comparison", "Row", "Timing", "choose", "compare"]
