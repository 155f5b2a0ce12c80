"""What is slow in inference by its modes and settings."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.footguns.slow_runs import BY_CODE, IMAGES, codes, conv, program, slow, what
from tests.footguns.slow_runs import settings as settings


class TestTrainMode:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))

    def test_names_the_modules(self) -> None:
        found = what("OL601", self.net, torch.randn(4, 8))
        assert "`1` and `2`" in found
        assert "statistics" in found

    def test_the_results_are_wrong(self) -> None:
        net, x = copy.deepcopy(self.net), torch.randn(4, 8)
        with torch.no_grad():
            mean = net[1].running_mean.clone()
            assert not torch.equal(net(x), net(x))
            assert not torch.equal(net(x)[:2], net(x[:2]))
            assert not torch.equal(net[1].running_mean, mean)
            net.eval()
            assert torch.equal(net(x), net(x))

    def test_parameters_that_never_train(self) -> None:
        net = copy.deepcopy(self.net).requires_grad_(False)
        assert "OL601" in codes(net, torch.randn(4, 8), grad=True)

    def test_a_call_that_drops_unless_told_not_to(self) -> None:
        class Forgets(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(x, 0.5)

        (found,) = slow(nn.Sequential(Forgets()).eval(), torch.randn(4, 8))
        assert found.code == "OL601"
        assert found.source == "return F.dropout(x, 0.5)"
        assert found.fix == "pass `training=self.training`"

    def test_attention_and_recurrent_layers(self) -> None:
        x = torch.randn(3, 2, 8)
        assert "OL601" in codes(nn.LSTM(8, 8, 2, dropout=0.1), x)
        assert "OL601" in codes(lambda q: F.scaled_dot_product_attention(q, q, q, None, 0.1), x)
        attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        assert "OL601" in codes(attention, x, x, x)
        assert "OL601" not in codes(attention.eval(), x, x, x)

    def test_silent_where_a_model_trains(self) -> None:
        net, x = self.net, torch.randn(4, 8)
        assert codes(net, x, grad=True) == set()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = net(x)  # the teacher, in train mode
            loss = F.mse_loss(net(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        assert codes(step, x, grad=True) == set()
        assert codes(optimizer.step, grad=True) == set()
        fixed = nn.Sequential(conv(), nn.BatchNorm2d(8)).eval()
        gradient = torch.func.grad(lambda x: fixed(x).sum())
        assert codes(gradient, torch.randn(IMAGES), grad=True) == set()

    def test_silent_where_a_checkpoint_recomputes(self) -> None:
        def forward(x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=True)

        assert codes(forward, torch.randn(4, 8, requires_grad=True), grad=True) == set()


class TestGradMode:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()

    def test_a_result_that_has_no_gradient_any_more(self) -> None:
        assert "OL602" in codes(lambda x: self.net(x).argmax(-1), torch.randn(4, 8), grad=True)

    def test_it_keeps_the_memory_of_all_layers(self) -> None:
        """What a layer gave is freed at once without autograd, and kept with it."""
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).eval()
        between: list[StorageWeakRef] = []
        net[0].register_forward_hook(
            lambda module, args, output: between.append(StorageWeakRef(output.untyped_storage()))
        )
        x = torch.randn(4, 8)
        recorded = net(x)
        with torch.inference_mode():
            bare = net(x)
        assert torch.equal(recorded, bare)
        assert [storage.expired() for storage in between] == [False, True]

    def test_at_the_line_that_defines_the_callable(self, tmp_path: Path) -> None:
        model, args = program(BY_CODE["OL602"].example, tmp_path)
        (found,) = slow(model, *args, grad=True)
        assert found.source == "def model(x):"

    def test_silent_where_gradients_may_be_wanted(self) -> None:
        x = torch.randn(4, 8)
        assert codes(self.net, x.requires_grad_(), grad=True) == set()
        partly = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()
        partly[1].train()
        assert codes(partly, torch.randn(4, 8), grad=True) == set()
        weight = nn.Parameter(torch.randn(8, 8))
        assert codes(lambda x: x @ weight, torch.randn(4, 8), grad=True) == set()
        assert codes(lambda x: self.net(x).sum().backward(), torch.randn(4, 8), grad=True) == set()


WIDE = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).eval()
CONVOLUTIONS = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 1)).eval()
ROWS, IMAGE = torch.randn(4, 8), torch.randn(1, 64, 56, 56)
LAST = torch.channels_last
SILENT: dict[str, tuple[str, nn.Module, Tensor]] = {
    "no difference by the mode": (
        *("OL601", nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8)), ROWS),
    ),
    "no running statistics": ("OL601", nn.BatchNorm1d(8, track_running_stats=False), ROWS),
    "an LSTM of one layer": ("OL601", nn.LSTM(8, 8, 1), ROWS),
    "little work": ("", nn.Linear(64, 64), torch.randn(8, 64)),
    "float64": ("", copy.deepcopy(WIDE).double(), torch.randn(64, 1024, dtype=torch.float64)),
    "weights in channels last": (
        "OL606",
        copy.deepcopy(CONVOLUTIONS).to(memory_format=LAST),
        IMAGE,
    ),
    "an input in channels last": ("OL606", CONVOLUTIONS, IMAGE.to(memory_format=LAST)),
    "one dimension": ("OL606", nn.Conv1d(256, 256, 3), torch.randn(1, 256, 1024)),
}
"""name -> a rule that is silent, or all of them where that is empty."""


@pytest.mark.parametrize("name", SILENT)
def test_silent(name: str) -> None:
    code, model, x = SILENT[name]
    found = codes(model, x)
    assert code not in found if code else found == set()


class TestPrecision:
    wide = WIDE

    def test_autocast_is_not_float32(self) -> None:
        def model(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.wide(x)

        x = torch.randn(64, 1024)
        assert {"OL603", "OL604"} <= codes(self.wide, x)
        assert not {"OL603", "OL604"} & codes(model, x)

    def test_most_in_half(self) -> None:
        half = copy.deepcopy(self.wide).bfloat16()
        x = torch.randn(64, 1024)

        def model(x: Tensor) -> Tensor:
            return half(self.wide[0](x).bfloat16())

        found = codes(model, x)
        assert "OL603" not in found
        assert "OL604" in found  # a third of it

    def test_tf32_of_convolutions(self) -> None:
        conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 56, 56)
        assert "OL604" not in codes(conv, x)
        torch.backends.cudnn.allow_tf32 = False
        (found,) = (f for f in slow(conv, x) if f.code == "OL604")
        assert found.fix == "torch.backends.cudnn.allow_tf32 = True"

    def test_the_setting_as_it_is_in_the_call(self) -> None:
        def model(x: Tensor) -> Tensor:
            torch.set_float32_matmul_precision("high")
            return self.wide(x)

        assert "OL604" not in codes(model, torch.randn(64, 1024))


class TestConvolutionSettings:
    def test_once_for_all(self) -> None:
        assert "`0` and `1`" in what("OL606", CONVOLUTIONS, IMAGE)
        assert "`0` and `1`" in what("OL605", CONVOLUTIONS, IMAGE)

    def test_silent_where_determinism_is_asked_for(self) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            assert "OL605" not in codes(CONVOLUTIONS, IMAGE)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("code", ["OL604", "OL605"])
def test_a_fix_that_is_pasted_is_all_that_it_takes(code: str, tmp_path: Path) -> None:
    model, args = program(BY_CODE[code].example, tmp_path)
    (found,) = (f for f in slow(model, *args) if f.code == code)
    exec(found.fix, {"torch": torch})
    assert code not in codes(model, *args)
