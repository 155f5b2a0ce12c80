"""The wall times of `results/engines.json` as an SVG; `python -m benchmarks.render` writes it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

ENGINES = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "reduce-overhead",
    "make_graphed_callables": "make_graphed_callables",
    "by-hand": "CUDA graph by hand",
    "onelaunch": "onelaunch",
    "onelaunch-compile": "onelaunch compile=True",
}
PANEL, MARGIN = 400, 16  # pixels; two panels side by side
NAME, FIGURE = 158, 58  # beside a bar: widths of the engine's name and of its time
TITLE, LINE, BAR = 26, 19, 13  # heights: of a panel's title, of a bar with its gap, of a bar
STYLE = """
    text { font: 12px system-ui, sans-serif; fill: #1f2328 }
    .head { font-size: 13px; font-weight: 600 }
    rect { fill: #8c959f }
    .ours { fill: #2da44e }
    @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
"""

Figure = Callable[[dict[str, Any], str], str]


def draw(results: dict[str, Any], titles: dict[str, str], figure: Figure) -> str:
    """Draw a panel for each workload, with a bar for each engine.

    Args:
        results: the content of `engines.json`.
        titles: the workloads' names for readers.
        figure: gives the text of a workload's wall time in an engine.
    """
    height = TITLE + len(ENGINES) * LINE + MARGIN
    parts: list[str] = []
    for i, (name, data) in enumerate(results["workloads"].items()):
        place = f"translate({i % 2 * PANEL + MARGIN} {i // 2 * height + MARGIN})"
        bars = "\n".join(panel(data, titles.get(name, name), figure))
        parts.append(f'  <g transform="{place}">\n{bars}\n  </g>\n')
    bottom = (len(parts) + 1) // 2 * height + 2 * MARGIN
    here = results["environment"]
    says = (
        "Microseconds per call; each panel has its own scale. ~: still moving when time was up. "
        f"{here['gpu'] or here['cpu']}."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL} {bottom}" '
        f'width="{2 * PANEL}" height="{bottom}" role="img">\n'
        f"  <title>Wall time of a call, by engine</title>\n  <style>{STYLE}  </style>\n"
        + "".join(parts)
        + f'  <text x="{MARGIN}" y="{bottom - 8}">{escape(says)}</text>\n</svg>\n'
    )


def panel(data: dict[str, Any], title: str, figure: Figure) -> list[str]:
    """Draw one workload, a line of SVG for each engine."""
    rows = {row["engine"]: row for row in data["rows"] if row["status"] == "ok" and row["wall"]}
    walls = {engine: rows[engine]["wall"]["median_us"] for engine in ENGINES if engine in rows}
    scale = (PANEL - 2 * MARGIN - NAME - FIGURE) / max(walls.values(), default=1.0)
    lines = [f'    <text class="head" y="12">{escape(title)}</text>']
    for i, (engine, name) in enumerate(ENGINES.items()):
        y = TITLE + i * LINE
        width = walls.get(engine, 0.0) * scale
        ours = ' class="ours"' if engine.startswith("onelaunch") else ""
        lines.append(
            f'    <text x="{NAME - 8}" y="{y + 11}" text-anchor="end">{name}</text>'
            f'<rect{ours} x="{NAME}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
            f'<text x="{NAME + width + 6:.1f}" y="{y + 11}">{escape(figure(data, engine))}</text>'
        )
    return lines
