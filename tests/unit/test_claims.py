"""The claims that the tables make, as `benchmarks.claims` reads and judges them."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onelaunch as ol
from benchmarks import claims, claims_built, claims_swept, claims_table, render
from benchmarks.claims import Claim, verdict
from benchmarks.claims_built import Counts, Found, count
from benchmarks.claims_listed import AHEAD, Told, recordings_of
from benchmarks.shapes import Target
from examples import train_rl
from onelaunch.tools.bench.environment import environment

CLAIM = Claim("training", "training:step:mlp", "onelaunch", "wall", "by-hand", 1.5, 1, 1)
NO_CLAIMS = {
    *("batching.json", "claims.json", "parallel.json", "serving.json"),
    "torch_versions.json",
}
"""The tables that are not of measured figures of ours, or take a whole service, or are run again
as a whole."""


def row(us: float = 100.0, **others: Any) -> dict[str, Any]:
    counts = {"recordings": 1, "launches": 1, "eager": 0}
    return {"status": "ok", "reason": None, "figures": {"wall": us}, **counts} | others


def test_every_row_of_ours_that_is_right_is_a_claim() -> None:
    found = claims.claims(list(claims.TABLES))
    assert {claim.table for claim in found} == set(claims.TABLES)
    places = {(c.table, c.group, c.ours, c.figure) for c in found}
    assert len(places) == len(found) > 400
    assert len({place[:3] for place in places}) > 240
    named = {claim.name: claim for claim in found}
    assert named["training: step:bert, onelaunch-compile"].theirs == "by-hand"
    assert all((c.lead is None or c.lead >= AHEAD) for c in found)
    assert {c.group.partition(":")[0] for c in found} == set(claims.BUILDERS)


def test_each_table_of_the_documents_is_claimed() -> None:
    files = {file for file, _ in render.TABLES.values()}
    assert {f"{table}.json" for table in claims.TABLES} == files - NO_CLAIMS


def test_each_claim_of_a_call_knows_its_launches() -> None:
    """The others are of targets, of first replays in fresh processes, and of many models."""
    found = claims.claims(list(claims.TABLES))
    unknown = {c.table for c in found if c.launches is None}
    assert unknown == {"shapes", "first_replay", "coverage", "doctor"}
    named = {claim.name: claim for claim in found}
    assert named["engines: resnet50, onelaunch-static, host"].recordings == 1
    assert named["backend: fp32:breaks, backend"].launches == 3
    assert named["backend: fp32:breaks, graph"].launches == 1
    assert named["optimize: conv, onelaunch 1e-2"].launches == 0  # a plan without a graph
    assert named["optimize: embedder, onelaunch 1e-2"].launches == 8
    assert named["generate: 15m:generate, onelaunch, greedy"].eager == 1  # the prompt
    assert named["first_replay: bert, onelaunch bucket"].recordings == 4


def test_the_other_of_a_claim_is_the_best_or_one_that_is_soon_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        Told("onelaunch", True, {"wall": 10.0, "host": 5.0}, 1, 1),
        Told("onelaunch-compile", True, {"wall": 8.0, "host": 5.1}, 1, 1),
        Told("reduce-overhead", False, {"wall": 9.0, "host": 5.2}),
        Told("by-hand", False, {"wall": 10.2, "host": 7.0}, plain=True),
        Told("eager", False, {"wall": 20.0, "host": 6.0}, plain=True),
        Told("max-autotune", False, {"wall": 8.1}, seconds=90.0),
    ]
    monkeypatch.setitem(claims.TABLES, "some", lambda results: [("calls:mlp", rows)])
    monkeypatch.setattr("benchmarks.claims_listed.RESULTS", tmp_path)
    (tmp_path / "some.json").write_text("{}")
    found = {(c.ours, c.figure): (c.theirs, c.lead) for c in claims.claims(["some"])}
    assert found == {
        ("onelaunch", "wall"): ("eager", 2.0),
        ("onelaunch", "host"): ("eager", 1.2),
        ("onelaunch-compile", "wall"): ("reduce-overhead", 1.125),
        ("onelaunch-compile", "host"): ("eager", pytest.approx(6.0 / 5.1)),
    }
    rows[1] = replace(rows[1], seconds=70.0)
    groups = {c.ours: c.group for c in claims.claims(["some"])}
    assert groups["onelaunch"] == "calls:mlp#onelaunch"


@pytest.mark.parametrize(
    ("notes", "recordings"),
    [
        ([], 1),
        (["12 nodes; inputs: x by node"], 1),
        (["f(x[2]): 3 nodes; inputs: none", "f(x[4]): 3 nodes; inputs: none", "a warning"], 2),
        (["recordings of 2, 3 nodes"], 2),
        (["3 recordings"], 3),
    ],
)
def test_notes_tell_recordings(notes: list[str], recordings: int) -> None:
    assert recordings_of(notes) == recordings


@pytest.mark.parametrize(
    ("rows", "holds", "said"),
    [
        ({"onelaunch": row(), "by-hand": row(140)}, True, "1.40x by-hand, 1.50x in the table"),
        ({"onelaunch": row(), "by-hand": row(90)}, False, "0.90x by-hand, 1.50x in the table"),
        ({"onelaunch": row(), "by-hand": row(status="failed", reason="late")}, True, "late"),
        ({"onelaunch": row(), "by-hand": row(figures={})}, True, "no such timer"),
        ({"onelaunch": row(status="wrong", reason="error 3"), "by-hand": row()}, False, "error 3"),
        ({"onelaunch": row(recordings=2), "by-hand": row(140)}, False, "2 r"),
        ({"onelaunch": row(launches=0), "by-hand": row(140)}, False, "0 launches a call, 1 in"),
        ({"onelaunch": row(eager=1), "by-hand": row(140)}, False, "1 calls eagerly, 0 in"),
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
    results["rows"] = [broken | {"group": "training:step:mlp#onelaunch", "figure": "host"}]
    assert "training, step:mlp, onelaunch, host (refused)" in claims_table.text_of(results)


def test_groups_share_processes() -> None:
    def group(name: str, seconds: float, theirs: str | None = None) -> list[Claim]:
        return [replace(CLAIM, group=name, seconds=seconds, theirs=theirs)]

    groups = {
        "plans:a": group("plans:a", 9.0),
        "plans:b": group("plans:b", 12.0, "incumbent (reduce-overhead)"),
        "training:c": group("training:c", 15.0),
        "plans:d": group("plans:d", 10.0),
        "backend:e": group("backend:e", 40.0),
    }
    shared = [["backend:e"], ["training:c", "plans:d"], ["plans:b"], ["plans:a"]]
    assert claims.shared_out(groups) == shared
    assert claims.variants_of(groups["plans:b"]) == ["onelaunch", "incumbent (reduce-overhead)"]


@pytest.mark.thorough
def test_claims_are_run_again_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was kept from an earlier run stays, one that no table makes any more goes."""
    out = tmp_path / "claims.json"
    kept, gone = (c for c in claims.claims(["training"]) if c.group == "training:pair:cnn")
    found = {"holds": True, "said": "runs", "found_lead": None}
    rows = [vars(kept) | found, vars(gone) | found | {"ours": "onelaunch-gone"}]
    out.write_text(json.dumps({"rows": rows}))
    argv = ["--tables", "training", "--match", "pair:mlp, onelaunch$", "--out", str(out)]
    assert claims.main(argv) == 0
    written = {(row["group"], row["ours"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(written) == {("training:pair:cnn", "onelaunch"), ("training:pair:mlp", "onelaunch")}
    assert written["training:pair:mlp", "onelaunch"]["holds"]
    said = capsys.readouterr().out
    assert "holds  training: pair:mlp, onelaunch: " in said
    assert "2 of 2 hold" in said


# Groups that are built.


@pytest.fixture(autouse=True)
def _a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONELAUNCH_READY_BY", str(time.time() + 60))
    for module in (claims_built, claims_swept):
        monkeypatch.setattr(module, "SAMPLES", 2, raising=False)
        monkeypatch.setattr(module, "SECONDS", 0.1, raising=False)


def test_a_group_is_built_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "wait_for_turn", lambda: None)
    monkeypatch.setattr(claims, "no_silent_eager", lambda: None)
    group = {"calls:mlp": ["onelaunch", "no_grad", "eager"]}
    data = json.loads(json.dumps(claims.one(group)))
    rows = {row["variant"]: row for row in data["groups"]["calls:mlp"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    ours = rows["onelaunch"]
    assert [ours[what] for what in ("recordings", "launches", "eager")] == [1, 1, 0]
    assert {"wall", "host"} <= set(ours["figures"])
    claim = Claim("engines", "calls:mlp", "onelaunch", "wall", "no_grad", 0.1, 1, 1)
    assert "x no_grad, 0.10x in the table" in verdict(claim, rows)[1]


@pytest.mark.parametrize(
    ("build", "name", "variant"),
    [
        (claims_built.trained, "pair:mlp", "onelaunch"),
        (claims_built.compiled, "fp32:sine", "graph"),
        (claims_built.planned, "conv2d", "onelaunch exact"),
    ],
)
def test_each_kind_of_way_is_counted(
    build: Callable[[str, Sequence[str]], claims_built.Finish], name: str, variant: str
) -> None:
    (found,) = build(name, [variant])()
    assert (found.status, found.reason) == ("ok", None)
    assert (found.recordings, found.launches, found.eager) == (1, 1, 0)
    assert found.figures["wall"] > 0


def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "no_silent_eager", lambda: None)
    monkeypatch.setattr(claims, "wait_for_turn", lambda: None)

    def builder(name: str, variants: Sequence[str]) -> claims_built.Finish:
        warnings.warn(ol.GraphWarning("OL304", "it runs eagerly"), stacklevel=1)
        raise AssertionError("the warning is an error")

    def late(name: str, variants: Sequence[str]) -> claims_built.Finish:
        def finish() -> list[Found]:
            raise ValueError("late")

        return finish

    monkeypatch.setitem(claims.BUILDERS, "calls", builder)
    monkeypatch.setitem(claims.BUILDERS, "plans", late)
    groups = {"calls:mlp#onelaunch": ["onelaunch"], "plans:mlp": ["onelaunch exact"]}
    data = claims.one(groups)["groups"]
    (warned,), (failed,) = (data[group] for group in groups)
    assert warned["status"] == failed["status"] == "failed"
    assert "OL304" in warned["reason"]
    assert failed["reason"] == "ValueError: late"


def test_a_call_that_fails_when_timed_is_named() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("the third")

    def build() -> claims_built.Contestant:
        contestant = claims_built.Contestant(Found("onelaunch"))
        contestant.call = call
        return contestant

    ways = claims_built.Ways()
    ways.add("onelaunch", True, build)
    (found,) = ways.finish()
    assert found.reason == "when timed: ValueError: the third"


def test_calls_that_are_no_launches_are_counted() -> None:
    fast = ol.graph(lambda x: x + 1, warmup=1)
    x = torch.ones(3)
    found = Found("onelaunch")
    count(found, lambda: (fast(x), fast(x[:2].clone())), Counts.now())
    assert (found.recordings, found.launches, found.eager) == (2, 2, 0)
    sizes = iter(range(4, 9))
    anew = Found("onelaunch")
    count(anew, lambda: fast(torch.ones(next(sizes))), Counts.now())
    assert (anew.launches, anew.eager) == (0, 1)  # each size is new to it


def test_learning_is_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_rl, "HORIZON", 4)
    (found,) = claims_swept.learned("ppo", ["onelaunch"])()
    assert (found.status, found.reason) == ("ok", None)
    assert found.launches == 4 + 1 + train_rl.EPOCHS * train_rl.BATCHES
    assert found.eager == 0
    assert found.figures["wall"] > 0


def test_requests_are_served() -> None:
    (found,) = claims_swept.requested("onelaunch", ["onelaunch"])()
    assert (found.status, found.launches, found.eager) == ("ok", 1, 0)
    assert set(found.figures) == {"wall", "p50", "p99"}


def test_a_target_that_the_table_has_as_missed_only_runs() -> None:
    targets = [
        Target("9 requests under a budget, wrong results", "0", "3", False),
        Target("onelaunch: requests per second", "9", "8", False),
    ]
    names = [claims_swept.shape_of(target.what) for target in targets]
    wrong, slow = claims_swept.judged(targets, names)
    assert wrong.reason == "3, to reach 0"
    assert (slow.status, slow.reason) == ("ok", None)


@pytest.mark.thorough
def test_a_first_replay_and_its_buckets_are_counted() -> None:
    found = claims_swept.replayed("resnet50", ["onelaunch", "onelaunch bucket"])()
    assert [(row.status, row.recordings, row.launches) for row in found] == [
        ("ok", 1, 1),
        ("ok", 4, 1),
    ]


@pytest.mark.thorough
def test_tokens_are_decoded_as_eagerly() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = claims_swept.decoded("15m:generate", ["onelaunch, greedy"])()
    assert [(row.status, row.launches, row.eager) for row in found] == [("ok", 63, 1)]


# Models of libraries, without running them.


def as_on_the_gpu(table: str, rows_of: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a `run` that finds what the table has."""
    cases = claims_swept.results(table)["cases"]

    def run(todo: Sequence[Any], *_: Any) -> None:
        for case in todo:
            case.rows = rows_of(cases[f"{case.name} {case.mode}"])

    return run


def test_a_sample_of_the_models_stands_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name.partition(" ")[0] for name in claims_swept.results("coverage")["cases"]}
    monkeypatch.setattr(claims_swept.catalogue, "names", lambda: sorted(models))
    ran: list[str] = []
    changed: dict[str, Any] = {}

    def rows_of(case: dict[str, Any]) -> dict[str, Any]:
        ran.append(case["about"])
        return {name: row | changed for name, row in case["engines"].items()}

    monkeypatch.setattr(claims_swept, "run", as_on_the_gpu("coverage", rows_of))
    variants = [c.ours for c in claims.claims(["coverage"])]
    found = claims_swept.covered("models", variants)()
    assert [row.variant for row in found] == variants
    assert {row.status for row in found} == {"ok"}
    assert len(ran) <= 12  # a sample
    again = list(ran)
    ran.clear()
    changed["verdict"] = "wrong"
    broken = claims_swept.covered("models", variants)()
    assert ran == again  # the same sample
    assert {row.status for row in broken} == {"failed"}
    assert all("wrong" in (row.reason or "") for row in broken)


def test_a_sample_of_the_models_is_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = claims_swept.results("doctor")["cases"]
    wanted = {name: case["on the GPU"] for name, case in cases.items()}
    monkeypatch.setattr(claims_swept.doctor, "expected", lambda models: wanted)
    models = sorted({name.partition(" ")[0] for name in wanted})
    monkeypatch.setattr(claims_swept.catalogue, "names", lambda: models)
    monkeypatch.setattr(
        claims_swept, "run", as_on_the_gpu("doctor", lambda case: {"doctor": case["here"]})
    )
    found = claims_swept.diagnosed("models", ["refused", "one launch"])()
    assert [row.status for row in found] == ["ok", "ok"]
    monkeypatch.setattr(claims_swept, "run", lambda todo, *_: None)
    broken = claims_swept.diagnosed("models", ["refused"])()
    assert "not run" in (broken[0].reason or "")


def test_claims_are_drawn(tmp_path: Path) -> None:
    rows = [vars(CLAIM) | {"holds": True, "said": "1.5x", "found_lead": 1.5}]
    results = {"environment": environment(), "source": "abc", "rows": rows}
    (tmp_path / "claims.json").write_text(json.dumps(results))
    page = render.render("<!-- begin:claims -->\n<!-- end:claims -->\n", tmp_path)
    assert "| training | 1 | 1 | 1 | 1 |" in page
