"""What an optimizer of one's own does with the numbers of its groups, besides arithmetic.

A capture has stand-ins for them: code must find the numbers themselves, and none may stay behind.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import replays
from .steps import Training, as_eager, assert_same_training, batch, own, training

KEPT: dict[str, Any] = {}
"""Where some of them keep numbers."""


NUMBERS: dict[str, Any] = {"lr": 0.1, "beta": 0.9, "betas": (0.0, 0.9)}


def momentum(self: Any, group: Any, p: Tensor, key: Any) -> None:
    state = self.state[p]
    if not state:
        state[key] = torch.zeros_like(p)
    p.sub_(state[key].mul_(group["beta"]).add_(p.grad), alpha=group["lr"])


def keys(self: Any, group: Any, p: Tensor) -> None:
    """As AggMo."""
    state = self.state[p]
    for beta in group["betas"]:
        if beta not in state and len(state) < 2:
            state[beta] = torch.zeros_like(p)
        p.sub_(state[beta].mul_(beta).add_(p.grad), alpha=group["lr"])


def a_key_that_is_made(self: Any, group: Any, p: Tensor) -> None:
    buffer = self.state[p].setdefault(group["beta"], torch.zeros_like(p))
    p.sub_(buffer.mul_(group["beta"]).add_(p.grad), alpha=group["lr"])


def a_name(self: Any, group: Any, p: Tensor) -> None:
    momentum(self, group, p, f"buffer {group['beta']}")


def a_rounded_name(self: Any, group: Any, p: Tensor) -> None:
    momentum(self, group, p, "buffer %.3f" % group["beta"])  # noqa: UP031  C code formats it


def a_name_that_is_made(self: Any, group: Any, p: Tensor) -> None:
    buffer = self.state[p].setdefault(json.dumps(group["beta"]), torch.zeros_like(p))
    p.sub_(buffer.mul_(group["beta"]).add_(p.grad), alpha=group["lr"])


def a_branch(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=group["lr"] if group["beta"] == 0.9 else -1.0)


def a_check(self: Any, group: Any, p: Tensor) -> None:
    if group["beta"] not in {0.9, 0.95} or group["lr"] > 0.1:
        raise ValueError(group["beta"])
    self.descend(group, p)


def an_index(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=[0.01, 0.02][int(group["lr"] * 10)] * round(group["beta"] * 10))


def a_remainder(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=group["lr"] % 0.03 + group["beta"] // 0.45)


@functools.lru_cache
def half(number: float) -> float:
    return number / 2


def a_cache(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=half(group["lr"]))


def numpys(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=float(np.sqrt(group["lr"])))


def on_the_device(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad * torch.tensor(group["lr"], device=p.device))


def a_filled_tensor(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(torch.where(p.grad > 0, group["lr"], -group["lr"]))


def a_comparison_of_torchs(self: Any, group: Any, p: Tensor) -> None:
    """Which computes with the number only if it is none."""
    p.sub_(torch.isclose(p.grad, p, rtol=group["lr"]).float(), alpha=0.01)


def an_assigned_number(self: Any, group: Any, p: Tensor) -> None:
    signs = p.grad.sign()
    signs[signs.gt(0)] = group["beta"]
    p.sub_(signs, alpha=group["lr"])


def its_type(self: Any, group: Any, p: Tensor) -> None:
    p.sub_(p.grad, alpha=group["lr"] if type(group["lr"]) is float else -1.0)


def kept_in_an_attribute(self: Any, group: Any, p: Tensor) -> None:
    self.kept["rate"] = 2 * group["lr"]
    self.descend(group, p)


def kept_in_the_state(self: Any, group: Any, p: Tensor) -> None:
    self.state[p]["rate"] = group["lr"]
    self.descend(group, p)


def kept_in_the_group(self: Any, group: Any, p: Tensor) -> None:
    group["rate"] = group["lr"]
    self.descend(group, p)


def kept_in_a_global(self: Any, group: Any, p: Tensor) -> None:
    KEPT["rate"] = group["lr"]
    self.descend(group, p)


def logged(self: Any, group: Any, p: Tensor) -> None:
    KEPT["rate"], KEPT["text"] = math.log(group["lr"]), f"rate {group['lr']:.4f}"
    self.descend(group, p)


def contents(optimizer: Any) -> str:
    """What it keeps in Python; C code writes the text, which takes a stand-in for a float."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return json.dumps([groups, [[*s] for s in optimizer.state.values()], optimizer.kept, KEPT])


UPDATES = [
    *(keys, a_key_that_is_made, a_name, a_rounded_name, a_name_that_is_made),
    *(a_branch, a_check, an_index, a_remainder, a_cache, numpys, on_the_device),
    *(a_filled_tensor, a_comparison_of_torchs, an_assigned_number, its_type),
    *(kept_in_an_attribute, kept_in_the_state, kept_in_the_group, kept_in_a_global, logged),
]


def schedule(i: int, job: Any) -> None:
    job.optimizers[0].param_groups[0]["lr"] = 0.1 if i < 8 else 0.05


def same_numbers(device: torch.device, jobs: Sequence[Training]) -> None:
    """Train graphed and eagerly, with a rate that changes; compare what is kept after each call."""
    fast, eager = ol.graph(jobs[0].step), jobs[1].step
    for i in range(14):
        kept: list[str] = []
        for job, step in zip(jobs, (fast, eager), strict=True):
            KEPT.update(dict.fromkeys(KEPT, ""))
            schedule(i, job)
            step(*batch(i, device))
            kept.append(contents(job.optimizers[0]))
        assert kept[0] == kept[1], f"call {i}"
        assert_same_training(jobs[0], jobs[1], f"call {i}")
    assert replays(fast) >= 8


@pytest.mark.parametrize("update", UPDATES)
def test_numbers_are_found_as_they_are(device: torch.device, update: Callable[..., None]) -> None:
    KEPT.clear()
    job = functools.partial(training, device, own(update, **NUMBERS))
    same_numbers(device, (job(), job()))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "update", [keys, a_key_that_is_made, a_branch, a_check, an_assigned_number]
)
def test_the_other_numbers_are_followed(device: torch.device, update: Callable[..., None]) -> None:
    job = functools.partial(training, device, own(update, **NUMBERS))
    as_eager(job, device, calls=12, between=schedule)


@pytest.mark.parametrize("update", [keys, kept_in_a_global])
def test_an_error_of_ones_own_is_raised_as_it_is(
    device: torch.device, update: Callable[..., None]
) -> None:
    """Also in the capture, and the numbers are the optimizer's own again."""
    KEPT.clear()
    calls = [0]

    def fails(self: Any, group: Any, p: Tensor) -> None:
        update(self, group, p)
        calls[0] += 1
        if calls[0] > 13:
            raise KeyError(group["lr"])

    job = training(device, own(fails, **NUMBERS))
    fast = ol.graph(job.step)
    for i in range(3):  # of four parameters each
        fast(*batch(i, device))
    with pytest.raises(KeyError, match=r"^0\.1$"):
        fast(*batch(3, device))
    assert json.loads(contents(job.optimizers[0]))[0][0]["lr"] == 0.1
    assert json.dumps(KEPT.get("rate", 0.1)) == "0.1"


@pytest.mark.filterwarnings("ignore:.*OL308")
def test_a_hook_of_torchs_optimizer_finds_its_numbers(device: torch.device) -> None:
    def job() -> Training:
        made = training(device, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        optimizer: Any = made.optimizers[0]
        optimizer.kept = {"rate": 0.0}

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.kept["rate"] = optimizer.param_groups[0]["lr"]

        optimizer.register_step_pre_hook(note)
        return made

    same_numbers(device, (job(), job()))
