"""Numbers in `param_groups`, changed between calls: as eager, by the same recording."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import onelaunch as ol

from .drop_in import Runs, assert_same, refused, replays
from .steps import Training, as_eager, batch, own, training

O = torch.optim  # noqa: E741
Make = Callable[[Any], Optimizer]
Turn = Callable[[int, Training], None]

MAKES: dict[str, Make] = {
    "SGD": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": lambda p: ol.capturable(O.Adam(p, lr=0.01, weight_decay=0.01)),
    "AdamW": lambda p: ol.capturable(O.AdamW(p, lr=0.01, amsgrad=True)),
    "Adam fused": lambda p: O.Adam(p, lr=0.01, fused=True),
    "Adagrad": lambda p: ol.capturable(O.Adagrad(p, lr=0.05, lr_decay=0.01)),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "warm-up, then exponential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


def scheduled(
    device: torch.device, make: Make, schedule: Callable[[Optimizer], Any]
) -> Callable[[], Training]:
    def job() -> Training:
        made = training(device, make)
        made.others["scheduler"] = schedule(made.optimizers[0])
        return made

    return job


def advance(i: int, job: Training) -> None:
    if i:
        job.others["scheduler"].step()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_scheduler_makes_no_recordings(device: torch.device, name: str, optimizer: str) -> None:
    job = scheduled(device, MAKES[optimizer], SCHEDULERS[name])
    fast, graphed = as_eager(job, device, calls=14, between=advance)
    assert all(type(group["lr"]) is float for group in graphed.optimizers[0].param_groups)
    assert fast.recordings[0].replays == 11


@pytest.mark.parametrize("name", list(MAKES))
def test_every_number_by_hand(device: torch.device, name: str) -> None:
    def turn(i: int, job: Training) -> None:
        for group in job.optimizers[0].param_groups:
            for key, value in list(group.items()):
                if type(value) is float and value:
                    group[key] = value * (0.9 + 0.01 * (i % 7))
                elif key == "betas":
                    group[key] = (0.9 - 0.01 * i, 0.99 + 0.0005 * i)

    if name == "Adagrad" and device.type == "cuda":  # torch has no step for it that counts there
        with pytest.raises(ol.CaptureError, match="OL120"):
            training(device, MAKES[name])
        return
    as_eager(lambda: training(device, MAKES[name]), device, calls=12, between=turn)


@torch.library.custom_op("onelaunch_tests::descend", mutates_args=("p",))
def descend(p: Tensor, g: Tensor, rate: float) -> None:
    p.sub_(g, alpha=rate)


def by_an_operation(self: Any, group: Any, p: Any) -> None:
    torch.ops.onelaunch_tests.descend(p, p.grad, 2 * group["lr"])


def decayed(self: Any, group: Any, p: Any) -> None:
    rate = group["lr"] * numpy.float64(0.7)
    p.mul_(1 - group["lr"] * group["decay"]).sub_(p.grad, alpha=rate)


def asking(self: Any, group: Any, p: Any) -> None:
    rate = group["lr"]
    p.sub_(p.grad, alpha=rate if isinstance(rate, float) else -0.5 * rate)


def rooted(self: Any, group: Any, p: Any) -> None:
    p.sub_(p.grad, alpha=math.sqrt(group["lr"]))
    p.mul_(1 - group["decay"])


ROOTED = own(rooted, lr=0.01, decay=0.001)
MAKES["decayed"] = own(decayed, lr=0.1, decay=0.013)


def of_two_groups(params: Any) -> Optimizer:
    first, *rest = params
    groups = [{"params": [first], "lr": 0.2}, {"params": rest, "weight_decay": 0.1}]
    return O.SGD(groups, lr=0.1, momentum=0.9)


def at(**numbers: Callable[[int], Any]) -> Turn:
    """Numbers of the first group at each call."""

    def turn(i: int, job: Training) -> None:
        for name, value in numbers.items():
            job.optimizers[0].param_groups[0][name] = value(i)

    return turn


def falling(i: int) -> float:
    return 0.1 / (1 + i)


def one_group_each(i: int, job: Training) -> None:
    job.optimizers[0].param_groups[i % 2]["lr"] *= 0.8


RISING = at(lr=lambda i: max(0.0, (i - 6) / 100))
TURNED: dict[str, tuple[Make, Turn]] = {
    "groups of their own": (of_two_groups, one_group_each),
    "zero and back": (MAKES["SGD"], at(lr=lambda i: 0.0 if i in (5, 6) else 0.1)),
    "zero at first, SGD": (MAKES["SGD"], RISING),
    "zero at first, Adam": (MAKES["Adam"], RISING),
    "zero at first, fused": (MAKES["Adam fused"], RISING),
    "integer, infinite": (MAKES["SGD"], at(lr=lambda i: {5: 1, 11: math.inf}.get(i, 0.1))),
    "for an operation of one's own": (
        own(by_an_operation, lr=0.1),
        at(lr=lambda i: 0.0 if i == 9 else falling(i)),
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_number_that_is_turned(device: torch.device, name: str) -> None:
    make, turn = TURNED[name]
    as_eager(lambda: training(device, make), device, calls=12, between=turn)


RECORDED_ANEW: dict[str, tuple[Make, Turn]] = {
    "is asked for its class": (own(asking, lr=0.1), at(lr=lambda i: 1 if i >= 6 else falling(i))),
    "decides what runs": (MAKES["SGD"], at(weight_decay=lambda i: 0.0 if i >= 6 else 0.01)),
    "is a flag": (MAKES["SGD"], at(maximize=lambda i: i >= 6)),
    "cannot be followed": (
        ROOTED,
        at(decay=lambda i: 0.001 * (i + 1), lr=lambda i: 0.02 if i >= 7 else 0.01),
    ),
}


@pytest.mark.parametrize("name", RECORDED_ANEW)
def test_a_number_that_makes_another_recording(device: torch.device, name: str) -> None:
    make, turn = RECORDED_ANEW[name]
    job = functools.partial(training, device, make)
    fast, _ = as_eager(job, device, calls=14, between=turn, recordings=2, min_replays=7)
    assert "an optimizer's numbers" in fast.recordings[0].why or name != "decides what runs"


def wrapped(
    device: torch.device, make: Make, wrap: Callable[[Training], Callable[..., Any]]
) -> Callable[[], Training]:
    """A job whose step is made of the standard one."""

    def job() -> Training:
        made = training(device, make)
        made.step = wrap(made)
        return made

    return job


def test_gradients_that_are_dropped_after_the_step(device: torch.device) -> None:
    def wrap(made: Training) -> Callable[..., Any]:
        inner = made.step

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = inner(x, y)
            made.optimizers[0].zero_grad()
            return loss

        return step

    as_eager(wrapped(device, MAKES["Adam"], wrap), device, calls=10, between=at(lr=falling))


def test_a_parameter_without_elements(device: torch.device) -> None:
    def wrap(made: Training) -> Callable[..., Any]:
        none, inner = nn.Parameter(torch.zeros(0, device=device)), made.step
        none.grad = torch.zeros_like(none)
        made.optimizers[0].add_param_group({"params": [none]})

        def step(x: Tensor, y: Tensor) -> Tensor:
            none.grad = torch.zeros_like(none)
            return inner(x, y)

        return step

    def turn(i: int, job: Training) -> None:
        for group in job.optimizers[0].param_groups:
            group["lr"] = falling(i)

    job = wrapped(device, lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=False), wrap)
    as_eager(job, device, calls=10, between=turn)


def test_a_rate_that_the_callable_returns(device: torch.device) -> None:
    """The callable's own code reads it, so it is a constant of the recording."""

    def wrap(made: Training) -> Callable[..., Any]:
        inner, optimizer = made.step, made.optimizers[0]
        return lambda x, y: (inner(x, y), optimizer.param_groups[0]["lr"])

    turn = at(lr=lambda i: 0.05 if i >= 6 else 0.1)
    job = wrapped(device, MAKES["SGD"], wrap)
    as_eager(job, device, calls=14, between=turn, recordings=2, min_replays=7)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_rate_whose_reciprocal_is_no_float(device: torch.device, foreach: bool) -> None:
    """On CUDA `torch._foreach_div_` refuses it, for it multiplies by the reciprocal."""

    def make(params: Any) -> Optimizer:
        return ol.capturable(O.Adam(params, lr=0.1, foreach=foreach))

    eager, graphed = training(device, make), training(device, make)
    fast = ol.graph(graphed.step)
    for i in range(12):
        outcomes: list[Any] = []
        for job, step in ((eager, eager.step), (graphed, fast)):
            job.optimizers[0].param_groups[0]["lr"] = 1e-40 if i == 8 else 0.1 / (1 + i)
            try:
                outcomes.append(step(*batch(i, device)))
            except RuntimeError as error:
                outcomes.append(str(error).splitlines()[0])
        assert type(outcomes[0]) is type(outcomes[1]), outcomes
        if isinstance(outcomes[0], str):
            return  # the step ended in the middle
        assert_same(outcomes[1], outcomes[0], f"call {i}")
    assert replays(fast) >= 7


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adam fused", "decayed"])
def test_numbers_of_numpy(device: torch.device, optimizer: str, kind: type[Any]) -> None:
    """Schedules are often arrays. What a step computes with a float32 is a float32."""
    rates = (0.1 * numpy.cos(numpy.linspace(0, 1.5, 12))).astype(kind)

    def turn(i: int, job: Training) -> None:
        for group in job.optimizers[0].param_groups:
            group["lr"] = rates[i]
            if "betas" in group:
                group["betas"] = (kind(0.9 - 0.01 * i), kind(0.99))

    job = functools.partial(training, device, MAKES[optimizer])
    as_eager(job, device, calls=12, between=turn, min_replays=7)


def test_a_number_of_another_precision(device: torch.device) -> None:
    """As large as the one before, and another number once something is computed with it."""
    turn = at(lr=lambda i: (float, numpy.float32, numpy.float64, int)[i % 4](1))
    job = functools.partial(training, device, MAKES["decayed"])
    as_eager(job, device, calls=12, between=turn, min_replays=7)


@pytest.mark.cpu
def test_a_tensor_learning_rate_is_read_where_it_is(device: torch.device) -> None:
    def make(params: Any) -> Optimizer:
        lr = torch.tensor(0.01, device=device)
        if device.type == "cpu":
            return O.Adam(params, lr=lr, fused=True)
        return O.Adam(params, lr=lr, capturable=True)

    def turn(i: int, job: Training) -> None:
        job.optimizers[0].param_groups[0]["lr"].fill_(0.01 / (i + 1))

    as_eager(lambda: training(device, make), device, between=turn)


def test_one_that_changes_at_every_call_is_refused_by_name(device: torch.device) -> None:
    job, eager = (training(device, ROOTED) for _ in range(2))
    fast = ol.graph(job.step)

    def call(i: int) -> None:
        for one in (eager, job):
            one.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + max(0, i - 5))
        assert_same(fast(*batch(i, device)), eager.step(*batch(i, device)))

    for i in range(7):  # the last of them runs eagerly, for its new number
        call(i)
    assert replays(fast) == 3
    with pytest.raises(ol.CaptureError, match=r"OL123.*`lr` of Own"):
        call(7)


def test_a_rate_that_is_asked_of_a_schedule_is_as_it_says(device: torch.device) -> None:
    """The callable's own line reads it, and the schedule makes a list of its own for each call."""

    def job() -> tuple[Any, lr_scheduler.LRScheduler]:
        made = training(device, MAKES["SGD"])
        schedule = lr_scheduler.StepLR(made.optimizers[0], 6)

        def step(x: Tensor, y: Tensor) -> Tensor:
            made.optimizers[0].zero_grad()
            loss = nn.functional.mse_loss(made.model(x), y) * schedule.get_last_lr()[0]
            loss.backward()
            made.optimizers[0].step()
            return loss.detach()

        return step, schedule

    (mine, schedule), (theirs, other) = job(), job()
    fast = ol.graph(mine)
    for i in range(17):
        assert_same(fast(*batch(i, device)), theirs(*batch(i, device)))
        schedule.step()
        other.step()
    assert fast.recordings


@pytest.mark.parametrize("every", [1, 100])
def test_a_schedule_inside_is_refused(device: torch.device, every: int) -> None:
    job = training(device, MAKES["SGD"])
    scheduler = lr_scheduler.StepLR(job.optimizers[0], every)
    inner = job.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        scheduler.step()
        return loss

    fast = ol.graph(step, warmup=1)
    refused(fast, *batch(0, device), match=r"OL122.*StepLR")


@pytest.mark.parametrize("half", [0.5, numpy.float64(0.5), numpy.float32(0.5)])
def test_a_rate_set_inside_is_refused(device: torch.device, half: Any) -> None:
    job = training(device, MAKES["SGD"])
    inner = job.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        job.optimizers[0].param_groups[0]["lr"] *= half
        return loss

    fast = ol.graph(step, warmup=1)
    refused(fast, *batch(0, device), match=r"OL122.*`lr` of SGD")


def test_state_dict_loaded_between(device: torch.device) -> None:
    """New state tensors and new groups: recorded again, and right."""
    saved: dict[int, Any] = {}

    def reload(i: int, job: Training) -> None:
        optimizer = job.optimizers[0]
        if i == 4:
            saved[id(job)] = copy.deepcopy(optimizer.state_dict())
        if i == 7:
            optimizer.load_state_dict(saved[id(job)])

    job = functools.partial(training, device, MAKES["Adam"])
    as_eager(job, device, calls=14, between=reload, recordings=None, min_replays=6)


@pytest.mark.cpu
def test_rprop_under_a_schedule(device: torch.device) -> None:
    """On a CPU it assigns its factors to elements, and no recording follows those."""
    job = scheduled(
        device,
        lambda p: O.Rprop(p, lr=0.01, capturable=device.type != "cpu"),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    )
    as_eager(job, device, calls=14, between=advance)


def test_a_group_added_between(device: torch.device) -> None:
    def job() -> Training:
        made = training(device, lambda p: O.SGD(list(p)[:2], lr=0.1, momentum=0.9))
        made.others["rest"] = list(made.model.parameters())[2:]
        return made

    def unfreeze(i: int, job: Training) -> None:
        if i == 6:
            job.optimizers[0].add_param_group({"params": job.others["rest"], "lr": 0.01})
        job.optimizers[0].param_groups[-1]["lr"] *= 0.9

    as_eager(job, device, calls=14, between=unfreeze, recordings=None, min_replays=6)


def test_the_callables_own_numbers_stay_floats(device: torch.device) -> None:
    """What the callable sees of the groups in the capture is what is there."""
    first: list[Any] = []
    runs = Runs()
    job = training(device, MAKES["SGD"])
    inner, optimizer = job.step, job.optimizers[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        runs.add()
        kinds = [type(v) for v in optimizer.param_groups[0].values()]
        assert kinds[:2] == [list, float]
        assert kinds == first
        return loss

    first += [type(v) for v in optimizer.param_groups[0].values()]
    fast = ol.graph(step)
    for i in range(6):
        fast(*batch(i, device))
    assert runs.count == 4


def test_a_learning_rate_that_the_step_returns_is_named(
    device: torch.device, rand: Callable[..., Tensor]
) -> None:
    """It is a number of the callable's then, and not of the step's alone."""
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    @ol.graph(capturable=True)
    def step(x: Tensor) -> dict[str, object]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "lr": optimizer.param_groups[0]["lr"]}

    def train() -> None:
        for i in range(8):
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
            assert step(rand(i, 3, 4))["lr"] == 0.01 / (i + 1)

    with pytest.raises(ol.CaptureError, match=r"OL123.*`lr` of Adam changes") as caught:
        train()
    assert "return {" in str(caught.value)
    assert "read it after the call" in str(caught.value)
