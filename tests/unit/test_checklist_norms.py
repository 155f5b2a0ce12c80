"""Folding of batch norms, and biases before norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.checklist_steps import apart, contents, lively, refusal, same, take

X = torch.randn(2, 4, 9, 9)


class Odd(nn.Module):
    """A convolution and a norm, run by code that torch.fx cannot trace."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().sum()) < 0:
            return x
        return self.norm(self.conv(x)).relu()


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a norm, then a dropout and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class ReadTwice(nn.Module):
    """Two convolutions with a norm each; something else reads what the second gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.first(self.a(x)))
        return self.second(y) + y


def sequence(*layers: nn.Module) -> nn.Module:
    return lively(nn.Sequential(*layers))


FOLDED: dict[str, tuple[nn.Module, Tensor]] = {
    "1d": (
        sequence(nn.Conv1d(4, 6, 3, bias=False), nn.BatchNorm1d(6), nn.ReLU()),
        torch.randn(2, 4, 9),
    ),
    "3d": (sequence(nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), nn.ReLU()), torch.randn(2, 4, 3, 3, 3)),
    "groups": (sequence(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, affine=False)), X),
    "transposed": (sequence(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), X),
    "linear": (sequence(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), torch.randn(5, 4)),
    "no bias": (sequence(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), torch.randn(5, 4)),
    "an activation of its own": (sequence(nn.Conv2d(4, 6, 3), NormAct(6)), X),
    "by the run": (lively(Odd(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), X),
    "one of two": (lively(ReadTwice()), X),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_norm_is_folded(name: str) -> None:
    model, x = FOLDED[name]
    before = contents(model)
    built = take(model, (x,), "fold-batchnorm")
    made: Any = built.call
    assert built.did == {"fold-batchnorm": f"1 of {2 if name == 'one of two' else 1} norms"}
    assert apart(made(x), model(x)) < 1e-6
    assert same(model, before)
    if name == "by the run":
        assert isinstance(made.norm, nn.Identity)


class Shared(nn.Module):
    """Two convolutions with one norm, so with shared statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(self.first(self.conv(x))))


class Unknown(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), self.norm.running_mean, self.norm.running_var)


def pairs(count: int) -> nn.Module:
    layers = [layer for _ in range(count) for layer in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))]
    return nn.Sequential(*layers)


def tied() -> nn.Module:
    model: Any = pairs(2)
    model[2].weight = model[0].weight
    return lively(model)


def hooked() -> nn.Module:
    model = lively(pairs(1))
    model[0].register_forward_hook(lambda module, args, result: result * 2)  # pyright: ignore
    return model


FEEDS = "none of its {} batch norms is all that a layer feeds"
LEFT: dict[str, tuple[nn.Module, str]] = {
    "of two layers": (lively(Shared()), FEEDS.format(2)),
    "of a layer that runs twice": (lively(Twice()), FEEDS.format(2)),
    "of a weight that two layers share": (tied(), FEEDS.format(2)),
    "of the batch": (pairs(1), "no BatchNorm with running statistics runs in it"),
    "of a layer with a hook": (hooked(), FEEDS.format(1)),
    "of an unknown class": (sequence(nn.Conv2d(4, 6, 3), Unknown(6)), FEEDS.format(1)),
    "a functional one": (lively(Functional()), FEEDS.format(1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_norm_is_left(name: str) -> None:
    model, why = LEFT[name]
    assert refusal(model, (X,), "fold-batchnorm") == why


def test_a_bias_that_the_norm_cancels_is_dropped() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6)).eval()
    built = take(model, (X,), "drop-bias")
    made: Any = built.call
    assert made[0].bias is None
    assert apart(made(X), model(X)) < 1e-5
    assert built.did == {"drop-bias": "1 of 1 biases"}


def test_a_bias_goes_into_the_running_mean() -> None:
    model = lively(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    before = contents(model)
    made: Any = take(model, (X,), "drop-bias").call
    assert made[0].bias is None
    assert apart(made(X), model(X)) < 1e-6
    assert same(model, before)


def test_a_bias_that_shows_stays() -> None:
    groups = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)).eval()
    assert refusal(groups, (X,), "drop-bias") == "no convolution before a norm has a bias"
    assert "none of 2" in refusal(lively(Twice()), (X,), "drop-bias")
    folded = lively(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    assert "no convolution" in refusal(folded, (X,), "fold-batchnorm", "drop-bias")
