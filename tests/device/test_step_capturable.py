"""Optimizers of torch with complex parameters, or with a learning rate in a tensor of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import on_accelerators
from .steps import Training, as_eager, batch, training
from .test_step_optimizers import COUNTS_BESIDE, COUNTS_ON_THE_HOST, Make

O = torch.optim  # noqa: E741


def complex_job(device: torch.device, make: Make) -> Training:
    torch.manual_seed(1)
    model = nn.ParameterList([torch.randn(4, 3, dtype=torch.cfloat), torch.randn(3)]).to(device)
    optimizer = make(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (x.to(torch.cfloat) @ model[0] * model[1] - y).abs().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, [optimizer], step)


@pytest.mark.cpu
@pytest.mark.parametrize("name", [*COUNTS_ON_THE_HOST, *COUNTS_BESIDE])
def test_complex_parameters(device: torch.device, name: str) -> None:
    """No fused step takes them: refused where that is the way, and the fix works."""
    make = {**COUNTS_ON_THE_HOST, **COUNTS_BESIDE}[name]
    job = complex_job(device, make)
    fast = ol.graph(job.step, capturable=True)
    fits = name in COUNTS_BESIDE if device.type == "cpu" else name != "Adagrad"
    if fits:
        as_eager(
            lambda: complex_job(device, lambda p: ol.capturable(make(p))), device, capturable=True
        )
        return
    options = [dict(group) for group in job.optimizers[0].param_groups]
    with pytest.raises(ol.CaptureError, match="OL120") as caught:
        fast(*batch(0, device))
    assert caught.value.fix.startswith("with complex parameters, graph the forward and backward")
    with pytest.raises(ol.CaptureError, match="OL120"):
        ol.capturable(job.optimizers[0])
    assert [dict(group) for group in job.optimizers[0].param_groups] == options
    job.step(*batch(0, device))


def test_an_optimizer_that_cannot_be_made_capturable_stays_as_it_was() -> None:
    real, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.cfloat))
    optimizer = O.Adam([{"params": [real]}, {"params": [other]}])
    with pytest.raises(ol.CaptureError, match="OL120"):
        ol.capturable(optimizer)
    assert not any(group["fused"] for group in optimizer.param_groups)


HOST_RATES: dict[str, Make] = {
    "Adam": lambda p: O.Adam(p, lr=torch.tensor(0.1), capturable=True),
    "Adam fused": lambda p: O.Adam(p, lr=torch.tensor(0.1), fused=True),
    "NAdam": lambda p: O.NAdam(p, lr=torch.tensor(0.1), capturable=True, weight_decay=0.01),
    "SGD fused": lambda p: O.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True),
}


@on_accelerators
@pytest.mark.parametrize("name", HOST_RATES)
def test_a_learning_rate_in_a_tensor_of_the_host(device: torch.device, name: str) -> None:
    """Its value is a constant: another one is another recording, and one for each is refused."""

    def later(i: int, job: Any) -> None:
        if i == 7:
            job.optimizers[0].param_groups[0]["lr"].fill_(0.05)

    def job() -> Training:
        return training(device, HOST_RATES[name])

    as_eager(job, device, calls=14, between=later, recordings=2, min_replays=8)
    made = job()
    schedule = O.lr_scheduler.ExponentialLR(made.optimizers[0], 0.9)
    fast = ol.graph(made.step)

    def calls() -> None:
        for i in range(10):
            fast(*batch(i, device))
            schedule.step()

    with pytest.raises(ol.CaptureError, match=r"OL123.*`lr` of \w+ is a tensor on the host") as at:
        calls()
    assert "`ol.capturable(optimizer)`" in at.value.fix
    assert at.value.where is not None


@on_accelerators
@pytest.mark.parametrize("name", HOST_RATES)
def test_a_learning_rate_of_the_host_that_is_moved(device: torch.device, name: str) -> None:
    def job() -> Training:
        made = training(device, lambda p: ol.capturable(HOST_RATES[name](p)))
        made.others["schedule"] = O.lr_scheduler.ExponentialLR(made.optimizers[0], 0.9)
        return made

    def advance(i: int, job: Training) -> None:
        if i:
            job.others["schedule"].step()

    as_eager(job, device, calls=10, between=advance)
