"""A graphed module is a module: copies, pickles, and modules inside modules."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, on_cpu_and_cuda, replays
from .models import Norms, Scaled, recorded

# Copies.


def test_deepcopy_starts_with_no_recordings(device: torch.device, rand: Rand) -> None:
    fast = recorded(Scaled(device), rand, max_recordings=7)
    twin = copy.deepcopy(fast)
    assert isinstance(twin, Scaled)
    assert len(twin.recordings) == 0
    assert len(fast.recordings) == 1
    assert twin.linear.weight is not fast.linear.weight
    assert twin.linear.weight.data_ptr() != fast.linear.weight.data_ptr()
    with torch.no_grad():
        twin.linear.weight.mul_(2)
    alike(twin, lambda x: twin.linear(x) * 2.0, rand, 5, 4)
    alike(fast, Scaled(device), rand, 5, 4)
    assert replays(twin) > 0


def test_shallow_copy_is_independent_or_the_same(device: torch.device, rand: Rand) -> None:
    fast = recorded(Scaled(device), rand)
    twin = copy.copy(fast)
    alike(twin, Scaled(device), rand, 5, 4, calls=1)
    alike(fast, Scaled(device), rand, 5, 4, calls=1)


@on_cpu_and_cuda
@pytest.mark.parametrize("by", ["pickle", "torch.save"])
def test_the_underlying_module_is_saved(device: torch.device, rand: Rand, by: str) -> None:
    fast = recorded(Scaled(device), rand)
    buffer = io.BytesIO()
    (pickle.dump if by == "pickle" else torch.save)(fast, buffer)
    buffer.seek(0)
    load = pickle.load if by == "pickle" else functools.partial(torch.load, weights_only=False)
    loaded = load(buffer)
    assert type(loaded) is Scaled
    assert_same(dict(loaded.state_dict()), dict(fast.state_dict()))
    alike(loaded, fast, rand, 5, 4, calls=1)


def test_the_state_dict_can_be_saved(device: torch.device, rand: Rand) -> None:
    fast = recorded(Scaled(device), rand)
    buffer = io.BytesIO()
    torch.save({k: v.cpu() for k, v in fast.state_dict().items()}, buffer)
    buffer.seek(0)
    plain = Scaled(device)
    plain.load_state_dict(torch.load(buffer))


# In a larger model.


def test_a_graphed_submodule(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(1)
    outer = nn.Sequential(nn.Linear(4, 4, device=device), ol.graph(Scaled(device), warmup=1))
    plain = nn.Sequential(copy.deepcopy(outer[0]), Scaled(device))
    assert list(outer.state_dict()) == list(plain.state_dict())
    alike(outer, plain, rand, 5, 4)
    assert replays(outer[1]) > 0


def test_the_same_graphed_submodule_twice(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(Scaled(device), warmup=1)
    outer, plain = nn.Sequential(fast, fast), nn.Sequential(Scaled(device), Scaled(device))
    alike(outer, plain, rand, 5, 4)


def test_a_graphed_submodule_in_a_graphed_model(device: torch.device, rand: Rand) -> None:
    inner = ol.graph(Scaled(device), warmup=1)
    outer = ol.graph(nn.Sequential(inner, nn.ReLU()), warmup=1)
    alike(outer, lambda x: Scaled(device)(x).relu(), rand, 5, 4)
    assert replays(outer) > 0


class WithSlots(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))

    def __getattr__(self, name: str) -> Any:
        if name == "dynamic":
            return 7
        return super().__getattr__(name)

    def __len__(self) -> int:
        return 4

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.dynamic


def test_special_methods_and_getattr(device: torch.device, rand: Rand) -> None:
    model = WithSlots(device)
    fast = recorded(model, rand)
    assert len(fast) == 4
    assert fast.dynamic == 7
    alike(fast, model, rand, 5, 4)


def test_sequential_and_module_list_protocols(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Tanh())
    fast = recorded(model, rand)
    assert len(fast) == 2
    assert fast[0] is model[0]
    assert list(fast) == list(model)


def test_parametrizations(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(2)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).to(device)
    fast = recorded(model, rand)
    alike(fast, model, rand, 5, 4)


def test_share_across_two_graphed_modules(device: torch.device, rand: Rand) -> None:
    model = Norms(device).train()
    reference = Norms(device).train()
    a, b = ol.graph(model, warmup=1), ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(10):
            assert_same((a if i % 2 else b)(rand(i, 5, 4)), reference(rand(i, 5, 4)))
            assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert replays(a) > 0
    assert replays(b) > 0


def test_a_slice_and_a_replica_are_modules_of_the_original_class(rand: Rand) -> None:
    model = nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Sigmoid())
    fast: Any = ol.graph(model, warmup=1)
    with torch.no_grad():
        part, replica = fast[:2], fast._replicate_for_data_parallel()
        for i in range(4):
            assert_same(fast(rand(i, 3)), model(rand(i, 3)))
            assert_same(part(rand(i, 3)), model[:2](rand(i, 3)))
            assert_same(replica(rand(i, 3)), model(rand(i, 3)))
    assert type(part) is nn.Sequential


def test_the_signature_of_forward_is_the_originals() -> None:
    """Libraries look at it to see which arguments a model takes."""

    class Model(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    model = Model()
    assert inspect.signature(ol.graph(model).forward) == inspect.signature(model.forward)
