"""The rules of the doctor: what stops a CUDA graph, makes it wrong in silence, or is slow.

rule.py       the form of a rule, and its documentation
findings.py   findings under their rules
blocks.py     what blocks a capture: the codes of `CaptureError`
training.py   of that: optimizers and schedulers
frozen.py     what a graph by hand gets wrong in silence: what Python decides in each call
memory.py     the same: memory that a graph has to itself, or knows by its address
slow/         what is slow in inference
selection.py  the rules that a word names
document.py   the documentation of a rule, as Markdown

A new rule is declared in one of these. The doctor detects it: in a listener of `doctor/run.py` by a
run (`doctor/slow/listener.py` for what is slow), and in `doctor/source/lint.py` in files.

Nothing here imports torch: `onelaunch explain` is quick.
"""

from __future__ import annotations

from onelaunch.tools.rules.blocks import BLOCKS
from onelaunch.tools.rules.frozen import FROZEN
from onelaunch.tools.rules.memory import MEMORY
from onelaunch.tools.rules.rule import Rule
from onelaunch.tools.rules.slow import SLOW

_SILENT = sorted((*FROZEN, *MEMORY), key=lambda rule: rule.code)
RULES: dict[str, Rule] = {rule.code: rule for rule in (*BLOCKS, *_SILENT, *SLOW)}
"""code -> rule, in the order of the codes."""
FOUND_IN_FILES = frozenset(
    f"OL{n}" for n in (101, 102, 103, 106, 109, 309, 501, 502, 503, 504, 510, 513)
)
"""Rules of the lint, which reads files that nobody runs. The other rules need a run."""
