"""The claims that the tables make, as `benchmarks.claims` reads and judges them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import claims, claims_table
from benchmarks.claims import Claim, verdict

CLAIM = Claim("training", "training:step:mlp", "onelaunch", "by-hand", 1.5, 1)


def row(us: float = 100.0, **others: Any) -> dict[str, Any]:
    wall = {"median_us": us, "spread_us": 1.0, "samples": 60}
    notes = ["recordings of 32 nodes"]
    return {"status": "ok", "reason": None, "notes": notes, "wall": wall} | others


def test_every_row_of_ours_that_is_right_is_a_claim() -> None:
    found = claims.claims(list(claims.TABLES))
    assert {claim.table for claim in found} == set(claims.TABLES)
    assert len({(c.table, c.group, c.ours) for c in found}) == len(found) > 150
    named = {claim.name: claim for claim in found}
    assert named["training: step:bert, onelaunch-compile"].theirs == "by-hand"
    assert all((c.lead is None or c.lead >= claims.AHEAD) for c in found)
    assert {c.group.partition(":")[0] for c in found} == set(claims.BUILDERS)


@pytest.mark.parametrize(
    ("rows", "holds", "said"),
    [
        ({"onelaunch": row(), "by-hand": row(140)}, True, "1.40x by-hand, 1.50x in the table"),
        ({"onelaunch": row(), "by-hand": row(90)}, False, "0.90x by-hand, 1.50x in the table"),
        ({"onelaunch": row(), "by-hand": row(status="failed", reason="late")}, True, "late"),
        ({"onelaunch": row(status="wrong", reason="error 3"), "by-hand": row()}, False, "error 3"),
        ({"onelaunch": row(notes=["recordings of 2, 3 nodes"]), "by-hand": row(140)}, False, "2 r"),
        ({}, False, "no result"),
    ],
)
def test_a_verdict(rows: dict[str, Any], holds: bool, said: str) -> None:
    found = verdict(CLAIM, rows)
    assert found[0] is holds
    assert said in found[1]


def test_a_claim_that_is_not_ahead_only_runs() -> None:
    alone = replace(CLAIM, theirs=None, lead=None)
    assert verdict(alone, {"onelaunch": row(), "by-hand": row(1)}) == (True, "runs", None)


def test_the_table_names_what_broke() -> None:
    kept = {"table": "training", "group": "training:step:mlp", "ours": "onelaunch", "said": "1.4x"}
    held = kept | {"theirs": "by-hand", "holds": True, "found_lead": 1.4}
    broken = kept | {"theirs": None, "holds": False, "found_lead": None, "said": "refused"}
    results = {"rows": [held, broken], "source": "abc"}
    assert claims_table.rows_of(results) == [("training", "2", "1", "1", "1")]
    assert "training, step:mlp, onelaunch (refused)" in claims_table.text_of(results)
