"""Which tensor an argument is, to a callable that asks: given twice, or one that it keeps itself.

And what a result is: an inference tensor, the object that a method belongs to, a tensor with an
attribute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, drop_in_worlds, replays

ASKS: dict[str, Callable[..., Tensor]] = {
    "is": lambda a, b: a * 2 if a is b else a * 3 + b,
    "id": lambda a, b: a * len({id(a), id(b)}) + b,
    "set": lambda *ts: ts[0] * len({*ts}),
    "address": lambda a, b: a * 2 if a.data_ptr() == b.data_ptr() else a * 3 + b,
    "in place": lambda a, b: a.add_(1) + b.mul_(2),
}


@pytest.mark.parametrize("name", ASKS)
def test_one_tensor_given_twice(rand: Rand, name: str) -> None:
    drop_in(ASKS[name], lambda i: (rand(i, 3),) * 2, calls=6)


def test_an_empty_tensor_given_twice(device: torch.device, rand: Rand) -> None:
    """Its memory does not tell, nor does that of a number of the host."""
    drop_in(lambda a, b: a * 2 if a is b else a * 3 + b, lambda i: (rand(i, 0, 3),) * 2, calls=6)

    def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x * a if a is b else x + b

    drop_in(scaled, lambda i: (rand(i, 3), *(torch.tensor(float(i)),) * 2), calls=6)


@pytest.mark.parametrize("name", ASKS)
def test_given_twice_or_not_by_turns(rand: Rand, name: str) -> None:
    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = rand(i, 3)
        return (x, x) if i % 2 else (x, rand(i + 9, 3))

    drop_in(ASKS[name], arguments, calls=12, recordings=2)


def test_the_same_memory_but_another_tensor(rand: Rand) -> None:
    """A view of all of it is another object."""

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = rand(i, 3)
        return (x, x) if i % 2 else (x, x.view(3))

    drop_in(ASKS["is"], arguments, calls=12, recordings=2)


def test_given_twice_in_a_list_and_by_name(rand: Rand) -> None:
    def f(ts: list[Tensor], more: Tensor) -> Tensor:
        return ts[0] * (1 + (ts[0] is ts[1]) + 2 * (ts[1] is more))

    def arguments(i: int) -> tuple[list[Tensor], Tensor]:
        x = rand(i, 3)
        return [x, x], x

    drop_in(f, arguments, calls=6)
    fast = ol.graph(f, warmup=1)
    alike(lambda x: fast([x, x], more=x), lambda x: x * 4, rand, 3)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_a_tensor_given_twice(rand: Rand, count: int) -> None:
    """All of them go to the one tensor, once."""

    def f(a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        assert a is b
        return (a * b).sin() + sum(rest)

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        leaves = [rand(i, 3).requires_grad_() for _ in range(2)]
        more = [rand(9, 3).requires_grad_() for _ in range(2)]
        results = []
        for call, x, y in zip((f, fast), leaves, more, strict=True):
            out = call(x, x, *([y] * (count - 2)))
            out.sum().backward()
            results.append(out.detach())
        assert_same(*results)
        assert_same(leaves[0].grad, leaves[1].grad)
        assert_same(more[0].grad, more[1].grad)
    assert replays(fast) == 4


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("keys", ["self", "cross"])
def test_attention_asks_whether_the_query_is_the_key(
    device: torch.device, rand: Rand, keys: str, training: bool
) -> None:
    """Self attention is one product where cross attention is three."""

    def world() -> Any:
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(8, 2, batch_first=True).to(device).train(training)

        def arguments(i: int) -> tuple[Tensor, Tensor, Tensor]:
            x, other = rand(i, 2, 5, 8), rand(i + 9, 2, 5, 8)
            return (x, x, x) if keys == "self" else (x, other, other)

        return layer, arguments

    drop_in_worlds(world, calls=6)


@pytest.mark.parametrize("asks", ["is", "address"])
@pytest.mark.parametrize("first", ["its own", "another"])
def test_a_tensor_that_the_callable_keeps_is_given_to_it(rand: Rand, asks: str, first: str) -> None:
    kept = rand(0, 3)

    def same(w: Tensor) -> bool:
        return w is kept if asks == "is" else w.data_ptr() == kept.data_ptr()

    fast = ol.graph(lambda w: w * (2 if same(w) else 1), warmup=1)
    with torch.no_grad():
        for turn in range(4):
            for i in range(4):
                own = (turn % 2 == 0) == (first == "its own")
                w = kept if own else rand(i, 3)
                assert_same(fast(w), w * (2 if own else 1))
    assert replays(fast) > 8


def test_a_view_of_a_tensor_that_the_callable_keeps_is_another_tensor(rand: Rand) -> None:
    """It lies where that lies, and a recording reads both in place."""
    kept = rand(0, 3)
    fast = ol.graph(lambda w: w * (2 if w is kept else 1), warmup=1)
    with torch.no_grad():
        for i in range(12):
            w = (kept, kept.view(3), rand(i, 3))[i % 3]
            assert_same(fast(w), w * (2 if w is kept else 1))
    assert replays(fast) > 5


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_results_of_inference_mode_that_the_callable_turns(rand: Rand, on: bool) -> None:
    class Kept:
        last: Tensor | None = None

    kept = Kept()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(on):
            kept.last = x * 3
            y = x * 2
            return y, y[1:]

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        with torch.inference_mode(not on):
            results = fast(rand(i, 3))
        assert [t.tolist() for t in map(torch.Tensor.cpu, results)] == [
            (rand(i, 3) * 2).tolist(),
            (rand(i, 3) * 2)[1:].tolist(),
        ]
        assert kept.last is not None
        assert [t.is_inference() for t in (*results, kept.last)] == [on] * 3
    assert replays(fast) > 0


def test_inference_tensors_are_refused_by_autograd_after_a_replay(rand: Rand) -> None:
    fast = ol.graph(torch.inference_mode()(lambda x: x * 2), warmup=1)
    w = rand(9, 3).requires_grad_()
    for i in range(4):
        y = fast(rand(i, 3))
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            w * y
    assert replays(fast) == 3


@pytest.mark.parametrize("how", ["method", "partial", "callable"])
def test_an_object_returns_itself(rand: Rand, how: str) -> None:
    class Sums:
        def __init__(self) -> None:
            self.total = rand(0, 3) * 0

        def add(self, x: Tensor) -> Any:
            self.total = self.total + x
            return self

        __call__ = add

    sums, expected = Sums(), Sums()
    call = {"method": sums.add, "partial": functools.partial(sums.add), "callable": sums}[how]
    fast = ol.graph(call, warmup=1)
    with torch.no_grad():
        for i in range(6):
            assert fast(rand(i, 3)) is sums
            assert_same(sums.total, expected.add(rand(i, 3)).total)
    assert replays(fast) > 0


def tags_its_result(x: Tensor) -> Tensor:
    y: Any = x * 2
    y.scale = 2
    return y


def tags_its_argument(x: Any) -> Tensor:
    x.seen = True
    return x * 2


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("f", [tags_its_result, tags_its_argument])
def test_attributes_set_on_tensors_are_refused(
    rand: Rand, f: Callable[[Tensor], Tensor], grad: bool
) -> None:
    """No replay sets them."""
    fast = ol.graph(f, warmup=1)
    fast(rand(0, 3).requires_grad_(grad))
    with pytest.raises(ol.CaptureError, match=r"OL105.*on a tensor"):
        fast(rand(1, 3).requires_grad_(grad))


def test_attributes_of_tensors_that_were_there_are_kept(device: torch.device, rand: Rand) -> None:
    weight: Any = nn.Parameter(rand(0, 3))
    weight.scale = 2
    fast = ol.graph(lambda x: (weight, x * weight), warmup=1)
    with torch.no_grad():
        for i in range(4):
            same, y = fast(rand(i, 3))
            assert same is weight
            assert same.scale == 2
            assert_same(y, rand(i, 3) * weight)
    assert replays(fast) == 3


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("view", [False, True], ids=["detached", "a view"])
def test_a_result_that_is_made_to_require_grad_does(rand: Rand, view: bool, grad: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.view(3, 1) if view else x).detach().requires_grad_()

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    with torch.set_grad_enabled(grad):
        for i in range(4):
            got = fast(rand(i, 3))
            assert got.requires_grad
            assert got.is_leaf
            assert_same(got, f(rand(i, 3)))


def test_a_leaf_that_the_callable_makes_of_an_argument(device: torch.device, rand: Rand) -> None:
    """As wav2vec's feature encoder does in training, so that checkpoints have a gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).to(device)

    def f(x: Tensor) -> Tensor:
        h = x[:, None]
        h.requires_grad = True
        return layer(h).sin()

    fast = ol.graph(f, warmup=1)

    def train(call: Callable[[Tensor], Tensor], i: int) -> Tensor:
        layer.zero_grad()
        call(rand(i, 2, 3)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert_same(train(fast, 0), train(f, 0))
    with pytest.warns(ol.GraphWarning, match="OL303.*a leaf is made"):
        train(fast, 1)
    for i in range(2, 5):
        assert_same(train(fast, i), train(f, i))
