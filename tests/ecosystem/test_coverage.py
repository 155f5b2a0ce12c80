"""A sample of what `benchmarks.coverage` runs on a GPU: architectures of transformers made small,
on the emulated device, with eager's results to the last bit or the refusal that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage_models import case as judged
from benchmarks.coverage_models import engines, pool
from benchmarks.coverage_models.pool import Case, run
from benchmarks.coverage_models.shrinking import Scale
from benchmarks.coverage_models.subject import Subject
from benchmarks.coverage_models.summary import NAMED, RIGHT, counts

SAMPLE = """
albert arcee bart beit bert bert-generation biogpt blenderbot blenderbot-small bloom bros camembert
canine clip_text_model clip_vision_model codegen cohere cohere2 convbert convnext convnextv2 ctrl
cwm data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 deepseek_v3 deit diffllama
dinov2 dinov3_vit distilbert dpr electra ernie ernie4_5 eurobert exaone4 falcon flaubert fnet gemma
gemma2 gemma3_text glm glm4 gpt2 gpt_oss imagegpt lfm2 llama mbart mistral mllama olmo qwen3
qwen3_moe roformer smollm3 t5 t5gemma2 vit wavlm whisper
"""
REFUSED = {"flaubert": "OL101"}
"""What is refused as it is written, with the code."""


@pytest.mark.thorough
def test_sixty_architectures() -> None:
    cases = [Case(f"transformers/{name}", "inference", ["onelaunch"]) for name in SAMPLE.split()]
    assert len(cases) >= 60
    run(cases, "tape", 2, 1800.0, lambda case: None)
    bad = {case.name: case.why or case.rows for case in cases if not _as_known(case)}
    assert not bad


@pytest.mark.thorough
def test_the_backend_of_torch_compile() -> None:
    """On the emulated device with torch's own operators; what Inductor runs is CUDA's to show."""
    names = ("bert", "convnext", "vit")
    engines = ["onelaunch backend"]
    cases = [Case(f"transformers/{name}", "inference", engines) for name in names]
    cases.append(Case("transformers/vit", "training", engines))
    run(cases, "tape", 2, 600.0, lambda case: None)
    rows = [case.rows.get("onelaunch backend", {}) for case in cases]
    assert all(row.get("verdict") == "one launch" for row in rows), rows


def _as_known(case: Case) -> bool:
    row = case.rows.get("onelaunch", {})
    known = REFUSED.get(case.name.partition("/")[2])
    if row.get("verdict") == "refused":
        return row["code"] == known and bool(row["line"]) and NAMED in row["fix"]
    return row.get("verdict") in RIGHT


WORKER = """#!/usr/bin/env python3
import json, os, sys, time
def say(**what):
    print(json.dumps(what), flush=True)
say(ready=True)
for line in sys.stdin:
    task = json.loads(line)
    say(begun="build")
    if task["name"] == "cannot":
        say(not_built="no inputs")
    else:
        say(begun="eager", about="a model")
        say(engine="eager", row={"spread": 0.0})
        for name in task["engines"]:
            say(begun=name)
            if name == "dies":
                sys.stderr.write("illegal memory access")
                os._exit(3)
            if name == "hangs":
                time.sleep(60)
            say(engine=name, row={"verdict": "one launch"})
            if name == "disorder":
                break
    say(done=True, ends="disorder" in task["engines"])
    if "disorder" in task["engines"]:
        break
"""


@pytest.mark.thorough
def test_a_death_costs_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker"
    worker.write_text(WORKER)
    worker.chmod(0o755)
    monkeypatch.setattr(pool.sys, "executable", str(worker))
    monkeypatch.setitem(pool.STEP_SECONDS, "hangs", 0.5)
    engines = ["right", "dies", "hangs", "disorder", "last"]
    cases = [Case("model", "inference", engines), Case("cannot", "inference", engines)]
    cases += [Case(f"model {i}", "training", engines) for i in range(2)]
    ended: list[str] = []
    run(cases, "cpu", 2, 60.0, lambda case: ended.append(case.name))
    assert len(ended) == 4
    assert cases[1].why == "no inputs"
    for case in (cases[0], *cases[2:]):
        assert case.ended
        assert {k: row.get("verdict") for k, row in case.rows.items()} == {
            "eager": None,
            "right": "one launch",
            "dies": "crashed",
            "hangs": "crashed",
            "disorder": "one launch",
            "last": "one launch",
        }
        assert "illegal memory access" in case.rows["dies"]["text"]


def test_time_that_is_up_leaves_cases_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    worker.write_text(WORKER)
    worker.chmod(0o755)
    monkeypatch.setattr(pool.sys, "executable", str(worker))
    cases = [Case(f"model {i}", "inference", ["right", "hangs"]) for i in range(3)]
    run(cases, "cpu", 1, 1.5, lambda case: None)
    assert [case.ended for case in cases] == [False] * 3
    assert "hangs" not in cases[0].rows


def test_tokens_keep_their_identity_in_a_small_vocabulary() -> None:
    scale = Scale(vocabulary=512)
    assert scale.token(3) == 3
    assert scale.token(255_036) == scale.token(255_036) == 511
    assert scale.token(255_037) == 510


class Ranked(nn.Module):
    """Rows in the order of their scores."""

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([1.0, 1.0 + apart]))
        self.rows = nn.Parameter(torch.tensor([[1.0], [5.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[self.scores.argsort()] * x


class Swapped(engines.Eager):
    """A compiler that takes the other order."""

    def __call__(self, args: Any, kwargs: Any) -> Any:
        return super().__call__(args, kwargs).flip(0)


@pytest.mark.parametrize(("apart", "verdict"), [(2e-7, "undecided"), (1e-2, "wrong")])
def test_an_order_that_rounding_decides(
    apart: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(name: str, model: nn.Module, training: bool) -> engines.Eager:
        return (engines.Eager if name == "eager" else Swapped)(model, training)

    monkeypatch.setattr(judged, "engine", engine)
    subject = Subject(Ranked(apart), lambda seed: ([torch.ones(1)], {}), "two rows")
    host = torch.device("cpu")
    reference = judged.reference(subject, "inference", host)
    row = judged.judge(subject, "onelaunch backend", "inference", host, reference)
    assert row["verdict"] == verdict
    assert ("eager moves" in row) == (verdict == "undecided")
    assert judged.judge(subject, "by hand", "inference", host, reference)["verdict"] == "wrong"


def test_counts_hold_onelaunch_against_the_others() -> None:
    whole = {"verdict": "one launch", "one_graph": True, "seconds": 10.0}
    right = {"verdict": "one launch", "seconds": 1.0}
    split = {"verdict": "pieces", "seconds": 1.0}
    line, fix = "net.py:3: y.item()", 'read it later; or `ol.graph(..., on_refusal="split")`'
    refused = {"verdict": "refused", "code": "OL101", "line": line, "fix": fix}
    cases = {
        "a inference": {
            "engines": {"onelaunch": right, "onelaunch split": right, "reduce-overhead": whole}
        },
        "b inference": {
            "engines": {"onelaunch": refused, "onelaunch split": split, "reduce-overhead": whole}
        },
        "c inference": {"not built": "no"},
    }
    found = counts(cases)["inference"]
    assert (found["cases"], found["not built"]) == (2, 1)
    assert found["engines"]["onelaunch"]["refused"] == 1
    targets = found["targets"]
    assert targets["one launch, of those of reduce-overhead in one graph"]["share"] == 0.5
    named = targets["refusals with a line and a fix that was tried"]
    assert (named["met"], named["of"]) == (1, 1)
    assert targets["split right, of all that eager runs"]["share"] == 1.0
    of_compiled = targets["median time to the first replay, of that of reduce-overhead"]
    assert of_compiled == pytest.approx(0.1)
