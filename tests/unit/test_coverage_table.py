"""The tables of the coverage benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import coverage_table
from benchmarks.coverage_models.summary import counts, tried

FIX = 'read it after the call; or `ol.graph(..., on_refusal="split")`'
LINE = "net.py:3: y.item()"


def refused(split: str = "pieces", **row: Any) -> dict[str, Any]:
    made = {"verdict": "refused", "code": "OL101", "line": LINE, "text": "a read", "fix": FIX}
    return {"onelaunch": made | row, "onelaunch split": {"verdict": split}}


def test_a_refusal_counts_that_has_a_line_and_names_what_was_right() -> None:
    assert tried(refused())
    assert tried(refused(split="one launch"))
    assert not tried(refused(split="wrong"))
    assert not tried(refused(split="not run"))
    assert not tried(refused(line=""))
    assert not tried(refused(fix="read it after the call"))
    assert not tried({"onelaunch": refused()["onelaunch"]})


@pytest.mark.parametrize("known", [True, False])
def test_refusals_by_code(known: bool) -> None:
    rows = [refused(), refused(line="net.py:9: y.tolist()"), refused(split="wrong")]
    rows += [refused(code="OL102"), {"onelaunch": {"verdict": "one launch"}}]
    for row in [] if known else rows:
        row["onelaunch"].pop("fix", None)  # as in results of before it was noted
    cases: dict[str, Any] = {f"{i} inference": {"engines": row} for i, row in enumerate(rows)}
    cases["none inference"] = {"not built": "no"}
    found = coverage_table.refusals({"cases": cases})
    first, second = found
    assert first[0] == (
        "[OL101](errors.md#ol101-host-read-of-a-device-value), host read of a device value"
    )
    assert first[1:] == ("3", "2", "2", "2 of 3" if known else "-")
    assert second[1:] == ("1", "1", "1", "1 of 1" if known else "-")
    targets = counts(cases)["inference"]["targets"]
    named = targets.get("refusals with a line and a fix that was tried")
    assert named == ({"met": 3, "of": 4, "share": 0.75} if known else None)


def test_the_paragraph_has_the_figures_of_the_table() -> None:
    engines: dict[str, Any] = {
        "onelaunch": {"one launch": 7, "refused": 2, "wrong": 1},
        "onelaunch split": {"one launch": 6, "pieces": 3, "refused": 1},
        "by hand": {"one launch": 5, "refused": 5},
    }
    results = {
        "counts": {"inference": {"cases": 10, "engines": engines}},
        "libraries": {"timm": "1.0", "torchvision": None},
    }
    text = coverage_table.summary_of(results)
    assert text.startswith(
        "Of 10 models of timm, 7 run as one launch. The others are refused, and 1"
    )
    assert "by hand runs 5." in text
    assert text.endswith("6 are one launch, 3 run in pieces, and 1 are refused.")
