"""What would be recorded again and again, for one call or a few each: it runs eagerly after some
recordings, with one warning that names what varies."""

from __future__ import annotations

import contextvars
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import onelaunch as ol

from .drop_in import Rand, assert_same


@dataclass
class Metadata:
    lengths: Tensor
    count: int = 3


context: Any = None
variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")


class Model(nn.Module):
    """Reads what the program puts into it before each call."""

    metadata: Any = None
    factor: Callable[[Tensor], Tensor] = staticmethod(torch.sin)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(4, 4)
        self.table: dict[str, Tensor] = {}


def of_a_global(model: Model, x: Tensor) -> Tensor:
    return model.lin(x) * context.lengths.sum()


def of_a_variable(model: Model, x: Tensor) -> Tensor:
    return model.lin(x) * variable.get().lengths.sum()


def of_an_attribute(model: Model, x: Tensor) -> Tensor:
    return model.lin(x) * model.metadata.lengths.sum()


def of_a_function(model: Model, x: Tensor) -> Tensor:
    return model.factor(model.lin(x))


def of_a_table(model: Model, x: Tensor) -> Tensor:
    if "w" not in model.table:
        model.table["w"] = model.lin.weight + model.lin.weight.T
    return x @ model.table["w"] + model.table["w"].sum(0)


def of_weights(model: Model, x: Tensor) -> Tensor:
    return model.lin(x)


def replace_global(model: Model, lengths: Tensor) -> None:
    global context
    context = Metadata(lengths)


def replace_namespace(model: Model, lengths: Tensor) -> None:
    global context
    context = types.SimpleNamespace(lengths=lengths)


def replace_variable(model: Model, lengths: Tensor) -> None:
    variable.set(Metadata(lengths))


def replace_attribute(model: Model, lengths: Tensor) -> None:
    model.metadata = Metadata(lengths)


def replace_function(model: Model, lengths: Tensor) -> None:
    factor = float(lengths[0])
    model.factor = lambda x: x * factor


def replace_table(model: Model, lengths: Tensor) -> None:
    model.table = {}


def move_weights(model: Model, lengths: Tensor) -> None:
    model.lin.weight.data = model.lin.weight.data * 1.01


BROUGHT = [
    (of_a_global, replace_global),
    (of_a_global, replace_namespace),
    (of_a_variable, replace_variable),
    (of_an_attribute, replace_attribute),
    (of_a_table, replace_table),
]
CASES = [
    (of_a_function, replace_function, "factor"),
    (of_weights, move_weights, "lin.weight"),
]


def _told(device: torch.device, rand: Rand, f: Any, change: Any, trains: bool) -> Any:
    """Return the callable, and (call, warning) for each warning of 60 calls."""
    models = Model().to(device), Model().to(device)
    fast = ol.graph(lambda x: f(models[0], x))
    told: list[tuple[int, str]] = []
    for i in range(60):
        x, lengths = rand(i, 2, 4), torch.full((2,), 1.0 + i).to(device)
        for model in models:
            change(model, lengths)
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(trains):
            warnings.simplefilter("always")
            got = fast(x)
        told += [(i, str(w.message)) for w in caught]
        expected = f(models[1], x)
        assert_same(got.detach(), expected.detach())
        if trains:
            got.sum().backward()
            expected.sum().backward()
            assert_same(models[0].lin.weight.grad, models[1].lin.weight.grad, "grad")
    return fast, told


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("f", "change", "name"), CASES, ids=[c.__name__ for _, c, _ in CASES])
def test_state_that_is_another_at_each_call(
    device: torch.device, rand: Rand, f: Any, change: Any, name: str, trains: bool
) -> None:
    fast, told = _told(device, rand, f, change, trains)
    ((first, text),) = told
    assert "[OL301]" in text
    assert "in a row for one call each" in text
    assert name in text
    assert first < 40
    assert fast.stats().captures <= 9


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("f", "change"), BROUGHT, ids=[c.__name__ for _, c in BROUGHT])
def test_metadata_that_is_another_at_each_call(
    device: torch.device, rand: Rand, f: Any, change: Any, trains: bool
) -> None:
    """Its tensors are inputs of the second recording."""
    fast, told = _told(device, rand, f, change, trains)
    assert not told
    assert fast.stats().captures == 2
    assert fast.stats().replays >= 54


def weight_normed(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old, and in many models
        return nn.utils.weight_norm(layer)


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.3)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("by", [weight_normed, nn.utils.spectral_norm, pruned])
def test_a_weight_that_a_hook_of_the_module_makes(
    device: torch.device, rand: Rand, by: Callable[[nn.Linear], nn.Module], trains: bool
) -> None:
    """The module's own hooks run before the launch, and the weight is an input. A callable around
    the module is recorded once."""
    models: list[Any] = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(by(nn.Linear(4, 4)).to(device))
    (eager, inner, module), told = models, list[str]()
    fast, instead = ol.graph(inner), ol.graph(lambda x: module(x))
    for i in range(40):
        x = rand(i, 2, 4)
        grad, seen = torch.set_grad_enabled(trains), warnings.catch_warnings(record=True)
        with grad, seen as caught:
            warnings.simplefilter("always")
            expected = eager(x)
            for result in (fast(x), instead(x)):
                assert_same(result.detach(), expected.detach())
                if trains:
                    result.sum().backward()
            if trains:
                expected.sum().backward()
                for model in (inner, module):
                    assert_same(
                        [p.grad for p in model.parameters()], [p.grad for p in eager.parameters()]
                    )
        told += [str(w.message) for w in caught]
    assert not told
    assert (fast.stats().captures, instead.stats().captures) == (2, 1)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.T


def test_cached_parametrizations(device: torch.device, rand: Rand) -> None:
    """Torch gives each `parametrize.cached()` a dict of its own, which a replay fills."""
    cells = [nn.Linear(6, 6), nn.Linear(6, 6)]
    cells[1].load_state_dict(cells[0].state_dict())
    for cell in cells:
        parametrize.register_parametrization(cell, "weight", Symmetric())
        cell.to(device)
    fast = ol.graph(lambda x: cells[0](cells[0](x)))

    for i in range(60):
        x = rand(i, 2, 6)
        with parametrize.cached():
            got = fast(x)
        with parametrize.cached():
            expected = cells[1](cells[1](x))
        assert_same(got.detach(), expected.detach())
        got.sum().backward()
        expected.sum().backward()
    assert fast.stats().captures == 2
    assert fast.stats().replays >= 54
    mine, theirs = (cell.parametrizations.weight.original.grad for cell in cells)
    assert_same(mine, theirs)


def test_it_is_recorded_again_once_that_pays(device: torch.device, rand: Rand) -> None:
    model = Model().to(device)
    fast = ol.graph(lambda x: of_an_attribute(model, x))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(50):
            replace_attribute(model, rand(i, 2))
            fast(rand(i, 2, 4))
        for i in range(80):
            assert_same(fast(rand(i, 2, 4)), of_an_attribute(model, rand(i, 2, 4)))
        replays = fast.stats().replays
        fast(rand(0, 2, 4))
    assert fast.stats().replays == replays + 1


def test_values_that_take_turns_are_inputs(device: torch.device, rand: Rand) -> None:
    """Seven adapters, each called a few times before any of them comes again."""
    model = Model().to(device)
    adapters = [Metadata(rand(i, 2)) for i in range(7)]
    fast = ol.graph(lambda x: of_an_attribute(model, x))
    with torch.no_grad():
        for turn in range(4):
            for adapter in adapters:
                model.metadata = adapter
                for i in range(4 if turn == 0 else 2):
                    assert_same(fast(rand(i, 2, 4)), of_an_attribute(model, rand(i, 2, 4)))
    assert fast.stats().captures == 2
    assert fast.stats().eager_calls == 0


class Cache:
    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(2, 4, device=device)


def test_a_request_that_is_an_attribute(device: torch.device, rand: Rand) -> None:
    """Each request of a few calls needs another recording."""

    def f(model: Model, x: Tensor) -> Tensor:
        model.metadata.total += model.lin(x)
        return model.metadata.total * 1

    models = Model().to(device), Model().to(device)
    fast = ol.graph(lambda x: f(models[0], x))

    @torch.no_grad()
    def run() -> None:
        for i in range(200):
            if i % 5 == 0:
                for model in models:
                    model.metadata = Cache(device)
            assert_same(fast(rand(i, 2, 4)), f(models[1], rand(i, 2, 4)))

    with pytest.warns(ol.GraphWarning, match=r"OL301.*a few calls.*metadata"):
        run()
    assert fast.stats().captures < 40
