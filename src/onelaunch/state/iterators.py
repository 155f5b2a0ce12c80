"""Iterators in the state: a call that advances one draws another value each time.

No replay advances it. Where it stands is compared before and after a warm-up, without a draw.
"""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from onelaunch.errors import CaptureError
from onelaunch.frames.stack import Use
from onelaunch.identity import id
from onelaunch.source import loaded_at
from onelaunch.state.slots import Slot
from onelaunch.state.walked import StateWalk

_EXAMPLES: tuple[Iterator[Any], ...] = (
    *(iter(()), iter([]), iter(range(0)), iter(range(2**70)), iter(""), iter(b"")),
    *(iter({}), iter({}.values()), iter({}.items()), iter(set[Any]()), reversed([]), reversed({})),
    *(zip(()), enumerate(()), map(int, ()), filter(None, ())),
)
KINDS = frozenset(
    (
        *map(type, _EXAMPLES),
        *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
        types.GeneratorType,
    )
) - {itertools.count, itertools.repeat}
"""The iterators of the interpreter, and generators. A `count` never gives a number twice, so that
two runs differ where it matters; else it is no more than a log."""
Standing = tuple[Slot, Iterator[Any], object]
"""The slot of an iterator, the iterator, and where it stands."""
_DEEPEST = 8
"""The most iterators over iterators that are followed."""


def iterators_of(walked: StateWalk, every: bool = False) -> list[Standing]:
    """Return the iterators that a callable reads, with where each stands. `every`: also those that
    it may come to read, and counts."""
    kinds = KINDS | {itertools.count} if every else KINDS
    return [
        (slot, value, _standing(value))
        for slot, value in walked.holding(kinds.__contains__)
        if every or walked.used.get(slot.id) is Use.READ
        for value in (cast(Iterator[Any], value),)
    ]


def advanced(before: Iterable[Standing], codes: Iterable[types.CodeType]) -> CaptureError | None:
    """Return the refusal of a run that has advanced one of these iterators; or None.

    Args:
        codes: the code that ran.
    """
    for slot, value, standing in before:
        if _standing(value) != standing:
            what = f"the iterator `{slot.name}` is advanced in the call"
            return CaptureError("OL117", what, where=loaded_at(codes, slot.word))
    return None


def _standing(value: Iterator[Any], depth: int = 0) -> object:
    """Return a value that differs after a draw. The place of a repeating `cycle` is not seen."""
    if type(value) is types.GeneratorType:
        frame = value.gi_frame
        held = () if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
        inner: list[object] = [] if frame is None else [*frame.f_locals.values()]
    else:
        held = operator.length_hint(value, -1)
        inner = gc.get_referents(value)
        inner += [part for v in inner if type(v) is tuple for part in cast(tuple[object, ...], v)]
    if depth == _DEEPEST:
        return held
    counts = [repr(v) for v in (value, *inner) if type(v) is itertools.count]
    parts = [cast(Iterator[Any], v) for v in inner if type(v) in KINDS and v is not value]
    return held, counts, *(_standing(part, depth + 1) for part in parts)
