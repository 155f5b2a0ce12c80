"""`forward` of a graphed module: read, replaced, wrapped and put back, as other libraries do."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, replays


class Net(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3, device=device)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.linear(x) * scale


Replace = Callable[[Any], None]


def doubled(model: Any) -> None:
    wrapped = model.forward
    model.forward = lambda *args: wrapped(*args) * 2


def twice(model: Any) -> None:
    doubled(model)
    doubled(model)


def as_accelerate_does(model: Any) -> None:
    """Autocast around the forward, and results made float32 again."""
    model._original_forward = model.forward
    kind = next(model.parameters()).device.type
    inner = torch.autocast(kind if kind != "tape" else "cpu", torch.bfloat16)(model.forward)

    @functools.wraps(inner)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs).float()

    model.forward = in_float32


def as_a_method(model: Any) -> None:
    original = type(model).forward if type(model) is Net else type(model).__bases__[1].forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return original(self, x, 3.0) - self.linear.bias

    model.forward = MethodType(forward, model)


def by_the_class(model: Any) -> None:
    forward = type(model).forward
    model.forward = lambda x: forward(model, x) + 1


def without_calling_it(model: Any) -> None:
    model.forward = model.linear.forward


REPLACE: dict[str, Replace] = {
    "doubled": doubled,
    "twice": twice,
    "autocast": as_accelerate_does,
    "method": as_a_method,
    "by the class": by_the_class,
    "another": without_calling_it,
}


def agree(fast: Any, eager: Any, rand: Rand, least: int = 3) -> None:
    before = replays(fast)
    alike(fast, eager, rand, 5, 4, calls=4)
    assert replays(fast) - before >= least


@pytest.mark.parametrize("name", REPLACE)
@pytest.mark.parametrize("recorded", [False, True], ids=["new", "recorded"])
def test_replaced(device: torch.device, rand: Rand, name: str, recorded: bool) -> None:
    eager, model = Net(device), Net(device)
    fast = ol.graph(model, warmup=1)
    if recorded:
        agree(fast, eager, rand)
    given, given_eager = fast.forward, eager.forward
    REPLACE[name](fast)
    REPLACE[name](eager)
    agree(fast, eager, rand)
    # What was taken before stays what it was, and the original follows.
    alike(given, given_eager, rand, 5, 4, calls=3)
    alike(model, eager, rand, 5, 4, calls=3)
    del fast.forward, eager.forward
    agree(fast, eager, rand)


@pytest.mark.parametrize("name", REPLACE)
def test_replaced_in_training(device: torch.device, rand: Rand, name: str) -> None:
    eager, fast = Net(device), ol.graph(Net(device), warmup=1)
    REPLACE[name](fast)
    REPLACE[name](eager)
    for i in range(4):
        for model in (eager, fast):
            model.zero_grad()
            model(rand(i, 5, 4)).square().sum().backward()
        for p, q in zip(fast.parameters(), eager.parameters(), strict=True):
            assert_same(p.grad, q.grad)
    assert replays(fast) == 3


def test_wrapped_before_and_replaced_on_the_original(device: torch.device, rand: Rand) -> None:
    eager, model = Net(device), Net(device)
    fast = ol.graph(model, warmup=1)
    agree(fast, eager, rand)
    wrapped = fast.forward
    model.forward = lambda *args: wrapped(*args) * 2  # type: ignore[method-assign]
    doubled(eager)
    agree(fast, eager, rand)
    alike(model, eager, rand, 5, 4)


@pytest.mark.cpu
def test_the_modes_of_a_wrapper_end_with_the_call(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(Net(device), warmup=1)
    as_accelerate_does(fast)
    kind = device.type if device.type != "tape" else "cpu"
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 5, 4))
            assert not torch.is_autocast_enabled(kind)
    assert replays(fast) == 3


def test_put_back(device: torch.device, rand: Rand) -> None:
    """As accelerate's `unwrap_model` does."""
    eager, fast = Net(device), ol.graph(Net(device), warmup=1)
    as_accelerate_does(fast)
    with torch.no_grad():
        fast(rand(0, 5, 4))
    forward, original = fast.forward, fast.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    fast.forward = forward
    assert forward == original
    assert "forward" not in fast.__dict__
    agree(fast, eager, rand)


def test_graphed_when_replaced_already(device: torch.device, rand: Rand) -> None:
    eager, model = Net(device), Net(device)
    doubled(eager)
    doubled(model)
    fast = ol.graph(model, warmup=1)
    agree(fast, eager, rand)
    doubled(eager)
    doubled(fast)
    agree(fast, eager, rand)
    agree(copy.deepcopy(ol.graph(model, warmup=1)), model, rand)


def test_delete_what_is_not_there(device: torch.device) -> None:
    with pytest.raises(AttributeError, match="forward"):
        del ol.graph(Net(device)).forward


def test_signatures(device: torch.device) -> None:
    fast, expected = ol.graph(Net(device)), inspect.signature(Net.forward)
    assert inspect.signature(type(fast).forward) == expected
    assert inspect.signature(fast.forward) == inspect.signature(Net(device).forward)
    assert list(inspect.signature(fast.__class__.forward).parameters) == ["self", "x", "scale"]
    fast.forward = lambda y: y
    assert list(inspect.signature(fast.forward).parameters) == ["y"]


def test_a_replaced_forward_pickles_with_the_module(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(Net(device), warmup=1)
    fast.forward = torch.nn.functional.relu
    again = pickle.loads(pickle.dumps(fast))
    assert type(again) is Net
    assert_same(again(rand(0, 5, 4)), rand(0, 5, 4).relu())


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported(strict: bool) -> None:
    """torch.export reads the code of `forward`, and traces through it."""
    device = torch.device("cpu")
    fast, x = ol.graph(Net(device), warmup=1), torch.ones(5, 4)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    program = torch.export.export(fast, (x,), strict=strict)
    assert_same(program.module()(x + 1), Net(device)(x + 1))
    assert fast.forward.__code__ is Net.forward.__code__


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * 2


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "script": lambda module, x: torch.jit.script(module),
    "trace": lambda module, x: torch.jit.trace(module, x),
    "fx": lambda module, x: torch.fx.symbolic_trace(module),
}


@pytest.mark.parametrize("way", TRACERS)
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("calls", [0, 5])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced(way: str, around: bool, calls: int, device: torch.device, rand: Rand) -> None:
    """What other tools make of a graphed module is what they make of the module."""
    module = Inner().to(device).eval()
    fast = ol.graph(module)
    with torch.no_grad():
        for i in range(calls):
            fast(rand(i, 2, 3))
        made = TRACERS[way](Outer(fast) if around else fast, rand(0, 2, 3))
    alike(made, lambda x: module(x) + around, rand, 2, 3)
    alike(fast, module, rand, 2, 3)


class Called(Net):
    """A class with a call of its own, around the forward and in its place."""

    around = True

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x + 1) * 3 if self.around else x - 1


def test_a_class_with_a_call_of_its_own(device: torch.device, rand: Rand) -> None:
    model = Called(device)
    fast = ol.graph(model)
    alike(fast, model, rand, 2, 4, calls=8)
    assert replays(fast) == 5
    model.around = False
    alike(fast, model, rand, 2, 4)


@pytest.mark.parametrize("way", ["deleted", "put back", "deleted of the original"])
def test_a_forward_that_is_taken_away_again(device: torch.device, rand: Rand, way: str) -> None:
    original, eager = Net(device), Net(device)
    fast = ol.graph(original, warmup=1)
    alike(fast, eager, rand, 5, 4, calls=3)
    before: Any = fast.forward
    fast.forward = lambda x: x * 2
    alike(fast, lambda x: x * 2, rand, 5, 4, calls=3)
    if way == "put back":
        fast.forward = before
    else:
        del (fast if way == "deleted" else original).forward
    alike(fast, eager, rand, 5, 4)
