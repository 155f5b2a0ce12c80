"""Distributions and adapters whose draws ask the host: the way to do without, as it is pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Distribution,
    LowRankMultivariateNormal,
    MultivariateNormal,
    OneHotCategorical,
    VonMises,
    Wishart,
)

import onelaunch as ol

from .drop_in import Rand, on_cpu, on_cpu_and_cuda, refused, replays

Program = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo turns it off for good as it compiles anything.
    monkeypatch.setattr(Distribution, "_validate_args", True)


def fix_of(program: Program, *args: Any) -> str:
    return refused(ol.graph(program, warmup=1), *args, match=r"OL10[14]").fix


def code_in(fix: str) -> list[str]:
    return re.findall(r"`([^`]+)`", fix)


def same(mended: Program, eager: Program, calls: list[Tensor]) -> None:
    fast = ol.graph(mended, warmup=1)
    for x in calls:
        torch.testing.assert_close(fast(x), eager(x))
    assert replays(fast) == len(calls) - 1


def root_of(x: Tensor) -> Tensor:
    """A lower triangular matrix with a positive diagonal."""
    return x[:4].tril(-1) + x[:4].diagonal().abs().add(1).diag_embed()


def test_a_low_rank_normal(rand: Rand) -> None:
    calls = [rand(i, 5, 4) for i in range(6)]
    diagonal, factor = rand(20, 4).abs() + 1, rand(21, 4, 2)

    def eager(loc: Tensor) -> Tensor:
        return LowRankMultivariateNormal(loc, factor, diagonal).log_prob(loc + 1)

    def written(code: str, loc: Tensor) -> Tensor:
        names = {"loc": loc, "factor": factor, "diagonal": diagonal, "torch": torch}
        made = eval(code, names | {"MultivariateNormal": MultivariateNormal})
        return made.log_prob(loc + 1)

    fix = fix_of(eager, calls[0])
    same(lambda loc: written(fix, loc), eager, calls)


def test_a_normal_of_a_precision(rand: Rand) -> None:
    calls = [rand(i, 5, 4) for i in range(6)]
    precision = root_of(calls[0]) @ root_of(calls[0]).mT

    def eager(mean: Tensor) -> Tensor:
        made = MultivariateNormal(mean, precision_matrix=precision, validate_args=False)
        return made.log_prob(mean + 1)

    def written(code: str, mean: Tensor) -> Tensor:
        names = {"mean": mean, "precision": precision, "torch": torch}
        return eval(code, names | {"MultivariateNormal": MultivariateNormal}).log_prob(mean + 1)

    fix = fix_of(eager, calls[0])
    same(lambda mean: written(fix, mean), eager, calls)


def test_a_wishart(device: torch.device, rand: Rand) -> None:
    """Its probabilities, and the mean of its draws."""
    root, df, count = root_of(rand(0, 4, 4)), torch.full((), 9.0, device=device), 4
    covariance = root @ root.mT
    fix = fix_of(lambda x: Wishart(df, scale_tril=root).log_prob(x @ x.mT), root)
    names: dict[str, Any] = {"torch": torch, "Wishart": Wishart, "df": df, "L": root, "p": count}
    _, made, drawn, result = code_in(fix)
    exec(made, names)
    eager = Wishart(df, scale_tril=root)
    same(
        lambda x: names["prior"].log_prob(x @ x.mT),
        lambda x: eager.log_prob(x @ x.mT),
        [root_of(rand(i, 4, 4)) for i in range(6)],
    )

    def draw() -> Tensor:
        exec(drawn, names)
        return eval(result, names)

    torch.manual_seed(0)
    fast = ol.graph(draw, warmup=1)
    mean = torch.stack([fast() for _ in range(4000)]).mean(0) / df
    torch.testing.assert_close(mean, covariance, rtol=0.1, atol=0.1)
    assert replays(fast) == 3999


def test_von_mises(rand: Rand) -> None:
    """Its parameters come from the launch, the draw is after it."""
    x = rand(0, 5, 4)
    made: Program = lambda x: VonMises(x, x.abs() + 1, validate_args=False)  # noqa: E731
    fix = fix_of(lambda x: made(x).sample(), x)
    assert "VonMises(mean, concentration).sample()" in code_in(fix)
    fast = ol.graph(lambda x: (x * 2, x.abs() + 1), warmup=1)
    for i in range(4):
        mean, concentration = fast(rand(i, 5, 4))
        torch.manual_seed(i)
        got = eval("VonMises(mean, concentration).sample()", {**globals(), **locals()})
        torch.manual_seed(i)
        expected = VonMises(rand(i, 5, 4) * 2, rand(i, 5, 4).abs() + 1).sample()
        torch.testing.assert_close(got, expected)
    same(lambda x: made(x).log_prob(x + 1), lambda x: made(x).log_prob(x + 1), [x] * 6)


@on_cpu
def test_a_one_hot_draw(device: torch.device, rand: Rand) -> None:
    def eager(logits: Tensor) -> Tensor:
        return OneHotCategorical(logits=logits, validate_args=False).sample()

    fix = fix_of(eager, rand(0, 5, 4))
    assert "Categorical" in fix
    draw, mended = code_in(fix)

    names: dict[str, Any] = {"torch": torch}
    lines = ["n = logits.shape[-1]", *draw.splitlines(), f"return {mended}"]
    exec("\n    ".join(["def written(logits):", *lines]), names)
    fast = ol.graph(names["written"], warmup=1)
    for i in range(5):
        torch.manual_seed(i)
        got = fast(rand(i, 5, 4))
        torch.manual_seed(i)
        torch.testing.assert_close(got, eager(rand(i, 5, 4)))
    assert replays(fast) == 4


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["LoHa", "LoKr"])
def test_adapters_that_drop_modules(name: str, device: torch.device, rand: Rand) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        config = getattr(peft, f"{name}Config")(r=2, target_modules=["0"], init_weights=False)
        return peft.get_peft_model(layers, config).to(device).train()

    plain, mended = adapted(), adapted()
    fix = fix_of(plain, rand(0, 5, 4))
    for code in code_in(fix)[:2]:
        exec(code, {"model": mended, "peft": peft})
    fast = ol.graph(mended, warmup=1)
    for i in range(6):
        for model in (fast, plain):
            model.zero_grad()
            model(rand(i, 5, 4)).square().sum().backward()
        for p, q in zip(mended.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert replays(fast) >= 4
