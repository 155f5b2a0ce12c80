"""Iterators that a call advances: refused by name, in a warm-up, before a value is lost."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, replays


def decaying() -> Iterator[float]:
    k = 0.1
    while True:
        yield k
        k *= 0.9


MAKES: dict[str, Callable[[], Iterator[Any]]] = {
    "generator": decaying,
    "generator over an iterator": lambda: (0.5 + i for i in iter(range(99))),
    "list": lambda: iter([0.5 + i for i in range(99)]),
    "range": lambda: iter(range(99)),
    "keys": lambda: iter(dict.fromkeys(range(99))),
    "map": lambda: map(float, range(99)),
    "zip": lambda: zip(range(99), strict=False),
    "enumerate": lambda: enumerate([0.5] * 99),
    "islice of a count": lambda: itertools.islice(itertools.count(), 99),
    "chain": lambda: itertools.chain(range(50), range(49)),
}


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("make", MAKES)
def test_a_number_that_is_read_and_then_replaced(
    device: torch.device, make: str, warmup: int
) -> None:
    """Each call finds what the last one drew."""
    s = SimpleNamespace(it=MAKES[make](), lr=1.0)

    def f(x: Tensor) -> Tensor:
        y = x * s.lr
        value = next(s.it)
        s.lr = float(value[0] if isinstance(value, tuple) else value)
        return y

    fast = ol.graph(f, warmup=warmup)
    drawn = 0
    with torch.no_grad(), pytest.raises(ol.CaptureError, match=r"OL117.*`s.it`") as caught:  # noqa: PT012
        for i in range(6):
            fast(torch.full((3,), i + 1.0, device=device))
            drawn += 1
    assert "value = next(s.it)" in str(caught.value.where)
    assert drawn <= warmup


def test_epochs(device: torch.device) -> None:
    """The call that makes the iterator anew differs from the one before it anyway."""
    data = [torch.full((2,), float(k), device=device) for k in range(4)]
    loader = SimpleNamespace(it=iter(data), epoch=0)

    def following() -> Tensor:
        try:
            return next(loader.it)
        except StopIteration:
            loader.epoch += 1
            loader.it = iter(data)
            return next(loader.it)

    fast = ol.graph(lambda x: following() + x)
    with torch.no_grad(), pytest.raises(ol.CaptureError, match=r"OL117.*`loader.it`"):  # noqa: PT012
        for _ in range(8):
            fast(torch.ones(2, device=device))


def test_one_that_is_only_held(rand: Rand) -> None:
    s = SimpleNamespace(it=iter([1, 2, 3]), scale=2.0)

    def f(x: Tensor) -> Tensor:
        assert s.it is not None
        return x * s.scale

    fast = ol.graph(f)
    compare(fast, f, lambda i: (rand(i, 3),), 6)
    assert replays(fast) == 3
    assert next(s.it) == 1


def test_one_that_another_thread_advances(rand: Rand) -> None:
    """The call reaches it, and does not read it."""
    s = SimpleNamespace(it=iter(range(99)), scale=2.0)
    ask, answer = threading.Semaphore(0), threading.Semaphore(0)

    def advance() -> None:
        for _ in range(6):
            ask.acquire()
            next(s.it)
            answer.release()

    def f(x: Tensor) -> Tensor:
        ask.release()
        answer.acquire()
        return x * s.scale

    thread = threading.Thread(target=advance, daemon=True)
    thread.start()
    fast = ol.graph(f, warmup=1)
    compare(fast, lambda x: x * 2.0, lambda i: (rand(i, 3),), 3)
    assert len(fast.recordings) == 1


def popping(left: set[int]) -> Callable[[], int]:
    return left.pop


def of_another_name(left: set[int]) -> Callable[[], int]:
    pop = left.pop
    return lambda: pop() + 1


class Numbers(set[int]):
    """A set of one's own."""

    def pop(self) -> int:
        return super().pop() * 2


TAKES: dict[str, Callable[[set[int]], Callable[[], int]]] = {
    "method": lambda left: lambda: left.pop(),
    "bound": popping,
    "another name": of_another_name,
}


@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
@pytest.mark.parametrize("kind", [set, Numbers])
@pytest.mark.parametrize("take", TAKES)
def test_an_element_that_a_set_chooses(
    device: torch.device, take: str, kind: type[set[int]], on_refusal: Any
) -> None:
    """It is refused before it is taken: no set can be told which to give next."""
    worlds = kind(range(50)), kind(range(50))

    def callable_of(left: set[int]) -> Callable[[Tensor], Tensor]:
        taken = TAKES[take](left)
        return lambda x: x * taken()

    eager, fast = callable_of(worlds[0]), ol.graph(callable_of(worlds[1]), on_refusal=on_refusal)

    def call(i: int) -> Tensor:
        return fast(torch.full((3,), i + 1.0, device=device))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(12):
            if i > 2 and on_refusal == "raise":
                with pytest.raises(ol.CaptureError, match=r"OL117.*from the set") as caught:
                    call(i)
                assert "test_state_iterators.py" in str(caught.value.where)
                break
            assert_same(call(i), eager(torch.full((3,), i + 1.0, device=device)), f"call {i}")
    assert sorted(worlds[0]) == sorted(worlds[1])
    assert worlds[0].pop() == worlds[1].pop()


def test_a_set_that_the_call_fills_itself(device: torch.device, rand: Rand) -> None:
    todo = set[int]()

    def f(x: Tensor) -> Tensor:
        todo.update((3, 1, 2))
        while todo:
            x = x + todo.pop()
        return x

    fast = ol.graph(f, warmup=1)
    compare(fast, f, lambda i: (rand(i, 3),), 6)
    assert replays(fast) >= 4
