"""The table of `benchmarks.optimize`: what each row says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEAD = (
    *("workload", "eager", "best exact incumbent", "`max_error=0`", "best incumbent", "`1e-2`"),
    *("error", "steps at 1e-2"),
)
TEXT = (
    "Wall time per call, microseconds. `error` is that of the plan under `max_error=1e-2`. "
    "*Exact*: with eager's results bit for bit. The last four workloads were given in bfloat16 "
    "and not asked for exact plans, and their plans may have the error that the best incumbent has "
    "where that is above 1e-2; all others in float32."
)


def rows_of(
    workloads: dict[str, Any], names: dict[str, str], number: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """A row for each workload."""

    def time(found: dict[str, Any] | None) -> str:
        if found is None:
            return "-"
        if "timing" not in found:
            return found.get("status", "-")
        title = f" {found['title'].removeprefix('torch.')}" if "title" in found else ""
        return number(found["timing"]["median_us"]) + title

    made: list[tuple[str, ...]] = []
    for name, data in workloads.items():
        rows = data["rows"]
        loose = rows.get("1e-2", {})
        order = ("eager", "exact incumbent", "exact", "incumbent", "1e-2")
        cells = [time(rows.get(row)) for row in order]
        error = f"{loose['error']:.1e}" if "error" in loose else "-"
        steps = ", ".join(loose.get("steps", ())) or "-"
        made.append((names.get(name, name), *cells, error, steps))
    return made
