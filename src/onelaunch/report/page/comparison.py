"""The page of a comparison."""

from __future__ import annotations

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison
from onelaunch.report.cells import (
    COLUMNS,
    cells,
    doubts,
    header,
    headline,
    in_order,
    remark,
    times_eager,
)
from onelaunch.report.charts.errors import errors
from onelaunch.report.charts.memory import memory
from onelaunch.report.charts.timelines import timelines
from onelaunch.report.charts.walls import walls
from onelaunch.report.page.elements import (
    Html,
    code,
    element,
    environment,
    facts,
    figure,
    joined,
    notes,
    pairs,
    paragraph,
    section,
    table,
)
from onelaunch.report.page.frame import page


def comparison_page(comparison: Comparison) -> str:
    """Write a comparison as one HTML file: the answer, then the charts, then all figures."""
    profile = comparison.profile
    body = joined(
        [
            section("What bounds this call", paragraph(profile.summary if profile else "")),
            section("Wall time per call", figure(walls(comparison))),
            section("One call, from start to end", figure(timelines(comparison.timelines))),
            section("Error against speed", figure(errors(comparison))),
            section("Memory between calls", figure(memory(comparison))),
            section("All engines", _figures(comparison), _reasons(comparison), _notes(comparison)),
            environment(comparison.environment),
        ]
    )
    return page(f"{comparison.workload}: onelaunch compare", _answer(comparison), body)


def _answer(comparison: Comparison) -> Html:
    """Say first what to take, with its code."""
    best = comparison.best
    return joined(
        [
            paragraph(f"onelaunch compare · {comparison.workload}", "kicker"),
            element("h1", headline(comparison)),
            facts(_facts(comparison)),
            code(best.code if best is not None else "", "The code of the fastest correct engine"),
            *(paragraph(doubt, "lead") for doubt in doubts(comparison)),
            *(paragraph(said, "small") for said in comparison.remarks),
            paragraph(
                "Interrupted: this is what was known by then." if comparison.interrupted else "",
                "warn",
            ),
        ]
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    best = comparison.best
    if best is None or best.wall is None:
        return []
    found = [("per call", us(best.wall.median_us))]
    if times_eager(comparison) is not None:
        found += [("eager", us(wall.median_us)) for wall in [comparison["eager"].wall] if wall]
    if best.error is not None:
        passes = f" ({comparison.tolerance:.0e} passes)" if comparison.tolerance else ""
        found.append((f"relative error{passes}", f"{best.error:.1e}"))
    return found


def _figures(comparison: Comparison) -> Html:
    """Lay out the rows that have a time; columns that nobody fills are left out."""
    rows = [row for row in in_order(comparison) if row.wall is not None]
    if not rows:
        return Html("")
    texts = [cells(row) for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(text[i] for text in texts)]
    said = [paragraph(header(comparison), "small")]
    if any(row.fresh_output is False for row in rows):
        said.append(paragraph("*: the next call overwrites the result.", "small"))
    best = comparison.best
    return joined(
        [
            table(
                [COLUMNS[i] for i in used],
                [[text[i] for i in used] for text in texts],
                "All engines that were timed",
                classes=["best" if row is best else "" for row in rows],
            ),
            *said,
        ]
    )


def _reasons(comparison: Comparison) -> Html:
    """List the rows without times, and why."""
    rows = [row for row in in_order(comparison) if row.wall is None]
    listed = pairs((row.title, _coloured(row.status, remark(row))) for row in rows)
    return joined([element("h3", "Not timed"), listed]) if rows else Html("")


def _coloured(status: str, said: str) -> str:
    classes = {"wrong": "bad", "failed": "warn"}
    return element("span", said, class_=classes[status]) if status in classes else said


def _notes(comparison: Comparison) -> Html:
    found = [f"{row.title}: {note}" for row in comparison.rows for note in row.notes]
    return joined([element("h3", "Notes"), notes(found)]) if found else Html("")
