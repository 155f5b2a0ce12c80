"""Taking arguments apart and putting them together again."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onelaunch.call.tree import (
    Constant,
    Container,
    Leaf,
    call_constants,
    constants,
    flatten,
    flatten_call,
    unflatten,
)


class Pair(NamedTuple):
    first: Any
    second: Any


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    content: Any
    label: str = "box"


@dataclasses.dataclass(frozen=True)
class Strict:
    content: Any
    seen: int = dataclasses.field(init=False, default=7)

    def __post_init__(self) -> None:
        assert not isinstance(self.content, int), "construction has rules"


class Colour(enum.Enum):
    RED = 1


TENSORS = [torch.ones(2), torch.zeros(1, 3), torch.empty(0)]
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.just(...)
    | st.sampled_from(
        [torch.float16, torch.device("cpu"), torch.Size([1, 2]), Colour.RED, range(3)]
    )
    | st.frozensets(st.integers(0, 3) | st.floats(), max_size=3)
)
PLAIN_KEYS = st.text(max_size=2) | st.integers(0, 9)
KEYS = PLAIN_KEYS | st.tuples(PLAIN_KEYS, PLAIN_KEYS, PLAIN_KEYS)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(Box, inner)
        | st.builds(slice, inner, inner)
    )


VALUES = st.recursive(PLAIN | st.sampled_from(TENSORS), containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, the same tensors."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, Box):
        return same(a.content, b.content) and a.label == b.label
    if isinstance(a, frozenset):  # each nan is another
        return sorted(map(repr, a)) == sorted(map(repr, b))  # pyright: ignore
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    return a is b or a == b


@given(VALUES)
def test_unflatten_undoes_flatten(value: Any) -> None:
    flat = flatten(value, "x")
    again = unflatten(flat.tree, list(flat.tensors))
    assert same(value, again)
    assert len(flat.paths) == len(flat.tensors)
    assert flatten(again).tree == flat.tree


@given(VALUES)
def test_equal_trees_have_equal_hashes(value: Any) -> None:
    flat = flatten(value)
    again = flatten(unflatten(flat.tree, list(flat.tensors)))
    assert flat.tree == again.tree
    assert hash(flat.tree) == hash(again.tree)


@given(VALUES, VALUES)
def test_trees_are_equal_for_the_same_form_alone(a: Any, b: Any) -> None:
    first, second = flatten(a), flatten(b)
    if first.tree == second.tree:
        assert hash(first.tree) == hash(second.tree)
        assert same(a, unflatten(first.tree, list(first.tensors)))
        assert same(
            unflatten(first.tree, list(first.tensors)), unflatten(second.tree, list(first.tensors))
        )


@given(VALUES)
def test_paths_lead_to_the_tensors(value: Any) -> None:
    flat = flatten(value, "value")
    for path, t in zip(flat.paths, flat.tensors, strict=True):
        assert eval(path, {"value": value}) is t


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (2, 2.0),
        (1, True),
        (0.0, -0.0),
        ("a", b"a"),
        (0.5, 0.5 + 0j),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Pair(1, 2), (1, 2)),
        (Pair(1, 2), Point(1, 2)),
        (OrderedDict(a=1), {"a": 1}),
        (frozenset([1]), frozenset([1.0])),
        (frozenset([0.0]), frozenset([-0.0])),
        (object(), object()),
        (complex(0.0, -0.0), complex(0.0, 0.0)),
        (math.nan, struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]),
    ],
)
def test_what_is_not_the_same(a: object, b: object) -> None:
    assert flatten(a).tree != flatten(b).tree


def test_what_is_the_same() -> None:
    assert flatten(float("nan")).tree == flatten(float("nan")).tree
    assert Constant(10**30).matches(10**30)
    thing = object()
    assert flatten([thing]).tree == flatten([thing]).tree
    assert Constant(thing).by_identity


def test_a_container_within_itself_ends() -> None:
    ring: list[Any] = [torch.ones(1)]
    ring.append(ring)
    flat = flatten(ring)
    assert isinstance(flat.tree, Container)
    assert flat.tree.children[0] == Leaf(0)
    assert flat.tree.children[1] == Constant(ring)


def test_construction_is_not_repeated() -> None:
    flat = flatten(Strict(torch.ones(1)))
    made = unflatten(flat.tree, [5])
    assert (type(made), made.content, made.seen) == (Strict, 5, 7)


def test_objects_are_constants_unless_asked() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys, self.length = [torch.ones(1)], 1

    cache = Cache()
    assert flatten(cache).tree == Constant(cache)
    flat = flatten(cache, "cache", objects=True)
    assert flat.paths == ["cache.keys[0]"]
    made = unflatten(flat.tree, ["t"])
    assert (type(made), vars(made)) == (Cache, {"keys": ["t"], "length": 1})
    cache.keys.clear()
    assert flatten(cache, objects=True).tree == Constant(cache)


def test_constants_have_paths() -> None:
    tree = flatten({"a": [1, torch.ones(1)], "b": Box("c")}).tree
    found = {path: constant.value for path, constant in constants(tree, "x")}
    assert found == {"x['a'][0]": 1, "x['b'].content": "c", "x['b'].label": "box"}
    call = flatten_call((1,), {"k": 2}).tree
    assert {p: c.value for p, c in call_constants(call)} == {"args[0]": 1, "kwargs['k']": 2}
