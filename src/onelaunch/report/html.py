"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison, Row
from onelaunch.report.cells import COLUMNS, cells, header, in_order, verdict

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4f86c6;
        --best: #1f7a3d; --wrong: #b3261e; --failed: #8a5a00; --small: #5c6066; }
@media (prefers-color-scheme: dark) {
  :root { --best: #5cc47d; --wrong: #ff8a80; --failed: #e0a84e; --small: #a3a8ae; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       overflow-wrap: anywhere; }
h1 { font-size: clamp(1.25rem, 5vw, 2rem); line-height: 1.25; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; overflow-wrap: normal; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 12rem; }
.best { color: var(--best); font-weight: 600; }
.missing, .small { color: var(--small); }
.wrong { color: var(--wrong); }
.failed { color: var(--failed); }
pre { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: .4rem; overflow-x: auto;
      overflow-wrap: normal; }
.small { font-size: .87em; }
.bars { display: grid; grid-template-columns: fit-content(40%) minmax(0, 1fr); gap: .35rem .7rem;
        align-items: center; font-size: .87em; }
.bars dt { text-align: right; }
.bars dd { margin: 0; display: flex; align-items: center; gap: .5rem; white-space: nowrap; }
.bars i { flex: none; width: calc(var(--part) * (100% - 5.5rem)); min-width: 1px; height: 1rem;
          border-radius: 2px; background: var(--bar); }
.bars .best i { background: var(--best); }
@media (max-width: 40rem) {
  .bars { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .bars dt { text-align: left; margin-top: .5rem; }
}
"""


def to_html(comparison: Comparison) -> str:
    """Write the page: the profile, the verdict with its code, bars, the table, the environment."""
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
    """Draw the wall times as bars: beside the engines' names, on a phone below them."""
    timed = [(row, row.wall.median_us) for row in in_order(comparison) if row.wall is not None]
    longest = max((wall for _, wall in timed), default=0.0)
    if longest <= 0:
        return ""
    bars = [
        f'<dt class="{_class(comparison, row)}">{escape(row.title)}</dt>'
        f'<dd class="{_class(comparison, row)}">'
        f'<i style="--part:{wall / longest:.4f}"></i>{us(wall)}</dd>'
        for row, wall in timed
    ]
    return f'<h2>Wall time per call</h2>\n<dl class="bars">{"".join(bars)}</dl>'


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
