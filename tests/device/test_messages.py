"""Refusals name the user's line: the one at fault where it is known, else where the callable
begins."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

Rand = Callable[..., Tensor]
FILE = pathlib.Path(__file__).name
SEEN: list[Tensor] = []


class Holder:
    kept: list[Any]


HOLDER = Holder()


def appends(x: Tensor) -> Tensor:
    y = x * 2
    SEEN.append(y)  # put there
    return y + 1


def hides(x: Tensor) -> Tensor:
    y = x * 2  # made here
    HOLDER.kept = [iter([y])]
    return y + 1


def replaces(x: list[Tensor]) -> Tensor:  # begins here
    x[0] = x[0] * 2
    return x[0] + 1


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)  # seeds here
    return x + torch.rand_like(x)


def transposes(x: Tensor) -> Tensor:
    x.t_()  # reshapes here
    return x + 1


def iterates(x: Tensor) -> Any:  # begins here
    return iter(x * 2)


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a list": (appends, "OL105", "# put there"),
    "an iterator": (hides, "OL105", "# made here"),
    "a list among the arguments": (replaces, "OL105", "# begins here"),
    "a seed": (seeds, "OL106", "# seeds here"),
    "a transposed argument": (transposes, "OL107", "# reshapes here"),
    "a result": (iterates, "OL108", "# begins here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_a_line(name: str, rand: Rand) -> None:
    fn, code, source = REFUSED[name]

    def given(i: int) -> Any:
        return [rand(i, 3, 4)] if fn is replaces else rand(i, 3, 4)

    fast = ol.graph(fn, warmup=1)
    with torch.no_grad():
        fast(given(0))
        with pytest.raises(ol.CaptureError) as caught:
            fast(given(1))
    check(caught.value, code, source)


def test_a_schedule_is_named_where_it_steps(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3, device=device)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.StepLR(sgd, 2)

    def step(x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        sgd.step()
        decay.step()  # steps here
        return loss.detach()

    check(refused_step(step, rand), "OL122", "# steps here")


def test_a_number_of_a_group_is_named_where_it_is_set(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3, device=device)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        sgd.step()
        sgd.param_groups[0]["lr"] *= 0.5  # set here
        return loss.detach()

    check(refused_step(step, rand), "OL122", "# set here")


class Lookahead(torch.optim.Optimizer):
    """A wrapper as people write it: it counts in the groups of the optimizer that it wraps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            group["counter"] += 1


def test_a_wrapper_that_counts_is_told_what_to_do(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3, device=device)
    wrapper = Lookahead(torch.optim.SGD(layer.parameters(), lr=0.1))

    def step(x: Tensor) -> Tensor:  # begins here
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        wrapper.step()
        return loss.detach()

    error = refused_step(step, rand)
    check(error, "OL122", "# begins here")
    assert "`counter` of SGD" in error.what
    assert "graph the forward and backward alone" in error.fix


def refused_step(step: Callable[..., Any], rand: Rand) -> ol.GraphError:
    fast = ol.graph(step, warmup=2)
    for i in range(2):
        fast(rand(i, 2, 3))
    with pytest.raises(ol.CaptureError) as caught:
        fast(rand(2, 2, 3))
    return caught.value


def test_gradients_of_gradients_name_a_line(rand: Rand) -> None:
    fast = ol.graph(lambda x: (x**3).sum(), warmup=1)  # one of two
    for i in range(4):
        x = rand(i, 3).requires_grad_()
        (g,) = torch.autograd.grad(fast(x), x, create_graph=True)
    with pytest.raises(ol.GraphError) as caught:
        g.sum().backward()  # one of two
    check(caught.value, "OL202", "# one of two")


def test_too_many_signatures_name_the_call(rand: Rand) -> None:
    fast = ol.graph(torch.pow, warmup=1, max_recordings=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for exponent in (2, 3):
            for i in range(3):
                fast(rand(i, 3), exponent)  # called here
    (warning,) = [w for w in caught if "[OL301]" in str(w.message)]
    text = str(warning.message)
    for part in ("  where: ", FILE, "# called here\n", "  why:   ", "  fix:   "):
        assert part in text
    with torch.no_grad(), pytest.raises(ol.CaptureError) as raised:
        fast.capture(rand(0, 3), 4)  # captured here
    check(raised.value, "OL301", "# captured here")


def check(error: ol.GraphError, code: str, source: str) -> None:
    assert error.code == code
    assert error.where is not None
    assert FILE in error.where
    assert error.where.endswith(source)
