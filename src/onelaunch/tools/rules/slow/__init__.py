"""The rules of what is slow in inference.

settings.py  modes and settings: one line at the start of a program changes each
layers.py    the architecture: norms, branches, channels, kernels
"""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule
from onelaunch.tools.rules.slow.layers import LAYERS
from onelaunch.tools.rules.slow.settings import SETTINGS

SLOW: tuple[Rule, ...] = (*SETTINGS, *LAYERS)
