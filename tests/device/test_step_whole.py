"""What training steps hold besides: dropout, statistics, autocast, scalers, averages."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onelaunch as ol

from .drop_in import (
    allocated,
    assert_same,
    on_accelerators,
    on_cpu,
    on_cpu_and_cuda,
    on_cuda,
    replays,
)
from .steps import Training, as_eager, assert_same_training, batch, small_model, training

SGD = torch.optim.SGD


def sgd(params: Any) -> torch.optim.Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def fused(params: Any) -> torch.optim.Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, fused=True)


@on_cpu_and_cuda  # the emulated device has the host's random state, and kernels of its own for it
def test_dropout(device: torch.device) -> None:
    as_eager(lambda: training(device, sgd, nn.Dropout(0.3)), device)


@pytest.mark.parametrize("evaluates", [False, True])
def test_batch_norm(device: torch.device, evaluates: bool) -> None:
    def between(i: int, job: Training) -> None:
        if evaluates and i % 3 == 2:
            job.model.eval()
            with torch.no_grad():
                job.model(batch(i, device)[0])
            job.model.train()

    as_eager(lambda: training(device, sgd, nn.BatchNorm1d(8)), device, between=between)


def test_a_method_of_a_trainer(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = small_model(device)
            self.optimizer = sgd(self.model.parameters())
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            self.seen = 0

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        def epoch(self, step: Callable[..., Tensor]) -> list[Tensor]:
            losses = [step(*batch(i, device)).detach() for i in range(4)]
            self.scheduler.step()
            self.seen += 4
            return losses

    eager, trainer = Trainer(), Trainer()
    fast = ol.graph(trainer.step)
    for _ in range(6):
        assert_same(trainer.epoch(fast), eager.epoch(eager.step))
    assert_same(dict(trainer.model.state_dict()), dict(eager.model.state_dict()))
    assert replays(fast) == 21


@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
)
@on_cpu_and_cuda
def test_autocast_inside(device: torch.device, dtype: torch.dtype, cache: bool) -> None:
    def job() -> Training:
        made = training(device, sgd)
        optimizer = made.optimizers[0]

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, cache_enabled=cache):
                loss = nn.functional.mse_loss(made.model(x).float(), y)
                loss = loss + made.model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        made.step = step
        return made

    as_eager(job, device)


def scaled(device: torch.device, make: Callable[[Any], Any], clip: bool = False) -> Training:
    made = training(device, make)
    optimizer = made.optimizers[0]
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)
    made.others["scaler"] = scaler

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(made.model(x).float(), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss, scaler._scale

    made.step = step
    return made


@pytest.mark.parametrize("clip", [False, True])
@on_cpu_and_cuda
def test_a_scaler_with_a_fused_optimizer(device: torch.device, clip: bool) -> None:
    _, graphed = as_eager(lambda: scaled(device, fused, clip), device, calls=10)
    assert graphed.others["scaler"].get_scale() > 64


@on_cpu_and_cuda
def test_a_scaler_with_an_optimizer_that_reads_its_rate(device: torch.device) -> None:
    """So the capture takes several attempts."""

    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            math.sqrt(self.param_groups[0]["lr"])
            return super().step(closure)

    as_eager(lambda: scaled(device, lambda p: Reading(p, 0.1, 0.9, fused=True)), device)


@on_cpu_and_cuda
def test_a_scaler_that_finds_an_overflow(device: torch.device) -> None:
    def infinite(i: int, job: Training) -> None:
        with torch.no_grad():
            job.model[0].bias.data.mul_(float("inf") if i == 5 else 1.0)
            if i == 6:
                job.model[0].bias.fill_(0.5)

    as_eager(lambda: scaled(device, fused), device, calls=10, between=infinite)


@on_cpu_and_cuda
def test_a_scaler_with_another_optimizer_is_refused(device: torch.device) -> None:
    job = scaled(device, sgd)
    before = [p.detach().clone() for p in job.model.parameters()]
    with pytest.raises(ol.CaptureError, match=r"OL121.*SGD"):
        ol.graph(job.step)(*batch(0, device))
    assert_same([p.detach() for p in job.model.parameters()], before)


def test_an_average_of_the_weights(device: torch.device) -> None:
    def job() -> Training:
        made = averaged(device)
        average, inner = made.others["average"], made.step

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = inner(x, y)
            with torch.no_grad():
                pairs = zip(average.module.parameters(), made.model.parameters(), strict=True)
                for slow, quick in pairs:
                    slow.lerp_(quick, 0.1)
            return loss

        made.step = step
        return made

    eager, graphed = job(), job()
    fast = ol.graph(graphed.step)
    for i in range(7):
        assert_same(fast(*batch(i, device)), eager.step(*batch(i, device)))
        assert_same(graphed.others["average"], eager.others["average"])
    assert replays(fast) == 4


def test_averaged_model_outside(device: torch.device) -> None:
    jobs = [averaged(device) for _ in range(2)]
    fast = ol.graph(jobs[1].step)
    for i in range(7):
        assert_same(fast(*batch(i, device)), jobs[0].step(*batch(i, device)))
        for job in jobs:
            job.others["average"].update_parameters(job.model)
    assert_same(jobs[1].others["average"], jobs[0].others["average"])


def test_averaged_model_inside_is_refused(device: torch.device) -> None:
    """It counts in a tensor of the host, and asks whether that is zero."""
    job = averaged(device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = job.step(x, y)
        job.others["average"].update_parameters(job.model)
        return loss

    fast = ol.graph(step, warmup=1)
    for i in range(2):  # the first sets up what it averages, and the second is unlike it
        fast(*batch(i, device))
    with pytest.raises(ol.CaptureError, match=r"OL10[134]") as caught:
        fast(*batch(2, device))
    assert "update_parameters" in str(caught.value.where)


def averaged(device: torch.device) -> Training:
    made = training(device, sgd)
    made.others["average"] = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return made


class OwnSGD(torch.optim.SGD):
    """A class that is not torch's, whose capture takes two runs."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
@pytest.mark.parametrize("period", [2, 4])
def test_a_counter_that_decides_counts_each_call_once(
    device: torch.device, kind: type[torch.optim.SGD], period: int
) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = small_model(device)
            self.optimizer = kind(self.model.parameters(), lr=0.1)
            self.calls = 0

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.calls += 1
            if self.calls % period == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

    mine, theirs = Trainer(), Trainer()
    fast = ol.graph(mine.step, on_refusal="eager")
    with pytest.warns(ol.GraphWarning, match=r"OL118.*`self.calls`"):  # noqa: PT031  after eight
        for i in range(60):
            assert_same(fast(*batch(i, device)), theirs.step(*batch(i, device)))
            assert_same(list(mine.model.parameters()), list(theirs.model.parameters()))
            assert mine.calls == theirs.calls


def test_two_players(device: torch.device) -> None:
    """A generator and a discriminator, each with its optimizer, in one callable."""

    def job() -> Training:
        torch.manual_seed(2)
        maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        first = SGD(maker.parameters(), lr=0.05, momentum=0.5)
        second = SGD(judge.parameters(), lr=0.1)

        def step(z: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
            made = maker(z)
            second.zero_grad()
            judged = (judge(made.detach()).exp().mean() - judge(real).mean()).square()
            judged.backward()
            second.step()
            first.zero_grad()
            fooled = judge(made).square().mean()
            fooled.backward()
            first.step()
            return judged, fooled

        return Training(nn.ModuleList([maker, judge]), [first, second], step)

    def turn(i: int, job: Training) -> None:
        for optimizer in job.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.9

    as_eager(job, device, calls=9, between=turn)


def test_two_steps_in_one_call(device: torch.device) -> None:
    def job() -> Training:
        made = training(device, sgd)
        once = made.step
        made.step = lambda x, y: (once(x, y), once(x * 2, y))
        return made

    as_eager(job, device)


def test_two_networks_share_a_pool(device: torch.device) -> None:
    pool, replayed = ol.Pool(), list[int]()

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        jobs = [training(device, sgd) for _ in range(2)]
        steps = [wrap(job.step) for job in jobs]
        losses = [step(*batch(i, device)) for i in range(8) for step in steps]
        replayed.append(pool.stats().replays)
        return [*losses, *(dict(job.model.state_dict()) for job in jobs)]

    assert_same(trained(lambda step: ol.graph(step, pool=pool)), trained(lambda step: step))
    assert replayed[0] >= 10


def test_batch_sizes_that_change(device: torch.device) -> None:
    def turn(i: int, job: Training) -> None:
        job.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + i % 5)

    as_eager(
        lambda: training(device, sgd),
        device,
        calls=30,
        rows=lambda i: (5, 5, 3, 5, 7)[i % 5],
        between=turn,
        recordings=3,
        min_replays=15,
    )


def test_the_loss_is_read_with_one_sync_of_its_own(device: torch.device) -> None:
    job, eager = training(device, sgd), training(device, sgd)
    fast = ol.graph(job.step)
    for i in range(6):
        assert fast(*batch(i, device)).item() == eager.step(*batch(i, device)).item()
    assert replays(fast) == 3


def test_captured_ahead_after_one_real_step(device: torch.device) -> None:
    jobs = [training(device, sgd) for _ in range(2)]
    fast = ol.graph(jobs[1].step)
    with pytest.raises(ol.CaptureError, match="OL1"):
        fast.capture(*batch(0, device))  # the optimizer has no state yet
    for job in jobs:
        job.step(*batch(0, device))
    fast.capture(*batch(1, device))
    fast.capture(*batch(1, device, 7))
    assert_same_training(jobs[1], jobs[0], "after capturing ahead")
    for i in range(1, 7):
        rows = 5 if i % 2 else 7
        assert_same(fast(*batch(i, device, rows)), jobs[0].step(*batch(i, device, rows)))
        assert_same_training(jobs[1], jobs[0], f"call {i}")
    assert replays(fast) == 6


@pytest.mark.thorough
def test_many_steps_leave_no_memory_behind(device: torch.device) -> None:
    """The short form of the GPU's: batch sizes, learning rate and accumulation change."""

    def pair() -> tuple[Training, Callable[..., Any], Callable[..., Any]]:
        made = training(device, sgd)

        def accumulate(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(made.model(x), y)
            loss.backward()
            return loss

        def finish(x: Tensor, y: Tensor) -> Tensor:
            loss = accumulate(x, y)
            made.optimizers[0].step()
            made.optimizers[0].zero_grad()
            return loss

        return made, accumulate, finish

    (eager, *steps), (graphed, *others) = pair(), pair()
    fast = [ol.graph(f) for f in others]
    batches = {rows: batch(rows, device, rows) for rows in (3, 5, 6)}
    used: list[int] = []
    for i in range(360):
        which, rows = i % 3 == 2, (3, 5, 6)[i // 3 % 3]
        for job in (eager, graphed):
            job.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + i / 50)
        assert_same(fast[which](*batches[rows]), steps[which](*batches[rows]), f"call {i}")
        if i in (260, 359):
            gc.collect()
            used.append(allocated(device) + sum(f.memory_bytes for f in fast))
    assert_same_training(graphed, eager, "at the end")
    assert used[0] == used[1]
    assert replays(fast[0]) + replays(fast[1]) > 250


@on_accelerators
def test_a_fused_optimizer_that_is_not_marked_capturable(device: torch.device) -> None:
    """Torch refuses it under capture though its step is all on the device."""
    _, job = as_eager(
        lambda: training(device, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)), device
    )
    assert job.optimizers[0].param_groups[0]["capturable"] is False


@on_cpu
def test_compile_watches_an_optimizer_that_has_its_state(device: torch.device) -> None:
    """The first step makes the state, so it does not show what later ones read."""
    as_eager(lambda: training(device, sgd), device, compile=True, calls=9, min_replays=5)


KEPT: list[Tensor] = []


@on_cuda
def test_losses_kept_from_before_are_refused(device: torch.device) -> None:
    """Their graphs accumulate gradients on the stream where they were made."""
    made = training(device, lambda p: torch.optim.SGD(p, lr=0.1))
    KEPT.clear()
    for i in range(2):
        x, y = batch(i, device)
        loss = nn.functional.mse_loss(made.model(x), y)
        loss.backward(retain_graph=True)
        KEPT.append(loss)
    del loss
    fast = ol.graph(made.step)
    for i in range(3):
        fast(*batch(i, device))
    with pytest.raises(ol.CaptureError, match="OL109") as caught:
        fast(*batch(3, device))
    assert "keep `loss.detach()`" in caught.value.fix
    KEPT.clear()
    as_eager(lambda: training(device, lambda p: torch.optim.SGD(p, lr=0.1)), device)
