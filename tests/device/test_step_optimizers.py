"""Every optimizer of torch in a whole step: recorded, or refused before it steps."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onelaunch as ol

from .drop_in import assert_same, compare, on_accelerators
from .steps import Training, as_eager, batch, own, small_model, training, training_of

Make = Callable[[Any], Optimizer]
O = torch.optim  # noqa: E741

EVERYWHERE: dict[str, Make] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD maximize": lambda p: O.SGD(p, lr=0.1, maximize=True),
    "SGD foreach": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD for loop": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": lambda p: O.Adam(p, lr=0.01, fused=True),
    "Adam fused amsgrad": lambda p: O.Adam(p, lr=0.01, fused=True, amsgrad=True, maximize=True),
    "AdamW fused": lambda p: O.AdamW(p, lr=0.01, fused=True),
}
"""Captured as they are, on every device."""

CAPTURABLE: dict[str, Make] = {
    "Adadelta": lambda p: O.Adadelta(p, capturable=True, weight_decay=0.01),
    "Adadelta for loop": lambda p: O.Adadelta(p, capturable=True, foreach=False),
    "Adam": lambda p: O.Adam(p, lr=0.01, capturable=True),
    "Adam for loop": lambda p: O.Adam(p, lr=0.01, capturable=True, foreach=False),
    "Adam amsgrad": lambda p: O.Adam(p, capturable=True, amsgrad=True, weight_decay=0.01),
    "Adam maximize": lambda p: O.Adam(p, capturable=True, maximize=True),
    "AdamW": lambda p: O.AdamW(p, lr=0.01, capturable=True),
    "AdamW for loop": lambda p: O.AdamW(p, lr=0.01, capturable=True, foreach=False),
    "AdamW foreach": lambda p: O.AdamW(p, lr=0.01, capturable=True, foreach=True, amsgrad=True),
    "Adamax": lambda p: O.Adamax(p, capturable=True, weight_decay=0.01),
    "Adamax foreach": lambda p: O.Adamax(p, capturable=True, foreach=True),
    "ASGD": lambda p: O.ASGD(p, capturable=True),
    "ASGD foreach": lambda p: O.ASGD(p, capturable=True, foreach=True, weight_decay=0.01),
    "NAdam": lambda p: O.NAdam(p, capturable=True, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": lambda p: O.NAdam(p, capturable=True, foreach=True),
    "RAdam": lambda p: O.RAdam(p, capturable=True, weight_decay=0.01),
    "RAdam foreach": lambda p: O.RAdam(p, capturable=True, foreach=True),
    "RMSprop": lambda p: O.RMSprop(p, capturable=True, momentum=0.9, centered=True),
    "RMSprop for loop": lambda p: O.RMSprop(p, capturable=True, foreach=False, weight_decay=0.01),
    "Rprop": lambda p: O.Rprop(p, capturable=True),
    "Rprop foreach": lambda p: O.Rprop(p, capturable=True, foreach=True, maximize=True),
}
"""Captured with the option that they need."""

COUNTS_ON_THE_HOST: dict[str, Make] = {
    "Adagrad": lambda p: O.Adagrad(p),
    "Adam": lambda p: O.Adam(p),
    "AdamW": lambda p: O.AdamW(p),
    "Adamax": lambda p: O.Adamax(p),
    "ASGD": lambda p: O.ASGD(p),
    "NAdam": lambda p: O.NAdam(p),
    "RAdam": lambda p: O.RAdam(p),
}
"""Refused as they are, on every device."""

COUNTS_BESIDE: dict[str, Make] = {
    "Adadelta": lambda p: O.Adadelta(p),
    "RMSprop": lambda p: O.RMSprop(p),
    "Rprop": lambda p: O.Rprop(p),
}
"""They count on the host and never read it: refused on an accelerator, and fine on a CPU."""

NEVER: dict[str, Make] = {
    "Adafactor": lambda p: O.Adafactor(p),
    "SparseAdam": lambda p: O.SparseAdam(list(p)),
}


def test_the_table_has_every_optimizer_of_torch() -> None:
    tables = (EVERYWHERE, CAPTURABLE, COUNTS_ON_THE_HOST, COUNTS_BESIDE, NEVER)
    known = {name.split()[0] for table in tables for name in table} | {"LBFGS", "Muon"}
    kinds = {name for name, kind in vars(O).items() if isinstance(kind, type)}
    assert known == kinds - {"Optimizer"}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_captured_as_it_is(device: torch.device, name: str) -> None:
    as_eager(lambda: training(device, EVERYWHERE[name]), device)


@on_accelerators
@pytest.mark.parametrize("name", CAPTURABLE)
def test_captured_with_its_option(device: torch.device, name: str) -> None:
    as_eager(lambda: training(device, CAPTURABLE[name]), device)


def refused_before_it_steps(device: torch.device, make: Make) -> ol.CaptureError:
    job = training(device, make)
    before = [p.detach().clone() for p in job.model.parameters()]
    fast = ol.graph(job.step)
    with pytest.raises(ol.CaptureError) as caught:
        fast(*batch(0, device))
    assert_same([p.detach() for p in job.model.parameters()], before)
    for state in job.optimizers[0].state.values():  # Adagrad has one from the beginning
        assert state["step"] == 0
    assert caught.value.code == "OL120"
    assert type(job.optimizers[0]).__name__ in caught.value.what
    assert "optimizer.step()" in str(caught.value.where)
    return caught.value


def test_a_learning_rate_in_a_tensor(device: torch.device) -> None:
    """SGD reads it on the host unless it is fused."""
    lr = torch.tensor(0.1, device=device)
    error = refused_before_it_steps(device, lambda p: torch.optim.SGD(p, lr=lr.clone()))
    assert "fused=True" in error.fix
    as_eager(
        lambda: training(device, lambda p: torch.optim.SGD(p, lr=lr.clone(), fused=True)), device
    )


@pytest.mark.cpu
@pytest.mark.parametrize("name", COUNTS_ON_THE_HOST)
def test_refused_as_it_is_and_captured_when_made_capturable(
    device: torch.device, name: str
) -> None:
    make = COUNTS_ON_THE_HOST[name]
    error = refused_before_it_steps(device, make)
    none = name == "Adagrad" and device.type == "cuda"  # its fused step is of other devices
    if device.type == "cpu":
        none = "fused" not in make([nn.Parameter(torch.ones(2))]).defaults
    if none:
        assert "after it" in error.fix
        return
    assert "ol.capturable(optimizer)" in error.fix
    assert ("fused=True" if device.type == "cpu" or name == "Adagrad" else "capturable=True") in (
        error.fix
    )
    as_eager(lambda: training(device, lambda p: ol.capturable(make(p))), device)


@pytest.mark.cpu
@pytest.mark.parametrize("name", COUNTS_BESIDE)
def test_refused_on_an_accelerator_alone(device: torch.device, name: str) -> None:
    make = COUNTS_BESIDE[name]
    if device.type == "cpu":
        as_eager(lambda: training(device, make), device)
    else:
        assert "capturable=True" in refused_before_it_steps(device, make).fix
    as_eager(lambda: training(device, lambda p: ol.capturable(make(p))), device)


@pytest.mark.parametrize("name", [*COUNTS_ON_THE_HOST, *COUNTS_BESIDE, "Adafactor", "SGD momentum"])
def test_made_capturable_where_it_steps(device: torch.device, name: str) -> None:
    """By an option of `graph`, and then it is as one that was made so before."""
    make = {**COUNTS_ON_THE_HOST, **COUNTS_BESIDE, **NEVER, **EVERYWHERE}[name]
    fits = True
    try:
        before = training(device, lambda p: ol.capturable(make(p)))
    except ol.CaptureError:
        fits, before = False, training(device, make)
    ours = training(device, make)
    fast = ol.graph(ours.step, warmup=1, capturable=True)
    if not fits:
        with pytest.raises(ol.CaptureError, match="OL120"):
            fast(*batch(0, device))
        return
    compare(fast, before.step, lambda i: batch(i, device), 5, torch.enable_grad)
    assert_same(dict(ours.model.state_dict()), dict(before.model.state_dict()))
    assert sum(recording.replays for recording in fast.recordings) == 4
    found, expected = (t.optimizers[0].param_groups[0] for t in (ours, before))
    for key in ("capturable", "fused"):
        assert found.get(key) == expected.get(key)


def test_what_no_option_helps(device: torch.device) -> None:
    refused_before_it_steps(device, NEVER["Adafactor"])
    for name, make in NEVER.items():
        with pytest.raises(ol.CaptureError, match=name):
            ol.capturable(make([nn.Parameter(torch.ones(2, device=device))]))


def test_lbfgs(device: torch.device) -> None:
    model = small_model(device)
    optimizer = O.LBFGS(model.parameters(), max_iter=2)
    loss = nn.MSELoss()

    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            return value

        return optimizer.step(closure)

    with pytest.raises(ol.CaptureError, match=r"OL120.*LBFGS"):
        ol.graph(step)(*batch(0, device))


def test_muon(device: torch.device) -> None:
    def job() -> Any:
        found = training(device, lambda p: O.SGD(p, lr=0.1))
        muon = O.Muon([found.model[0].weight, found.model[-1].weight], lr=0.02)

        def step(x: Tensor, y: Tensor) -> Tensor:
            muon.zero_grad()
            loss = nn.functional.mse_loss(found.model(x), y)
            loss.backward()
            muon.step()
            return loss

        found.step, found.optimizers = step, [muon]
        return found

    as_eager(job, device)


def test_refused_once_then_eager(device: torch.device) -> None:
    job, expected = (training(device, lambda p: O.Adam(p)) for _ in range(2))
    fast = ol.graph(job.step, on_refusal="eager")
    with pytest.warns(ol.GraphWarning, match="OL120"):
        assert_same(fast(*batch(0, device)), expected.step(*batch(0, device)))
    for i in range(1, 5):
        assert_same(fast(*batch(i, device)), expected.step(*batch(i, device)))


def test_an_optimizer_made_capturable_goes_on_where_it_was(device: torch.device) -> None:
    """Eager steps, then `ol.capturable`, then recorded ones: as eager steps all the way."""
    job, eager = (training(device, lambda p: O.Adam(p, lr=0.01)) for _ in range(2))
    for i in range(3):
        for one in (job, eager):
            one.step(*batch(i, device))
    for one in (job, eager):
        before = {id(p): one.optimizers[0].state[p]["step"].item() for p in one.model.parameters()}
        assert ol.capturable(one.optimizers[0]) is one.optimizers[0]
        for p in one.model.parameters():
            step = one.optimizers[0].state[p]["step"]
            assert step.device == p.device
            assert step.item() == before[id(p)] == 3
    fast = ol.graph(job.step)
    for i in range(3, 10):
        assert_same(fast(*batch(i, device)), eager.step(*batch(i, device)))
    assert_same(dict(job.model.state_dict()), dict(eager.model.state_dict()))
    assert fast.recordings[0].replays == 4


def test_capturable_takes_optimizers_only() -> None:
    with pytest.raises(ol.GraphError, match="OL401"):
        ol.capturable(nn.Linear(1, 1))  # pyright: ignore


def lion(self: Any, group: Any, p: Any) -> None:
    state = self.state[p]
    if "m" not in state:
        state["m"] = torch.zeros_like(p)
    p.add_(state["m"].lerp(p.grad, 1 - group["beta"]).sign(), alpha=-group["lr"])
    state["m"].lerp_(p.grad, 0.01)


def if_there_is_a_gradient(self: Any, group: Any, p: Any) -> None:
    if p.grad is not None:
        self.descend(group, p)


def with_a_frozen_group(params: Any) -> Optimizer:
    params = list(params)
    frozen = nn.Parameter(torch.ones(2, device=params[0].device))
    groups = [{"params": params}, {"params": [frozen]}]
    return own(if_there_is_a_gradient, lr=0.1)(groups)


@pytest.mark.parametrize(
    "make", [own(lion, lr=0.1, beta=0.9), with_a_frozen_group], ids=["Lion", "a frozen group"]
)
def test_an_optimizer_of_ones_own(device: torch.device, make: Make) -> None:
    """A group without gradients makes no constants."""

    def schedule(i: int, job: Any) -> None:
        for group in job.optimizers[0].param_groups:
            group["lr"] = 0.1 / (i + 1)

    as_eager(lambda: training(device, make), device, calls=10, between=schedule)


def test_a_number_that_a_sign_hides_is_a_constant(device: torch.device) -> None:
    """It reaches no kernel as itself, and others near it lead to the same step."""

    def update(self: Any, group: Any, p: Any) -> None:
        m = self.state[p].setdefault("m", torch.ones_like(p))
        p.add_((p.grad - m * math.sqrt(group["beta"])).sign(), alpha=-group["lr"])

    def schedule(i: int, job: Any) -> None:
        job.optimizers[0].param_groups[0]["lr"] = 0.1 / (i + 1)
        job.optimizers[0].param_groups[0]["beta"] = 0.25 if i < 6 else 0.0001

    job = functools.partial(training, device, own(update, lr=0.1, beta=0.25))
    as_eager(job, device, calls=10, between=schedule, recordings=2, min_replays=4)


def noisy(self: Any, group: Any, p: Any) -> None:
    p.add_(p.grad + torch.randn_like(p) * 0.01, alpha=-group["lr"])


def counting(self: Any, group: Any, p: Any) -> None:
    group["count"].add_(1)
    p.add_(p.grad / group["count"], alpha=-group["lr"])


def by_size(self: Any, group: Any, p: Any) -> None:
    factor = math.sqrt(group["beta"]) if p.shape[0] > 4 else group["beta"]
    p.add_(p.grad * factor, alpha=-group["lr"])


def from_a_table(self: Any, group: Any, p: Any) -> None:
    p.sub_(p.grad * {0.1: 1.0, 0.05: 2.0}.get(group["lr"], 3.0), alpha=0.01)


def hidden_and_held(self: Any, group: Any, p: Any) -> None:
    b = group["beta"]
    p.add_((p.grad * b - p * math.sqrt(b) * 0.01).sign(), alpha=-group["lr"])


def of_its_own_parameters(self: Any, group: Any, p: Any) -> None:
    names = self.__dict__.setdefault("names", {})
    if not names:
        names.update({id(q): i for i, q in enumerate(group["params"])})
    p.sub_(p.grad * (names[id(p)] + 1), alpha=group["lr"])


@pytest.mark.parametrize(
    "update", [noisy, counting, by_size, from_a_table, hidden_and_held, of_its_own_parameters]
)
def test_a_trial_of_an_optimizer_of_ones_own(
    device: torch.device, update: Callable[[Any, Any, Any], None]
) -> None:
    """It leaves no trace, and sees what the numbers do."""

    def make(params: Any) -> Optimizer:
        count = torch.zeros((), device=device)
        return own(update, lr=0.1, beta=0.25, count=count)(params)

    def schedule(i: int, job: Any) -> None:
        job.optimizers[0].param_groups[0]["lr"] = 0.1 if i < 6 else 0.05
        job.optimizers[0].param_groups[0]["beta"] = 0.25 if i < 8 else 0.0001

    job = functools.partial(training, device, make)
    as_eager(job, device, calls=12, between=schedule, recordings=None, min_replays=3)


def test_a_number_that_large_parameters_alone_lead_astray(device: torch.device) -> None:
    """The trial has small ones; two captures of the step itself tell."""

    def update(self: Any, group: Any, p: Any) -> None:
        factor = math.sqrt(group["beta"]) if p.numel() > 5000 else group["beta"]
        p.add_(p.grad * factor * group["beta"], alpha=-group["lr"])

    def job() -> Training:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 3)).to(device)
        return training_of(model, own(update, lr=0.01, beta=0.25)(model.parameters()))

    def schedule(i: int, job: Any) -> None:
        job.optimizers[0].param_groups[0]["beta"] = 0.25 if i < 6 else 0.5

    as_eager(job, device, calls=12, between=schedule, recordings=None, min_replays=6, warmup=1)


@pytest.mark.parametrize("key", ["progress", "dampening"])
def test_a_number_that_the_step_does_not_use_may_change(device: torch.device, key: str) -> None:
    def make(params: Any) -> Optimizer:
        return torch.optim.SGD([{"params": list(params), "progress": 0.01}], lr=0.1)

    def schedule(i: int, job: Any) -> None:
        job.optimizers[0].param_groups[0][key] = i / 10 + 0.01

    as_eager(functools.partial(training, device, make), device, calls=10, between=schedule)


def test_a_schedule_made_anew_makes_no_recording(device: torch.device) -> None:
    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def schedule(i: int, job: Any) -> None:
        if i % 4 == 0:
            job.others["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
                job.optimizers[0], max_lr=0.1 / (i + 1), total_steps=10
            )
        else:
            job.others["schedule"].step()

    job = functools.partial(training, device, make)
    as_eager(job, device, calls=20, between=schedule, recordings=None, min_replays=13)


@pytest.mark.thorough
def test_an_optimizer_made_in_the_call_is_captured_in_the_end(device: torch.device) -> None:
    """Each capture makes another, of which nothing is known."""
    model, other = small_model(device), small_model(device)
    runs: list[Any] = []

    def step_of(model: Any) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            runs.append(made := own(by_size, lr=0.1, beta=0.25)(model.parameters()))
            made.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            made.step()
            return loss.detach()

        return step

    fast, eager = ol.graph(step_of(model), on_refusal="eager"), step_of(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(6):
            assert_same(fast(*batch(i, device)), eager(*batch(i, device)))
            assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert len(runs) < 60
