"""What is slow in inference by its architecture."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from examples.resnet import resnet50
from tests.footguns.slow_runs import BY_CODE, IMAGES, codes, conv, program, separable, slow, what
from tests.footguns.slow_runs import settings as settings


class Swapped(nn.Module):
    """A linear layer whose features are the channels of a batch norm."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.swap = nn.Linear(8, 6), nn.BatchNorm1d(6), swap

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.norm(y.transpose(1, 2) if self.swap else y)


class ReadTwice(nn.Module):
    def __init__(self, result: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.result = conv(), nn.BatchNorm2d(8), result

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return (self.norm(y), y) if self.result else self.norm(y) + y


class Standardized(nn.Conv2d):
    """A convolution whose weight is computed anew at each call."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input, weight, self.bias)


BEFORE_NORMS: dict[str, tuple[nn.Module, tuple[int, ...], set[str]]] = {
    "batch norm": (nn.Sequential(conv(), nn.BatchNorm2d(8)), IMAGES, {"OL607", "OL608"}),
    "no bias": (nn.Sequential(conv(False), nn.BatchNorm2d(8)), IMAGES, {"OL608"}),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)),
        IMAGES,
        {"OL608"},
    ),
    "channels_last": (
        nn.Sequential(conv(), nn.InstanceNorm2d(8)).to(memory_format=torch.channels_last),  # pyright: ignore
        IMAGES,
        {"OL607", "OL609"},
    ),
    "instance norm": (nn.Sequential(conv(), nn.InstanceNorm2d(8)), IMAGES, {"OL607", "OL609"}),
    "running instance norm": (
        nn.Sequential(conv(False), nn.InstanceNorm2d(8, track_running_stats=True)),
        IMAGES,
        set(),
    ),
    "no running statistics": (
        nn.Sequential(conv(), nn.BatchNorm2d(8, track_running_stats=False)),
        IMAGES,
        {"OL607", "OL609"},
    ),
    "a group for each channel": (nn.Sequential(conv(), nn.GroupNorm(8, 8)), IMAGES, {"OL607"}),
    "a group of two": (nn.Sequential(conv(), nn.GroupNorm(4, 8)), IMAGES, set()),
    "layer norm": (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), (2, 4), set()),
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), (2, 4), {"OL608"}),
    "linear, swapped": (Swapped(True), (2, 6, 8), {"OL608"}),
    "linear, other channels": (Swapped(False), (2, 6, 8), set()),
    "relu between": (nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(8)), IMAGES, set()),
    "relu in place": (nn.Sequential(conv(), nn.ReLU(True), nn.BatchNorm2d(8)), IMAGES, set()),
    "read twice": (ReadTwice(False), IMAGES, set()),
    "a result too": (ReadTwice(True), IMAGES, set()),
    "a weight computed": (nn.Sequential(Standardized(4, 8, 3), nn.BatchNorm2d(8)), IMAGES, set()),
    "norm first": (nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), conv()), IMAGES, set()),
}


@pytest.mark.parametrize("name", BEFORE_NORMS)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode", "autocast"])
def test_layers_before_norms(name: str, mode: str) -> None:
    module, sizes, expected = BEFORE_NORMS[name]
    modes: dict[str, Callable[[], Any]] = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with modes[mode]():
        found = codes(module.eval(), torch.randn(sizes), grad=True)
    assert found - {"OL602"} == expected


class TestNorms:
    def test_a_bias_that_statistics_cancel_changes_nothing(self) -> None:
        x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
        for norm in (
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.InstanceNorm2d(8),
            nn.GroupNorm(8, 8),
        ):
            biased = conv().double()
            bare = copy.deepcopy(biased)
            bare.bias = None
            norm = norm.double()
            torch.testing.assert_close(norm(biased(x)), norm(bare(x)))
        other = nn.GroupNorm(4, 8).double()
        assert not torch.allclose(other(biased(x)), other(bare(x)))

    def test_a_running_mean_holds_the_bias(self) -> None:
        """The fix, as the rule has it."""
        layer, norm = conv().double(), nn.BatchNorm2d(8).double()
        x = torch.randn(IMAGES, dtype=torch.float64)
        norm(layer(x))
        norm.eval()
        with torch.no_grad():
            expected = norm(layer(x))
            norm.running_mean -= layer.bias  # pyright: ignore
            layer.bias = None
            torch.testing.assert_close(norm(layer(x)), expected)

    @pytest.mark.parametrize("kind", ["convolution", "linear"])
    def test_folding_gives_the_same_numbers(self, kind: str) -> None:
        if kind == "linear":
            layer: nn.Module = nn.Linear(4, 8).double()
            norm: nn.Module = nn.BatchNorm1d(8).double()
            x = torch.randn(16, 4, dtype=torch.float64)
        else:
            layer, norm = conv(False).double(), nn.BatchNorm2d(8).double()
            x = torch.randn(IMAGES, dtype=torch.float64)
        norm(layer(x) * 3 + 1)  # statistics other than 0 and 1
        model = nn.Sequential(layer, norm).eval()
        (found,) = (f for f in slow(model, x) if f.code == "OL608")
        fuse = fuse_linear_bn_eval if kind == "linear" else fuse_conv_bn_eval
        assert found.fix.startswith(f"model[0] = torch.nn.utils.fusion.{fuse.__name__}(model[0]")
        pasted = copy.deepcopy(model)
        exec(found.fix, {"torch": torch, "nn": nn, "model": pasted})
        torch.testing.assert_close(pasted(x), model(x))
        assert isinstance(pasted[1], nn.Identity)
        folded = fuse(*model)  # pyright: ignore
        torch.testing.assert_close(folded(x), model(x))
        assert "OL608" not in codes(folded, x)

    def test_the_paths_of_all(self) -> None:
        found = slow(resnet50().eval(), torch.randn(1, 3, 64, 64))
        (unfolded,) = (f for f in found if f.code == "OL608")
        assert "53 batch norms, the first `stem.1`" in unfolded.what
        assert unfolded.fix.endswith(
            "(model.stem[0], model.stem[1]); model.stem[1] = nn.Identity()"
        )
        assert unfolded.source == "x = self.pool(torch.relu(self.stem(images)))"

    def test_the_mode_of_the_norm_counts(self) -> None:
        """In train mode its statistics are those of the batch, and nothing folds."""
        found = codes(nn.Sequential(conv(), nn.BatchNorm2d(8)).train(), torch.randn(IMAGES))
        assert found == {"OL601", "OL607"}


class Branches(nn.Module):
    """The sum of branches; a parameter says how."""

    def __init__(self, *branches: nn.Module, how: str = "add") -> None:
        super().__init__()
        self.branches, self.how = nn.ModuleList(branches), how

    def forward(self, x: Tensor) -> Any:
        if self.how == "halves":
            return self.branches[0](x[:, :2]) + self.branches[1](x[:, 2:])
        parts = [branch(x) for branch in self.branches]
        if self.how == "sum":
            return sum(parts)
        if self.how == "in place":
            first, *others = parts
            for part in others:
                first += part
            return first
        if self.how == "cut":
            return parts[0][:, :, :6] + parts[1][:, :, :, :6]
        if self.how == "given":
            return parts[0] + parts[1], parts[0]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def c(kernel: int, channels: int = 4, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, kernel, **{"padding": kernel // 2, **kwargs})


def normed(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.BatchNorm2d(4))


MERGE: dict[str, nn.Module] = {
    "two": Branches(c(3), c(1)),
    "of one size": Branches(c(3), c(3)),
    "norms between": Branches(normed(c(3)), normed(c(1))),
    "three by sum": Branches(c(5), c(3), c(1), how="sum"),
    "in place": Branches(c(3), c(1), how="in place"),
    "strided": Branches(c(3, stride=2), c(1, stride=2)),
    "grouped": Branches(c(3, groups=4), c(1, groups=4)),
    "dilated": Branches(c(3, dilation=2, padding=2), c(1)),
    "identity too": Branches(normed(c(3)), normed(c(1)), nn.BatchNorm2d(4)),
    "one row, one column": Branches(
        nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
    ),
}
STAY: dict[str, nn.Module] = {
    "shortcut": Branches(nn.Sequential(c(3), nn.ReLU(), c(3)), c(1)),
    "relu between": Branches(nn.Sequential(c(3), nn.ReLU()), c(1)),
    "other strides": Branches(c(3, stride=2), nn.Sequential(c(1), nn.MaxPool2d(2))),
    "other groups": Branches(c(3), c(3, groups=4)),
    "other dilations": Branches(c(3), c(3, dilation=2, padding=2)),
    "another centre": Branches(c(3, padding=(1, 0)), c(3, padding=(0, 1)), how="cut"),
    "other parts of the input": Branches(c(3, 2), c(1, 2), how="halves"),
    "one given as well": Branches(c(3), c(1), how="given"),
}


class TestBranches:
    @pytest.mark.parametrize("name", MERGE)
    def test_merge(self, name: str) -> None:
        assert "OL610" in codes(MERGE[name].eval(), torch.randn(IMAGES))

    @pytest.mark.parametrize("name", STAY)
    def test_stay(self, name: str) -> None:
        module = STAY[name].eval()
        x = torch.randn(IMAGES)
        if name == "other parts of the input":
            # Both branches also run on the whole input in `forward`, so give them what they take.
            module.forward = (
                lambda x: (  # pyright: ignore
                    module.branches[0](x[:, :2]) + module.branches[1](x[:, 2:])  # pyright: ignore
                )
            )
        assert "OL610" not in codes(module, x)

    def test_all_of_a_sum_are_named_once(self) -> None:
        found = what("OL610", MERGE["three by sum"].eval(), torch.randn(IMAGES))
        assert found.startswith("`branches.0` + `branches.1` + `branches.2` of one input")

    def test_the_merged_one_gives_the_same_numbers(self, tmp_path: Path) -> None:
        rule = BY_CODE["OL610"]
        torch.manual_seed(0)
        two, args = program(rule.example, tmp_path)
        torch.manual_seed(0)
        one, _ = program(rule.instead, tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(one(*args), two(*args))


class Whole(nn.Module):
    """A product of whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.ones(1024, width, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight)


class Gated(nn.Module):
    """A dense convolution could not take the place of these two."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = separable(2, 4)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x)
        return self.pointwise(y * y.mean((2, 3), keepdim=True).sigmoid())


def depthwise() -> nn.Module:
    return nn.Conv2d(16, 16, 3, padding=1, groups=16)


IMAGES_AND_HEAD = nn.Sequential(
    *(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
LITTLE = nn.Sequential(
    *(depthwise(), nn.Conv2d(16, 128, 4, stride=4)),
    *(nn.Conv2d(128, 512, 3, padding=1), nn.Conv2d(512, 512, 3, padding=1)),
)
SILENT: dict[str, tuple[str, Any, tuple[int, ...]]] = {
    "images and small heads": ("OL611", IMAGES_AND_HEAD.eval(), (1, 3, 64, 64)),
    "groups": ("OL611", nn.Conv2d(36, 36, 7, groups=12, padding=3), (8, 36, 64, 64)),
    "results of results": ("OL611", lambda x: x @ x.mT, (8, 255, 1001)),
    # A pair of many channels has a ninth of the arithmetic.
    "a pair that pays": ("OL612", separable(128, 128), (1, 128, 28, 28)),
    "a gate between": ("OL612", Gated().eval(), (1, 2, 512, 512)),
    "waits for launches": ("OL613", depthwise(), (1, 16, 32, 32)),
    "waits for weights": ("OL613", nn.Linear(1024, 4096), (1, 1024)),
    "little of the call": ("OL613", LITTLE.eval(), (1, 16, 192, 192)),
}


@pytest.mark.parametrize("name", SILENT)
def test_silent(name: str) -> None:
    code, model, sizes = SILENT[name]
    assert code not in codes(model, torch.randn(sizes))


class TestChannels:
    def test_the_widths(self) -> None:
        net = nn.Sequential(nn.Conv2d(64, 60, 3), nn.Conv2d(60, 64, 3)).eval()
        found = what("OL611", net, torch.randn(1, 64, 56, 56))
        assert "multiple of 8: `0` and `1`, 64 to 60" in found

    def test_int8(self) -> None:
        x = torch.ones(64, 1024, dtype=torch.int8)
        assert "multiple of 32" in what("OL611", Whole(1000), x)
        assert "OL611" not in codes(Whole(1024), x)


class TestSeparable:
    def test_the_figures_hold(self) -> None:
        """Timed here in another way, the dense one is faster too."""
        pair, dense = separable(2, 4), nn.Conv2d(2, 4, 3, padding=1)
        x = torch.randn(1, 2, 512, 512)
        assert "(measured on cpu)" in what("OL612", pair, x)

        def taken(model: nn.Module) -> float:
            start = time.perf_counter()
            model(x)
            return time.perf_counter() - start

        with torch.no_grad():  # in turns, so that a busy machine slows both
            times = [(taken(dense), taken(pair)) for _ in range(40)]
        assert min(dense for dense, _ in times) < min(pair for _, pair in times)

    def test_norms_and_activations_between(self) -> None:
        pair = separable(2, 4, nn.BatchNorm2d(2), nn.ReLU(inplace=True))
        assert "OL612" in codes(pair, torch.randn(1, 2, 512, 512))


class TestTraffic:
    def test_the_figure(self) -> None:
        found = what("OL613", depthwise(), torch.randn(4, 16, 192, 192))
        # 9 products and as many sums for each number, which is read and written, of 4 bytes.
        assert found.startswith("2.2 operations per byte in `Conv2d`, 100% of the call")


class TestLaunches:
    def test_at_the_line_with_the_most(self) -> None:
        def model(x: Tensor) -> Tensor:
            for _ in range(40):
                x = x + 1
                x = x * 2 - 1
            return x

        (found,) = slow(model, torch.randn(8))
        assert found.code == "OL614"
        assert found.source == "x = x * 2 - 1"
        assert found.what.startswith("120 operations (80 of them here)")

    def test_views_launch_nothing(self) -> None:
        def model(x: Tensor) -> Tensor:
            for _ in range(100):
                x = x.view(2, 4).t()[None][0].flatten()
            return x

        copies = "100 operations (100 of them here)"  # by the last step alone
        assert what("OL614", model, torch.randn(8)).startswith(copies)
        assert codes(lambda x: [x.view(2, 4)[0] for _ in range(300)], torch.randn(8)) == set()

    def test_silent_where_kernels_are_long(self) -> None:
        def model(x: Tensor) -> Tensor:
            for _ in range(100):
                x = x.neg()
            return x

        assert codes(model, torch.randn(2 * 10**6)) == set()  # 16 MB: 8 us on an A100
        assert codes(model, torch.randn(1000)) == {"OL614"}
