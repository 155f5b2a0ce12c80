"""Batches by the rule of a batcher against batches of a fixed size, simulated: no device is used.

    python -m benchmarks.batching      # writes benchmarks/results/batching.json, in seconds

Requests of one row arrive at random (Poisson), at 70% of the rate that the largest size sustains.
One device runs a batch at a time. The times of the sizes are given: a part for each launch, and a
part for each row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onelaunch as ol

OUT = Path(__file__).parent / "results" / "batching.json"
LOAD = 0.7
BUCKETS = {"1, 2, 4 .. 32": ol.Buckets.powers_of_two(32), "4, 8, 12 .. 32": ol.Buckets.every(4, 32)}
TIMES = {"the launch": (1.0, 0.005), "both": (0.5, 0.03), "the rows": (0.2, 0.1)}
"""What takes the time -> milliseconds of each launch, and of each row."""
WAITS = (0.0, 1.0)
"""`max_wait_ms` in times of the largest batch."""
Times = Mapping[int, float]
"""Size -> milliseconds."""
Rule = Callable[[ol.Buckets, int, float, float, Times], tuple[int, int]]
"""Buckets, waiting requests, milliseconds waited, the most of them, times -> the requests to run
and their size."""


def fixed(
    buckets: ol.Buckets, waiting: int, waited: float, most: float, times: Times
) -> tuple[int, int]:
    """First come, always at the largest size: a batch that is full, or has waited long enough."""
    largest = buckets.largest[0]
    return (min(waiting, largest) if waiting >= largest or waited >= most else 0), largest


def padded(
    buckets: ol.Buckets, waiting: int, waited: float, most: float, times: Times
) -> tuple[int, int]:
    """The same batches, padded to the next size."""
    return sized(buckets, fixed(buckets, waiting, waited, most, times)[0])


def batcher(
    buckets: ol.Buckets, waiting: int, waited: float, most: float, times: Times
) -> tuple[int, int]:
    """The batches of `Buckets.best`."""
    return sized(buckets, buckets.best(waiting, waited, max_wait_ms=most, times=times))


def sized(buckets: ol.Buckets, count: int) -> tuple[int, int]:
    return count, next(size for size in buckets.sizes[0] if size >= count)


RULES: dict[str, Rule] = {"fixed": fixed, "padded": padded, "batcher": batcher}


def simulate(
    rule: Rule, buckets: ol.Buckets, times: Times, most: float, requests: int
) -> dict[str, float]:
    """Serve so many requests, and return the figures."""
    dice, now = random.Random(0), 0.0
    arrivals: list[float] = []
    largest = buckets.largest[0]
    for _ in range(requests):
        now += dice.expovariate(LOAD * largest / times[largest])
        arrivals.append(now)
    now = busy = 0.0
    served = rows = batches = 0
    latencies: list[float] = []
    while served < requests:
        now = max(now, arrivals[served])
        waiting = bisect_right(arrivals, now) - served
        expires = arrivals[served] + most
        waited = most if now >= expires else now - arrivals[served]
        count, size = rule(buckets, waiting, waited, most, times)
        if count == 0:
            later = arrivals[served + waiting : served + waiting + 1]
            now = min([expires, *later])
            continue
        now, busy = now + times[size], busy + times[size]
        rows, batches = rows + size, batches + 1
        latencies += [now - arrival for arrival in arrivals[served : served + count]]
        served += count
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "padding": round(1 - requests / rows, 4),
        "busy": round(busy / now, 4),
        "rows per batch": round(requests / batches, 2),
        "p50 ms": round(cuts[49], 3),
        "p99 ms": round(cuts[98], 3),
    }


def figures(requests: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for (sizes, buckets), (name, parts) in itertools.product(BUCKETS.items(), TIMES.items()):
        times = {size: parts[0] + parts[1] * size for size in buckets.sizes[0]}
        for wait in WAITS:
            most = wait * times[buckets.largest[0]]
            rules = {
                title: simulate(rule, buckets, times, most, requests)
                for title, rule in RULES.items()
            }
            row = {"sizes": sizes, "times": name, "max_wait_ms": round(most, 3), "rules": rules}
            found.append(row)
    return {
        "benchmark": "batching",
        "load": LOAD,
        "requests": requests,
        "times": TIMES,
        "rows": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.write_text(json.dumps(figures(options.requests), indent=1) + "\n")


if __name__ == "__main__":
    main()
