"""The alignment of a padded run with the unpadded run at the real size, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.taint.attribution import DIVERGES, DRAWN, NUMBER, TaintCause
from onelaunch.padding.taint.rules.call import argument_of
from onelaunch.padding.taint.rules.table import rule_of
from onelaunch.padding.taint.trace import AHEAD, LAYOUT, PREFIX, TracedStep, packet_of
from onelaunch.source import user_frame


class Alignment:
    """A search for the step of the unpadded run that corresponds to each step of the padded run.
    `reference`: the steps of the unpadded run."""

    def __init__(self, reference: Sequence[TracedStep]) -> None:
        self._reference = reference
        self._next = 0
        self._unmatched: Counter[tuple[Any, ...]] = Counter()  # slices in only one of the two runs
        self.apart: TaintCause | None = None  # the first operation in which the runs differ

    def counterpart(self, step: TracedStep) -> TracedStep | None:
        """Return the corresponding step of the unpadded run, or None."""
        for ahead in range(AHEAD):
            place = self._next + ahead
            if place >= len(self._reference):
                break
            if self._reference[place].name == step.name:
                skipped = self._reference[self._next : place]
                self._unmatched.update(s.fixed for s in skipped if _shifts(s))
                self._next = place + 1
                return self._reference[place]
            if packet_of(self._reference[place].name) not in LAYOUT:
                break
        if packet_of(step.name) not in LAYOUT:
            self.differ(TaintCause(step.name, user_frame(), DIVERGES))
        if _shifts(step):
            self._unmatched.subtract([step.fixed])
        return None

    def differ(self, finding: TaintCause) -> None:
        self.apart = self.apart or finding

    def finish(self, steps: Sequence[TracedStep]) -> TaintCause | None:
        """Return the first operation in which the runs differ, or None."""
        rest = self._reference[self._next :]
        unmatched = next((s for s in rest if packet_of(s.name) not in LAYOUT), None)
        self._unmatched.update(s.fixed for s in rest if _shifts(s))
        if unmatched is None and any(self._unmatched.values()):
            unmatched = next(s for s in [*steps, *self._reference] if self._unmatched[s.fixed])
        if unmatched is not None:
            self.differ(TaintCause(unmatched.name, None, DIVERGES))
        return self.apart


def reason_of(step: TracedStep, real: TracedStep | None, random: bool) -> str | None:
    """Return why a result differs from the unpadded run's whatever the inputs are, or None.
    `random`: whether the operation draws random numbers."""
    packet = packet_of(step.name)
    if real is None:
        return None
    if not _same_numbers(step, real) or _splits_elsewhere(step, real):
        return NUMBER
    if step.constant is not None and not _begins(step.constant, real.constant):
        return "its values change with the size"
    grown = real.outputs != step.outputs
    if grown and random:
        return DRAWN
    if grown and not step.inputs and packet not in PREFIX and not random:
        return "its values change with the size"
    return None


def _shifts(step: TracedStep) -> bool:
    """Return whether it is a slice that moves rows. A slice of all rows is no operation."""
    return step.name == "slice.Tensor" and (step.fixed[1] != 0 or step.fixed[2] not in (0, 1))


_HIDDEN = {("float", "-inf"), ("float", "-65504.0")}
"""The numbers that torch's attention uses for False in a boolean mask. The second is for cuDNN's
kernel, which it takes at some sizes only."""


def _same_numbers(step: TracedStep, real: TracedStep) -> bool:
    if step.name == "scalar_tensor" and {*step.fixed} ^ {*real.fixed} <= _HIDDEN:
        return len(step.fixed) == len(real.fixed)
    return step.fixed == real.fixed


def _splits_elsewhere(step: TracedStep, real: TracedStep) -> bool:
    """Return whether a dimension that does not follow the size is split at other places."""
    if not step.name.startswith("split"):
        return False
    dim, before, after = step.fixed[0], real.inputs[0], step.inputs[0]
    if before[dim] != after[dim]:
        return False
    return [s[dim] for s in real.outputs] != [s[dim] for s in step.outputs]


def _begins(constant: Tensor, real: Tensor | None) -> bool:
    """Return whether a constant in the code begins with the unpadded run's constant."""
    if real is None or real.dim() != constant.dim():
        return False
    part = constant[tuple(slice(0, n) for n in real.shape)]
    return part.shape == real.shape and bool(((part == real) | (part.isnan() & real.isnan())).all())


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers: attention does for its dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return rule_of(func) is None or argument_of(func, args, kwargs, "dropout_p", 0.0) > 0
