"""Arguments and results of every structure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, drop_in_worlds, replays, right_or_refused


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


@dataclasses.dataclass
class State:
    hidden: Tensor
    steps: int = 0
    extra: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor
    label: str = "a"


class Subtuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Subdict(dict):  # type: ignore[type-arg]
    pass


INPUTS: dict[str, Callable[[Rand, int], Any]] = {
    "tuple": lambda r, i: (r(i, 3), r(i + 50, 3)),
    "list": lambda r, i: [r(i, 3), [r(i + 50, 3), 2]],
    "dict": lambda r, i: {"a": r(i, 3), "b": {"c": [r(i + 50, 3)], "d": None}},
    "ordered dict": lambda r, i: collections.OrderedDict(b=r(i, 3), a=r(i + 50, 3)),
    "default dict": lambda r, i: collections.defaultdict(list, a=r(i, 3)),
    "int keys": lambda r, i: {0: r(i, 3), 1: r(i + 50, 3)},
    "named tuple": lambda r, i: Pair(r(i, 3), r(i + 50, 3)),
    "named tuple with None": lambda r, i: Pair(r(i, 3)),
    "dataclass": lambda r, i: State(r(i, 3), 4, {"more": r(i + 50, 3)}),
    "frozen dataclass": lambda r, i: Frozen(r(i, 3), "b"),
    "list of dataclasses": lambda r, i: [State(r(i + k, 3), k) for k in range(3)],
    "empty containers": lambda r, i: [(), [], {}, None, r(i, 3)],
    "deep": lambda r, i: [[[[{"x": ({"y": [r(i, 3)]},)}]]]],
    "same list twice": lambda r, i: (lambda inner: [inner, inner])([r(i, 3)]),
}


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for child in tree for leaf in leaves(child)]
    return []


@pytest.mark.parametrize("name", INPUTS)
def test_structures_as_arguments(rand: Rand, name: str) -> None:
    def f(tree: Any) -> list[Tensor]:
        return [x * (k + 2) for k, x in enumerate(leaves(tree))]

    drop_in(f, lambda i: (INPUTS[name](rand, i),))


@pytest.mark.parametrize("name", INPUTS)
def test_structures_as_results(rand: Rand, name: str) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return INPUTS[name](lambda seed, *shape: x * 2 if seed < 50 else y + x, 0)

    drop_in(f, lambda i: (rand(i, 3), rand(i + 50, 3)))


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize(
    "make", [lambda x, y: Subtuple((x, y)), lambda x, y: Subdict(a=x, b=1)], ids=["tuple", "dict"]
)
def test_subclasses_of_containers_are_right_refused_or_eager(rand: Rand, make: Any) -> None:
    world = (lambda x: make(x * 2, x), lambda i: (rand(i, 3),))
    right_or_refused(lambda: world, "OL108")
    fast = ol.graph(lambda tree: [x * 2 for x in leaves(tree)], warmup=1)
    alike(
        lambda x: fast(make(x, x + 1)), lambda x: [y * 2 for y in leaves(make(x, x + 1))], rand, 3
    )


class Counted(tuple):  # type: ignore[type-arg]
    """As e3nn's `Irreps`: made of what its `__new__` takes, and without a length."""

    def __new__(cls, *items: Any) -> Counted:
        return super().__new__(cls, items)

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError


class Labelled(tuple):  # type: ignore[type-arg]
    """With an attribute beside its items."""

    label: Any


def labelled(x: Tensor, label: Any) -> Labelled:
    made = Labelled((x, 1))
    made.label = label
    return made


def test_tuples_of_other_classes(rand: Rand) -> None:
    def f(x: Tensor, given: Counted, pair: Labelled) -> Any:
        a, n = tuple.__iter__(given)
        return a * n + x, Counted(x * 2, 3), labelled(x + 1, pair.label * 2)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            y, counted, other = fast(
                rand(i, 3), Counted(rand(10 + i, 3), 2), labelled(rand(i, 3), rand(i, 2))
            )
            assert_same(y, rand(10 + i, 3) * 2 + rand(i, 3))
            assert type(counted) is Counted
            assert_same(list(tuple.__iter__(counted)), [rand(i, 3) * 2, 3])
            assert type(other) is Labelled
            assert_same([*other, other.label], [rand(i, 3) + 1, 1, rand(i, 2) * 2])
    assert replays(fast) == 4


@pytest.mark.parametrize("make", [lambda k: Counted(k, 2), lambda k: labelled(k, k)])
def test_tuples_of_constants_compare_by_value(rand: Rand, make: Any) -> None:
    fast = ol.graph(lambda x, given: x * next(tuple.__iter__(given)), warmup=1)
    for k in (0, 1):
        alike(lambda x, k=k: fast(x, make(k)), lambda x, k=k: x * k, rand, 3, calls=4)
    assert len(fast.recordings) == 2


def test_a_result_container_is_new_at_each_call(rand: Rand) -> None:
    fast = ol.graph(lambda x: {"y": [x * 2], "n": {"k": 1}}, warmup=1)
    with torch.no_grad():
        for i in range(6):
            out = fast(rand(i, 3))
            assert list(out) == ["y", "n"]
            assert out["n"] == {"k": 1}
            assert_same(out["y"], [rand(i, 3) * 2])
            out["y"].append("of the caller")
            out["n"]["k"] = 2
            out.clear()
    assert replays(fast) > 0


def test_an_argument_container_returned(rand: Rand) -> None:
    """Returning the very container that was given is the caller's container."""

    def f(d: dict[str, Tensor]) -> Any:
        return d, d["x"] * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            d = {"x": rand(i, 3)}
            same, y = fast(d)
            assert_same((same, y), (d, rand(i, 3) * 2))
            assert same["x"] is d["x"]


def test_model_output(rand: Rand) -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    def f(x: Tensor) -> Any:
        return BaseModelOutputWithPooling(
            last_hidden_state=x * 2, pooler_output=x.sum(0), hidden_states=(x, x + 1)
        )

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            out = fast(rand(i, 3, 4))
            assert type(out) is BaseModelOutputWithPooling
            assert list(out.keys()) == ["last_hidden_state", "pooler_output", "hidden_states"]
            assert_same(out.last_hidden_state, rand(i, 3, 4) * 2)
            assert_same(out["pooler_output"], rand(i, 3, 4).sum(0))
            assert_same(out[2], (rand(i, 3, 4), rand(i, 3, 4) + 1))
            assert out.attentions is None
    assert replays(fast) > 0


def test_model_output_as_an_argument(rand: Rand) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    def f(encoded: Any) -> Tensor:
        return encoded.last_hidden_state * 2 + encoded[0]

    drop_in(f, lambda i: (BaseModelOutput(last_hidden_state=rand(i, 3)),))


RESULTS: dict[str, Any] = {
    "None": None,
    "int": 3,
    "float": -0.0,
    "string": "done",
    "bool": True,
    "size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "empty tuple": (),
    "nested constants": {"a": [1, (2.0, None)], "b": "c"},
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_callable_that_returns_no_tensor(rand: Rand, name: str) -> None:
    """It still has effects on tensors."""

    def f(x: Tensor) -> Any:
        x.mul_(2)
        return RESULTS[name]

    drop_in(f, lambda i: (rand(i, 3),))


def test_a_result_beside_constants(rand: Rand) -> None:
    drop_in(lambda x: (x * 2, None, x.shape, 3, "a", x.dtype), lambda i: (rand(i, 3, 2),))


class Result:
    def __init__(self, y: Tensor) -> None:
        self.y = y


@pytest.mark.parametrize(
    ("make", "read"),
    [(Result, lambda result: result.y), (lambda y: (z for z in (y, y + 1)), list)],
    ids=["object", "generator"],
)
def test_a_result_that_cannot_be_rebuilt_is_refused_or_right(
    rand: Rand, make: Any, read: Any
) -> None:
    fast = ol.graph(lambda x: make(x * 2), warmup=1)
    kept: list[Any] = []
    refused = None
    with torch.no_grad():
        try:
            for i in range(5):
                kept.append(read(fast(rand(i, 3))))
        except ol.CaptureError as error:
            refused = error.code
        for i, got in enumerate(kept):
            assert_same(got, read(make(rand(i, 3) * 2)))
    assert refused in (None, "OL108")


def test_no_arguments(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        counter = rand(0, 3)

        def f() -> Tensor:
            counter.add_(1)
            return counter * 2

        return f, lambda i: ()

    drop_in_worlds(world)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_no_tensors_at_all() -> None:
    fast = ol.graph(lambda a, b: a + b, warmup=1)
    for i in range(5):
        assert fast(i, 1) == i + 1
        assert fast(2, 1) == 3


def test_zero_size_batches(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device).eval()
    drop_in(lambda x: model(x), lambda i: (rand(i, 0, 4),))
    drop_in(lambda x: (x * 2, x.sum(), x.t()), lambda i: (rand(i, 0, 4),))


def test_big_and_empty_batches_in_turn(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2).to(device)
    arguments = lambda i: (rand(i, 3 * (i % 2), 4),)  # noqa: E731
    drop_in(lambda x: model(x), arguments, calls=8, recordings=2, min_replays=4)


@dataclasses.dataclass
class Made:
    """A dataclass that has more attributes than fields."""

    x: Tensor
    n: int = 0

    def __post_init__(self) -> None:
        self.q = 1.0 + self.n


def reads_made(d: Made) -> Tensor:
    return d.x * d.q


def asks_made(d: Made) -> Tensor:
    return d.x * getattr(d, "later", 9.0)


def moves_made(d: Made) -> Tensor:
    d.later = getattr(d, "later", 9.0) + 1
    return d.x * d.later


def turns_made(d: Made) -> Tensor:
    d.on = not getattr(d, "on", False)
    return d.x * (2 if d.on else 3)


def returns_made(d: Made) -> Made:
    return dataclasses.replace(d, x=d.x * 2, n=d.n + 1)


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("f", [reads_made, asks_made, moves_made, turns_made, returns_made])
def test_attributes_of_a_dataclass_that_are_no_fields(
    device: torch.device, rand: Rand, f: Callable[[Made], Any]
) -> None:
    """In new objects, in one object at each call, and given by the caller between the calls."""
    fast = ol.graph(f)
    alike(lambda x: leaves_of(fast(Made(x))), lambda x: leaves_of(f(Made(x))), rand, 3, calls=6)
    with torch.no_grad():
        mine, theirs = Made(rand(0, 3)), Made(rand(0, 3))
        for i in range(12):
            if i in (6, 9):
                mine.later = theirs.later = mine.q = theirs.q = float(i)
            assert_same(leaves_of(fast(mine)), leaves_of(f(theirs)), f"call {i}")
            assert {**vars(mine), "x": 0} == {**vars(theirs), "x": 0}


def leaves_of(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(vars(result).values())
