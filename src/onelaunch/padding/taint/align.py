"""The alignment of a padded run with the unpadded run at the real size, step by step, and the
attribution of taint to an operation, which a refusal names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from onelaunch.padding.taint.trace import AHEAD, LAYOUT, PREFIX, TracedStep, packet_of
from onelaunch.source import Place, user_frame

TAKES = "it takes a padded row"
MOVED = "it takes other elements, which padding moves"
ONCE = "it would be written once for each piece"
DRAWN = "random numbers are drawn for the padded rows too"
NUMBER = "a number in it changes with the size"
STRANGE = "its effect on rows is not known"
DIVERGES = (
    "the run at another size does not have it: the callable branches on the size, or on a value"
)


@dataclass(slots=True)
class TaintEvent:
    """A record of an operation's effect on taint, so that a refusal can name it."""

    name: str
    place: Place | None
    known: bool  # whether there is a rule for it
    sources: frozenset[int]
    targets: frozenset[int]
    before: list[Tensor]
    after: list[Tensor]
    reason: str | None


class TaintCause(NamedTuple):
    """A reason why a result depends on padding: the operation, its line, and perhaps an
    explanation."""

    name: str
    place: Place | None
    reason: str | None


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
    part = constant[tuple(map(slice, real.shape))]
    return part.shape == real.shape and bool(((part == real) | (part.isnan() & real.isnan())).all())


def find_cause(events: Sequence[TaintEvent], storage: int) -> TaintCause:
    """Return the operation that made this memory depend on padding."""
    wanted = {storage}
    chain: list[TaintEvent] = []
    for event in reversed(events):
        if event.targets & wanted:
            wanted |= event.sources
            chain.append(event)
    chain.reverse()
    for event in chain:
        if event.reason:
            return TaintCause(event.name, event.place, event.reason)
    for event in chain:  # from some tainted elements to all
        whole = bool(event.after) and float(event.after[0]) == 1
        if whole and any(0 < float(b) < 1 for b in event.before):
            reason = None if event.known else STRANGE
            reason = TAKES if packet_of(event.name) in LAYOUT else reason
            return TaintCause(event.name, event.place, reason)
    rising = [e for e in chain if e.after and e.before]
    last = max(
        rising,
        key=lambda e: float(e.after[0]) - max(float(b) for b in e.before),
        default=chain[-1] if chain else None,
    )
    if last is None:
        return TaintCause("result", None, None)
    return TaintCause(last.name, last.place, None if last.known else STRANGE)
