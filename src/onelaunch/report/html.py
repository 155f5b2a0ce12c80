"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison, Row
from onelaunch.report.cells import COLUMNS, cells, header, in_order, verdict

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #7aa2d6; --best: #3f9d5a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; }
tr.best { color: var(--best); font-weight: 600; }
tr.missing, .small { opacity: .65; }
tr.wrong { color: #c0392b; }
tr.failed { color: #b9770e; }
pre { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: .4rem; overflow-x: auto; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.small { font-size: .87em; }
"""
LABEL, CHART, LINE = 260, 720, 24  # pixels: of the names, of the whole chart, of one bar


def to_html(comparison: Comparison) -> str:
    """The page: what bounds the workload, the table, a bar chart, the code, the environment."""
    parts = [f"<h1>{escape(comparison.workload)}: the ways to run it</h1>"]
    if comparison.profile is not None:
        parts.append(f"<p>{escape(comparison.profile.summary)}</p>")
    parts += [f"<p><strong>{escape(verdict(comparison))}</strong></p>"]
    if comparison.best is not None:
        parts.append(f"<pre>{escape(comparison.best.code)}</pre>")
    parts += [_chart(comparison), _table(comparison)]
    parts += [f'<p class="small">{escape(header(comparison))}</p>']
    parts += [f"<p>{escape(remark)}</p>" for remark in comparison.remarks]
    if comparison.interrupted:
        parts.append("<p>Interrupted: this is what was known by then.</p>")
    parts += [_notes(comparison), _environment(comparison)]
    title = escape(f"{comparison.workload}: onelaunch compare")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "\n".join(
        f'<tr class="{_class(comparison, row)}">'
        + "".join(f"<td>{escape(text)}</td>" for text in cells(row))
        + "</tr>"
        for row in in_order(comparison)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _class(comparison: Comparison, row: Row) -> str:
    return "best" if comparison.best is not None and row is comparison.best else row.status


def _chart(comparison: Comparison) -> str:
    """Bars of the wall time per call, shorter is better."""
    timed = [row for row in in_order(comparison) if row.wall is not None]
    longest = max((row.wall.median_us for row in timed if row.wall), default=0.0)
    if longest <= 0:
        return ""
    scale = (CHART - LABEL - 90) / longest
    bars: list[str] = []
    for i, row in enumerate(timed):
        if row.wall is None:
            continue
        y, width = i * LINE, max(1.0, row.wall.median_us * scale)
        color = "var(--best)" if _class(comparison, row) == "best" else "var(--bar)"
        bars.append(
            f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{escape(row.title)}</text>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{width:.1f}" height="16" rx="2" fill="{color}"/>'
            f'<text x="{LABEL + width + 6:.1f}" y="{y + 16}">{us(row.wall.median_us)}</text>'
        )
    height = len(timed) * LINE
    return (
        "<h2>Wall time per call</h2>"
        f'<svg viewBox="0 0 {CHART} {height}" width="{CHART}" height="{height}" role="img" '
        f'aria-label="Wall time per call of each engine">{"".join(bars)}</svg>'
    )


def _notes(comparison: Comparison) -> str:
    items = [
        f"<li>{escape(row.title)}: {escape(note)}</li>"
        for row in comparison.rows
        for note in row.notes
    ]
    return f'<ul class="small">{"".join(items)}</ul>' if items else ""


def _environment(comparison: Comparison) -> str:
    lines = [
        f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>"
        for key, value in comparison.environment.items()
        if value is not None
    ]
    return f'<h2>Environment</h2><table class="small"><tbody>{"".join(lines)}</tbody></table>'
