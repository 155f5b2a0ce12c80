"""Two comparisons: the ratio of each engine's wall times, with what may be chance."""

from __future__ import annotations

from onelaunch.bench.changes import Changes, EngineChange
from onelaunch.bench.profile import us
from onelaunch.report.charts.chart import Chart, Spec, in_rows

HEAD = ("engine", "before", "after", "ratio", "rel. error", "change")
MARKS = (1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0, 1000.0)  # of the axis, both ways
OTHER = 3.0  # an error that grew or fell by more is another one


def ratios(changes: Changes) -> Chart | None:
    """Draw the ratios, the slower first; None where no engine has two times."""
    found = [one for one in changes.engines if one.ratio is not None]
    if not found:
        return None
    found.sort(key=lambda one: -(one.ratio or 1.0))
    reach = max(max(_ratio(one), 1 / _ratio(one), 1 + (one.noise or 0.0)) for one in found)
    reach = max(1.1, 1.05 * reach)
    values: list[Spec] = [
        {
            "name": one.title,
            "shown": f"{_ratio(one):.2f}x",
            "best": False,
            "change": one.change,
            "one": 1,
            "ratio": _ratio(one),
            "low": 1 / (1 + (one.noise or 0.0)),
            "high": 1 + (one.noise or 0.0),
        }
        for one in found
    ]
    counts = {kind: sum(one.change == kind for one in found) for kind in ("slower", "faster")}
    return Chart(
        name="ratios",
        title="Time after, in times of before",
        caption="Left of the line is faster, right of it slower. The pale band is what may be "
        "chance: a bar that ends in it is no change.",
        alternative=f"The ratio of the wall times of {len(found)} engines: {counts['slower']} "
        f"slower, {counts['faster']} faster.",
        spec=in_rows(values, _layers(), _axis(reach)),
        head=HEAD,
        rows=tuple(figures(one) for one in found),
        words=(5,),
        key=(
            ("warn", "slower"),
            ("accent", "faster"),
            ("muted", "within noise"),
            ("line", "what may be chance"),
        ),
    )


def figures(one: EngineChange) -> tuple[str, ...]:
    """Write the figures of an engine, for `HEAD`."""
    return (
        one.title,
        *(us(row.wall.median_us) if row and row.wall else "" for row in (one.before, one.after)),
        "" if one.ratio is None else f"{one.ratio:.2f} ±{one.noise:.2f}",
        _error(one),
        one.change,
    )


def _error(one: EngineChange) -> str:
    """Write the error, and that before where it was another."""
    old, new = (row.error if row else None for row in (one.before, one.after))
    if new is None:
        return ""
    if old is None or old <= OTHER * new <= OTHER**2 * old:
        return f"{new:.1e}"
    return f"{old:.1e} → {new:.1e}"


def _ratio(one: EngineChange) -> float:
    return one.ratio or 1.0


def _axis(reach: float) -> Spec:
    inside = [tick for tick in MARKS if tick <= reach][-2:]
    ticks = sorted({1.0, *inside, *(1 / tick for tick in inside)})
    return {
        "type": "quantitative",
        "axis": {"title": "after / before", "values": ticks, "format": ".2~f"},
        "scale": {"type": "log", "domain": [1 / reach, reach], "nice": False},
    }


def _layers() -> list[Spec]:
    colours = [("slower", "warn"), ("faster", "accent")]
    colour: Spec = {
        "condition": [
            {"test": f"datum.change === '{change}'", "value": f"var(--{name})"}
            for change, name in colours
        ],
        "value": "var(--muted)",
    }
    return [
        {
            "mark": {"type": "bar", "height": 14, "yOffset": 6, "color": "var(--line)"},
            "encoding": {"x": "low", "x2": {"field": "high"}},
        },
        {
            "name": "ratios",
            "mark": {"type": "bar", "height": 6, "yOffset": 6},
            "encoding": {"x": "one", "x2": {"field": "ratio"}, "color": colour},
        },
        {
            "mark": {
                "type": "tick",
                "thickness": 1.5,
                "height": 14,
                "yOffset": 6,
                "color": "var(--ink)",
            },
            "encoding": {"x": "one"},
        },
    ]
