"""Error against speed: what each engine gives up of the one for the other."""

from __future__ import annotations

import math

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison, Row
from onelaunch.report.charts.chart import Chart, Spec, specification, time_axis
from onelaunch.report.charts.walls import wall_us

HEAD = ("engine", "wall / call", "rel. error")
HEIGHT = 240
EXACT = "exact"
ANCHORS = ["right", "left", "top", "bottom", "top-right", "bottom-right", "top-left", "bottom-left"]


def errors(comparison: Comparison) -> Chart | None:
    """Plot the error over the wall time of each engine that has both; None for less than two."""
    rows = [r for r in comparison.rows if r.status == "ok" and r.wall and r.error is not None]
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: row is not comparison.best)  # its name has the first choice of place
    divisor, unit = time_axis(min(wall_us(row) for row in rows))
    decades = _decades(rows, comparison.tolerance)
    values: list[Spec] = [
        {
            "name": row.title,
            "wall": wall_us(row) / divisor,
            "error": max(row.error or 0.0, 10.0 ** decades[0]),
            "best": row is comparison.best,
            "order": order,
            "said": f"{us(wall_us(row)).replace(' us', ' µs')}, error {row.error:.1e}",
        }
        for order, row in enumerate(rows)
    ]
    passes = ""
    if comparison.tolerance > 0:
        passes = f" An error above the dashed line, {comparison.tolerance:.0e}, does not pass."
    return Chart(
        name="errors",
        title="Error against speed",
        caption=f"Left is faster, lower is more exact; both scales are logarithmic.{passes} "
        "Names stand where there is room; the others show under a pointer, and in the table.",
        alternative=f"Points of {len(rows)} engines: wall time across, relative error upwards. "
        f"The errors are from {min(r.error or 0.0 for r in rows):.1e} to "
        f"{max(r.error or 0.0 for r in rows):.1e}.",
        spec=_spec(values, unit, decades, comparison.tolerance),
        head=HEAD,
        rows=tuple((r.title, us(wall_us(r)), f"{r.error:.1e}") for r in rows),
    )


def _decades(rows: list[Row], tolerance: float) -> list[int]:
    """Return the powers of ten to mark: around all errors, the lowest of all for an error of 0."""
    found = [row.error for row in rows if row.error]
    found += [tolerance] if tolerance > 0 else []
    low = math.floor(math.log10(min(found, default=1e-7)))
    high = math.ceil(math.log10(max(found, default=1e-4)))
    low -= any(row.error == 0 for row in rows)
    step = max(1, math.ceil((high - low) / 6))
    return list(range(low, high + step, step))


def _spec(values: list[Spec], unit: str, decades: list[int], tolerance: float) -> Spec:
    exact = f"datum.value < {10.0 ** (decades[0] + 0.5)} && {int(any_exact(values, decades))}"
    label = f"{exact} ? '{EXACT}' : format(datum.value, '.0e')"
    x: Spec = {
        "field": "wall",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "padding": 24},
        "axis": {"title": f"{unit} per call", "tickCount": 5, "format": "~r", "grid": False},
    }
    y: Spec = {
        "field": "error",
        "type": "quantitative",
        "scale": {
            "type": "log",
            "domain": [10.0 ** (decades[0] - 0.2), 10.0 ** (decades[-1] + 0.2)],
            "nice": False,
        },
        "axis": {
            "title": None,
            "values": [10.0**power for power in decades],
            "labelExpr": label,
        },
    }
    best = {"condition": {"test": "datum.best", "value": "var(--accent)"}, "value": "var(--host)"}
    points: Spec = {
        "name": "points",
        "mark": {"type": "circle", "size": 80, "opacity": 0.9, "aria": False},
        "encoding": {
            "x": x,
            "y": y,
            "color": best,
            "tooltip": [
                {"field": "name", "title": "engine"},
                {"field": "said", "title": "per call"},
            ],
        },
    }
    limit: Spec = {
        "data": {"values": [{"error": tolerance}] if tolerance > 0 else []},
        "mark": {"type": "rule", "color": "var(--muted)", "strokeDash": [4, 4]},
        "encoding": {"y": y},
    }
    spec = specification(values, [limit, points], height=HEIGHT)
    # Vega-Lite cannot yet keep names off each other; Vega can, and leaves out what has no room.
    label_marks: Spec = {
        "type": "text",
        "from": {"data": "points_marks"},
        "interactive": False,
        "aria": False,
        "encode": {
            "enter": {
                "text": {"field": "datum.name"},
                "fontSize": {"value": 12},
                "fill": {"signal": "datum.datum.best ? 'var(--accent)' : 'var(--ink)'"},
            }
        },
        "transform": [
            {
                "type": "label",
                "size": {"signal": "[max(1, width), max(1, height)]"},
                "anchor": ANCHORS * 2,
                "offset": [4] * len(ANCHORS) + [16] * len(ANCHORS),
                "sort": {"field": "datum.datum.order"},
                "avoidBaseMark": True,
            }
        ],
    }
    spec["usermeta"] = {
        "embedOptions": {"patch": [{"op": "add", "path": "/marks/-", "value": label_marks}]}
    }
    return spec


def any_exact(values: list[Spec], decades: list[int]) -> bool:
    return any(value["error"] <= 10.0 ** decades[0] for value in values)
