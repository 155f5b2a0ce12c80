"""The wall time of each engine, with its host and GPU parts and its spread."""

from __future__ import annotations

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison, Row
from onelaunch.report.cells import in_order, timing
from onelaunch.report.charts.chart import Chart, Spec, in_rows, time_axis, x_axis

HEAD = ("engine", "wall / call", "host", "GPU")
MOST = 5.0
"""Times of eager's end, or of the fastest's, at which the axis ends at the latest."""
KEY = (("bar", "wall time"), ("host", "until the host returns"), ("accent", "the GPU's work"))


def walls(comparison: Comparison) -> Chart | None:
    """Draw the wall times, the fastest first; None where nothing was timed."""
    rows = [row for row in in_order(comparison) if row.wall is not None]
    if not rows:
        return None
    on_gpu = any(row.gpu is not None for row in rows)
    slowest, fastest = max(rows, key=wall_us), min(rows, key=wall_us)
    yardstick = next((row for row in rows if row.engine == "eager"), fastest)
    longest = max(end for row in rows if (end := _end(row)) <= MOST * _end(yardstick))
    beyond = [row.title for row in rows if _end(row) > longest]
    divisor, unit = time_axis(longest)
    values = [_value(comparison, row, divisor, on_gpu, longest) for row in rows]
    caption = "Shorter is better. The line at a bar's end is the spread between the quartiles."
    if any(row.noisy for row in rows):
        caption += " ~: had not settled."
    if beyond:
        caption += f" Cut off, since it would hide the others: {', '.join(beyond)}."
    return Chart(
        name="walls",
        title="Wall time per call",
        caption=caption,
        alternative=f"Bars of the wall time per call of {len(rows)} engines, from {fastest.title}, "
        f"{us(wall_us(fastest))}, to {slowest.title}, {us(wall_us(slowest))}.",
        spec=in_rows(
            values, _layers(on_gpu), x_axis(f"{unit} per call", domainMax=longest / divisor)
        ),
        head=HEAD,
        rows=tuple((r.title, timing(r.wall), timing(r.host), timing(r.gpu)) for r in rows),
        key=KEY if on_gpu else (),
    )


def _value(comparison: Comparison, row: Row, divisor: float, on_gpu: bool, longest: float) -> Spec:
    def drawn(time_us: float) -> float:
        return min(max(0.0, time_us), longest) / divisor

    half = row.wall.spread_us / 2 if row.wall else 0.0
    value: Spec = {
        "name": f"{row.title}{' *' if row.fresh_output is False else ''}",
        "shown": f"{'~' if row.noisy else ''}{us(wall_us(row))}".replace(" us", " µs"),
        "best": comparison.best is not None and row.engine == comparison.best.engine,
        "wall": drawn(wall_us(row)),
        "low": drawn(wall_us(row) - half),
        "high": drawn(wall_us(row) + half),
    }
    if on_gpu:
        value["host"] = drawn(row.host.median_us) if row.host else 0
        value["gpu"] = drawn(row.gpu.median_us) if row.gpu else 0
    return value


def _layers(on_gpu: bool) -> list[Spec]:
    best = {
        "condition": {"test": "datum.best", "value": "var(--accent-soft)"},
        "value": "var(--bar)",
    }
    whole: Spec = {
        "name": "walls",
        "mark": {"type": "bar", "height": 14, "yOffset": 6, "cornerRadius": 1},
        "encoding": {"x": "wall", "color": best},
    }
    parts: list[Spec] = [
        {
            "mark": {"type": "bar", "height": 4, "yOffset": offset, "color": colour},
            "encoding": {"x": field},
        }
        for field, offset, colour in (("host", 3, "var(--host)"), ("gpu", 9, "var(--accent)"))
    ]
    spread: Spec = {
        "mark": {"type": "rule", "yOffset": 6, "color": "var(--ink)", "strokeWidth": 1.5},
        "encoding": {"x": "low", "x2": {"field": "high"}},
    }
    return [whole, *(parts if on_gpu else []), spread]


def wall_us(row: Row) -> float:
    """Return the median wall time of a row that ran; 0 of another."""
    return row.wall.median_us if row.wall else 0.0


def _end(row: Row) -> float:
    """Return the right end of what is drawn of a row."""
    found = [t.median_us for t in (row.host, row.gpu) if t is not None]
    spread = row.wall.spread_us / 2 if row.wall else 0.0
    return max(wall_us(row) + spread, *found) if found else wall_us(row) + spread
