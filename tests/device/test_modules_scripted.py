"""TorchScript modules: scripted, traced, loaded and frozen, and all that they hold."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, replays

Change = Callable[[Any], object]

# From torch 2.15 on TorchScript is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    __annotations__ = {"offset": Tensor | None}

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = 2.0
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(3))
        self.numbers = {"a": 1.0}
        self.tensors = [torch.ones(3, device=device)]
        self.offset = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x) * self.scale + self.shift) * self.numbers["a"]
        for t in self.tensors:
            x = x + t
        offset = self.offset
        if offset is not None:
            x = x + offset
        return x


def compiled(module: nn.Module, device: torch.device) -> Any:
    return torch.jit.script(module.to(device))


def scripted(device: torch.device) -> Any:
    torch.manual_seed(0)
    return compiled(Net(device).eval(), device)


def loaded(device: torch.device) -> Any:
    file = io.BytesIO()
    torch.jit.save(scripted(torch.device("cpu")), file)
    file.seek(0)
    return torch.jit.load(file, map_location=device)


def traced(device: torch.device) -> Any:
    torch.manual_seed(0)
    return torch.jit.trace(Net(device).eval().to(device), torch.ones(2, 3, device=device))


def frozen(device: torch.device) -> Any:
    return torch.jit.freeze(scripted(device))


MAKERS = (scripted, loaded, traced, frozen)


def agree(fast: Any, model: Any, rand: Rand) -> None:
    """Six calls: its interpreter compiles in the first two, after which last bits may differ."""
    before = replays(fast)
    for i in range(6):
        torch.testing.assert_close(fast(rand(i, 2, 3)), model(rand(i, 2, 3)))
    assert replays(fast) > before


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("inside", [False, True])
def test_each_kind_replays(
    device: torch.device, rand: Rand, make: Callable[..., Any], inside: bool
) -> None:
    model = make(device)
    with torch.no_grad():
        agree(ol.graph(lambda x: model(x)) if inside else ol.graph(model), model, rand)


def other_weight(model: Any) -> None:
    model.linear.weight = nn.Parameter(torch.zeros_like(model.linear.weight))


CHANGES: dict[str, Change] = {
    "a buffer": lambda model: setattr(model, "shift", torch.zeros_like(model.shift)),
    "a parameter of a child": other_weight,
    "a parameter's memory": lambda model: setattr(
        model.linear.weight, "data", model.linear.weight.data * 2
    ),
    "a number": lambda model: setattr(model, "scale", 3.0),
    "a number in a dict": lambda model: setattr(model, "numbers", {"a": 5.0}),
    "a tensor in a list": lambda model: setattr(model, "tensors", [model.tensors[0] * 2]),
    "a longer list": lambda model: setattr(model, "tensors", [*model.tensors, model.tensors[0]]),
    "a tensor in place of None": lambda model: setattr(model, "offset", model.shift * 2),
}
OF_TENSORS = ("a buffer", "a parameter of a child", "a parameter's memory")


@pytest.mark.parametrize(
    ("make", "changed"),
    [(make, key) for make in MAKERS[:2] for key in CHANGES] + [(traced, key) for key in OF_TENSORS],
)
def test_a_change_of_what_it_holds(
    device: torch.device, rand: Rand, make: Callable[..., Any], changed: str
) -> None:
    model = make(device)
    fast = ol.graph(model)
    with torch.no_grad():
        agree(fast, model, rand)
        was = model(rand(0, 2, 3))
        CHANGES[changed](model)
        assert not torch.allclose(model(rand(0, 2, 3)), was)
        agree(fast, model, rand)


def test_training_and_eval(device: torch.device, rand: Rand) -> None:
    model = scripted(device)
    fast = ol.graph(model)
    with torch.no_grad():
        agree(fast, model, rand)
        fast.train()
        assert model.training
        results = [fast(rand(0, 2, 3)) for _ in range(6)]
        assert not all(torch.equal(results[0], t) for t in results[1:])
        fast.eval()
        agree(fast, model, rand)


class Writing(nn.Module):
    """What a call stores: a buffer in place, and a tensor in a list anew."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.kept = [torch.zeros(3, device=device)]

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        self.kept[0] = self.kept[0] + x.mean(0)
        return x * self.total + self.kept[0]


def test_what_a_call_stores(device: torch.device, rand: Rand) -> None:
    model, other = compiled(Writing(device), device), compiled(Writing(device), device)
    fast = ol.graph(model)
    with torch.no_grad():
        for i in range(8):
            torch.testing.assert_close(fast(rand(i, 2, 3)), other(rand(i, 2, 3)))
            torch.testing.assert_close(model.total, other.total)
            torch.testing.assert_close(model.kept[0], other.kept[0])
    assert replays(fast) >= 4


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x


@pytest.mark.parametrize("inside", [False, True])
def test_a_branch_on_a_value_runs_eagerly_where_that_is_asked(
    device: torch.device, rand: Rand, inside: bool
) -> None:
    """Its interpreter's RuntimeError is a refusal like any other."""
    model = compiled(Branching(), device)
    fast = ol.graph((lambda x: model(x)) if inside else model, warmup=1, on_refusal="eager")
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL101"):  # noqa: PT031
        for i in range(8):
            torch.testing.assert_close(fast(rand(i, 3)), model(rand(i, 3)))
    assert not fast.recordings


def test_gradients(device: torch.device, rand: Rand) -> None:
    model, other = scripted(device), scripted(device)
    fast = ol.graph(model)
    for i in range(7):
        for f in (fast, other):
            f(rand(i, 2, 3)).square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert replays(fast) >= 3


def test_the_twin_is_the_module_to_others(device: torch.device, rand: Rand) -> None:
    model = scripted(device)
    fast = ol.graph(model)
    assert isinstance(fast, torch.jit.ScriptModule)
    assert list(fast.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.jit.save(fast, file)
    file.seek(0)
    again, copied = torch.jit.load(file), copy.deepcopy(fast)
    with torch.no_grad():
        agree(copied, model, rand)
        torch.testing.assert_close(again(rand(0, 2, 3)), model(rand(0, 2, 3)))
