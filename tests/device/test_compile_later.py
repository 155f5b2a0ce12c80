"""`compile="later"`: eager's kernels are replayed until compiled ones are there."""

from __future__ import annotations

import functools
import random
import threading
import time
import warnings
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.beside import is_beside
from onelaunch.capture.callee import Callee

from .drop_in import Rand, assert_same, in_threads, replays

pytestmark = pytest.mark.usefixtures("compiled")


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device).eval()


def finished(fast: Any) -> Any:
    """Wait until everything was compiled."""
    own = getattr(fast, "__graphed__", fast)
    end = time.monotonic() + 100
    while (own._due or own._worker.busy) and time.monotonic() < end:
        time.sleep(0.01)
    assert not own._due
    assert not own._worker.busy
    return own


def compiled(own: Any) -> list[Any]:
    """Return the recordings of compiled code, which lie in a pool of their own."""
    return [
        e for e in own._table.entries if e.pool_member.device_pool in own._compiled._pool._parts()
    ]


def compiled_launches(own: Any) -> int:
    return sum(entry.captured.launches[0] for entry in compiled(own))


def test_compiled_code_takes_over(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, compile="later")
    with torch.inference_mode():
        for i in range(5):
            assert_same(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
        assert replays(fast) >= 2  # nothing waits for the compiler
        own = finished(fast)
        before = compiled_launches(own)
        for i in range(4):
            torch.testing.assert_close(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
    assert compiled_launches(own) == before + 4
    assert len(fast.recordings) == 1
    assert own.memory_bytes >= own._compiled._pool.memory_bytes > 0
    assert not own.stats().eager_reasons


def test_what_was_captured_ahead_is_compiled(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast: Any = ol.graph(net, compile="later")
    with torch.inference_mode():
        found = fast.warm_up([rand(0, rows, 4) for rows in (2, 3)])
        assert len(found.captured) == 2
        assert_same(fast(rand(1, 3, 4)), net(rand(1, 3, 4)))
        own = finished(fast)
        for i in range(4):
            torch.testing.assert_close(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
        fast.warm_up([rand(0, 2, 4)])  # is there
    assert compiled_launches(own) >= 4
    assert len(fast.recordings) == 2
    assert len(fast.readiness().captured) == 2
    assert fast.stats().captures == 4
    assert fast.stats().warmup_calls == 0


collector: ContextVar[dict[str, int] | None] = ContextVar("collector", default=None)


class Collecting(nn.Module):
    """A module that sets state and puts it back in each call, as every model of transformers 5."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net, self.given = network(device), SimpleNamespace(global_var=None, depth=0)

    def forward(self, x: Tensor) -> Tensor:
        token = collector.set({})
        self.given.depth += 1
        try:
            return self.net(x)
        finally:
            self.given.depth -= 1
            collector.reset(token)
            self.given.global_var = None


@pytest.mark.parametrize("ahead", [False, True])
def test_state_that_is_put_back_in_the_call(device: torch.device, rand: Rand, ahead: bool) -> None:
    model, eager = Collecting(device), Collecting(device)  # whose state is its own
    fast: Any = ol.graph(model, compile="later")
    with torch.inference_mode():
        if ahead:
            fast.warm_up([rand(0, 2, 4)])
        for i in range(5):
            torch.testing.assert_close(fast(rand(i, 2, 4)), eager(rand(i, 2, 4)))
        own = finished(fast)
        for i in range(4):
            torch.testing.assert_close(fast(rand(i, 2, 4)), eager(rand(i, 2, 4)))
    assert compiled_launches(own) >= 4


@pytest.mark.parametrize("how", ["state", "random", "grad"])
def test_what_is_captured_ahead_and_not_compiled(
    device: torch.device, rand: Rand, how: str
) -> None:
    total, net = torch.zeros(4, device=device), network(device)

    def f(x: Tensor) -> Tensor:
        if how == "random":
            return x + torch.rand_like(x)
        if how == "state":
            total.add_(x.sum(0))
        return net(x)

    fast: Any = ol.graph(f, compile="later")
    with torch.set_grad_enabled(how == "grad"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fast.capture(rand(0, 2, 4))
        fast(rand(1, 2, 4))
        finished(fast)
    (text,) = [str(w.message) for w in told]
    assert "OL316" in text
    assert not compiled(fast)
    assert replays(fast) == 1


def test_threads_call_meanwhile(device: torch.device, rand: Rand) -> None:
    net = network(device)
    fast = ol.graph(net, compile="later")

    def body(k: int) -> None:
        with torch.inference_mode():
            for i in range(40):
                x = rand(i, 1 + (i + k) % 3, 4)
                torch.testing.assert_close(fast(x), net(x))

    in_threads(*(functools.partial(body, k) for k in range(3)))
    assert len(compiled(finished(fast))) == 3


@pytest.mark.parametrize("how", ["wrong", "fails"])
def test_what_the_compiler_gets_wrong(
    device: torch.device, rand: Rand, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def form(callee: Any, driver: Any) -> Any:
        if not callee.compile:
            return callee.fn
        return bad

    def bad(x: Tensor) -> Tensor:
        if how == "fails":
            raise RuntimeError("no such kernel")
        return net(x) * 1.5

    monkeypatch.setattr(Callee, "captured_form", form)
    net = network(device)
    fast = ol.graph(net, compile="later")
    with torch.inference_mode(), warnings.catch_warnings(record=True, action="always") as told:
        for i in range(5):
            assert_same(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
        own = finished(fast)
        before = replays(fast)
        for i in range(4):
            assert_same(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
    (text,) = [str(w.message) for w in told]
    assert "OL316" in text
    assert {"wrong": "differs from eager's", "fails": "no such kernel"}[how] in text
    assert replays(fast) == before + 4
    assert not compiled(own)


def test_state_and_gradients_keep_eagers_kernels(device: torch.device, rand: Rand) -> None:
    total = torch.zeros(4, device=device)

    def f(x: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return x * 2

    for f_, grad in ((f, False), (network(device), True)):
        fast = ol.graph(f_, compile="later")
        with warnings.catch_warnings(record=True, action="always") as told:
            for i in range(6):
                with torch.set_grad_enabled(grad):
                    result = fast(rand(i, 2, 4))
                if grad:
                    result.sum().backward()
        (text,) = [str(w.message) for w in told]
        assert "OL316" in text
        assert "keeps eager's kernels" in text
        assert replays(fast) >= 3


def taken_over(device: torch.device, rand: Rand) -> tuple[nn.Module, Any]:
    """A network, and its graph once compiled code has taken over."""
    net = network(device)
    fast = ol.graph(net, compile="later")
    with torch.inference_mode():
        for i in range(5):
            fast(rand(i, 2, 4))
    finished(fast)
    return net, fast


def test_weights_that_move(device: torch.device, rand: Rand) -> None:
    net, fast = taken_over(device, rand)
    net[0].weight.data = net[0].weight.data * 2  # pyright: ignore
    with torch.inference_mode():
        for i in range(8):
            torch.testing.assert_close(fast(rand(i, 2, 4)), net(rand(i, 2, 4)))
        own = finished(fast)
        before = compiled_launches(own)
        torch.testing.assert_close(fast(rand(1, 2, 4)), net(rand(1, 2, 4)))
    assert compiled_launches(own) == before + 1


@pytest.mark.parametrize(
    "options", [{"buckets": ol.Buckets(sizes=(1, 2))}, {"capture": "background"}]
)
def test_options_that_do_not_go_together(options: Any) -> None:
    with pytest.raises(ol.ArgumentError, match=r"OL401.*later"):
        ol.graph(lambda x: x, compile="later", **options)


def test_reset(device: torch.device, rand: Rand) -> None:
    net, fast = taken_over(device, rand)
    with torch.inference_mode():
        fast.reset()
        assert not fast.recordings
        assert_same(fast(rand(1, 2, 4)), net(rand(1, 2, 4)))


def test_dynamos_marks_are_no_state(device: torch.device, rand: Rand) -> None:
    """It marks the buffers of a module, as BERT's positions. A capture ahead of calls took the mark
    for lasting state (OL110)."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift: Tensor
            self.register_buffer("shift", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift[: x.shape[-1]]

    net = Shifted().to(device)
    fast: Any = ol.graph(net, compile=True)
    with torch.inference_mode():
        fast.capture(rand(0, 2, 4))
        assert_same(fast(rand(1, 2, 4)), net(rand(1, 2, 4)))
    assert replays(fast) == 1


def test_random_numbers_of_other_threads(device: torch.device, rand: Rand) -> None:
    """Dynamo puts generators back to where they were before a compilation."""
    net = network(device)
    fast = ol.graph(net, compile="later")

    def drawn() -> tuple[float, float, float]:
        return random.random(), torch.rand(1).item(), torch.rand(1, device=device).item()

    def seed() -> None:
        random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = [drawn() for _ in range(400)]
    seed()
    found: list[Any] = []
    with torch.inference_mode():
        own = getattr(fast, "__graphed__", fast)
        while len(found) < 6 or (len(found) < 400 and (own._due or own._worker.busy)):
            fast(rand(0, 2, 4))
            found.append(drawn())
            time.sleep(0.02)
        finished(fast)
        found.append(drawn())
    assert_same(found, expected[: len(found)])


def test_state_that_moves_while_it_is_compiled(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler runs nothing from then on, and what the caller changed stays."""
    entered, go = threading.Event(), threading.Event()
    form = Callee.captured_form

    def slow(callee: Any, driver: Any) -> Any:
        if callee.compile and is_beside():
            entered.set()
            go.wait(60)
        return form(callee, driver)

    monkeypatch.setattr(Callee, "captured_form", slow)
    state = SimpleNamespace(on=False, count=0, scale=2.0)

    def f(x: Tensor) -> Tensor:
        if state.on:
            state.count += 1
        return x * state.scale

    fast = ol.graph(f, compile="later")
    for i in range(5):
        assert_same(fast(rand(i, 3)), rand(i, 3) * 2.0)
    assert entered.wait(60)
    state.on, state.scale = True, 3.0
    go.set()
    finished(fast)
    assert (state.on, state.count, state.scale) == (True, 0, 3.0)
    with warnings.catch_warnings(record=True, action="always") as told:
        for i in range(8):
            torch.testing.assert_close(fast(rand(i, 3)), rand(i, 3) * 3.0)
            assert state.count == i + 1
    assert {getattr(t.message, "code", "") for t in told} == {"OL316"}
