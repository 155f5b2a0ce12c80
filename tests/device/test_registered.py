"""`ol.register`: arguments of a class that are taken apart from the first call on."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, drop_in, replays


@ol.register
class Batch:
    """A request, by its attributes."""

    def __init__(self, x: Tensor, scale: float = 2) -> None:
        self.x, self.scale = x, scale


class Packed:
    """A request of which attributes are not the whole."""

    __slots__ = ("scale", "x")

    def __init__(self, x: Tensor, scale: Any = 2) -> None:
        self.x, self.scale = x, scale


ol.register(
    Packed,
    lambda packed: ((packed.x,), packed.scale),
    lambda children, scale: Packed(*children, scale),
)

KINDS = pytest.mark.parametrize("kind", [Batch, Packed])


def scaled(request: Any) -> Tensor:
    return request.x * request.scale + request.x.sum()


@KINDS
@pytest.mark.parametrize("place", ["alone", "in a list", "by name"])
def test_each_call_brings_another_instance(rand: Rand, kind: Any, place: str) -> None:
    def f(*args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        request = kwargs["request"] if kwargs else args[0][0] if args[1:] else args[0]
        return request, scaled(request)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            mine, theirs = kind(rand(i, 3)), kind(rand(i, 3))
            if place == "by name":
                same, result = fast(request=mine)
            else:
                same, result = fast(mine) if place == "alone" else fast([mine], 1)
            assert same is mine
            assert_same(result, scaled(theirs))
    assert len(fast.recordings) == 1
    assert replays(fast) == 4


@KINDS
def test_its_numbers_are_compared_by_type_and_bits(device: torch.device, kind: Any) -> None:
    fast, x = ol.graph(scaled, warmup=1), torch.arange(3, device=device)
    compare(fast, scaled, lambda i: (kind(x, (2, 2.0, True)[i % 3]),), 9)
    assert len(fast.recordings) == 3


def test_a_tensor_in_the_context_is_an_input(rand: Rand) -> None:
    fast = ol.graph(scaled, warmup=1)
    compare(fast, scaled, lambda i: (Packed(rand(i, 3), rand(10 + i, 3)),), 5)
    assert len(fast.recordings) == 1


@KINDS
def test_its_tensors_are_written(rand: Rand, kind: Any) -> None:
    fast = ol.graph(lambda request: request.x.mul_(request.scale).sum(), warmup=1)
    with torch.no_grad():
        for i in range(4):
            request, expected = kind(rand(i, 3)), rand(i, 3) * 2
            assert_same(fast(request), expected.sum())
            assert_same(request.x, expected)
    assert replays(fast) == 3


@KINDS
def test_gradients_reach_its_tensors(rand: Rand, kind: Any) -> None:
    fast = ol.graph(scaled, warmup=1)
    for i in range(4):
        mine, theirs = rand(i, 3).requires_grad_(), rand(i, 3).requires_grad_()
        fast(kind(mine)).sum().backward()
        scaled(kind(theirs)).sum().backward()
        assert_same(mine.grad, theirs.grad)
    assert replays(fast) == 3


@KINDS
def test_its_tensors_are_padded_to_buckets(rand: Rand, kind: Any) -> None:
    fast = ol.graph(lambda r: r.x * r.scale, warmup=1, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    sizes = [n for n in range(1, 9) for _ in range(2)]
    compare(fast, lambda r: r.x * 2, lambda i: (kind(rand(i, sizes[i], 2)),), 16)
    assert len(fast.recordings) == 2


def test_objects_in_attributes_are_taken_apart(rand: Rand) -> None:
    class Store:
        def __init__(self, owner: Any, x: Tensor) -> None:
            self.owner, self.x = weakref.ref(owner), x

    @ol.register
    class Graph:
        def __init__(self, x: Tensor) -> None:
            self.store = Store(self, x)

    def f(graph: Graph) -> Tensor:
        assert graph.store.owner() is graph
        return graph.store.x * 2

    drop_in(f, lambda i: (Graph(rand(i, 3)),))


@dataclasses.dataclass(frozen=True)
class Options:
    """What torch's pytree knows as a constant, which has an equality of its own."""

    scale: float
    note: str = dataclasses.field(default="", compare=False)


pytree.register_constant(Options)


def test_a_constant_of_torch_is_compared_by_its_own_equality(rand: Rand) -> None:
    def f(x: Tensor, options: Options) -> Tensor:
        return x * options.scale

    fast = ol.graph(f, warmup=1)
    compare(fast, f, lambda i: (rand(i, 3), Options(2.0 + i % 2, str(i // 2))))
    assert len(fast.recordings) == 2


def test_a_subclass_is_not_registered(rand: Rand) -> None:
    class Derived(Batch):
        pass

    fast = ol.graph(scaled, warmup=1)
    compare(fast, scaled, lambda i: (Derived(rand(i, 3)),), 3)
    assert replays(fast) == 0


def moved(request: Any, row: Tensor) -> Tensor:
    request.x = request.x + row
    return request.x * request.scale


def test_one_that_the_callable_changes_is_compared_by_identity(rand: Rand) -> None:
    fast, mine, theirs = ol.graph(moved, warmup=1), Batch(rand(0, 3)), Batch(rand(0, 3))
    with torch.no_grad():
        for i in range(6):
            assert_same(fast(mine, rand(i, 3)), moved(theirs, rand(i, 3)))
            assert_same(mine.x, theirs.x)
    assert replays(fast) >= 3


def test_new_ones_that_the_callable_changes_are_named(rand: Rand) -> None:
    fast = ol.graph(moved, warmup=1)

    def run() -> None:
        for i in range(20):
            mine, theirs = Batch(rand(i, 3)), Batch(rand(i, 3))
            assert_same(fast(mine, rand(i, 3)), moved(theirs, rand(i, 3)))
            assert_same(mine.x, theirs.x)

    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL302") as caught:
        run()
    assert len(caught) == 1


def test_one_with_functions_that_the_callable_changes_is_refused(rand: Rand) -> None:
    fast, mine, theirs = ol.graph(moved, warmup=1), Packed(rand(0, 3)), Packed(rand(0, 3))
    with torch.no_grad():
        assert_same(fast(mine, rand(0, 3)), moved(theirs, rand(0, 3)))
        with pytest.raises(ol.CaptureError, match="OL105"):
            fast(mine, rand(1, 3))
        assert_same(mine.x, theirs.x)


def test_torch_takes_a_class_with_functions_apart(rand: Rand) -> None:
    result = torch.func.grad(lambda packed: (packed.x * packed.scale).sum())(Packed(rand(0, 3), 3))
    assert isinstance(result, Packed)
    assert_same(result.x, torch.full_like(rand(0, 3), 3))


class Listed(list[Tensor]):
    pass


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((Packed, list, list), "registered with torch's pytree already"),
        ((Batch, list), "one function without the other"),
        ((Listed,), "attributes are not the whole of a Listed"),
        ((torch.nn.Linear,), "attributes are not the whole of a Linear"),
        ((3,), "expected a class, got an int"),
    ],
)
def test_what_cannot_be_registered(arguments: Any, text: str) -> None:
    with pytest.raises(ol.ArgumentError, match="OL401") as raised:
        ol.register(*arguments)
    assert text in str(raised.value)


def test_a_class_may_be_registered_again() -> None:
    assert ol.register(Batch) is Batch
    assert ol.register(Packed) is Packed


class Sizes:
    """A context that says less than it holds: two of one length are equal."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sizes) and len(other.sizes) == len(self.sizes)

    def __hash__(self) -> int:
        return len(self.sizes)


class Stacked:
    """A table of tensors with a leading size in common, as a TensorDict."""

    def __init__(self, rows: dict[str, Tensor], sizes: tuple[int, ...]) -> None:
        self.rows, self.sizes = rows, sizes

    @staticmethod
    def flatten(table: Stacked) -> tuple[list[Tensor], dict[str, Any]]:
        context = {"keys": list(table.rows), "sizes": Sizes(table.sizes)}
        return list(table.rows.values()), context

    @staticmethod
    def unflatten(children: Any, context: dict[str, Any]) -> Stacked:
        return Stacked(dict(zip(context["keys"], children, strict=True)), context["sizes"].sizes)


pytree.register_pytree_node(Stacked, Stacked.flatten, Stacked.unflatten)


def test_an_object_in_a_context_is_compared_by_its_parts(rand: Rand) -> None:
    def f(table: Stacked) -> Stacked:
        return Stacked({"y": sum(table.rows.values()) * table.sizes[0]}, table.sizes)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(12):
            keys = ("a", "b") if i % 3 else ("a", "c")
            sizes = (4,) if i < 6 else (2,)
            table = Stacked({key: rand(i + n, 4, 3) for n, key in enumerate(keys)}, sizes)
            got, expected = fast(table), f(table)
            assert got.sizes == sizes
            assert_same(got.rows, expected.rows)
    assert len(fast.recordings) == 4
    assert replays(fast) >= 8
