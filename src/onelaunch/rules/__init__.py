"""The rules of the doctor: what stops a CUDA graph, makes it wrong in silence, or is slow.

rule.py       the form of a rule, and its documentation
finding.py    one finding of a rule, at a line
blocks.py     what blocks a capture: the codes of `CaptureError`
training.py   of that: optimizers and schedulers
silent.py     what a bare graph gets wrong in silence
frozen.py     of that: what Python decides in each call
memory.py     of that: memory that a graph has to itself, or knows by its address
slow/         what is slow in inference
selection.py  the rules that a word names
document.py   the documentation of a rule, as Markdown

A new rule is declared in one of these. `onelaunch.doctor` detects it: in `doctor/source` by the
source, in a listener of `doctor/run.py` by a run (`doctor/slow/listener.py` for what is slow).

Nothing here imports torch: `onelaunch explain` is quick.
"""

from __future__ import annotations

from onelaunch.rules.blocks import BLOCKS
from onelaunch.rules.rule import Rule
from onelaunch.rules.silent import SILENT
from onelaunch.rules.slow import SLOW

RULES: dict[str, Rule] = {rule.code: rule for rule in (*BLOCKS, *SILENT, *SLOW)}
"""code -> rule, in the order of the codes."""
