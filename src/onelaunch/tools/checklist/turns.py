"""Times of two callables, taken in turns, and whether one of them pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.gc_pause import no_collection
from onelaunch.tools.bench.timers import WINDOW, Timed, Timer, Timing, settled
from onelaunch.tools.checklist.clock import UNLIMITED, Clock

LEAST_ROUNDS = 3
CLEARLY = 0.1
"""A difference of that part in each of the first rounds needs no more of them."""


@dataclass(frozen=True)
class Turns:
    """Microseconds per call of two callables, round by round."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def timings(self) -> tuple[Timing, Timing]:
        return Timing.of(self.before), Timing.of(self.after)

    @property
    def ratio(self) -> float:
        """The time of the second as a part of that of the first, the median of the rounds."""
        return statistics.median(_ratios(self.before, self.after))

    def pays(self, least_gain: float) -> bool:
        """Return whether the second takes less time by that part, and in three rounds of four; a
        part below 0 is what it may cost."""
        quartile = sorted(_ratios(self.before, self.after))[(3 * len(self.before)) // 4]
        return self.ratio <= 1 - least_gain and (least_gain < 0 or quartile < 1)


def _ratios(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [b / a for a, b in zip(before, after, strict=True)]


def in_turns(
    before: Timed, after: Timed, timer: Timer, seconds: float, clock: Clock = UNLIMITED
) -> Turns:
    """Time two callables in turns, each first in every other round, until both have settled, the
    difference is clear, or the time is up.

    Raises:
        TimeIsUp: by the clock, before the least number of rounds.
    """
    calls = before, after
    samples: tuple[list[float], list[float]] = [], []
    about = [timer.sample(call, float("inf"))[0] for call in calls]  # a single call each
    start = time.monotonic()
    with no_collection():
        while True:
            turn = len(samples[1]) % 2
            for which in (turn, 1 - turn):
                if len(samples[0]) < LEAST_ROUNDS:
                    clock.check()
                about[which] = timer.sample(calls[which], about[which])[-1]
                samples[which].append(about[which])
            rounds = len(samples[0])
            if rounds >= LEAST_ROUNDS and time.monotonic() - start >= seconds:
                break
            if rounds >= 2 * WINDOW and all(settled(found) for found in samples):
                break
            ratios = _ratios(*samples)
            clear = max(ratios) < 1 - CLEARLY or min(ratios) > 1 + CLEARLY
            if rounds >= WINDOW and clear:
                break
    return Turns(tuple(samples[0]), tuple(samples[1]))
