"""Figures as people read them."""

from __future__ import annotations


def us(microseconds: float) -> str:
    """Write a duration in the unit that leaves a short number: 3.1 us, 41 us, 1.3 ms, 2.1 s."""
    for factor, unit in ((1.0, "us"), (1e3, "ms"), (1e6, "s")):
        value = microseconds / factor
        if value < 999.5 or unit == "s":
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
    raise AssertionError


def with_spread(median_us: float, spread_us: float) -> str:
    """Write a median and half of its spread: ``41.2 us ±0.3``."""
    value, unit = us(median_us).split()
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}[unit]
    half = spread_us / 2
    if half > median_us:
        return f"{value} {unit} ±{us(half)}"
    return f"{value} {unit} ±{half / scale:.{2 if float(value) < 10 else 1}f}"


def seconds(value: float) -> str:
    return us(value * 1e6) if value < 1 else f"{value:.1f} s"


def memory(count: int) -> str:
    """Write bytes in the unit that leaves a short number."""
    if count < 2**10:
        return f"{count} B" if count else "0"
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def axis_unit(longest_us: float) -> tuple[float, str]:
    """Return the divisor and the unit in which durations up to the longest are read best."""
    scales = ((1.0, "µs"), (1e3, "ms"), (1e6, "s"))
    return max((scale for scale in scales if scale[0] <= longest_us), default=scales[0])
