"""What people are told: the line, the cause and a way on."""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.call import ambient
from tests.device.drop_in import on_accelerators
from tests.device.steps import small_model

from .side_by_side import refused

Rand = Callable[..., Tensor]


def test_a_print_of_a_tensor(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/91302

    An assertion of the stream's status, of a line that printed or looked at a tensor."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            y = x * 2
            print(y)  # printed
            return y + 1

        fast = graph(forward)
        for i in range(6):
            yield fast(rand(i, 3))

    message = refused(program, device, "OL101", "# printed")
    assert "torch.where" not in message


def test_an_assertion_on_values(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/130071

    A check of values on the host within the captured region."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            assert (x < 100).all()  # checked
            return x + 1

        fast = graph(forward)
        for i in range(6):
            yield fast(rand(i, 3))

    message = refused(program, device, "OL101", "# checked")
    assert "torch.where" not in message


@pytest.mark.parametrize("by", ["logging", "statistics"])
def test_a_value_that_the_standard_library_reads(
    device: torch.device, rand: Rand, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/14213

    A loss that is logged in the step: which line read it?"""
    caplog.set_level(logging.INFO)

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            if by == "logging":
                logging.getLogger("reports").info("loss %s", x.sum())  # read
            else:
                statistics.fmean([x.sum(), x.mean()])  # read
            return x + 1

        fast = graph(forward)
        for i in range(6):
            yield fast(rand(i, 3))

    refused(program, device, "OL101", "# read")


def test_an_object_that_moves_on(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/physicsnemo-sym/issues/279

    A number that moves from call to call is to be named where it moves."""

    class Step:
        at: Any = None

        def __init__(self) -> None:
            self.table = [0.9, 0.8, 0.7] * 9

        def __call__(self, x: Tensor) -> Tensor:
            if self.at is None:
                self.at = 0
            y = x * self.table[self.at]
            self.at += 1  # moves
            return y

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(Step())
        for i in range(27):
            yield fast(rand(i, 3))

    refused(program, device, "OL118", "# moves")


def test_state_that_a_step_keeps(device: torch.device, rand: Rand) -> None:
    """https://github.com/fangwei123456/spikingjelly/issues/310

    A membrane potential with its graph stays in the module when the step is over."""

    class Neuron(nn.Module):
        v: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.v + x
            spike = torch.sigmoid(self.v)
            self.v = self.v * (1 - spike)  # kept
            return spike

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 3), Neuron()).to(device)

    @ol.graph
    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = net(x).sum()
        loss.backward()
        return loss.detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            step(rand(i, 2, 3))
            net[1].v = 0.0
    told = [str(w.message) for w in caught if isinstance(w.message, ol.GraphWarning)]
    assert step.stats().replays or ("`net.1.v`" in told[0] and "# kept" in told[0]), told


@pytest.mark.cpu
def test_complex_parameters(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/118018

    Which optimizers can be captured, and with which options, for which parameters."""

    def program(graph: Any) -> Iterator[Any]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat, device=device))
        optimizer = torch.optim.Adam([weight], lr=0.1)

        @graph
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).abs().square().sum().backward()
            optimizer.step()

        for i in range(7):
            yield step(rand(i, 3)), weight.detach().clone()

    message = refused(program, device, "OL120", "optimizer.step()")
    if device.type == "cpu":
        assert "fused" not in message  # torch has no such kernel


@on_accelerators
def test_a_learning_rate_of_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/106802

    A learning rate that is a tensor of the host, of an optimizer that can be captured."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        lr = torch.tensor(0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, capturable=True)

        @graph
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for i in range(7):
            lr.mul_(0.9)
            yield step(rand(i, 5, 4)), [p.detach().clone() for p in model.parameters()]

    message = refused(program, device, "OL123", "optimizer.step()")
    assert "`lr` of Adam" in message
    assert "ol.capturable(optimizer)" in message


def test_too_many_sizes(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/128424

    One recording after another for sizes in random order: what helps?"""
    fast = ol.graph(lambda x: x * 2, max_recordings=4, warmup=1)

    def calls() -> None:
        for i in range(40):
            fast(rand(i, 1 + (i * 7) % 11))

    with pytest.warns(ol.GraphWarning, match=r"(?s)OL301.*[Bb]uckets"):
        calls()


def test_all_sizes_ahead_without_buckets(device: torch.device, rand: Rand) -> None:
    """https://github.com/InternLM/lmdeploy/pull/3851

    All sizes are to be captured ahead, of a callable that was given no buckets."""
    fast: Any = ol.graph(small_model(device))
    fast.warm_up([rand(0, rows, 4) for rows in (1, 3, 5)])
    for rows in (1, 3, 5):
        fast(rand(0, rows, 4))
    assert (fast.stats().replays, fast.stats().warmup_calls) == (3, 0)


def test_compiling_what_is_graphed(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/axonn-ai/yalis/issues/93

    `torch.compile` around a callable that is a graph already."""
    monkeypatch.setattr(ambient, "_told", set())  # each name is told of once in a process
    fast = ol.graph(small_model(device).eval())
    compiled: Any = torch.compile(fast, backend="eager")

    def calls() -> None:
        for i in range(6):
            compiled(rand(i, 5, 4))

    told = r"(?s)OL313.*`Sequential` is graphed.*compiled\(rand\(i, 5, 4\)\).*compile=True"
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match=told):
        calls()


def test_the_loss_is_shown(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/61880

    The loss of a captured step is printed after a replay: its value, and that it has a graph, which
    the backward in the step used up (docs/limits.md)."""
    model = small_model(device)

    @ol.graph
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for i in range(6):
        with torch.no_grad():
            expected = model(rand(i, 5, 4)).square().mean()
        loss = step(rand(i, 5, 4))
    assert repr(loss.detach()) == repr(expected)
    assert loss.grad_fn is not None


def test_a_norm_in_training_mode_and_padding(device: torch.device, rand: Rand) -> None:
    """https://github.com/LibreYOLO/libreyolo/pull/671

    Statistics over a padded batch: evaluation mode was meant."""
    fast = ol.graph(nn.BatchNorm1d(4).to(device), buckets=ol.Buckets(dim=0, sizes=(4, 8)))

    def calls() -> None:
        for i, n in enumerate((3, 5, 2, 7, 3, 5, 6, 7)):
            fast(rand(i, n, 4))

    with torch.no_grad(), pytest.raises(ol.CaptureError, match=r"(?s)OL140.*\.eval\(\)"):
        calls()


def test_an_argument_that_is_made_a_leaf(device: torch.device, rand: Rand) -> None:
    """https://github.com/openmm/openmm-torch/pull/120

    Gradients of an argument, which a step asks for itself: at which line?"""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            x.requires_grad_()  # asked
            loss = model(x).square().mean()
            loss.backward()  # run
            return loss.detach()

        for i in range(6):
            yield step(rand(i, 5, 4))

    message = refused(program, device, "OL115", "# run")
    assert "`args[0]`" in message
