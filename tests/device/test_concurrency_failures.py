"""Table of failure: exceptions, captures that fail half-way, and re-entrance."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.watch.observer import Observer

from .drop_in import Rand, alike, allocated, assert_same, drop_in, random_tensor, replays


class Refused(Exception):
    pass


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_the_callables_own_exception_comes_through_once_and_unchanged(
    rand: Rand, fails_at: int
) -> None:
    """In warm-up, at the capture, and after it."""
    raised: list[Refused] = []
    armed = False

    def f(x: Tensor) -> Tensor:
        y = x * 2
        if armed:
            raised.append(Refused("as it is"))
            raise raised[-1]
        return y + 1

    fast = ol.graph(f, warmup=2)
    with torch.no_grad():
        for i in range(fails_at):
            assert_same(fast(rand(i, 3)), rand(i, 3) * 2 + 1)
        armed = True
        if fails_at < 3:
            with pytest.raises(Refused) as caught:
                fast(rand(7, 3))
            assert caught.value is raised[0]
            assert len(raised) == 1, "the callable ran more than once"
            assert caught.value.args == ("as it is",)
            assert caught.value.__cause__ is None
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert frames[-1].name == "f"
    armed = False
    alike(fast, f, rand, 3)
    assert replays(fast) > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, MemoryError, SystemExit])
def test_exceptions_of_other_kinds(rand: Rand, error: type[BaseException]) -> None:
    armed = False

    def f(x: Tensor) -> Tensor:
        if armed:
            raise error
        return x + 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        armed = True
        with pytest.raises(error):
            fast(rand(1, 3))
    armed = False
    alike(fast, lambda x: x + 1, rand, 3)
    assert replays(fast) > 0


def test_an_error_of_torch_in_the_callable(rand: Rand) -> None:
    fast = ol.graph(lambda x, y: x @ y, warmup=1)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            fast(rand(0, 3, 4), rand(0, 3, 4))
        assert not isinstance(caught.value, ol.GraphError)
    alike(lambda x: fast(x, x.t()), lambda x: x @ x.t(), rand, 3, 4)
    assert len(fast.recordings) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(o, marks=pytest.mark.thorough)
            for o in ({"inputs": "rebind"}, {"outputs": "static"})
        ),
    ],
    ids=str,
)
def test_everything_works_after_a_capture_that_failed_half_way(
    device: torch.device, rand: Rand, options: dict[str, str]
) -> None:
    other = ol.graph(lambda x: x * 5, warmup=1)
    state = rand(9, 4)

    def f(x: Tensor, peek: bool) -> Tensor:
        big = torch.zeros(1 << 16, device=device) + x.sum()
        state.add_(1)
        y = x * 2 + big[0]
        return y * y.sum().item() if peek else y + state

    fast = ol.graph(f, warmup=1, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for i in range(3):
            other(rand(i, 4))
        fast(rand(0, 4), True)
        with pytest.raises(ol.CaptureError):
            fast(rand(0, 4), True)
        start = allocated(device)
        for i in range(4):
            before = state.clone()
            with pytest.raises(ol.CaptureError):
                fast(rand(i, 4), True)
            # The capturing call did not happen.
            assert_same(state, before)
            del before
        assert allocated(device) == start
        assert gc.isenabled()
        for i in range(4):
            assert_same(other(rand(i, 4)), rand(i, 4) * 5)
            before = state.clone()
            assert_same(fast(rand(i, 4), False), rand(i, 4) * 2 + rand(i, 4).sum() + (before + 1))
    assert replays(fast) > 0
    assert replays(other) > 3


@pytest.mark.thorough
def test_a_refusal_that_is_kept_keeps_no_memory(device: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(lambda x: (x * 2).nonzero(), warmup=1)
    x = rand(0, 64, 64)
    with torch.no_grad():
        fast(x)
        start = allocated(device)
        with pytest.raises(ol.CaptureError) as caught:
            fast(x)
        assert allocated(device) == start
        assert caught.value.code == "OL102"


def test_a_refused_step_keeps_no_autograd_graph(device: torch.device, rand: Rand) -> None:
    """Its nodes live on the stream of the capture, and the next backward's would be on another."""
    model = torch.nn.Linear(4, 4).to(device)
    weight = model.weight

    def step(x: Tensor) -> Tensor:
        loss = (x @ weight.t()).square().mean()
        loss.backward()
        return loss * loss.item()

    def kept() -> int:
        """Views that were seen; they keep nodes, as long as no collection comes by."""
        return sum(
            len(o.memory._kept) + len(o.host._kept) for o in gc.get_objects() if type(o) is Observer
        )

    fast: Any = ol.graph(step, warmup=1)
    fast(rand(0, 5, 4))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ol.CaptureError, match="OL101"):
            fast(rand(1, 5, 4))
        assert not kept()
    finally:
        gc.enable()


@pytest.mark.thorough
def test_garbage_with_tensors_collected_during_a_capture(device: torch.device, rand: Rand) -> None:
    """Freeing device memory under capture can break the capture; cycles are freed when GC likes."""

    def f(x: Tensor) -> Tensor:
        for generation in range(3):
            cycle: list[Any] = [x * 2]
            cycle.append(cycle)
            del cycle
            gc.collect(generation)
        return x + 1

    for _ in range(20):
        loop: list[Any] = [random_tensor(0, 64, device=device)]
        loop.append(loop)
    del loop
    drop_in(f, lambda i: (rand(i, 8),))
    assert gc.isenabled()


def test_gc_stays_off_if_it_was_off(rand: Rand) -> None:
    gc.disable()
    try:
        drop_in(lambda x: x + 1, lambda i: (rand(i, 8),))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_recursion(rand: Rand) -> None:
    """A callable that calls its graphed self is inlined into its own capture."""
    fast: Any = None

    def f(x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else fast(x * 2, depth - 1) + 1

    def eager(x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else eager(x * 2, depth - 1) + 1

    fast = ol.graph(f, warmup=1)
    alike(lambda x: fast(x, 3), lambda x: eager(x, 3), rand, 3, calls=6)


def test_capture_and_reset_inside_the_callable_do_no_harm(rand: Rand) -> None:
    inner = ol.graph(lambda x: x * 3, warmup=1)

    def f(x: Tensor) -> Tensor:
        inner.reset()
        return inner(x) + 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(3):
            inner(rand(i, 3))
    alike(lambda x: (fast(x), inner(x)), lambda x: (x * 3 + 1, x * 3), rand, 3, calls=6)


def test_reset_by_the_callable_of_itself(rand: Rand) -> None:
    fast: Any = None

    def f(x: Tensor) -> Tensor:
        fast.reset()
        return x + 1

    fast = ol.graph(f, warmup=1)
    alike(fast, lambda x: x + 1, rand, 3, calls=6)
