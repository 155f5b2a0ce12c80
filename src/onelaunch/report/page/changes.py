"""The page of two comparisons side by side."""

from __future__ import annotations

from onelaunch.bench.changes import Changes
from onelaunch.report.changed import environments, summary
from onelaunch.report.charts.ratios import HEAD, figures, ratios
from onelaunch.report.page.elements import (
    Html,
    element,
    figure,
    joined,
    paragraph,
    section,
    table,
)
from onelaunch.report.page.frame import page


def changes_page(changes: Changes) -> str:
    """Write what changed as one HTML file: the answer, the ratios, all figures, the machines."""
    body = joined(
        [
            section("Time after, in times of before", figure(ratios(changes))),
            section("All engines", _engines(changes)),
            section("What differs of the machines", _environments(changes)),
        ]
    )
    return page(f"{changes.before} and {changes.after}: onelaunch compare", _answer(changes), body)


def _answer(changes: Changes) -> Html:
    head, *rest = summary(changes)
    return joined(
        [
            paragraph(f"onelaunch compare · {changes.before} → {changes.after}", "kicker"),
            element("h1", head),
            *(paragraph(said, "lead") for said in rest),
        ]
    )


def _engines(changes: Changes) -> Html:
    rows = [one for one in changes.engines if one.change != "not timed"]
    if not rows:
        return Html("")
    classes = ["worse" if one.worse else "" for one in rows]
    return table(HEAD, [figures(one) for one in rows], "All engines", words=(5,), classes=classes)


def _environments(changes: Changes) -> Html:
    rows = environments(changes)
    return table(("", "before", "after"), rows, "The machines", words=(1, 2)) if rows else Html("")
