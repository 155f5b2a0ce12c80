"""What a callable reads and changes behind its arguments, in Python."""

from __future__ import annotations

import contextvars
import enum
import functools
import math
import os
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import onelaunch as ol
from tests.device.drop_in import assert_same
from tests.device.steps import small_model

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def test_layers_that_are_dropped_at_random(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/84614

    Random numbers of a capture are drawn once: here Python's, which drop layers."""

    def program(graph: Any) -> Iterator[Any]:
        layers, draw = [nn.Tanh(), nn.Sigmoid(), nn.ReLU()], random.Random(5).random

        def forward(x: Tensor) -> Tensor:
            for layer in layers:
                if draw() < 0.6:
                    x = layer(x)
            return x

        fast = graph(forward)
        for i in range(20):
            yield fast(rand(i, 3))

    right_or_refused(program, device, "OL117")


def test_a_callback_of_a_bound_c_method(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/2831

    Host state is consulted by a stored method of a dict, a list or a context variable."""

    def program(graph: Any) -> Iterator[Any]:
        table, order = {"scale": 2.0}, [0.5, 3.0]
        var = contextvars.ContextVar("var", default=1.0)
        scale, nth, current = table.get, order.__getitem__, var.get

        fast = graph(lambda x: x * scale("scale") + nth(0) * current())
        for i in range(16):
            yield fast(rand(i, 3))
            if i == 5:
                table["scale"] = 3.0
            if i == 8:
                order[0] = 4.0
            if i == 11:
                var.set(2.0)

    side_by_side(program, device)


@pytest.mark.parametrize("way", ["vars", "dict", "get", "getattr"])
def test_a_flag_by_the_dict_of_a_module(device: torch.device, rand: Rand, way: str) -> None:
    """https://github.com/pytorch/pytorch/issues/156377

    Configuration that a model reads from `__dict__`, and that a user sets between requests."""

    class Net(nn.Module):
        alpha: float

        def forward(self, x: Tensor) -> Tensor:
            match way:
                case "vars":
                    return x * vars(self)["alpha"]
                case "dict":
                    d = self.__dict__
                    return x * d["alpha"]
                case "get":
                    return x * self.__dict__.get("alpha", 0.0)
                case _:
                    return x * getattr(self, "al" + "pha")

    def program(graph: Any) -> Iterator[Any]:
        net = Net()
        net.alpha = 1.5
        fast = graph(net)
        for i in range(12):
            if i in (5, 8):
                net.alpha = float(i)
            yield fast(rand(i, 3))

    side_by_side(program, device)


def test_an_environment_variable(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/vllm-project/vllm/pull/23595

    A switch of the environment that is read in the model, and changes in the process."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            if os.environ["REPORTS_NEGATE"] == "1":
                x = -x
            return x * float(os.getenv("REPORTS_SCALE", "1"))

        fast = graph(forward)
        for i in range(12):
            monkeypatch.setenv("REPORTS_NEGATE", str(int(i > 5)))
            monkeypatch.setenv("REPORTS_SCALE", str(1 + int(i > 8)))
            yield fast(rand(i, 3))

    side_by_side(program, device)


def test_a_module_that_is_imported_inside(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/chengzeyi/stable-fast/issues/84

    Functions of a pipeline are swapped for others, "hacked", below a captured model."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            import reports_hacked  # type: ignore[import-not-found]

            return reports_hacked.scale * x

        fast = graph(forward)
        for i in range(9):
            if i in (0, 5):
                made: Any = types.ModuleType("reports_hacked")
                made.scale = float(i + 1)
            monkeypatch.setitem(sys.modules, "reports_hacked", made)
            yield fast(rand(i, 3))

    side_by_side(program, device)


def test_a_member_of_an_enum(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang/pull/30752

    The mode of a forward as an enum, of an object that each batch makes anew."""

    class Mode(enum.Enum):
        PREFILL = 1.0
        DECODE = 2.0

    class Batch:
        def __init__(self, x: Tensor, mode: Mode) -> None:
            self.x, self.mode = x, mode

    def program(graph: Any) -> Iterator[Any]:
        def forward(batch: Batch) -> Tensor:
            y = batch.x * batch.mode.value
            return y.cumsum(0) if batch.mode is Mode.DECODE else y

        fast = graph(forward)
        for i in range(14):
            yield fast(Batch(rand(i, 3), Mode.PREFILL if i % 5 == 0 else Mode.DECODE))

    side_by_side(program, device)


def test_a_counter_that_chooses_a_buffer(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/2715

    The first of several micro-batches takes another way, which a flag of the module says."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_first_microbatch = True
            torch.manual_seed(3)
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("cast", torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            if self.is_first_microbatch:
                self.cast.copy_(self.weight.round(decimals=1))
                self.is_first_microbatch = False
            return x @ self.cast

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        layer = Layer().to(device)
        fast = graph(layer)
        for i in range(18):
            if i % 3 == 0:
                layer.is_first_microbatch = True
                layer.weight.mul_(1.1)
            yield fast(rand(i, 2, 4)), layer.is_first_microbatch, layer.cast.clone()

    side_by_side(program, device)


def test_state_that_a_module_keeps_through_training(device: torch.device, rand: Rand) -> None:
    """https://github.com/fangwei123456/spikingjelly/issues/594

    A membrane potential that is a number at first, and reset after each sequence."""

    class Neuron(nn.Module):
        v: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.v + (x - self.v) / 2
            spike = torch.sigmoid(4 * (self.v - 1))
            self.v = self.v * (1 - spike)
            return spike

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), Neuron()).to(device)

        @graph
        def sequence(x: Tensor) -> Tensor:
            net.zero_grad()
            loss = sum(net(row).square().mean() for row in x)
            loss.backward()
            net[1].v = 0.0
            return loss.detach()

        for i in range(9):
            yield sequence(rand(i, 4, 2, 3)), [p.grad.clone() for p in net.parameters()]

    side_by_side(program, device)


def test_a_parametrization_that_is_cached(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/118742

    Parametrized weights, computed once for several calls within `parametrize.cached()`. Its cache
    is another dict in each block, which the first call fills."""

    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w + w.T

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        cell = nn.Linear(6, 6)
        parametrize.register_parametrization(cell, "weight", Symmetric())
        cell.to(device)
        fast = graph(lambda x: cell(cell(x)))
        for i in range(20):
            with parametrize.cached():
                y = fast(rand(i, 2, 6))
                y.sum().backward()
            yield y.detach(), cell.parametrizations.weight.original.grad.clone()

    side_by_side(program, device, captures=2)


@pytest.mark.parametrize("old", [False, True])
def test_weight_norm(device: torch.device, rand: Rand, old: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/121902

    `weight_norm` of either kind, whose weight is made anew in each forward."""
    import warnings

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        conv = nn.Conv1d(3, 4, 3).to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrap = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
            conv = wrap(conv)
        fast = graph(nn.Sequential(conv, nn.Tanh()))
        optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
        for i in range(7):
            optimizer.zero_grad()
            fast(rand(i, 2, 3, 8)).square().mean().backward()
            optimizer.step()
            yield [p.detach().clone() for p in conv.parameters()]

    side_by_side(program, device)


def test_spectral_norm_in_training(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/6929

    A power iteration in each forward, in place, and none in evaluation."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).to(device)
        fast = graph(net)
        for i in range(14):
            net.train(i % 4 != 3)
            net.zero_grad()
            y = fast(rand(i, 2, 4))
            y.sum().backward()
            yield y.detach(), [t.clone() for t in net.state_dict().values()]

    side_by_side(program, device)


def test_containers_that_change_below(device: torch.device, rand: Rand) -> None:
    """https://github.com/LibreYOLO/libreyolo/pull/645

    The head of a model is rebuilt after the capture, which goes on with the old one."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2))).to(device)
        queue = deque([0.5, 2.0], maxlen=2)
        extra: Any = defaultdict(float, shift=1.0)
        fast = graph(lambda x: net(x) * queue[0] + extra["shift"])
        for i in range(22):
            if i == 5:
                net.head = nn.Linear(4, 3).to(device)
            elif i == 10:
                queue.append(4.0)
            elif i == 15:
                extra["shift"] = -1.0
            elif i == 19:
                net.append(nn.ReLU())
            yield fast(rand(i, 2, 4)).detach()

    side_by_side(program, device)


def test_a_memo_of_frequencies(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/91302

    Timestep embeddings make a table on the host at each call, by `math` and `torch.arange`."""

    @functools.lru_cache(maxsize=4)
    def frequencies(n: int, period: float) -> Tensor:
        steps = torch.arange(n, dtype=torch.float32)
        return torch.exp(-math.log(period) * steps / n).to(device)

    def program(graph: Any) -> Iterator[Any]:
        def embed(t: Tensor, n: int) -> Tensor:
            angles = t[:, None].float() * frequencies(n, 10000.0)[None]
            return torch.cat([angles.cos(), angles.sin()], -1)

        fast = graph(embed)
        for i in range(12):
            yield fast(torch.tensor([i, i + 7], device=device), 4 if i % 2 else 6)

    side_by_side(program, device)


def test_evaluation_and_training_by_turns(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/63269

    One module of several is in another mode than when they were graphed."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device, nn.BatchNorm1d(8), nn.Linear(8, 8))
        fast = graph(model)
        for i in range(20):
            model.train()
            model[2].train(i % 3 != 1)
            yield fast(rand(i, 5, 4)).detach(), model[2].running_mean.clone()

    side_by_side(program, device)


def test_a_weight_written_through_data(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/183313

    A convolution whose weight is changed through `.data` inside of forward."""

    class Clipped(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data.clamp(-0.1, 0.1) * 1.01
            return F.conv2d(x, self.weight, self.bias)

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = Clipped(2, 3, 3).to(device)
        fast = graph(net)
        for i in range(8):
            yield fast(rand(i, 1, 2, 6, 6)), net.weight.clone()

    assert "copy_" in refused(program, device, "OL105", "self.weight.data = ")


def test_a_count_in_steps_of_two(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/candle/pull/3729

    A position that moves on by more than one, and is read by the step."""

    def program(graph: Any) -> Iterator[Any]:
        state = types.SimpleNamespace(n=0)

        def forward(x: Tensor) -> Tensor:
            y = x + state.n
            state.n += 2
            return y

        fast = graph(forward)
        for i in range(20):
            yield fast(rand(i, 3)), state.n

    side_by_side(program, device, captures=4)


def test_a_module_with_names_of_ours(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/tensordict/pull/1346

    A wrapper hides what the module has of the same name, as `state_dict`."""

    class Tracker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stats", torch.zeros(3))
            self.resets = 0

        def reset(self) -> str:
            self.resets += 1
            return "the module's own"

        def forward(self, x: Tensor) -> Tensor:
            self.stats.add_(x)
            return self.stats * 2

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        tracker = Tracker().to(device)
        fast = graph(tracker)
        for i in range(7):
            yield fast(rand(i, 3)), fast.stats.clone(), fast.reset(), tracker.resets

    eager = list(program(lambda fn, **_: fn))
    got = list(program(lambda fn, **_: ol.graph(fn)))
    assert_same(got, eager)
