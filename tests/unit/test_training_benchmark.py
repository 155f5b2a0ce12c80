"""The benchmark of training runs on any machine, and judges by the targets as they stand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import learning, long_training, render
from benchmarks.call_overhead import Row
from benchmarks.training import ORDER, RUNS, main, targets
from benchmarks.training_check import Reference
from benchmarks.training_engines import (
    LEARNING_RATE,
    PARTS,
    Batch,
    Training,
    adam,
    forward_backward,
    whole_step,
)
from examples.placement import device
from onelaunch.tools.bench.timers import Timing


def trains(test: Callable[..., None]) -> Callable[..., None]:
    """On a GPU where there is one, and so before the emulated device is registered: see
    conftest.py."""
    return pytest.mark.gpu(test) if torch.cuda.is_available() else test


def row(variant: str, wall: float) -> Row:
    return Row(variant, variant, host=Timing(1.0, 0.1, 9), wall=Timing(wall, 0.1, 9))


STEP = [
    row("bare", 100.0),
    row("onelaunch", 106.0),
    row("reduce-overhead", 90.0),
    row("onelaunch-compile", 90.5),
]
PAIR = [
    row("eager", 500.0),
    row("make_graphed_callables", 200.0),
    row("compile", 180.0),
    row("onelaunch", 139.0),
    row("onelaunch-direct", 181.0),
]


def missed(part: str, workload: str, rows: list[Row]) -> set[tuple[str, str]]:
    return {(t.variant, t.rule) for t in targets(part, workload, rows) if not t.met}


def test_targets_of_whole_steps() -> None:
    bare = ("onelaunch", "1.05x a bare replay")
    fastest = ("onelaunch-compile", "1.00x the best incumbent")
    assert missed("step", "mlp", STEP) == {bare, fastest}
    assert missed("step", "bert", STEP) == {bare}


def test_targets_of_pairs() -> None:
    assert missed("pair", "cnn", PAIR) == {
        ("onelaunch", "0.7x the best incumbent"),
        ("onelaunch-direct", "0.7x make_graphed_callables"),
        ("onelaunch-direct", "0.7x the best incumbent"),
    }
    assert missed("pair", "bert", PAIR) == set()
    slower = [*PAIR[:3], row("onelaunch", 203.0), row("onelaunch-direct", 182.0)]
    assert missed("pair", "resnet50", slower) == {
        ("onelaunch", "1.01x the best of eager's kernels"),
        ("onelaunch-direct", "1.01x the best incumbent"),  # the faster of the two
    }


def test_nothing_is_judged_without_figures() -> None:
    for part in PARTS:
        missing = [Row(r.variant, r.title, "missing", "needs an NVIDIA GPU") for r in STEP]
        assert targets(part, "mlp", missing) == []


def check(part: str, model: nn.Module, batches: Sequence[Batch], wrong: str) -> str | None:
    """What the check says of an engine that is wrong in one way, or in none."""
    mine = copy.deepcopy(model)
    optimizer = adam(mine)
    step = whole_step(mine, optimizer)
    if part == "pair":
        step = forward_backward(mine, mine)
    if wrong == "another optimizer":
        optimizer = torch.optim.SGD(mine.parameters(), lr=LEARNING_RATE)
        step = whole_step(mine, optimizer)
    right = step

    def call(x: Tensor, y: Tensor) -> Tensor:
        if wrong == "frozen input":
            x = batches[0][0]
        if wrong == "gradients of two steps":
            right(x, y)
            return accumulating(x, y)
        if wrong == "no step":
            return nn.functional.cross_entropy(mine(x), y)
        if wrong == "statistics of BatchNorm twice":
            mine(x)
        return right(x, y)

    def accumulating(x: Tensor, y: Tensor) -> Tensor:
        loss = mine(x).sum()
        loss.backward()
        return loss

    right(*batches[0])
    if wrong == "learning rate 1% off":
        optimizer.param_groups[0]["lr"] *= 1.01
    if wrong == "counts its steps elsewhere":
        for known in optimizer.state.values():
            known["step"] = known["step"].clone() + 7
            known["step"].fill_ = lambda count: None  # so that loading a state does not reach it
    engine = Training(call, mine, optimizer if part == "step" else None)
    return Reference(part, model, batches).judge(engine)[1]


class Shallow(nn.Module):
    """With BatchNorm over few values, where float32 is far from float64 after a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8 * 3 * 3, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.fixture(scope="module")
def shallow() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    where = device()
    batches = [
        (torch.randn(2, 1, 7, 7, device=where), torch.randint(5, (2,), device=where))
        for _ in range(3)
    ]
    return Shallow().to(where), batches


@trains
@pytest.mark.parametrize(
    ("part", "wrong", "says"),
    [
        ("step", "frozen input", "losses"),
        ("step", "another optimizer", "updates"),
        ("step", "no step", "gradients"),
        ("step", "learning rate 1% off", "updates"),
        ("step", "counts its steps elsewhere", "updates"),
        ("step", "statistics of BatchNorm twice", "buffers"),
        ("pair", "frozen input", "gradients"),
        ("pair", "gradients of two steps", "gradients"),
        ("pair", "statistics of BatchNorm twice", "buffers"),
    ],
)
def test_an_engine_that_trains_wrongly_is_found(
    shallow: tuple[nn.Module, list[Batch]], part: str, wrong: str, says: str
) -> None:
    found = check(part, *shallow, wrong)
    assert found is not None
    assert says in found


@trains
@pytest.mark.parametrize("part", PARTS)
def test_an_engine_that_trains_rightly_passes(
    shallow: tuple[nn.Module, list[Batch]], part: str
) -> None:
    assert check(part, *shallow, "nothing") is None


@trains
def test_rounding_that_training_magnifies_is_no_fault(
    shallow: tuple[nn.Module, list[Batch]],
) -> None:
    """Gradients that are off by what float32 costs pass, although Adam would follow them to
    quite another place."""
    model, batches = shallow
    mine = copy.deepcopy(model)
    optimizer = adam(mine)
    reference = Reference("step", model, batches)
    allowed = 1e-3

    def rounded() -> None:
        for p in mine.parameters():
            assert p.grad is not None
            noise = torch.randn_like(p.grad)
            p.grad += noise * (allowed / 4 * p.grad.norm() / noise.norm())
        optimizer.step()

    step = whole_step(mine, optimizer, rounded)
    step(*batches[0])
    assert reference.judge(Training(step, mine, optimizer))[1] is None


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gives")
def test_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "training.json"
    wanted = "step:mlp,pair:mlp,long"
    small = ["--seconds", "0.3", "--steps", "40", "--build-seconds", "120"]
    assert main(["--runs", wanted, *small, "--out", str(out)]) == 0
    assert "MLP (32, 1024), step" in capsys.readouterr().out
    data = json.loads(out.read_text())
    for part in PARTS:
        status = {r["variant"]: r["status"] for r in data[part]["mlp"]["rows"]}
        assert status["eager"] == status["onelaunch"] == "ok", data[part]["mlp"]["rows"]
        assert status["reduce-overhead"] == "missing"
    for check in data["long"]["checks"]:
        assert check["parameters equal"], check
        assert check["recordings"] > 0

    page = "".join(
        f"<!-- begin:{name} -->\n<!-- end:{name} -->\n"
        for name in ("training-step", "training-pair")
    )
    text = render.render(page, tmp_path)
    assert "| torch.cuda.make_graphed_callables | missing |" in text
    assert render.render(text, tmp_path) == text


def test_a_table_without_results_is_left_alone(tmp_path: Path) -> None:
    page = "<!-- begin:training-step -->\nNot yet.\n<!-- end:training-step -->\n"
    assert render.render(page, tmp_path) == page


@pytest.mark.thorough
@trains
@pytest.mark.parametrize("check", long_training.CHECKS)
def test_changing_batch_sizes_rates_and_accumulation(check: long_training.Check) -> None:
    """Once every size has its recording, none is made anew; the parameters are eager's."""
    found = long_training.run_long(check, 800)
    assert found["parameters equal"], found
    assert found["losses equal"]
    assert found["recordings"] == found["recordings after a quarter"] > 0


def test_its_workloads_exist() -> None:
    assert set(ORDER) <= set(render.NAMES)
    assert {run.partition(":")[0] for run in RUNS} == {*PARTS, "long"}


def test_learning_by_every_engine(tmp_path: Path) -> None:
    out = tmp_path / "learning.json"
    assert (
        learning.main(["--engines", "eager,onelaunch", "--iterations", "2", "--out", str(out)]) == 0
    )
    page = render.render("<!-- begin:learning -->\n<!-- end:learning -->\n", tmp_path)
    assert page.count("| onelaunch |") == page.count("| eager |") == 1
    engines = json.loads(out.read_text())["engines"]
    assert engines["eager"]["returns"] == engines["onelaunch"]["returns"]
