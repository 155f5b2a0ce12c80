"""Branches that become one layer, and channels that are filled up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.checklist_steps import apart, contents, lively, refusal, same, take

X = torch.randn(2, 6, 9, 9)


def conv_norm(kernel: int, **options: Any) -> nn.Module:
    conv = nn.Conv2d(6, 6, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(6))


class RepVgg(nn.Module):
    """3x3, 1x1 and identity, a norm each, as the paper trains them (arXiv:2101.03697)."""

    def __init__(self, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.large = conv_norm(3, stride=stride, groups=groups)
        self.small = conv_norm(1, stride=stride, groups=groups)
        self.same = nn.BatchNorm2d(6) if stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.large(x) + self.small(x)
        if self.same is not None:
            y = y + self.same(x)
        return torch.relu(y)


def convolutions(net: Any) -> list[nn.Conv2d]:
    return [m for m in net.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 3}], ids=str)
def test_a_block_becomes_one_convolution(options: dict[str, int], folded: bool) -> None:
    model = lively(nn.Sequential(RepVgg(**options), nn.Conv2d(6, 6, 1)))
    before = contents(model)
    names = ["fold-batchnorm"] if folded else []
    built = take(model, (X,), *names, "merge-branches:sums")
    assert len(convolutions(built.call)) == 2
    assert apart(built.call(X), model(X)) < 1e-6
    assert built.did["merge-branches:sums"] == "1 sums of branches"
    assert same(model, before)


class Loop(nn.Module):
    """A sum that starts from 0, as MobileOne's; and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 1, 1), (3, 2, 2), (5, 1, 2)]  # a 3x3 of dilation 2 lies in a 5x5, a 3x3 too
        self.branches = nn.ModuleList(
            nn.Conv2d(6, 6, kernel, dilation=dilation, padding=padding)
            for kernel, dilation, padding in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        y = 0
        for branch in self.branches:
            y = y + branch(x)
        return x + y


def test_dilated_kernels_lie_in_larger_ones() -> None:
    model = Loop().eval()
    built = take(nn.Sequential(model), (X,), "merge-branches:sums")
    (one,) = convolutions(built.call)
    assert one.kernel_size == (5, 5)
    assert apart(built.call(X), model(X)) < 1e-6


class Unequal(nn.Module):
    def __init__(self, second: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Conv2d(6, 6, 3, padding=1), second, twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.second(y if self.twice else x)


def with_second(*args: Any, twice: bool = False, **options: Any) -> nn.Module:
    return Unequal(nn.Conv2d(6, 6, *args, **options), twice).eval()


STAY: dict[str, nn.Module] = {
    "groups": with_second(3, padding=1, groups=2),
    "circular": with_second(3, padding=1, padding_mode="circular"),
    "taps between those of the first": with_second(5, dilation=2, padding=4),
    "relu": Unequal(nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU())).eval(),
    "another input": with_second(1, twice=True),
    "a norm of the batch": RepVgg().train(),
}


@pytest.mark.parametrize("name", STAY)
def test_branches_that_differ_stay(name: str) -> None:
    assert "no sum" in refusal(nn.Sequential(STAY[name]), (X,), "merge-branches:sums")


@pytest.mark.parametrize("where", ["0.0", "0", "0.second", "0.second.1"])
def test_a_module_with_a_hook_stays_with_it(where: str) -> None:
    class Inner(nn.Sequential):
        """No module of torch's: a trace goes inside."""

    inner = Inner(nn.Conv2d(6, 6, 1), nn.Identity())
    model = nn.Sequential(nn.Sequential(RepVgg(), nn.ReLU()) if where == "0.0" else Unequal(inner))
    called: list[int] = []
    lively(model).get_submodule(where).register_forward_hook(lambda *_: called.append(1))
    assert "no sum" in refusal(model, (X,), "merge-branches:sums")
    with torch.no_grad():
        model.append(Unequal(nn.Conv2d(6, 6, 1)))
        built = take(model.eval(), (X,), "merge-branches:sums")
        called.clear()
        assert apart(built.call(X), model(X)) < 1e-6
    assert len(called) == 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
        self.value, self.out = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, other: Tensor | None = None, *, swap: bool = False) -> Tensor:
        if swap:
            value, query, key = self.value(x), self.query(x), self.key(x)
        else:
            query, key = self.query(x), self.key(x if other is None else other)
            value = self.value(x)
        return self.out((query @ query.mT).softmax(-1) @ value + key)


def test_layers_of_one_input_are_one() -> None:
    model = nn.Sequential(Attention())
    x = torch.randn(2, 5, 16)
    before = contents(model)
    built = take(model, (x,), "merge-branches:parallel")
    made: Any = built.call
    assert built.did == {"merge-branches:parallel": "3 layers as 1"}
    assert [m.out_features for m in made.modules() if isinstance(m, nn.Linear)] == [32, 16]
    assert apart(made(x), model(x)) < 1e-6
    assert made[0].query.together.kept is None  # nothing is held between calls
    assert same(model, before)


def test_layers_in_another_order_or_of_another_input_compute_by_themselves() -> None:
    model = Attention()
    x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    call = take(model, (x,), "merge-branches:parallel").call
    for args, kwargs in (((x, other), {}), ((x,), {"swap": True}), ((x,), {})):
        assert apart(call(*args, **kwargs), model(*args, **kwargs)) < 1e-6


def test_parallel_convolutions_are_one() -> None:
    class Inception(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 8, 1)
            self.c = nn.Conv2d(6, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x).relu(), self.b(x).relu(), self.c(x)], 1)

    model = Inception()
    built = take(model, (X,), "merge-branches:parallel")
    assert built.did == {"merge-branches:parallel": "2 layers as 1"}
    assert apart(built.call(X), model(X)) < 1e-6


def test_merged_layers_are_one_launch_and_one_compiled_graph() -> None:
    model, x = Attention().eval(), torch.randn(2, 5, 16)
    graphed = take(model, (x,), "inference-mode", "merge-branches:parallel", "graph")
    graphed.warm()
    within: Any = graphed.call
    assert len(within.fn.recordings) == 1
    assert apart(within(x), model(x)) < 1e-6
    plain = take(model, (x,), "merge-branches:parallel").call
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert apart(compiled(x), model(x)) < 1e-6


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(13, 10), torch.randn(3, 13)),
        (nn.Conv2d(6, 10, 3, padding=1), X),
        (nn.Conv2d(3, 10, 3), torch.randn(3, 8, 8)),  # without a batch
        (nn.Conv2d(6, 10, 3, padding=1, padding_mode="reflect"), X),
        (nn.Conv1d(6, 8, 3, bias=False), torch.randn(2, 6, 9)),
    ],
    ids=["linear", "convolution", "unbatched", "reflect", "no-bias"],
)
def test_channels_are_filled_up_and_cut_off_again(layer: nn.Module, x: Tensor) -> None:
    model = nn.Sequential(layer, nn.ReLU())
    before = contents(model)
    built = take(model, (x,), "pad-channels")
    result = built.call(x)
    assert built.did == {"pad-channels": "1 of 1 layers"}
    assert result.is_contiguous()
    assert result.shape == model(x).shape
    assert apart(result, model(x)) < 1e-6
    inner: Any = built.call
    outputs, inputs = inner.fn[0].layer.weight.shape[:2]
    assert outputs % 8 == 0
    assert inputs % 8 == 0 or inputs <= 4
    assert same(model, before)
