"""Classes of containers: what is beside the items, and what methods of their own find there."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, drop_in_worlds, replays, right_or_refused


class Noted(dict):  # type: ignore[type-arg]
    """With attributes beside its items."""


class NotedInOrder(OrderedDict):  # type: ignore[type-arg]
    """The same."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value if key != "c" else None)


class InSlots(dict):  # type: ignore[type-arg]
    __slots__ = ("note",)


@dataclasses.dataclass
class DataDict(dict):  # type: ignore[type-arg]
    note: Any = None


@dataclasses.dataclass
class DataList(list):  # type: ignore[type-arg]
    note: Any = None


def noted(kind: type, x: Tensor) -> Any:
    made: Any = kind(a=x, b=3)
    made.note = x + 1
    made.flag = "kept"
    return made


@pytest.mark.parametrize("kind", [Noted, NotedInOrder, OrderedDict])
def test_attributes_of_a_dict_come_back_with_it(rand: Rand, kind: type) -> None:
    drop_in(lambda x: noted(kind, x * 2), lambda i: (rand(i, 3),))


@pytest.mark.parametrize("kind", [Noted, NotedInOrder, OrderedDict])
def test_attributes_of_a_dict_are_arguments(rand: Rand, kind: type) -> None:
    fast = drop_in(lambda d: d["a"] * d["b"] + d.note, lambda i: (noted(kind, rand(i, 3)),))
    other = noted(kind, rand(0, 3))
    other.flag = "another"
    with torch.no_grad():
        for _ in range(3):
            assert_same(fast(other), other["a"] * other["b"] + other.note)
    assert fast.recordings[0].why == "args[0].flag: captured 'kept', got 'another'"


def test_a_class_keeps_its_own_order_and_values(rand: Rand) -> None:
    drop_in(lambda x: NotedInOrder(c=x, a=x * 2), lambda i: (rand(i, 3),))


def in_slots(x: Tensor) -> Any:
    made = InSlots(a=x)
    made.note = x + 1
    return made


def data_dict(x: Tensor) -> Any:
    made = DataDict(x + 1)
    made["a"] = x
    return made


def data_list(x: Tensor) -> Any:
    made = DataList(x + 1)
    made.append(x)
    return made


@pytest.mark.parametrize("make", [in_slots, data_dict, data_list])
def test_what_cannot_be_made_again_is_refused(rand: Rand, make: Callable[[Tensor], Any]) -> None:
    world = (lambda x: make(x * 2), lambda i: (rand(i, 3),))
    assert right_or_refused(lambda: world, "OL108") == "OL108"


@pytest.mark.parametrize("make", [in_slots, data_dict, data_list])
@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_as_an_argument_it_is_right(rand: Rand, make: Callable[[Tensor], Any]) -> None:
    fast = ol.graph(lambda made: made.note * 2, warmup=1)
    alike(lambda x: fast(make(x)), lambda x: (x + 1) * 2, rand, 3)


# State in containers whose class has methods of its own.


class Lower(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key.lower())


class LowerByName(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self, key.lower())


class LowerInOrder(OrderedDict):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key.lower())


class LowerWhereMissing(dict):  # type: ignore[type-arg]
    def __missing__(self, key: str) -> Any:
        return self[key.lower()]


class Next(list):  # type: ignore[type-arg]
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index + 1)


class ByObject:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name.lower())


class BySuper(ByObject):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name.lower())


class WhereMissing:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, name.lower())


FOUND_ELSEWHERE: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], object]]] = {
    **{
        kind.__name__: (
            lambda kind=kind: kind(scale=2.0),
            lambda state: lambda x: x * state["Scale"],
            lambda state: dict.__setitem__(state, "scale", 3.0),
        )
        for kind in (Lower, LowerByName, LowerInOrder, LowerWhereMissing)
    },
    **{
        kind.__name__: (
            kind,
            lambda state: lambda x: x * state.SCALE,
            lambda state: object.__setattr__(state, "scale", 3.0),
        )
        for kind in (ByObject, BySuper, WhereMissing)
    },
    "Next": (
        lambda: Next([1.0, 2.0]),
        lambda state: lambda x: x * state[0],
        lambda state: state.__setitem__(1, 3.0),
    ),
}
"""A class -> what makes an object of it that holds 2, a program of it, and what makes it 3."""


@pytest.mark.parametrize("name", FOUND_ELSEWHERE)
def test_what_a_class_finds_under_another_name(rand: Rand, name: str) -> None:
    make, program, write = FOUND_ELSEWHERE[name]
    state = make()
    fast = ol.graph(program(state), warmup=1)
    alike(fast, lambda x: x * 2.0, rand, 3, calls=4)
    write(state)
    alike(fast, lambda x: x * 3.0, rand, 3, calls=4)
    assert len(fast.recordings) == 2
    assert replays(fast) == 6


class Frozen(dict):  # type: ignore[type-arg]
    """Its own way to store an item is not taken: not by a replay, nor to undo a capture."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("frozen")

    def __delitem__(self, key: Any) -> None:
        raise TypeError("frozen")


def test_a_dict_that_is_written_past_its_class(rand: Rand) -> None:
    def world() -> Any:
        state = Frozen(n=0)

        def f(x: Tensor) -> Tensor:
            dict.__setitem__(state, "n", state["n"] + 1)
            return x * 2

        worlds.append(state)
        return f, lambda i: (rand(i, 3),)

    worlds: list[Any] = []
    drop_in_worlds(world, calls=6, min_replays=3)
    assert [state["n"] for state in worlds] == [6, 6]


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
def test_a_refused_capture_leaves_such_a_dict_as_it_was(rand: Rand) -> None:
    state = Frozen(n=0)

    def f(x: Tensor) -> Tensor:
        dict.__setitem__(state, "n", state["n"] + 1)
        dict.__setitem__(state, "more", x)
        return x * 2 if x.sum() > 100 else x

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    alike(fast, lambda x: x, rand, 3, calls=4)
    assert state["n"] == 4
    assert torch.equal(state["more"], rand(3, 3))


@pytest.mark.parametrize("take", [lambda held: held.popleft(), lambda held: held.pop()])
def test_what_a_refused_capture_took_from_a_deque_is_there_again(
    rand: Rand, take: Callable[[Any], float]
) -> None:
    held = deque([1.0, 2.0, 3.0, 4.0])
    fast = ol.graph(lambda x: x * take(held), warmup=1)
    with torch.no_grad():
        for i in range(2):  # the second finds it changed for the first time
            fast(rand(i, 3))
        before = list(held)
        with pytest.raises(ol.CaptureError) as caught:
            fast(rand(2, 3))
    assert caught.value.code in ("OL117", "OL118")
    assert list(held) == before


def taken_from_the_front(held: Any) -> Any:
    key = next(iter(held))
    value = held.pop(key)
    return key, value


def moved_to_the_end(held: Any) -> Any:
    key = next(iter(held))
    value = held[key]
    held.move_to_end(key)
    return key, value


@pytest.mark.parametrize(
    ("kind", "take"),
    [
        (dict, taken_from_the_front),
        (OrderedDict, taken_from_the_front),
        (OrderedDict, moved_to_the_end),
    ],
)
def test_a_dict_whose_entries_take_turns(
    rand: Rand, kind: type[Any], take: Callable[[Any], Any]
) -> None:
    """A replay would write the entry of the capture, and leave the order as it is."""

    def world() -> Any:
        held = kind((f"key {i}", rand(i, 3)) for i in range(3))

        def f(x: Tensor) -> Tensor:
            key, value = take(held)
            held["".join(key)] = value + x
            return value

        return f, lambda i: (rand(i, 3),)

    assert right_or_refused(world, "OL118") == "OL118"


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("when", [{1}, {2}, {3}, {1, 2, 3}, {5}, range(1, 24)])
def test_entries_that_the_caller_moves_between_calls(
    rand: Rand, kind: type[Any], when: Collection[int]
) -> None:
    """Each order has a recording."""

    def world() -> Any:
        held = kind((f"key {i}", 0.5 + i) for i in range(3))

        def f(x: Tensor) -> Tensor:
            for value in held.values():
                x = x * value + 1
            return x

        def arguments(i: int) -> tuple[Tensor]:
            if i in when:
                held["key 0"] = held.pop("key 0")
                if isinstance(held, OrderedDict):
                    held.move_to_end("key 1")
            return (rand(i, 3),)

        return f, arguments

    drop_in_worlds(world, calls=24, warmup=3, recordings=None, min_replays=12)


READS: dict[str, Callable[[list[float], Tensor], Tensor]] = {
    "the last": lambda held, x: x * held[-1],
    "the length": lambda held, x: x * len(held),
    "all": lambda held, x: x * sum(held),
}


@pytest.mark.cpu
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("warmup", [1, 3])
def test_a_list_that_the_caller_lengthens_between_calls(rand: Rand, read: str, warmup: int) -> None:
    """It ends as an attribute that is another at each call."""
    held = [1.0]
    fast = ol.graph(lambda x: READS[read](held, x), warmup=warmup)

    @torch.no_grad()
    def run() -> None:
        for i in range(60):
            assert_same(fast(rand(i, 3)), READS[read](held, rand(i, 3)), f"call {i}")
            held.append(i + 2.0)

    with pytest.warns(ol.GraphWarning, match="OL301.*held changed its length"):
        run()


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [dict, list])
def test_a_clock_beside_what_the_first_call_fills(rand: Rand, kind: type[Any]) -> None:
    """The caller did not change the length, so it explains nothing."""
    held = kind()

    def f(x: Tensor) -> Tensor:
        if len(held) == 0:
            x = x + 1
            held.update(a=1) if isinstance(held, dict) else held.append(1)
        return x * time.perf_counter()

    fast = ol.graph(f, warmup=1)

    @torch.no_grad()
    def run() -> None:
        for i in range(8):
            fast(rand(i, 3))

    with pytest.raises(ol.CaptureError, match=r"(?s)OL117.*perf_counter"):
        run()


def test_an_entry_that_is_taken_and_put_back(rand: Rand) -> None:
    """It is the last from the first call on."""

    def world() -> Any:
        held = {f"key {i}": rand(i, 3) for i in range(3)}

        def f(x: Tensor) -> Tensor:
            held["key 1"] = held.pop("key 1") * 0.5 + x
            return held["key 1"] + held["key 0"]

        return f, lambda i: (rand(i, 3),)

    drop_in_worlds(world, calls=8, min_replays=3)
