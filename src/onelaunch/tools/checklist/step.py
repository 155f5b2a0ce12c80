"""One step of the checklist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onelaunch.tools.checklist.subject import Subject


@dataclass(frozen=True)
class Step:
    """One step of the checklist.

    Attributes:
        name: its name in a plan: ``"fold-batchnorm"``, or ``"half:bf16"`` for one way of several.
        title: its name for people.
        take: changes the subject, and says what it did (``"12 of 12 norms"``).
        rounds: True if by its nature it rounds otherwise, or as a timing decides: not tried under
            ``max_error=0``, where others are compared bit for bit.
        group: of steps that exclude each other the group, or None.
        least_gain: the part of the time that it must save to be kept; below 0, may cost.
    """

    name: str
    title: str
    take: Callable[[Subject], str | None]
    rounds: bool = False
    group: str | None = None
    least_gain: float = 0.02
