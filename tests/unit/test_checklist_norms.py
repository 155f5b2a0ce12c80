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


def test_a_norm_is_folded_by_the_run_not_by_the_source() -> None:
    model = lively(Odd(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    before = contents(model)
    built = take(model, (X,), "fold-batchnorm")
    made: Any = built.call
    assert built.did == {"fold-batchnorm": "1 of 1 norms"}
    assert isinstance(made.norm, nn.Identity)
    assert apart(made(X), model(X)) < 1e-6
    assert same(model, before)


@pytest.mark.parametrize(
    ("layer", "norm", "x"),
    [
        (nn.Conv1d(4, 6, 3, bias=False), nn.BatchNorm1d(6), torch.randn(2, 4, 9)),
        (nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), torch.randn(2, 4, 3, 3, 3)),
        (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, affine=False), X),
        (nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), X),
        (nn.Linear(4, 6), nn.BatchNorm1d(6), torch.randn(5, 4)),
        (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), torch.randn(5, 4)),
    ],
    ids=["1d", "3d", "groups", "transposed", "linear", "linear-without-bias"],
)
def test_each_kind_of_layer_is_folded(layer: nn.Module, norm: nn.Module, x: Tensor) -> None:
    model = lively(nn.Sequential(layer, norm, nn.ReLU()))
    built = take(model, (x,), "fold-batchnorm")
    assert built.did == {"fold-batchnorm": "1 of 1 norms"}
    assert apart(built.call(x), model(x)) < 1e-6


class Shared(nn.Module):
    """Two convolutions with one norm, so with shared statistics; and one read twice."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        if self.shared:
            return self.norm(self.b(y))
        y = self.b(y)
        return self.norm2(y) + y if hasattr(self, "norm2") else y


def test_a_norm_of_two_layers_is_left() -> None:
    why = refusal(lively(Shared(shared=True)), (X,), "fold-batchnorm")
    assert why == "none of its 2 batch norms is all that a layer feeds"


def test_a_layer_that_something_else_reads_is_left() -> None:
    model = Shared(shared=False)
    model.norm2 = nn.BatchNorm2d(4)
    lively(model)
    built = take(model, (X,), "fold-batchnorm")
    assert built.did == {"fold-batchnorm": "1 of 2 norms"}
    assert apart(built.call(X), model(X)) < 1e-6


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(self.first(self.conv(x))))


def test_a_layer_that_runs_twice_is_left() -> None:
    assert "none of its 2" in refusal(lively(Twice()), (X,), "fold-batchnorm")


def test_a_weight_that_two_layers_share_is_left() -> None:
    model = lively(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    )
    model[2].weight = model[0].weight
    assert "none of its 2" in refusal(model, (X,), "fold-batchnorm")


def test_norms_of_the_batch_are_left() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))  # in train mode
    assert "no BatchNorm with running statistics" in refusal(model, (X,), "fold-batchnorm")


def test_a_layer_with_a_hook_is_left() -> None:
    model = lively(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    assert "none of its 1" in refusal(model, (X,), "fold-batchnorm")


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a norm, then a dropout and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class Unknown(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_norm_with_its_activation_keeps_that() -> None:
    model = lively(nn.Sequential(nn.Conv2d(4, 6, 3), NormAct(6)))
    assert apart(take(model, (X,), "fold-batchnorm").call(X), model(X)) < 1e-6


def test_a_norm_of_an_unknown_class_is_left() -> None:
    model = lively(nn.Sequential(nn.Conv2d(4, 6, 3), Unknown(6)))
    assert "none of its 1" in refusal(model, (X,), "fold-batchnorm")


def test_a_functional_norm_is_left() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            norm = self.norm
            return F.batch_norm(self.conv(x), norm.running_mean, norm.running_var)

    assert "none of its 1" in refusal(lively(Functional()), (X,), "fold-batchnorm")


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
