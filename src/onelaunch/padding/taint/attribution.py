"""The attribution of taint to an operation, which a refusal names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.table import rule_of
from onelaunch.padding.taint.trace import LAYOUT, packet_of
from onelaunch.source import Place

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
            known = None if _known(event.name) else STRANGE
            known = TAKES if packet_of(event.name) in LAYOUT else known
            return TaintCause(event.name, event.place, known)
    rising = [e for e in chain if e.after and e.before]
    last = max(
        rising,
        key=lambda e: float(e.after[0]) - max(float(b) for b in e.before),
        default=chain[-1] if chain else None,
    )
    if last is None:
        return TaintCause("result", None, None)
    return TaintCause(last.name, last.place, None if _known(last.name) else STRANGE)


def _known(name: str) -> bool:
    packet = packet_of(name)
    func = getattr(torch.ops.aten, packet, None)
    if func is None or name == "attention":
        return name == "attention"
    overload = getattr(func, name.partition(".")[2] or "default", None)
    return overload is not None and rule_of(overload) is not None
