"""The rules of what a graph captured by hand gets wrong in silence.

By hand, one copies the inputs into static tensors, replays, and clones the results. Each rule says
what `ol.graph` makes of the same.
"""

from __future__ import annotations

from onelaunch.rules.frozen import FROZEN
from onelaunch.rules.memory import MEMORY
from onelaunch.rules.rule import Rule

SILENT: tuple[Rule, ...] = tuple(sorted((*FROZEN, *MEMORY), key=lambda rule: rule.code))
