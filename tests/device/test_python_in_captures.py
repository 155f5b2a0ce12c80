"""Python in a capture: hooks are named, numbers that it moves on are right in every replay."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import onelaunch as ol
from onelaunch.gc_pause import FROZEN_AT_START

from .drop_in import assert_same, compare, replays
from .steps import Training, batch, small_model, training
from .training import Rand

FILE = __file__.rpartition("/")[2]


def counting(*_: Any) -> None:
    next(counts)


counts = itertools.count()


class Called:
    """A hook of one's own that is no function."""

    def __call__(self, *_: Any) -> None:
        next(counts)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_of_submodules_are_named(
    device: torch.device, rand: Rand, kind: str, grad: bool
) -> None:
    model, eager = (small_model(device) for _ in range(2))
    for one in (model, eager):
        getattr(one[0], f"register_{kind}")(counting)
        one[2].register_forward_hook(lambda module, args, out: out * 2)
        one.register_forward_hook(counting)  # of the graphed module itself: as in eager
    fast = ol.graph(model)
    mode = torch.enable_grad if grad else torch.no_grad
    compare(fast, eager, lambda i: (rand(i, 5, 4),), 3, mode)
    with pytest.warns(ol.GraphWarning, match="OL308") as caught:
        compare(fast, eager, lambda _: (rand(3, 5, 4),), 1, mode)
    assert len(caught) == 1
    compare(fast, eager, lambda i: (rand(i, 5, 4),), 4, mode)
    (first, second) = sorted(fast.recordings[0].hooks)
    assert first.startswith(f"0.{kind} `counting` (")
    assert f"{FILE}:" in first
    assert second.startswith("2.forward_hook `<lambda>` (")
    assert first in str(caught[0].message)
    where = str(caught[0].message.where).splitlines()
    assert [line.partition(": ")[2] for line in sorted(where)] == [
        "def counting(*_: Any) -> None:",
        "one[2].register_forward_hook(lambda module, args, out: out * 2)",
    ]


def test_hooks_of_every_kind_in_a_whole_step(device: torch.device) -> None:
    made, eager = (training(device, lambda p: torch.optim.SGD(p, lr=0.1)) for _ in range(2))
    for one in (made, eager):
        model, (optimizer,) = one.model, one.optimizers
        assert isinstance(model, nn.Sequential)
        model.register_forward_hook(Called())
        model[2].register_full_backward_hook(counting)
        weight = model[0].weight
        assert isinstance(weight, Tensor)
        weight.register_hook(lambda g: g * 2)
        weight.register_post_accumulate_grad_hook(counting)
        optimizer.register_step_pre_hook(counting)
        optimizer.register_step_post_hook(counting)
    fast = ol.graph(made.step)
    compare(fast, eager.step, lambda i: batch(i, device), 3, torch.enable_grad)
    with pytest.warns(ol.GraphWarning, match="OL308") as caught:
        compare(fast, eager.step, lambda _: batch(3, device), 1, torch.enable_grad)
    assert len(caught) == 1
    compare(fast, eager.step, lambda i: batch(i, device), 4, torch.enable_grad)
    assert_same(dict(made.model.state_dict()), dict(eager.model.state_dict()))
    names = [name.partition(" (")[0] for name in fast.recordings[0].hooks]
    assert sorted(names) == [
        "SGD.step_post_hook `counting`",
        "SGD.step_pre_hook `counting`",
        "model.0.weight.hook `<lambda>`",
        "model.0.weight.post_accumulate_grad_hook `counting`",
        "model.2.backward_hook `counting`",
        "model.forward_hook `Called.__call__`",
    ]


def weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    "wrap",
    [
        weight_norm,
        nn.utils.spectral_norm,
        parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_hooks_of_torch_are_not_named(
    device: torch.device, wrap: Callable[[nn.Module], Any]
) -> None:
    made = training(device, lambda p: torch.optim.SGD(p, lr=0.1))
    assert isinstance(made.model, nn.Sequential)
    wrap(made.model[0])
    fast = ol.graph(made.model)
    for i in range(5):
        fast(batch(i, device)[0]).sum().backward()
    assert fast.recordings[0].hooks == ()


class Counter:
    """Numbers that a call reads and rewrites, each by another way."""

    def __init__(self) -> None:
        self.n = 0
        self.kept: dict[str, int] = {"n": 0}
        self.size = 0

    def attribute(self, x: Tensor) -> Tensor:
        self.n += 1
        return x**self.n  # no recording follows a power

    def pointer(self, x: Tensor) -> Tensor:
        y = x[:, self.n :]
        self.n = (self.n + 1) % 3
        return y.clone()

    def item(self, x: Tensor) -> Tensor:
        self.kept["n"] += 1
        return x ** self.kept["n"]

    def branch(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return x * 2 if self.n % 2 else x * 3

    def unused(self, x: Tensor) -> Tensor:
        self.n += 1
        self.kept["n"] += len("ab")
        return x * 2

    @torch.no_grad()
    def decorated(self, x: Tensor) -> Tensor:
        self.n += 1
        return x**self.n  # no recording follows a power

    def stored(self, x: Tensor) -> Tensor:
        self.size = x.shape[0]
        self.kept["n"] = x.shape[0] + 1
        return x * self.size * self.kept["n"]


def decorated() -> Callable[[Tensor], Tensor]:
    counter = Counter()
    return lambda x: counter.decorated(x)


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ptr = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ptr = (self.ptr + 1) % 3
        return x + self.ptr


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: Counter().attribute, "self.n"),
        (lambda: Counter().item, "self.kept['n']"),
        (lambda: Counter().branch, "self.n"),
        (decorated, "counter.n"),
    ],
)
def test_a_number_that_is_another_at_each_call_is_refused(
    rand: Rand, made: Callable[[], Any], name: str
) -> None:
    """After a recording for each of eight values, and every call is right."""
    fast, eager = ol.graph(made(), warmup=1, on_refusal="eager"), made()
    with pytest.warns(ol.GraphWarning, match="OL118") as caught:
        compare(fast, eager, lambda i: (rand(i, 5, 4),), 24, torch.enable_grad)
    assert len(caught) == 1
    assert f"`{name}`" in str(caught[0].message)
    refused = ol.graph(made(), warmup=1)
    with pytest.raises(ol.CaptureError, match="OL118"):  # noqa: PT012
        for i in range(24):
            refused(rand(i, 5, 4))


@pytest.mark.parametrize("made", [lambda: Counter().pointer, Queue])
def test_a_number_of_few_values_has_a_recording_for_each(
    rand: Rand, made: Callable[[], Any]
) -> None:
    fast, eager = ol.graph(made(), warmup=1), made()
    compare(fast, eager, lambda i: (rand(i, 5, 4),), 30)
    assert len(fast.recordings) == 3
    assert replays(fast) > 15


def test_a_variable_that_the_callable_moves_on_is_named(rand: Rand) -> None:
    n = 0

    def f(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x**n

    fast = ol.graph(f, warmup=1)
    with pytest.raises(ol.CaptureError, match=r"OL118.*`n`"):
        compare(fast, lambda x: x**n, lambda i: (rand(i, 5, 4),), 30, torch.enable_grad)


def test_a_number_that_is_counted_or_stored_alone(rand: Rand) -> None:
    """Each replay counts, and stores what its call would: of two sizes in turn."""
    for name in ("unused", "stored"):
        counter, other = Counter(), Counter()
        fast, eager = ol.graph(getattr(counter, name), warmup=1), getattr(other, name)
        for i in range(20):
            x = rand(i, 5 + i // 2 % 2, 4)
            assert_same(fast(x), eager(x))
            assert vars(counter) == vars(other)
        assert len(fast.recordings) == 2


def test_a_wrapper_that_counts_steps(device: torch.device) -> None:
    class Lookahead:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.n = 0

        def step(self) -> None:
            self.optimizer.step()
            self.n = (self.n + 1) % 3
            if self.n == 0:
                for group in self.optimizer.param_groups:
                    for p in group["params"]:
                        p.data.mul_(0.5)

    def job() -> tuple[Training, Callable[..., Tensor]]:
        made = training(device, lambda p: torch.optim.SGD(p, lr=0.1))
        ahead = Lookahead(made.optimizers[0])

        def step(x: Tensor, y: Tensor) -> Tensor:
            made.model.zero_grad()
            loss = nn.functional.mse_loss(made.model(x), y)
            loss.backward()
            ahead.step()
            return loss

        return made, step

    (mine, step), (theirs, eager) = job(), job()
    fast = ol.graph(step)
    for i in range(24):
        assert_same(fast(*batch(i, device)), eager(*batch(i, device)), f"call {i}")
        assert_same(list(mine.model.parameters()), list(theirs.model.parameters()))
    assert len(fast.recordings) == 3
    assert replays(fast) > 9


def test_a_list_that_grows_is_named(rand: Rand) -> None:
    sizes: list[int] = []

    def f(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return x * 2

    fast = ol.graph(f, warmup=1)
    with pytest.warns(ol.GraphWarning, match="OL309.*`sizes`"):  # noqa: PT031
        for i in range(4):
            fast(rand(i, 5, 4))


def test_a_list_that_grows_and_is_read_is_refused(rand: Rand) -> None:
    sizes: list[int] = []

    def f(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return x * 2 if len(sizes) < 9 else x * 3

    fast = ol.graph(f, warmup=1)
    with pytest.raises(ol.CaptureError, match=r"OL118.*`sizes`"):  # noqa: PT012
        for i in range(4):
            fast(rand(i, 5, 4))


class Waits:
    """Garbage that waits for the device as it goes, which ends a capture."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.itself = t, self

    def __del__(self) -> None:
        self.t.sum().item()


@pytest.mark.parametrize(
    ("grad", "by_name"),  # each goes through the objects of the whole process
    [
        (False, False),
        *(
            pytest.param(*both, marks=pytest.mark.thorough)
            for both in ((False, True), (True, False), (True, True))
        ),
    ],
)
def test_a_collection_in_the_callable_leaves_older_garbage(
    rand: Rand, grad: bool, by_name: bool
) -> None:
    gc.collect()  # what earlier tests left
    collect, frozen = gc.collect, gc.get_freeze_count()

    def f(x: Tensor) -> Tensor:
        (collect if by_name else gc.collect)()
        return (x * 2).sin()

    fast = ol.graph(f, warmup=1)
    with torch.set_grad_enabled(grad):
        for i in range(5):
            Waits(rand(9, 3))
            x, mine = (rand(i, 3).requires_grad_(grad) for _ in range(2))
            y, expected = fast(x), (mine * 2).sin()
            assert_same(y, expected)
            if grad:
                y.sum().backward()
                expected.sum().backward()
                assert_same(x.grad, mine.grad)
    assert replays(fast) >= 3  # the garbage of the warm-up reads there
    assert gc.get_freeze_count() <= max(frozen, FROZEN_AT_START)


def test_what_the_program_froze_stays_frozen(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1)
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        compare(fast, lambda x: x * 2, lambda i: (rand(i, 3),), 4)
        assert gc.get_freeze_count() >= count - 100  # some of it may have gone
    finally:
        gc.unfreeze()
    assert replays(fast) == 3
