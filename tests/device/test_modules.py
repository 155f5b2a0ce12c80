"""A graphed module is a module: state, attributes and hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import onelaunch as ol

from .drop_in import CUDA, Rand, alike, assert_same, on_accelerators, random_tensor, replays
from .models import Norms, Scaled, recorded

# Identity and state.


def test_it_is_an_instance_of_its_class(device: torch.device) -> None:
    assert isinstance(ol.graph(Scaled(device)), Scaled)


def test_it_has_the_name_of_its_class(device: torch.device) -> None:
    """Libraries choose by it: the `Trainer` of transformers how to shift labels, `save_pretrained`
    what to write into a config."""
    model = Scaled(device)
    fast = ol.graph(model)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(fast), name) == getattr(Scaled, name)
    assert fast._get_name() == "Scaled"
    assert repr(fast) == repr(model)


class Averages(nn.Module):
    """Called by a `__call__` of its own that runs no forward, as a model of `ema_pytorch`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)


def test_a_module_without_a_forward_is_refused_where_its_calls_would_pass_by(
    device: torch.device, rand: Rand
) -> None:
    module = Averages(Scaled(device))
    with pytest.raises(ol.ArgumentError, match=r"Averages has no `forward`") as caught:
        ol.graph(module)
    assert "ol.graph(lambda *args: module(*args))" in str(caught.value)
    fast = ol.graph(lambda *args: module(*args), warmup=1)
    alike(fast, module, rand, 5, 4, calls=4)
    assert replays(fast) == 3


def test_the_original_is_unchanged(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    before = type(model), set(vars(model))
    fast = recorded(model, rand)
    assert (type(model), set(vars(model))) == before
    with torch.no_grad():
        assert_same(model(rand(9, 5, 4)), fast(rand(9, 5, 4)))


def test_parameters_and_state_are_shared(device: torch.device) -> None:
    model = Norms(device)
    fast = ol.graph(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    for (n, p), (m, q) in zip(fast.named_parameters(), model.named_parameters(), strict=True):
        assert n == m
        assert p is q
    for (n, p), (m, q) in zip(fast.named_buffers(), model.named_buffers(), strict=True):
        assert n == m
        assert p is q
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]
    assert fast.linear is model.linear
    assert len(list(fast.children())) == 3


def test_load_state_dict(device: torch.device, rand: Rand) -> None:
    fast = recorded(Norms(device).eval(), rand)
    other = Norms(device).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    fast.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert_same(fast(rand(7, 5, 4)), other(rand(7, 5, 4)))
    assert len(fast.recordings) == 1


def test_attributes(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    fast = ol.graph(model)
    assert fast.scale == 2.0
    assert fast.kind == "scaled"
    assert fast.width == 4
    assert_same(fast.encode(rand(0, 4)).detach(), model.encode(rand(0, 4)).detach())
    fast.note = "hello"
    assert model.note == "hello"
    model.other = 3
    assert fast.other == 3
    del fast.note
    assert not hasattr(model, "note")
    with pytest.raises(AttributeError, match="nothing"):
        _ = fast.nothing


def test_a_plain_attribute_set_later(device: torch.device, rand: Rand) -> None:
    """A number that forward reads is in the recording: another value is another recording."""
    model = Scaled(device)
    fast = recorded(model, rand)
    fast.scale = 3.0
    alike(fast, lambda x: model.linear(x) * 3.0, rand, 5, 4)
    model.scale = 5.0
    alike(fast, lambda x: model.linear(x) * 5.0, rand, 5, 4)


def test_a_parameter_set_through_the_graphed_module(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    fast = recorded(model, rand)
    fast.linear.weight = nn.Parameter(torch.ones(4, 4, device=device))
    fast.extra = nn.Linear(2, 2)
    assert "extra.weight" in model.state_dict()
    alike(fast, model, rand, 5, 4)


def test_train_and_eval(device: torch.device, rand: Rand) -> None:
    model, eager = Norms(device), Norms(device)
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(12):
            training = i % 4 < 2
            assert fast.train(training) is fast
            eager.train(training)
            assert model.training == fast.training == model.norm.training == training
            assert_same(fast(rand(i, 5, 4)), eager(rand(i, 5, 4)))
        assert fast.eval() is fast
        assert not model.norm.training
    assert len(fast.recordings) == 2


def test_to_another_dtype(device: torch.device, rand: Rand) -> None:
    fast = recorded(Scaled(device), rand)
    assert fast.to(torch.float64) is fast
    reference = Scaled(device).to(torch.float64)
    alike(fast, reference, functools.partial(rand, dtype=torch.float64), 5, 4)
    assert fast.float() is fast
    alike(fast, Scaled(device), rand, 5, 4)


@on_accelerators
def test_to_the_host_and_back(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    there, here = copy.deepcopy(model), copy.deepcopy(model).cpu()
    fast = recorded(model, rand)
    fast.to("cpu")
    alike(fast, here, random_tensor, 5, 4)
    fast.to(device)
    alike(fast, there, rand, 5, 4)


def test_requires_grad_(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(Scaled(device), warmup=1)
    fast.requires_grad_(False)
    for i in range(4):
        y = fast(rand(i, 5, 4))
        assert not y.requires_grad
    assert replays(fast) > 0


def test_zero_grad_apply_and_half(device: torch.device) -> None:
    fast = ol.graph(Scaled(device))
    fast.linear.weight.grad = torch.ones_like(fast.linear.weight)
    fast.zero_grad()
    assert fast.linear.weight.grad is None
    seen: list[nn.Module] = []
    fast.apply(seen.append)
    assert fast.linear in seen
    assert fast.half().linear.weight.dtype == torch.float16


# Hooks.


def test_hooks_run_at_each_call(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    fast = ol.graph(model, warmup=1)
    ran: list[str] = []

    def before(module: nn.Module, args: Any) -> Any:
        ran.append("before")
        return (args[0] + 1,)

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        ran.append("after")
        return output * 2

    handles = [fast.register_forward_pre_hook(before), fast.register_forward_hook(after)]
    alike(fast, lambda x: (model.linear(x + 1) * 2.0) * 2, rand, 5, 4, calls=6)
    assert ran == ["before", "after"] * 6
    for handle in handles:
        handle.remove()
    alike(fast, lambda x: model.linear(x) * 2.0, rand, 5, 4)
    assert replays(fast) > 0


def test_a_hook_from_before_reads_the_host_and_is_no_part_of_the_recording(
    device: torch.device, rand: Rand
) -> None:
    model = Scaled(device)
    norms: list[float] = []
    model.register_forward_hook(lambda m, a, y: norms.append(y.norm().item()))
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(6):
            fast(rand(i, 5, 4))
    assert len(norms) == len(set(norms)) == 6
    assert replays(fast) >= 4


def test_a_hook_on_a_submodule_is_part_of_the_computation(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    model.linear.register_forward_hook(lambda m, a, y: y + 100)
    with pytest.warns(ol.GraphWarning, match="OL308"):
        fast = recorded(model, rand)
    alike(fast, model, rand, 5, 4)


def test_a_hook_added_to_a_submodule_later(device: torch.device, rand: Rand) -> None:
    model = Scaled(device)
    fast = recorded(model, rand)
    handle = model.linear.register_forward_hook(lambda m, a, y: y + 100)
    with pytest.warns(ol.GraphWarning, match="OL308"):
        alike(fast, model, rand, 5, 4)
    handle.remove()
    alike(fast, model, rand, 5, 4)


class LazyScale(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """A lazy module that stays of its class."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.UninitializedParameter(device=device)

    def initialize_parameters(self, x: Tensor) -> None:
        self.scale.materialize(x.shape[1:], device=x.device)
        nn.init.constant_(self.scale, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)  # the tape has no uninitialized
@pytest.mark.parametrize(
    "make",
    [
        lambda device: nn.LazyLinear(3, device=device),
        lambda device: nn.LazyBatchNorm1d(device=device),
        LazyScale,
        lambda device: nn.Sequential(nn.LazyLinear(3, device=device), nn.Tanh()),
    ],
)
def test_a_lazy_module_becomes_what_it_does_in_eager(
    device: torch.device, rand: Rand, make: Callable[[torch.device], nn.Module]
) -> None:
    eager, original = make(device), make(device)
    fast = ol.graph(original, warmup=1)
    for i in range(5):
        results: list[Any] = []
        for model in (eager, fast):
            torch.manual_seed(1)
            model.zero_grad()
            y = model(rand(i, 5, 4))
            y.square().sum().backward()
            results.append([y, *[p.grad for p in model.parameters()], dict(model.state_dict())])
        assert_same(results[1], results[0])
    assert type(original) is type(eager)
    assert isinstance(fast, type(eager))
    assert type(fast).__bases__[1] is type(eager)
    assert type(copy.deepcopy(fast)) is type(fast)
    assert replays(fast) >= 3


class HalfLazy(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3, device=device)
        self.plain = nn.Linear(3, 3, device=device)
        self.whole = False

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.lazy(x) if self.whole else x)


@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("grad", [False, True])
def test_a_lazy_module_is_captured_once_it_has_its_sizes(
    device: torch.device, rand: Rand, grad: bool
) -> None:
    """A capture that gave it its sizes could not take them back."""
    model = HalfLazy(device)
    fast = ol.graph(model, warmup=1)
    with torch.set_grad_enabled(grad):
        with pytest.raises(ol.CaptureError, match=r"OL110\] `lazy.weight`"):
            fast.capture(rand(0, 5, 3))
        fast(rand(0, 5, 3))
        model.whole = True
        for _ in range(2):
            with pytest.raises(ol.CaptureError, match=r"OL110\] `lazy.weight`"):
                fast(rand(0, 5, 3))
        assert isinstance(model.lazy.weight, nn.UninitializedParameter)
        model(rand(0, 5, 3))
        alike(fast, model, rand, 5, 3, calls=5)
    assert replays(fast) >= 3


@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
def test_a_lazy_module_with_captures_beside_calls(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(nn.LazyLinear(3, device=device), capture="background", warmup=1)
    eager = nn.Linear(4, 3, device=device)
    with torch.no_grad():
        fast(rand(0, 5, 4))
        eager.load_state_dict(fast.state_dict())
        alike(fast, eager, rand, 5, 4, calls=5)


def test_a_hook_of_all_modules_comes_and_goes(device: torch.device, rand: Rand) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    fast = ol.graph(lambda x: net(x), warmup=1)
    alike(fast, net, rand, 3, 4, calls=4)
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: y * 2)
    try:
        with pytest.warns(ol.GraphWarning, match="OL308"):
            alike(fast, net, rand, 3, 4, calls=4)
    finally:
        handle.remove()
    alike(fast, net, rand, 3, 4, calls=4)
    assert replays(fast) >= 8


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_twin_is_given_another_class(device: torch.device, rand: Rand) -> None:
    """As a parametrization does: the original gets it too."""
    original, eager = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    eager.load_state_dict(original.state_dict())
    fast = ol.graph(original, warmup=1)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: None,
        lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
        lambda m: parametrize.remove_parametrizations(m, "weight"),
        lambda m: setattr(m, "__class__", Doubled),
    ]
    for change in changes:
        change(fast)
        change(eager)
        alike(lambda x: (fast(x), original(x)), lambda x: (eager(x), eager(x)), rand, 2, 3, calls=4)
        assert fast.__class__ is type(original)
        assert isinstance(fast, type(original))
    assert type(original) is Doubled
    assert replays(fast) >= 9


class Named(nn.Module):
    """A module that has names of ours, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.capture = 3
        self.reset = nn.Linear(4, 4)
        self.register_buffer("recordings", torch.ones(4))

    def stats(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.reset(x) * self.recordings * self.capture


def test_what_a_module_has_under_a_name_of_ours_is_the_modules(device: torch.device) -> None:
    model = Named().to(device)
    fast: Any = ol.graph(model, warmup=1)
    x = torch.ones(2, 4, device=device)
    with torch.no_grad():
        for i in range(6):
            fast.capture = 3 + i // 3
            assert_same(fast(x), model(x))
            assert model.capture == fast.capture == 3 + i // 3
    assert fast.stats() == "mine"
    assert fast.reset is model.reset
    assert fast.recordings is model.recordings
    assert fast.memory_bytes > 0
    assert fast.__graphed__.stats().replays >= 3
    assert len(fast.__graphed__.recordings) == 2
