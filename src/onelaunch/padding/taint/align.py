"""The operations of a run at a padded size beside those of the run at the real size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.taint.attribution import DIVERGES, DRAWN, Finding
from onelaunch.padding.taint.rules.table import rule_of
from onelaunch.padding.taint.trace import AHEAD, LAYOUT, PREFIX, Step, packet_of
from onelaunch.source import user_frame


class Alignment:
    """Finds the step of the run at the real size that corresponds to one at the padded size.

    Args:
        reference: the steps of the run at the real size.
    """

    def __init__(self, reference: Sequence[Step]) -> None:
        self._reference = reference
        self._next = 0
        self._alone: Counter[tuple[Any, ...]] = Counter()
        """Slices that one of the two runs has and the other has not."""
        self.apart: Finding | None = None
        """The first operation in which the runs differ."""

    def counterpart(self, step: Step) -> Step | None:
        """The step of the run at the real size, or None where it has none."""
        for ahead in range(AHEAD):
            place = self._next + ahead
            if place >= len(self._reference):
                break
            if self._reference[place].name == step.name:
                skipped = self._reference[self._next : place]
                self._alone.update(s.fixed for s in skipped if _shifts(s))
                self._next = place + 1
                return self._reference[place]
            if packet_of(self._reference[place].name) not in LAYOUT:
                break
        if packet_of(step.name) not in LAYOUT:
            self.part(Finding(step.name, user_frame(), DIVERGES))
        if _shifts(step):
            self._alone.subtract([step.fixed])
        return None

    def part(self, finding: Finding) -> None:
        """Say where the runs go apart, if they have not before."""
        self.apart = self.apart or finding

    def finish(self, steps: Sequence[Step]) -> Finding | None:
        """The first operation in which the runs differ, or None."""
        rest = self._reference[self._next :]
        left = next((s for s in rest if packet_of(s.name) not in LAYOUT), None)
        self._alone.update(s.fixed for s in rest if _shifts(s))
        if left is None and any(self._alone.values()):
            left = next(s for s in [*steps, *self._reference] if self._alone[s.fixed])
        if left is not None:
            self.part(Finding(left.name, None, DIVERGES))
        return self.apart


def reason_of(func: Any, step: Step, real: Step | None) -> str | None:
    """Why a result differs from that at the real size whatever the inputs are, or None."""
    packet = packet_of(step.name)
    if real is None:
        return None
    if not _same_numbers(step, real) or _cut_otherwise(step, real):
        return "a number in it changes with the size"
    if step.constant is not None and not _begins(step.constant, real.constant):
        return "its values change with the size"
    grown = real.outputs != step.outputs
    random = draws(func)
    if grown and random:
        return DRAWN
    if grown and not step.inputs and packet not in PREFIX and not random:
        return "its values change with the size"
    return None


def _shifts(step: Step) -> bool:
    """Whether it is a slice that moves rows to other places. One of all rows is no operation."""
    return step.name == "slice.Tensor" and (step.fixed[1] != 0 or step.fixed[2] not in (0, 1))


_HIDES = {("float", "-inf"), ("float", "-65504.0")}
"""What torch's attention makes of a boolean mask's False: the second for cuDNN's kernel, which it
takes at some sizes and not at others."""


def _same_numbers(step: Step, real: Step) -> bool:
    if step.name == "scalar_tensor" and {*step.fixed} ^ {*real.fixed} <= _HIDES:
        return len(step.fixed) == len(real.fixed)
    return step.fixed == real.fixed


def _cut_otherwise(step: Step, real: Step) -> bool:
    """Whether a dimension that does not follow the size is split in other places."""
    if not step.name.startswith("split"):
        return False
    dim, before, after = step.fixed[0], real.inputs[0], step.inputs[0]
    if before[dim] != after[dim]:
        return False
    return [s[dim] for s in real.outputs] != [s[dim] for s in step.outputs]


def _begins(constant: Tensor, real: Tensor | None) -> bool:
    """Whether a constant in the code begins with that of the run at the real size."""
    if real is None or real.dim() != constant.dim():
        return False
    part = constant[tuple(slice(0, n) for n in real.shape)]
    return part.shape == real.shape and bool(((part == real) | (part.isnan() & real.isnan())).all())


def draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and rule_of(func) is None
