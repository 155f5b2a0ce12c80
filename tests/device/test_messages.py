"""Refusals name the user's line: the one at fault where it is known, else where the callable
begins."""

from __future__ import annotations

import copy
import functools
import logging
import pathlib
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand

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


def replaces(x: list[Tensor]) -> Tensor:
    x[0] = x[0] * 2  # replaced here
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
    "a list among the arguments": (replaces, "OL105", "# replaced here"),
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
        for i in range(2 if fn is appends else 1):  # it may be for the first and last time
            fast(given(i))
        with pytest.raises(ol.CaptureError) as caught:
            fast(given(2))
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


def test_a_schedule_of_ones_own_is_named_and_not_what_asks(
    device: torch.device, rand: Rand
) -> None:
    layer = nn.Linear(3, 3, device=device)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)

    def decay() -> None:
        sgd.param_groups[0]["lr"] *= 0.5  # set here

    def step(x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        sgd.step()
        decay()
        return loss.detach() * (0 if sgd.param_groups[0]["lr"] == 0 else 1)

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
            group["counter"] += 1  # counts here
            for p in group["params"]:
                p.data.mul_(1 - 1 / group["counter"])


def test_a_wrapper_that_counts_is_told_what_to_do(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(3, 3, device=device)
    wrapper = Lookahead(torch.optim.SGD(layer.parameters(), lr=0.1))

    def step(x: Tensor) -> Tensor:
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        wrapper.step()
        return loss.detach()

    error = refused_step(step, rand, 3)
    check(error, "OL122", "# counts here")
    assert "`counter` of SGD" in error.what
    assert "graph the forward and backward alone" in error.fix


def backward_of(loss: Tensor) -> Tensor:
    loss.backward()  # of the helper
    return loss.detach()


def asks(x: Tensor) -> Tensor:
    x.requires_grad_()
    return backward_of((x * x).sum())


def by_function(x: Tensor) -> Tensor:
    loss = (x.requires_grad_() * 2).sum()
    torch.autograd.backward(loss)  # by a function
    return loss.detach()


@pytest.mark.parametrize(
    ("step", "source"), [(asks, "# of the helper"), (by_function, "# by a function")]
)
def test_the_gradient_of_an_argument_is_named_where_it_is_made(
    rand: Rand, step: Callable[[Tensor], Tensor], source: str
) -> None:
    error = refused_step(step, rand)
    check(error, "OL115", source)
    assert "gives `args[0]` a gradient" in error.what


def reads_gradient(x: Tensor) -> Tensor:
    before = x.grad  # read here
    return x.detach() if before is None else x.detach() + before


@pytest.mark.parametrize(
    ("step", "source"), [(reads_gradient, "# read here"), (asks, "# of the helper")]
)
def test_the_gradient_of_an_argument_is_named_where_it_is_read(
    rand: Rand, step: Callable[[Tensor], Tensor], source: str
) -> None:
    fast, leaf = ol.graph(step, warmup=2), rand(0, 3).requires_grad_()
    leaf.grad = rand(1, 3)
    for _ in range(2):
        fast(leaf)
    with pytest.raises(ol.CaptureError) as caught:
        fast(leaf)
    check(caught.value, "OL115", source)


def refused_step(step: Callable[..., Any], rand: Rand, calls: int = 2) -> ol.GraphError:
    fast = ol.graph(step, warmup=2)
    for i in range(calls):
        fast(rand(i, 2, 3))
    with pytest.raises(ol.CaptureError) as caught:
        fast(rand(calls, 2, 3))
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


def prints(x: Tensor) -> Tensor:
    print(x * 2)
    return x


def formats(x: Tensor) -> Tensor:
    name = f"{x.sum():.3f}"
    return x + len(name) * 0


def logs(x: Tensor) -> Tensor:
    logging.getLogger("quiet").error("x is %s", x.sum())
    return x


def prints_a_number(x: Tensor) -> Tensor:
    print("loss", x.sum().item())
    return x


def asserts(x: Tensor) -> Tensor:
    assert (x > -1e9).all(), "too small"
    return x


def asserts_a_number(x: Tensor) -> Tensor:
    assert x.max().item() < 1e9
    return x


def asserts_equal(x: Tensor) -> Tensor:
    assert torch.equal(x, x)
    return x


def prints_what_it_drew(x: Tensor) -> Tensor:
    print(torch.rand(3))
    return x


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x + 1


def branches_on_what_it_drew(x: Tensor) -> Tensor:
    return x if torch.rand(3)[0] > 2 else x + 1


LATER = "y = fast(x); print(y)"
CHECKED = "y, ok = fast(x); assert ok"


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("f", "fix"),
    [
        *[(f, LATER) for f in (prints, formats, logs, prints_a_number, prints_what_it_drew)],
        *[(f, CHECKED) for f in (asserts, asserts_a_number, asserts_equal)],
        (branches, "torch.where"),
        (branches_on_what_it_drew, "torch.rand"),
    ],
)
def test_the_way_to_show_or_check_a_value(
    device: torch.device, rand: Rand, f: Any, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a line chooses nothing: `torch.where` is of no help."""
    if f is branches_on_what_it_drew and device.type == "cpu":
        fix = "torch.where"  # drawn on the device
    monkeypatch.setattr(logging, "raiseExceptions", False)
    fast = ol.graph(f, warmup=1)
    with torch.no_grad(), pytest.raises(ol.CaptureError) as caught:
        list(map(fast, [rand(i, 3) for i in range(4)]))
    assert fix in caught.value.fix
    assert ("torch.where" in caught.value.fix) is (fix == "torch.where")


class Count:
    def __init__(self, n: int) -> None:
        self.n = n


class Table:
    """Numbers that move on."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.turns = {"n": 0}
        self.kept = [torch.ones(3)] * 30
        self.n = 0
        self.log: list[int] = []
        self.tensors: dict[str, list[Tensor]] = {"n": []}
        self.logs: dict[str, list[int]] = {"n": []}
        self.count = Count(0)

    def replaces(self, x: Tensor) -> Tensor:
        y = x * self.count.n
        self.count = Count(self.count.n + 1)  # it is replaced here
        return y

    def attribute(self, x: Tensor) -> Tensor:
        if self.at is None:
            self.at = 0
        y = x * (self.at + 0.5)
        self.at += 2  # the attribute moves here
        return y

    def attribute_on_a_line(self, x: Tensor) -> Tensor:
        _ = self.at is None and setattr(self, "at", 0)
        y = x * ((self.at or 0) + 0.5)
        self.at += 2  # type: ignore[operator]  # the attribute moves here
        return y

    def item(self, x: Tensor) -> Tensor:
        y = x * (self.turns["n"] + 0.5)
        self.turns["n"] = self.turns["n"] + 1  # the item moves here
        return y

    def beside_an_item(self, x: Tensor) -> Tensor:
        if len(self.turns) > 9:
            self.turns["n"] = self.turns["n"] + 1
        y = x * (self.n + 0.5)
        self.n += 2  # the attribute moves here
        return y

    def beside_an_attribute(self, x: Tensor) -> Tensor:
        if len(self.turns) > 9:
            self.n = self.n + 1
        y = x * (self.turns["n"] + 0.5)
        self.turns["n"] += 1  # the item moves here
        return y

    def grows(self, x: Tensor) -> Tensor:
        y = x * len(self.log)
        self.log.append(1)  # it grows here
        return y

    def fills(self, x: Tensor) -> Tensor:
        y = x * len(self.turns)
        self.turns[str(len(self.turns))] = 1  # it is filled here
        return y

    def grows_inside(self, x: Tensor) -> Tensor:
        y = x * len(self.logs["n"])
        self.logs["n"].append(1)  # the inner one grows here
        return y

    def grows_by_another_name(self, x: Tensor) -> Tensor:
        log = self.log  # it is taken here
        y = x * len(log)
        log.append(1)
        return y

    def keeps_inside(self, x: Tensor) -> Tensor:
        y = x * 2
        self.tensors["n"].append(y)  # it is kept here
        return y

    def pops(self, x: Tensor) -> Tensor:
        count = len(self.kept)
        self.kept.pop()  # it is taken here
        return x * count

    def of_a_result(self, x: Tensor) -> Tensor:
        y = x * 2
        y.scale = 2.0  # type: ignore[attr-defined]  # set here
        return y


def of_an_argument(x: Tensor, found: dict[str, Tensor]) -> Tensor:
    y = x * 2
    found["y"] = y  # stored here
    return y


def of_a_closure() -> Callable[[Tensor], Tensor]:
    turn = 0

    def f(x: Tensor) -> Tensor:
        nonlocal turn
        y = x * (turn + 0.5)
        turn += 1  # the variable moves here
        return y

    return f


def test_what_grows_inside_of_a_dict_is_named(device: torch.device, rand: Rand) -> None:
    logs: dict[str, list[int]] = {"n": []}

    def f(x: Tensor) -> Tensor:
        logs["n"].append(1)  # it grows here
        return x * 2

    with pytest.warns(ol.GraphWarning, match="OL309") as caught:
        called(ol.graph(f, warmup=1), 3, lambda i: (rand(i, 3),))
    check(caught[0].message, "OL309", "# it grows here")


def called(fast: Any, calls: int, arguments: Callable[[int], tuple[Any, ...]]) -> None:
    with torch.no_grad():
        for i in range(calls):
            fast(*arguments(i))


CHANGED: dict[str, tuple[str, str]] = {
    "attribute": ("OL118", "the attribute moves here"),
    "attribute_on_a_line": ("OL118", "the attribute moves here"),
    "item": ("OL118", "the item moves here"),
    "of_a_closure": ("OL118", "the variable moves here"),
    "beside_an_item": ("OL118", "the attribute moves here"),
    "beside_an_attribute": ("OL118", "the item moves here"),
    "replaces": ("OL118", "it is replaced here"),
    "grows": ("OL118", "it grows here"),
    "fills": ("OL118", "it is filled here"),
    "grows_inside": ("OL118", "the inner one grows here"),
    "grows_by_another_name": ("OL118", "it is taken here"),
    "keeps_inside": ("OL105", "it is kept here"),
    "pops": ("OL105", "it is taken here"),
    "of_a_result": ("OL105", "set here"),
    "of_an_argument": ("OL105", "stored here"),
}
"""A method of a table, or a function -> the refusal, and the comment of its line."""


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_is_named_where_it_is_made(device: torch.device, name: str, rand: Rand) -> None:
    code, text = CHANGED[name]
    others: dict[str, Any] = {"of_a_closure": of_a_closure(), "of_an_argument": of_an_argument}
    fast = ol.graph(others.get(name) or getattr(Table(), name), on_refusal="raise")
    rest: list[Any] = [{}] if name == "of_an_argument" else []
    with pytest.raises(ol.CaptureError) as caught:
        called(fast, 30, lambda i: (rand(i, 3), *rest))
    check(caught.value, code, f"# {text}")


def data_of_a_copy(layer: nn.Linear) -> None:
    kept = {p: p.data.clone() for p in layer.parameters()}
    for p, old in kept.items():
        p.data = old  # assigned here


def data_of_a_vector(layer: nn.Linear) -> None:
    vector = nn.utils.parameters_to_vector(layer.parameters()).detach()
    nn.utils.vector_to_parameters(vector, layer.parameters())  # assigned here


@pytest.mark.parametrize("assign", [data_of_a_copy, data_of_a_vector])
def test_data_that_is_replaced_is_named_where_it_is_assigned(
    device: torch.device, rand: Rand, assign: Callable[[nn.Linear], None]
) -> None:
    layer = nn.Linear(3, 3, device=device)

    def step(x: Tensor) -> Tensor:
        y = layer(x)
        assign(layer)
        return y

    with torch.no_grad():
        error = refused_step(step, rand, 3)  # the third may have been the last to assign it
    check(error, "OL105", "# assigned here")
    assert "copy_" in error.fix


@pytest.mark.parametrize(
    "read",
    [
        lambda y: statistics.fmean(y.tolist()),
        lambda y: logging.getLogger("ol").error("%s", y),
        lambda y: functools.reduce(max, y),
        lambda y: copy.copy(sorted(y)),
    ],
    ids=["fmean", "log", "reduce", "sorted"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_standard_library_is_not_the_users_line(
    device: torch.device, read: Callable[[Tensor], object], rand: Rand
) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        read(y)  # reads here
        return y

    fast = ol.graph(f, on_refusal="raise")
    with pytest.raises(ol.CaptureError) as caught:
        called(fast, 4, lambda i: (rand(i, 3),))
    check(caught.value, "OL101", "")
