"""Optimizers of one's own that count in Python: a count that the step only keeps, or asks for, goes
on in each replay; a count that it computes with is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import onelaunch as ol

from .drop_in import assert_same, compare
from .steps import as_eager, batch, own, training

O = torch.optim  # noqa: E741


def in_the_group(self: Any, group: Any, p: Tensor) -> None:
    """As Lion of pytorch_optimizer."""
    if "step" in group:
        group["step"] += 1
    else:
        group["step"] = 1
    self.descend(group, p)


def by_get(self: Any, group: Any, p: Tensor) -> None:
    group["step"] = group.get("step", 0) + 1
    self.descend(group, p)


def by_setdefault(self: Any, group: Any, p: Tensor) -> None:
    group.setdefault("step", 0)
    group["step"] += 1
    self.descend(group, p)


def in_the_state(self: Any, group: Any, p: Tensor) -> None:
    state = self.state[p]
    if len(state) == 0:
        state.update(step=0, momentum=torch.zeros_like(p))
    state["step"] += 1
    p.sub_(state["momentum"].mul_(0.9).add_(p.grad), alpha=group["lr"])


def in_the_state_by_max(self: Any, group: Any, p: Tensor) -> None:
    self.state[p]["step"] = max(self.state[p].get("step", 0) + 1, 1)
    self.descend(group, p)


def in_an_attribute(self: Any, group: Any, p: Tensor) -> None:
    self.n = getattr(self, "n", 0) + 1
    self.kept["n"] = self.kept.get("n", 0) + 2
    self.descend(group, p)


def in_phases(self: Any, group: Any, p: Tensor) -> None:
    """As a warm-up that is over once and for all."""
    state = self.state[p]
    state["step"] = state.get("step", 0) + 1
    self.descend(group, p, 0.1 if state["step"] <= 6 else 1.0)


def in_turns(self: Any, group: Any, p: Tensor) -> None:
    """As Lookahead."""
    state = self.state[p]
    if not state:
        state.update(slow=p.clone(), n=0)
    self.descend(group, p)
    state["n"] += 1
    if state["n"] >= 3:
        p.copy_(state["slow"].lerp_(p, 0.5))
        state["n"] = 0


def plain(optimizer: Any) -> list[Any]:
    """What it keeps in Python."""
    states = [{k: v for k, v in s.items() if type(v) is int} for s in optimizer.state.values()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [groups, states, optimizer.kept, getattr(optimizer, "n", 0)]


RECORDINGS = {in_phases: 2, in_turns: 2}


@pytest.mark.parametrize(
    "update",
    [
        *(in_the_group, by_get, by_setdefault, in_the_state, in_the_state_by_max),
        *(in_an_attribute, in_phases, in_turns),
    ],
)
def test_a_count_that_the_step_does_not_compute_with(
    device: torch.device, update: Callable[..., None]
) -> None:
    """It goes on in each replay, and a rate that changes is followed besides."""
    kept: list[Any] = []

    def between(i: int, job: Any) -> None:
        optimizer = job.optimizers[0]
        optimizer.param_groups[0]["lr"] = 0.1 if i < 10 else 0.05
        kept.append(plain(optimizer))

    job = functools.partial(training, device, own(update, lr=0.1))
    recordings = RECORDINGS.get(update, 1)
    as_eager(job, device, calls=16, between=between, recordings=recordings, min_replays=10)
    assert kept[::2] == kept[1::2]
    assert kept[0] != kept[-1]


def corrected(self: Any, group: Any, p: Tensor) -> None:
    state = self.state[p]
    state["step"] = state.get("step", 0) + 1
    self.descend(group, p, 1 / (1 - 0.9 ** state["step"]))


def corrected_by_the_group(self: Any, group: Any, p: Tensor) -> None:
    group["step"] = group.get("step", 0) + 1
    self.descend(group, p, 1 / group["step"])


def every_tenth(self: Any, group: Any, p: Tensor) -> None:
    """As Shampoo."""
    state = self.state[p]
    state["step"] = state.get("step", 0) + 1
    self.descend(group, p, 0.5 if state["step"] % 10 == 0 else 1.0)


def as_a_tensor(self: Any, group: Any, p: Tensor) -> None:
    state = self.state[p]
    state["step"] = state.get("step", 0) + 1
    p.sub_(p.grad / torch.tensor(float(state["step"]), device=p.device), alpha=group["lr"])


def as_a_name(self: Any, group: Any, p: Tensor) -> None:
    group["step"] = group.get("step", 0) + 1
    self.kept["name"] = f"step {group['step']}"
    self.descend(group, p)


def a_float(self: Any, group: Any, p: Tensor) -> None:
    group["step"] = group.get("step", 0.0) + 1.0
    self.descend(group, p)


def a_rate_of_its_own(self: Any, group: Any, p: Tensor) -> None:
    self.descend(group, p)
    group["lr"] *= 0.9


@pytest.mark.parametrize(
    "update",
    [
        *(corrected, corrected_by_the_group, every_tenth, as_a_tensor),
        *(as_a_name, a_float, a_rate_of_its_own),
    ],
)
def test_a_count_that_the_step_computes_with(
    device: torch.device, update: Callable[..., None]
) -> None:
    """It is refused, and eager goes on where it was."""
    job = functools.partial(training, device, own(update, lr=0.1))
    made, eager = job(), job()
    fast = ol.graph(made.step, warmup=2)
    compare(fast, eager.step, lambda i: batch(i, device), 2, torch.enable_grad)
    counts = r"OL120.*Own counts its steps in Python"
    with pytest.raises(ol.CaptureError, match=counts) as caught:  # noqa: PT012
        for _ in range(2):  # the first may be one more warm-up
            assert_same(fast(*batch(2, device)), eager.step(*batch(2, device)))
    assert re.search(r'\["(step|lr)"\] (=|\*=) ', str(caught.value.where))
    for i in range(2, 5):
        assert_same(made.step(*batch(i, device)), eager.step(*batch(i, device)))
        assert plain(made.optimizers[0]) == plain(eager.optimizers[0])
    assert_same(dict(made.model.state_dict()), dict(eager.model.state_dict()))


@pytest.mark.parametrize("how", ["attribute", "list", "dict", "float"])
def test_an_optimizer_that_counts_in_an_attribute_is_refused(
    device: torch.device, how: str
) -> None:
    class Decaying(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.t: Any = {"list": [0], "dict": {"of": {"n": 0}}, "float": 0.5}.get(how, 0)

        def advance(self) -> float:
            if how == "list":
                self.t[0] += 1
                return self.t[0]
            if how == "dict":
                self.t["of"]["n"] += 1
                return self.t["of"]["n"]
            self.t += 1
            return self.t

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            t = self.advance()
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] / t)

    made, eager = training(device, Decaying), training(device, Decaying)
    fast = ol.graph(made.step)
    compare(fast, eager.step, lambda i: batch(i, device), 3, torch.enable_grad)
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(ol.CaptureError, match=r"counts its steps in Python, in `optimizer\.t\b"):
        fast(*batch(3, device))
    assert_same([p.detach() for p in made.model.parameters()], before)
    # Eager goes on where it was.
    compare(made.step, eager.step, lambda i: batch(i, device), 3, torch.enable_grad)
    assert_same(dict(made.model.state_dict()), dict(eager.model.state_dict()))


def test_an_attribute_is_told_from_an_option_of_its_name(device: torch.device) -> None:
    class Decaying(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.rate = 1.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                if len(group) > 99:
                    group["rate"] = group["rate"] * 0.9
                self.rate *= 0.9
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] * self.rate)

    fast = ol.graph(training(device, Decaying).step, warmup=1)
    fast(*batch(0, device))
    with pytest.raises(ol.CaptureError, match=r"OL120.*`optimizer\.rate`") as caught:
        fast(*batch(1, device))
    assert str(caught.value.where).endswith(": self.rate *= 0.9")


def test_an_optimizer_whose_count_it_does_not_use_is_captured(device: torch.device) -> None:
    class Counting(O.SGD):
        steps = 0
        warm = False

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            self.warm = not self.warm
            return super().step(closure)

    # A recording for each value of the flag, which it turns; the count goes on in each replay.
    made = lambda: training(device, lambda p: Counting(p, lr=0.1))  # noqa: E731
    as_eager(made, device, recordings=2, min_replays=1)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_what_torch_and_its_schedulers_keep_is_no_count(device: torch.device, name: str) -> None:
    class Own(O.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def job() -> Any:
        made = training(device, lambda p: Own(p, lr=0.1, momentum=0.9))
        options = {"StepLR": (100,), "OneCycleLR": (0.1, 100), "CosineAnnealingLR": (100,)}
        made.others["schedule"] = getattr(O.lr_scheduler, name)(made.optimizers[0], *options[name])
        return made

    made = job()
    fast = ol.graph(made.step)
    for i in range(8):
        fast(*batch(i, device))
    assert fast.recordings[0].replays == 5
