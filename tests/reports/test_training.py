"""Whole steps and loops: optimizers, scalers, schedules, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.device.drop_in import on_accelerators, on_cpu_and_cuda
from tests.device.steps import small_model

from .side_by_side import refused, side_by_side

Rand = Callable[..., Tensor]


def state_of(model: nn.Module) -> list[Any]:
    """Copies of parameters, buffers and gradients."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [[t.clone() for t in model.state_dict().values()], grads]


@on_accelerators  # `capturable` is refused by torch on a CPU
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_a_learning_rate_as_a_tensor(device: torch.device, rand: Rand, make: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/106802

    A learning rate as a tensor is read by the host at each step, and a number is frozen."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        lr = torch.tensor(0.1, device=device)
        optimizer = make(model.parameters(), lr=lr, capturable=True, foreach=True)

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(9):
            lr.fill_(0.1 / (1 + i))
            yield step(rand(i, 5, 4)), state_of(model)

    side_by_side(program, device, captures=1)


def test_a_schedule_of_a_number(device: torch.device, rand: Rand) -> None:
    """https://github.com/tracel-ai/burn/issues/5779

    A captured step trains on with the learning rate and the step count of its capture."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(12):
            yield step(rand(i, 5, 4)), state_of(model), optimizer.param_groups[0]["lr"]
            schedule.step()

    side_by_side(program, device)


def test_accumulation_in_a_loop(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/169545

    Gradients that are accumulated over calls of a reduce-overhead model: "overwritten"."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        model = nn.Linear(10, 1).to(device)
        fast = graph(model)
        for i in range(8):
            x = rand(i, 10).requires_grad_()
            loss = fast(x).clone().sum().clone()
            loss.backward()
            yield loss.detach(), x.grad, state_of(model)
            if i % 4 == 3:
                model.zero_grad(set_to_none=i == 3)

    side_by_side(program, device)


def test_micro_batches_inside_one_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/torchtitan/pull/4584

    Gradients of several micro-batches are to be accumulated within one graph."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @graph
        def step(batches: list[Tensor]) -> Tensor:
            optimizer.zero_grad()
            losses = []
            for x in batches:
                loss = model(x).square().mean() / len(batches)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            return torch.stack(losses)

        for i in range(8):
            yield step([rand(i + 20 * j, 5, 4) for j in range(3)]), state_of(model)

    side_by_side(program, device, captures=1)


def test_static_gradients_are_not_the_sum(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/181723

    `make_graphed_callables` hands out its own gradient buffers, and `.grad` is overwritten."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        for i in range(6):
            model.zero_grad()
            kept = []
            for j in range(3):
                fast(rand(10 * i + j, 5, 4)).square().sum().backward()
                kept.append([p.grad.clone() for p in model.parameters()])
            yield kept, state_of(model)

    side_by_side(program, device)


def test_gradients_that_stay_static(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/torchtitan/pull/4436

    A capture makes `.grad` in its pool; `zero_grad` of either kind comes between replays."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @graph
        def forward_backward(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        for i in range(16):
            yield forward_backward(rand(i, 5, 4)), state_of(model)
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=i < 8)

    side_by_side(program, device)


def test_a_scaler_around_the_step(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/55562

    `GradScaler.update` made its scale anew, which a captured backward does not see."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2)

        @graph
        def forward_backward(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            return loss.detach()

        for i in range(10):
            x = rand(i, 5, 4)
            if i == 6:
                x = x / 0  # an overflow: the step is left out, the scale halved
            yield forward_backward(x).isnan(), state_of(model)[0]
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale()

    side_by_side(program, device)


def test_clipping_without_a_sync(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/60691

    `clip_grad_norm_` branched on the norm, which a capture takes as it comes."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @graph
        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
            optimizer.step()
            return norm

        for i in range(8):
            yield step(rand(i, 5, 4) * (0.1 if i % 2 else 10)), state_of(model)

    side_by_side(program, device, captures=1)


def test_clipping_that_asks_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/61042

    `error_if_nonfinite=True` waits for the device, which a capture cannot."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)

        @graph
        def step(x: Tensor) -> Any:
            model.zero_grad()
            model(x).square().mean().backward()
            return nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

        for i in range(6):
            yield step(rand(i, 5, 4))

    refused(program, device, "OL101", "error_if_nonfinite=True")


def test_batches_tracked(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/70444

    BatchNorm replaced `num_batches_tracked` by a tensor of the graph: it stands still, or worse."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.num_batches_tracked = self.num_batches_tracked + 1
            return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)

    def program(graph: Any) -> Iterator[Any]:
        norm = Norm(4).to(device)
        fast = graph(norm)
        for i in range(12):
            norm.train(i % 5 != 4)
            yield fast(rand(i, 6, 4)).detach(), state_of(norm)
            if i == 8:
                norm(rand(99, 6, 4))  # in eager, between two replays

    side_by_side(program, device)


def test_statistics_after_a_warm_up(device: torch.device, rand: Rand) -> None:
    """https://github.com/LibreYOLO/libreyolo/pull/671

    Warm-up forwards of `make_graphed_callables` move BatchNorm's statistics on."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device, nn.BatchNorm1d(8))
        fast = graph(model)
        for i in range(7):
            model.zero_grad()
            fast(rand(i, 5 + i % 2, 4)).square().mean().backward()
            yield state_of(model)

    side_by_side(program, device)


def test_statistics_that_the_host_averages(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/70444

    Under `momentum=None` BatchNorm reads how many batches there were."""

    def program(graph: Any) -> Iterator[Any]:
        norm = nn.BatchNorm1d(4, momentum=None).to(device)
        fast = graph(norm)
        for i in range(6):
            yield fast(rand(i, 6, 4)).detach()  # here

    assert "momentum=0.1" in refused(program, device, "OL101", "# here")


def test_an_average_of_the_weights(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/94820

    `AveragedModel` branches on `n_averaged`, a tensor on the device."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @graph
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(7):
            loss = step(rand(i, 5, 4))
            average.update_parameters(model)
            yield loss, [t.clone() for t in average.state_dict().values()]

    side_by_side(program, device, captures=1)


def test_a_step_number_inside_the_loss(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/physicsnemo-sym/issues/279

    The weights of losses follow the step's number, an int, and stay at that of the capture."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

        @graph
        def step(x: Tensor, n: int) -> Tensor:
            optimizer.zero_grad()
            y = model(x)
            loss = y.square().mean() * (1.0 / (1 + n)) + y.abs().mean() * 0.99**n
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(14):
            yield step(rand(i, 5, 4), i), state_of(model)

    side_by_side(program, device, replayed=0)


def test_adam_that_counts_on_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/18501

    "Attempting CUDA graph capture of step() for an instance of AdamW but capturable is False"."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @graph
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for i in range(6):
            yield step(rand(i, 5, 4))

    message = refused(program, device, "OL120", "optimizer.step()")
    assert "capturable=True" in message


@on_cpu_and_cuda
def test_weights_of_bfloat16_and_fp32_masters(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3076

    The copy from master weights to the model is left out of the first replay: zero gradients."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).to(torch.bfloat16)
        masters = [p.detach().float().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)

        @graph
        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x.bfloat16()).float().square().mean()
            loss.backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)
            return loss.detach()

        for i in range(8):
            yield step(rand(i, 5, 4)), [m.clone() for m in masters], state_of(model)

    side_by_side(program, device)
