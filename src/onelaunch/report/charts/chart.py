"""A chart: its specification for Vega-Lite, and the same figures for who cannot see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, which nothing loads
STEP = 46  # px, of a row: a line of text, and its bar
CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domain": False,
        "gridColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelColor": "var(--muted)",
        "labelFlush": True,
        "labelFontSize": 12,
        "titleColor": "var(--muted)",
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "text": {"color": "var(--ink)", "fontSize": 13},
}
"""Colours are the variables of the page, so that a chart follows the page into the dark."""


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        name: its name in the page.
        title: its name for people.
        caption: how to read it.
        alternative: what it shows, in words.
        spec: the specification; text of users stands in its data alone, never in an expression.
        head, rows: its figures as a table.
        words: the columns of the table that hold sentences.
        key: colours, by their names in the page, and what they stand for.
    """

    name: str
    title: str
    caption: str
    alternative: str
    spec: Spec
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...] = ()
    key: tuple[tuple[str, str], ...] = ()


def specification(values: list[Spec], layers: list[Spec], **more: Any) -> Spec:
    """Make a specification as wide as the page: marks in layers over the same values."""
    return {
        "$schema": SCHEMA,
        "width": "container",
        "padding": {"left": 0, "right": 0, "top": 4, "bottom": 6},
        "data": {"name": "figures", "values": values},
        "layer": layers,
        "config": CONFIG,
        **more,
    }


def in_rows(values: list[Spec], layers: list[Spec], axis: Spec, **more: Any) -> Spec:
    """Lay values out in rows: a line of text above each bar, a name left and a figure right.

    Nothing is cut off by a narrow screen so, and long names have the whole width.

    Args:
        values: each with `name`, `shown` and `best`, in the order of the rows.
        layers: marks below the text; their `x` is the name of a field.
        axis: the encoding of `x` that they share.
    """
    for i, value in enumerate(values):
        value["row"] = i
    strong = {"condition": {"test": "datum.best", "value": "var(--accent)"}, "value": "var(--ink)"}
    reserved = 12 + 7.5 * max(len(value["shown"]) for value in values)  # px, for the figures
    words: Spec = {"type": "text", "yOffset": -13, "baseline": "middle", "aria": False}
    texts: list[Spec] = [
        {
            "mark": {**words, "align": "left", "limit": {"expr": f"width - {reserved}"}},
            "encoding": {"x": {"value": 0}, "text": {"field": "name"}, "color": strong},
        },
        {
            "mark": {**words, "align": "right"},
            "encoding": {"x": {"value": "width"}, "text": {"field": "shown"}, "color": strong},
        },
    ]
    for layer in layers:
        layer["encoding"]["x"] = {**axis, "field": layer["encoding"]["x"]}
    spec = specification(values, [*layers, *texts], **more)
    spec["encoding"] = {
        "y": {"field": "row", "type": "ordinal", "axis": None, "scale": {"padding": 0}},
    }
    spec["height"] = STEP * len(values)
    return spec


def time_axis(longest_us: float) -> tuple[float, str]:
    """Return the divisor and the unit in which times up to the longest are read best."""
    for divisor, unit in ((1.0, "µs"), (1e3, "ms")):
        if longest_us < 1e3 * divisor:
            return divisor, unit
    return 1e6, "s"


def x_axis(title: str, **more: Any) -> Spec:
    """Encode a quantity from 0, with few lines behind the marks."""
    return {
        "type": "quantitative",
        "axis": {"title": title, "tickCount": 4, "titlePadding": 8},
        "scale": {"domainMin": 0, "nice": False, **more},
    }
