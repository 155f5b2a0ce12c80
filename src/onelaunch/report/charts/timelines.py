"""One call of some engines, one above the other on one time axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from onelaunch.bench.profile import us
from onelaunch.bench.timeline import Span, Timeline
from onelaunch.report.charts.chart import Chart, Spec, specification, time_axis

DEPTHS = 3  # of the host's operators; those deeper inside are not drawn
LINE, GPU, GAP = 9, 20, 26  # px: a depth of the host, the GPU's lane, between two engines
TITLE = 20
NAME = 80  # characters: the template arguments of thousands of kernels would be megabytes
HEAVIEST = 12  # rows of the table for each engine and lane

HEAD = ("engine", "where", "what", "times", "total")


def timelines(found: Sequence[Timeline]) -> Chart | None:
    """Draw the timelines in the order given; None where there is none."""
    found = [timeline for timeline in found if timeline.spans]
    if not found:
        return None
    longest = max(timeline.wall_us for timeline in found)
    divisor, unit = time_axis(longest)
    spans, lanes, titles, top = [], [], [], 0
    for timeline in found:
        titles.append({"name": timeline.title, "shown": _shown(timeline), "top": top + TITLE / 2})
        top += TITLE
        for lane, height in _lanes(timeline):
            end = timeline.wall_us / divisor
            lanes.append({"start": 0, "end": end, "top": top, "bottom": top + height - 2})
            drawn = _drawn(timeline, lane)
            spans += [_value(span, i, top, divisor) for i, span in enumerate(drawn)]
            top += height
        top += GAP
    return Chart(
        name="timelines",
        title="One call, from start to end",
        caption=_caption(found),
        alternative=". ".join(f"{t.title}: {_shown(t)}" for t in found) + ".",
        spec=_spec(spans, lanes, titles, top - GAP, _until(found, divisor), unit),
        head=HEAD,
        rows=tuple(row for timeline in found for row in _heaviest(timeline)),
        words=(2,),
        key=(("host", "host"), *((("accent", "GPU"),) if _on_gpu(found) else ())),
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


def busy_us(spans: Iterable[Span]) -> float:
    """Return the time in which at least one of these spans runs."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_us):
        end = span.start_us + span.duration_us
        total += max(0.0, end - max(until, span.start_us))
        until = max(until, end)
    return total


def _shown(timeline: Timeline) -> str:
    gpu = [span for span in timeline.spans if span.lane == "gpu"]
    said = us(timeline.wall_us)
    if gpu:
        share = min(1.0, busy_us(gpu) / timeline.wall_us)
        said += f", GPU busy {share:.0%}"
    return said.replace(" us", " µs")


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
        "took": us(span.duration_us).replace(" us", " µs"),
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


def _spec(
    spans: list[Spec],
    lanes: list[Spec],
    titles: list[Spec],
    height: int,
    until: Spec,
    unit: str,
) -> Spec:
    x: Spec = {
        "field": "start",
        "type": "quantitative",
        "scale": {"domainMin": 0, "domainMax": {"expr": "until"}, "nice": False},
        "axis": {"title": unit, "tickCount": 5, "grid": True, "zindex": 0},
    }
    box: Spec = {
        "x": x,
        "x2": {"field": "end"},
        "y": {"field": "top", "type": "quantitative", "scale": None, "axis": None},
        "y2": {"field": "bottom"},
    }
    colour = {"condition": {"test": "datum.gpu", "value": "var(--accent)"}, "value": "var(--host)"}
    shade = {"condition": {"test": "datum.odd", "value": 0.75}, "value": 1}
    words: Spec = {"type": "text", "baseline": "middle", "aria": False}
    at = {"y": {"field": "top", "type": "quantitative", "scale": None, "axis": None}}
    layers: list[Spec] = [
        {
            "data": {"values": lanes},
            "mark": {"type": "rect", "color": "var(--faint)", "clip": True, "aria": False},
            "encoding": box,
        },
        {
            "name": "spans",
            "mark": {"type": "rect", "clip": True, "aria": False},
            "encoding": {
                **box,
                "color": colour,
                "opacity": shade,
                "tooltip": [{"field": "name"}, {"field": "took"}],
            },
        },
        {
            "data": {"values": titles},
            "mark": {**words, "align": "left", "limit": {"expr": "width - 140"}},
            "encoding": {**at, "x": {"value": 0}, "text": {"field": "name"}},
        },
        {
            "data": {"values": titles},
            "mark": {**words, "align": "right", "color": "var(--muted)"},
            "encoding": {**at, "x": {"value": "width"}, "text": {"field": "shown"}},
        },
    ]
    return specification(spans, layers, height=height, params=[until])


def _heaviest(timeline: Timeline) -> list[tuple[str, ...]]:
    """Add up the spans of one name, those with the longest total first."""
    rows: list[tuple[str, ...]] = []
    for lane in ("host", "gpu"):
        total: defaultdict[str, float] = defaultdict(float)
        times: defaultdict[str, int] = defaultdict(int)
        for span in _drawn(timeline, lane):
            total[span.name] += span.duration_us
            times[span.name] += 1
        names = sorted(total, key=lambda name: -total[name])
        where = "GPU" if lane == "gpu" else lane
        rows += [
            (timeline.title, where, name, str(times[name]), us(total[name]))
            for name in names[:HEAVIEST]
        ]
    return rows
