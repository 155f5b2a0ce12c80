"""Copies of a workload share nothing with it, and fresh inputs look like its own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from onelaunch.tools.bench.reference import judge, make_reference, outputs
from onelaunch.tools.bench.workload import Workload, own


class Counter(nn.Module):
    """Adds the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls

    def double_it(self, x: Tensor) -> Tensor:
        return self(2 * x)


class Pipeline:
    """A callable around a model."""

    def __init__(self, net: Counter) -> None:
        self.net = net

    def __call__(self, x: Tensor) -> Tensor:
        return self.net(x)

    def run(self, x: Tensor) -> Tensor:
        return self.net(x)


GLOBAL = Counter()


def with_a_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def wrappers(net: Counter) -> dict[str, Callable[[Tensor], Tensor]]:
    def closure(x: Tensor) -> Tensor:
        return net(x)

    return {
        "module": net,
        "method": net.double_it,
        "closure": closure,
        "partial": functools.partial(net),
        "object": Pipeline(net),
        "method of an object": Pipeline(net).run,
    }


KINDS = list(wrappers(Counter()))


@pytest.mark.parametrize("which", KINDS)
def test_a_copy_has_its_own_state(which: str) -> None:
    net = Counter()
    workload = Workload(wrappers(net)[which], (torch.ones(3),))
    workload.copy()()
    assert net.calls == 0


@pytest.mark.parametrize("which", KINDS)
def test_a_copy_runs_in_float64(which: str) -> None:
    workload = Workload(wrappers(Counter())[which], (torch.ones(3),))
    assert workload.in_float64()().dtype is torch.float64
    assert workload().dtype is torch.float32


def test_a_global_model_is_copied_too() -> None:
    workload = Workload(with_a_global, (torch.ones(3),))
    assert workload.copy()().tolist() == [2.0, 2.0, 2.0]
    assert workload.in_float64()().dtype is torch.float64
    assert GLOBAL.calls == 0
    assert GLOBAL.calls.dtype is torch.float32


class Locked(nn.Linear):
    """A module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_not_widened_in_place() -> None:
    model = Locked()
    with pytest.raises(TypeError, match="Locked cannot be copied"):
        Workload(model, (torch.ones(3),)).in_float64()
    assert model.weight.dtype is torch.float32


def test_the_device_is_where_the_results_are() -> None:
    workload = Workload(torch.relu, (torch.ones(3),))
    assert workload.device == torch.device("cpu")
    moved = replace(workload, results_on=torch.device("cuda", 0))
    assert moved.device == torch.device("cuda", 0)
    assert moved.copy().device == torch.device("cuda", 0)


@pytest.mark.parametrize("share", [False, True])
def test_a_large_model_shares_its_parameters_and_nothing_else(share: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def closure(x: Tensor) -> Tensor:
        return model(x)

    for fn in (model, closure):
        copied = Workload(fn, (torch.ones(2, 3),), share_parameters=share).copy()
        theirs = list(copied.parameters())
        assert len(theirs) == 4
        assert all((a is b) is share for a, b in zip(theirs, model.parameters(), strict=True))
        copied()
        assert model[1].num_batches_tracked == 0


def test_a_closed_over_tensor_is_copied_and_widened() -> None:
    weight = torch.ones(3)

    def scale(x: Tensor) -> Tensor:
        return x * weight.add_(1)

    workload = Workload(scale, (torch.ones(3),))
    assert workload.in_float64()().dtype is torch.float64
    assert torch.equal(weight, torch.ones(3))


def test_what_cannot_be_copied_is_shared() -> None:
    lock = threading.Lock()

    def locked(x: Tensor) -> Tensor:
        with lock:
            return x + 1

    assert torch.equal(own(locked)(torch.zeros(2)), torch.ones(2))


def test_a_tensor_passed_twice_stays_one() -> None:
    x = torch.zeros(2)
    (a, b), kwargs = Workload(torch.add, (x, x), {"out": x}).copy_inputs()
    assert a is b
    assert a is kwargs["out"]
    assert a is not x


def test_fresh_inputs_keep_shape_range_and_strides() -> None:
    floats = torch.rand(4, 6).t()
    ids = torch.arange(10)
    (new_floats, new_ids, scalar), _ = Workload(torch.add, (floats, ids, 3)).fresh(
        torch.Generator().manual_seed(0)
    )
    assert new_floats.stride() == floats.stride()
    assert not torch.equal(new_floats, floats)
    assert new_floats.min() >= floats.min()
    assert new_floats.max() <= floats.max()
    assert sorted(new_ids.tolist()) == ids.tolist()
    assert new_ids.tolist() != ids.tolist()
    assert scalar == 3


def test_fresh_inputs_of_every_kind() -> None:
    inputs = (
        torch.ones(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.zeros(0, 4),
        torch.tensor(2.0),
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
    )
    fresh, _ = Workload(torch.add, inputs).fresh(torch.Generator().manual_seed(0))
    for old, new in zip(inputs, fresh, strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert new.requires_grad == old.requires_grad
    assert not torch.equal(fresh[0], inputs[0])


def test_names_in_code() -> None:
    x = torch.zeros(1)
    assert Workload(torch.add, (x,)).call_text == "x"
    assert Workload(torch.add, (x, x), {"out": x}).call_text == "x0, x1, out=out"
    assert Workload(torch.add, (), {"input": x}).call_text == "input=input"


NET = nn.Linear(2, 2)
OPTIMIZER = torch.optim.LBFGS(NET.parameters(), line_search_fn="strong_wolfe")
STEPS: list[Tensor] = [torch.zeros(())]


def loss_of(x: Tensor) -> Tensor:
    OPTIMIZER.zero_grad()
    loss = NET(x).square().mean()
    loss.backward()
    return loss


def train(x: Tensor) -> Tensor:
    STEPS[0] += 1
    return OPTIMIZER.step(lambda: loss_of(x))


def test_a_step_over_globals_is_copied_whole() -> None:
    """The optimizer with all that it has, of the parameters of the copied module, which the other
    functions of the file see too."""
    before = [p.detach().clone() for p in NET.parameters()]
    workload = Workload(train, (torch.ones(3, 2),))
    first, second = workload.copy(), workload.copy()
    losses = [first() for _ in range(3)]
    assert losses[-1] < losses[0]
    torch.testing.assert_close([second() for _ in range(3)], losses, rtol=0, atol=0)
    assert all(map(torch.equal, NET.parameters(), before))
    assert not OPTIMIZER.state
    assert STEPS == [0]


def test_hooks_of_parameters_and_optimizers_are_copied_with_what_they_hold() -> None:
    """A step with hooks runs in a copy as it does itself, and counts in the copy alone."""
    model, seen = nn.Linear(4, 2), torch.zeros(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halve(grad: Tensor) -> Tensor:
        seen[0] += 1
        return grad / 2

    def note(*_: object) -> None:
        seen[1] += 1

    def after(*_: object) -> None:
        seen[2] += model.weight.detach().abs().max() > 0

    model.weight.register_hook(halve)
    model.weight.register_post_accumulate_grad_hook(note)
    optimizer.register_step_post_hook(after)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return torch.cat([model.weight.flatten(), seen])

    weight = model.weight.detach().clone()
    x = torch.ones(3, 4)
    copied = Workload(step, (x,)).copy()
    results = [copied() for _ in range(2)]
    assert seen.tolist() == [0, 0, 0]
    assert torch.equal(model.weight, weight)
    for result in results:
        assert torch.equal(result, step(x))
    assert seen.tolist() == [2, 2, 2]


class Cache:
    """A cache as people write it: no container that torch knows."""

    def __init__(self) -> None:
        self.kept = torch.zeros(4, 2)
        self.at = 0


def append(x: Tensor, cache: Cache) -> Tensor:
    cache.kept[cache.at] = x
    cache.at += 1
    return cache.kept * 2


def test_an_object_among_the_arguments_is_left_as_it_was() -> None:
    """The runs of a check each begin with it, and eager is right in all of them."""
    cache = Cache()
    made = make_reference(Workload(append, (torch.ones(2), cache)), torch.Generator())
    assert (cache.at, cache.kept.abs().sum().item()) == (0, 0)
    assert made.repeatable
    assert len(made.cases) > 3
    for case in made.cases:
        workload = Workload(append, *case.inputs)
        result = append(*workload.copy_inputs()[0])
        assert judge(outputs(result), case, case.tolerance).wrong is None
        assert case.inputs[0][1].at == 0
