"""Every way to run a callable, side by side: checked, then timed.

comparison.py   `ol.compare`: rounds over all engines, until their times agree
entry.py        one engine in it: built, checked, timed, a row
rows.py         the result, as data and JSON
shown.py        a result as a document
isolated.py     an engine in a process of its own
worker.py       that process
engines/        the ways to run a callable, a file each
workload.py     a callable with its arguments, and copies of both
target.py       the callable and arguments behind `path.py:name`
reference.py    the check against float64
precision.py    the distance of results, all elements together
draws.py        other inputs to check engines on
timers.py       wall, host and GPU time
profile.py      the limit of a workload: launches or kernels
trace.py        what torch.profiler sees of some calls, as plain events
timeline.py     one traced call, to be drawn
environment.py  hardware and versions
"""

from onelaunch.tools.bench.comparison import choose, compare
from onelaunch.tools.bench.engines import ENGINES
from onelaunch.tools.bench.rows import Comparison, Row
from onelaunch.tools.bench.timers import Timing

__all__ = ["ENGINES", "Comparison", "Row", "Timing", "choose", "compare"]
