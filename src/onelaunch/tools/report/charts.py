"""The two charts of a page, as specifications for Vega-Lite: bars and timelines.

Text of users stands in their data alone, never in an expression.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from onelaunch.tools.report.document import (
    Bars,
    Chart,
    Layer,
    ReportTable,
    Span,
    Timeline,
    busy_us,
)
from onelaunch.tools.report.units import axis_unit, us

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, which nothing loads
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
STRONG = {"condition": {"test": "datum.best", "value": "var(--accent)"}, "value": "var(--ink)"}
WORDS_OF = 30  # marks that are told in words
WORDS: Spec = {"type": "text", "baseline": "middle", "aria": False}
ROW = 46  # px: a line of text, and its bar
DEPTHS = 3  # of the host's operators; those deeper inside are not drawn
LINE, GPU, GAP, TITLE = 9, 20, 26, 20  # px: a depth of the host, the GPU's lane, and between calls
NAME = 80  # characters: the template arguments of thousands of kernels would be megabytes
HEAVIEST = 12  # rows of the table for each engine and lane
_MICRO = re.compile(r"(?<=\d) us\b")


def micro(said: str) -> str:
    """Write ``41 µs`` for ``41 us``."""
    return _MICRO.sub(" µs", said)


def bars(chart: Bars) -> tuple[str, ReportTable, Spec]:
    """Lay a chart out in words, as a table, and as a specification."""
    values = [
        {key: micro(v) if key == "shown" else v for key, v in value.items()}
        for value in chart.values
    ]
    said = ", ".join(f"{value['name']} {value['shown']}" for value in values[:WORDS_OF])
    rows = tuple((value["name"], value["shown"]) for value in chart.values)
    figures = ReportTable(chart.title, ("", "figure"), rows, (1,))
    return f"{chart.title}: {said}", figures, _bars(chart, values)


def _spec(values: list[Spec], layers: list[Spec], **more: Any) -> Spec:
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


def _bars(chart: Bars, values: list[Spec]) -> Spec:
    """Lay values out in rows: a line of text above each bar, a name left and a figure right.

    Nothing is cut off by a narrow screen so, and long names have the whole width.
    """
    values = [{**value, "row": i} for i, value in enumerate(values)]
    reserved = 12 + 7.5 * max(len(value["shown"]) for value in values)  # px, for the figures
    above = {**WORDS, "yOffset": -13}
    texts: list[Spec] = [
        {
            "mark": {**above, "align": "left", "limit": {"expr": f"width - {reserved}"}},
            "encoding": {"x": {"value": 0}, "text": {"field": "name"}, "color": STRONG},
        },
        {
            "mark": {**above, "align": "right"},
            "encoding": {"x": {"value": "width"}, "text": {"field": "shown"}, "color": STRONG},
        },
    ]
    fields = [field for layer in chart.layers for field in (layer.start, layer.end) if field]
    longest = chart.longest or max(value[field] for value in values for field in fields)
    divisor, unit = axis_unit(longest)
    for value in values:
        value |= {field: min(value[field], longest) / divisor for field in fields}
    longest /= divisor
    main = next((layer for layer in chart.layers if layer.kinds), chart.layers[0])
    axis: Spec = {
        "type": "quantitative",
        "axis": {"title": f"{unit} per call", "tickCount": 4, "titlePadding": 8},
        "scale": {"domainMin": 0, "domainMax": longest, "nice": False},
    }
    layers = [
        {**({"name": chart.name} if layer is main else {}), **_layer(layer, axis)}
        for layer in chart.layers
    ]
    spec = _spec(values, [*layers, *texts], height=ROW * len(values))
    spec["encoding"] = {
        "y": {"field": "row", "type": "ordinal", "axis": None, "scale": {"padding": 0}},
    }
    return spec


def _layer(layer: Layer, axis: Spec) -> Spec:
    mark: Spec = {"type": layer.mark, "yOffset": layer.y}
    if layer.mark == "rule":
        mark["strokeWidth"] = 1.5
    else:
        mark |= {"height": layer.height, "cornerRadius": 1}
    kinds = [
        {"test": f"datum.kind === '{kind}'", "value": f"var(--{name})"}
        for kind, name in layer.kinds
    ]
    colour: Spec = {"value": f"var(--{layer.colour})"}
    encoding: Spec = {
        "x": {**axis, "field": layer.start or layer.end},
        "color": {"condition": kinds, **colour} if kinds else colour,
    }
    if layer.start:
        encoding["x2"] = {"field": layer.end}
    return {"mark": mark, "encoding": encoding}


def timelines(found: Sequence[Timeline]) -> tuple[Chart, str, ReportTable, Spec] | None:
    """Draw calls above each other on the same time axis; None where no call has a span."""
    found = [timeline for timeline in found if timeline.spans]
    if not found:
        return None
    divisor, unit = axis_unit(max(timeline.wall_us for timeline in found))
    spans, lanes, titles, top = [], [], [], 0
    for timeline in found:
        titles.append({"name": timeline.title, "shown": _busy(timeline), "top": top + TITLE / 2})
        top += TITLE
        for lane, height in _lanes(timeline):
            end = timeline.wall_us / divisor
            lanes.append({"start": 0, "end": end, "top": top, "bottom": top + height - 2})
            inside = _drawn(timeline, lane)
            spans += [_value(span, i, top, divisor) for i, span in enumerate(inside)]
            top += height
        top += GAP
    chart = Chart(
        name="timelines",
        title="One call, from start to end",
        caption=_caption(found),
        values=(),
        key=(("host", "host"), *((("accent", "GPU"),) if _on_gpu(found) else ())),
    )
    until = _until(found, divisor)
    rows = tuple(row for timeline in found for row in _heaviest(timeline))
    figures = ReportTable(chart.title, ("engine", "where", "what", "times", "total"), rows, (2,))
    said = ". ".join(f"{t.title}: {_busy(t)}" for t in found) + "."
    return (
        chart,
        said,
        figures,
        _timelines(spans, lanes, titles, unit, height=top - GAP, params=[until]),
    )


def _caption(found: Sequence[Timeline]) -> str:
    said = (
        "All from 0 on one axis. The grey lanes are the host's operators, an operator below the "
        "one that calls it"
    )
    if _on_gpu(found):
        said += "; what is empty in the GPU's lane is time in which it waits"
    said += ". Recorded by the profiler, which slows the host down."
    hidden = sum(t.left_out + sum(s.depth >= DEPTHS for s in t.spans) for t in found)
    return f"{said} {hidden} operators further inside are not drawn." if hidden else said


def _busy(timeline: Timeline) -> str:
    gpu = [span for span in timeline.spans if span.lane == "gpu"]
    share = f", GPU busy {min(1.0, busy_us(gpu) / timeline.wall_us):.0%}" if gpu else ""
    return micro(f"{us(timeline.wall_us)}{share}")


def _on_gpu(found: Iterable[Timeline]) -> bool:
    return any(span.lane == "gpu" for timeline in found for span in timeline.spans)


def _lanes(timeline: Timeline) -> list[tuple[str, int]]:
    """Return the lanes of a timeline, with their heights in pixels."""
    deepest = max((s.depth for s in timeline.spans if s.lane == "host"), default=0)
    lanes = [("host", LINE * min(DEPTHS, deepest + 1) + 4)]
    return [*lanes, ("gpu", GPU)] if _on_gpu([timeline]) else lanes


def _drawn(timeline: Timeline, lane: str) -> list[Span]:
    return [s for s in timeline.spans if s.lane == lane and s.depth < DEPTHS]


def _value(span: Span, number: int, top: int, divisor: float) -> Spec:
    top += LINE * span.depth if span.lane == "host" else 0
    return {
        "name": span.name if len(span.name) <= NAME else f"{span.name[:NAME]}…",
        "gpu": int(span.lane == "gpu"),
        "odd": number % 2,  # the shades of neighbours differ, where no gap tells them apart
        "start": round(span.start_us / divisor, 5),
        "end": round((span.start_us + span.duration_us) / divisor, 5),
        "top": top,
        "bottom": top + (LINE - 1 if span.lane == "host" else GPU - 2),
        "took": micro(us(span.duration_us)),
    }


def _until(found: Sequence[Timeline], divisor: float) -> Spec:
    """Let the reader choose how far the axis goes: as long as any call."""
    ends = sorted({round(t.wall_us / divisor, 5): t.title for t in found}.items(), reverse=True)
    parameter: Spec = {"name": "until", "value": ends[0][0]}
    if len(ends) > 1:
        parameter["bind"] = {
            "input": "radio",
            "options": [end for end, _ in ends],
            "labels": [f"the call of {title}" for _, title in ends],
            "name": "Axis as long as ",
        }
    return parameter


def _timelines(
    spans: list[Spec], lanes: list[Spec], titles: list[Spec], unit: str, **more: Any
) -> Spec:
    x: Spec = {
        "field": "start",
        "type": "quantitative",
        "scale": {"domainMin": 0, "domainMax": {"expr": "until"}, "nice": False},
        "axis": {"title": unit, "tickCount": 5, "grid": True, "zindex": 0},
    }
    y: Spec = {"field": "top", "type": "quantitative", "scale": None, "axis": None}
    box: Spec = {"x": x, "x2": {"field": "end"}, "y": y, "y2": {"field": "bottom"}}
    rect: Spec = {"type": "rect", "clip": True, "aria": False}
    look: Spec = {
        "color": {"condition": {"test": "datum.gpu", "value": "var(--accent)"}},
        "opacity": {"condition": {"test": "datum.odd", "value": 0.75}, "value": 1},
        "tooltip": [{"field": "name"}, {"field": "took"}],
    }
    look["color"]["value"] = "var(--host)"
    sides = (
        ({"align": "left", "limit": {"expr": "width - 140"}}, 0, "name"),
        ({"align": "right", "color": "var(--muted)"}, "width", "shown"),
    )
    texts: list[Spec] = [
        {
            "data": {"values": titles},
            "mark": {**WORDS, **mark},
            "encoding": {"y": y, "x": {"value": place}, "text": {"field": field}},
        }
        for mark, place, field in sides
    ]
    layers: list[Spec] = [
        {
            "data": {"values": lanes},
            "mark": {**rect, "color": "var(--faint)"},
            "encoding": box,
        },
        {"name": "spans", "mark": rect, "encoding": {**box, **look}},
        *texts,
    ]
    return _spec(spans, layers, **more)


def _heaviest(timeline: Timeline) -> list[tuple[str, ...]]:
    """Add up the spans of each name, the longest total first."""
    rows: list[tuple[str, ...]] = []
    for lane, where in (("host", "host"), ("gpu", "GPU")):
        total: defaultdict[str, float] = defaultdict(float)
        times: defaultdict[str, int] = defaultdict(int)
        for span in _drawn(timeline, lane):
            total[span.name] += span.duration_us
            times[span.name] += 1
        names = sorted(total, key=lambda name: -total[name])
        rows += [
            (timeline.title, where, name, str(times[name]), us(total[name]))
            for name in names[:HEAVIEST]
        ]
    return rows
