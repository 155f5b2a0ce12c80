"""The warning of a callable that runs in pieces."""

from __future__ import annotations

from onelaunch.errors import GraphWarning
from onelaunch.runtime.stats import GraphStats, SplitModule


def warning_of(name: str, pieces: str, stats: GraphStats, settled: bool) -> GraphWarning:
    """Make the warning of a callable that runs in pieces: those that run as they are, the lines
    that are the reason, and the cost of a call.

    Args:
        pieces: the noun for what is graphed.
        settled: whether each piece was launched, or runs as it is for good.
    """
    of_line: dict[str | None, SplitModule] = {}
    for refusal in stats.split:  # the outer ones first: a line is its innermost module's
        of_line[refusal.where] = refusal
    whole = list(dict.fromkeys(f"`{refusal.module}`" for refusal in stats.split))
    what = (
        f"`{name}` runs in pieces: {_listed(whole)} as {_are(whole)}, with {pieces} graphed; "
        f"a call is {_counted(stats.split_launches, 'launch')} and {stats.split_us:.0f} us of host "
        "time, waits for the device included"
    )
    if not settled:
        what += "; some pieces still get other sizes or arguments at each call, and run as they are"
    lines = [
        f"{refusal.where or refusal.module} ({refusal.code}, {refusal.what})"
        for refusal in of_line.values()
    ]
    return GraphWarning("OL311", what, where="\n         ".join(lines))


def _listed(names: list[str]) -> str:
    most = names[:_MOST]
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(most)}{rest} {'run' if len(names) > 1 else 'runs'}"


def _are(names: list[str]) -> str:
    return "they are" if len(names) > 1 else "it is"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}es"


_MOST = 8
"""The modules that a message names."""
