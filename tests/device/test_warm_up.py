"""The start of a service: what `warm_up` captures, and what a health check and metrics say."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, Runs, assert_same, on_accelerators, replays


def served(fast: Any, calls: list[Tensor], expected: Callable[[Tensor], Tensor]) -> None:
    """Each call is a replay, and right."""
    before = fast.stats()
    for x in calls:
        assert_same(fast(x).detach(), expected(x).detach())
    after = fast.stats()
    assert after.replays - before.replays == len(calls)
    assert (after.warmup_calls, after.captures) == (before.warmup_calls, before.captures)


def picky(x: Tensor) -> Tensor:
    """Three rows are refused, at a line."""
    if x.shape[0] == 3:
        return x * x.sum().item()
    return x * 2


LINE = "return x * x.sum().item()"


# What is captured.


def test_the_largest_is_captured_first(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2)
    xs = [rand(n, n, 4) for n in (2, 8, 1, 4)]
    found = fast.warm_up(xs)
    assert [r.spec.tensors[0].shape[0] for r in reversed(fast.recordings)] == [8, 4, 2, 1]
    assert found.ready
    assert fast.ready
    assert found == fast.readiness()
    assert len(found.captured) == 4
    assert not found.pending
    assert not found.refused
    served(fast, xs, lambda x: x * 2)


def test_examples_are_calls(rand: Rand) -> None:
    def f(x: Any, other: Any = 0, *, scale: float = 1.0) -> Tensor:
        return sum(x) * scale if isinstance(x, list) else x * scale + other

    fast = ol.graph(f)
    x, y = rand(0, 3), rand(1, 3)
    fast.warm_up([x, (x, y), ((x,), {"scale": 2.0}), [x, y], ((), {"x": x, "other": y})])
    assert len(fast.recordings) == 5
    assert_same(fast(x), f(x))
    assert_same(fast(x, y), f(x, y))
    assert_same(fast(x, scale=2.0), f(x, scale=2.0))
    assert_same(fast([x, y]), f([x, y]))
    assert_same(fast(x=x, other=y), f(x=x, other=y))
    assert fast.stats().replays == 5
    assert fast.stats().warmup_calls == 0


def test_a_generator_gives_examples_and_equal_signatures_count_once(rand: Rand) -> None:
    fast = ol.graph(lambda x: x + 1)
    told: list[tuple[int, int, str]] = []
    found = fast.warm_up((rand(i, 3) for i in range(4)), progress=lambda *now: told.append(now))
    assert len(found.captured) == fast.stats().captures == 1
    assert [now[:2] for now in told] == [(0, 1), (1, 1)]


def test_nothing_is_called(device: torch.device, rand: Rand) -> None:
    model = nn.BatchNorm1d(4).to(device)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    fast: Any = ol.graph(model)
    with torch.no_grad():
        fast.warm_up([rand(0, 6, 4)])
    assert_same(dict(model.state_dict()), before)


def test_a_module_that_trains(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2).to(device)
    fast: Any = ol.graph(model)
    fast.warm_up([rand(n, n, 4) for n in (2, 5)])
    assert fast.ready
    for n in (2, 5):
        x = rand(n, n, 4)
        fast(x).sum().backward()
        got, model.weight.grad = model.weight.grad, None
        model(x).sum().backward()
        assert_same(got, model.weight.grad)
        model.weight.grad = None
    assert fast.stats().warmup_calls == 0
    assert replays(fast) == 2


def test_numbers_that_are_read_at_each_call_stay_captured(rand: Rand) -> None:
    """Their recordings give way to a recording for every number."""
    fast = ol.graph(lambda x, k: x * k, warmup=1)
    x = rand(0, 5)
    fast.warm_up([(x, 0.5), (x, 1.5)])
    for i in range(12):
        assert_same(fast(x, 0.25 * i), x * (0.25 * i))
    assert len(fast.readiness().captured) == 2


# A run that ends early, and the next.


def test_a_second_run_captures_what_is_new(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2)
    fast.warm_up([rand(0, 2), rand(0, 4)])
    found = fast.warm_up([rand(0, 2), rand(0, 4), rand(0, 6)])
    assert fast.stats().captures == 3
    assert len(found.captured) == 3


@pytest.mark.parametrize("inside", [False, True], ids=["between", "in a capture"])
def test_after_an_interrupt_it_goes_on(rand: Rand, inside: bool) -> None:
    runs = Runs()

    def f(x: Tensor) -> Tensor:
        runs.add()
        if inside and runs.count == 3:  # in the capture of the second
            raise KeyboardInterrupt
        return x * 2

    def stop(done: int, total: int, what: str) -> None:
        if not inside and done == 1:
            raise KeyboardInterrupt

    fast = ol.graph(f)
    xs = [rand(0, 8), rand(0, 4), rand(0, 2)]
    with pytest.raises(KeyboardInterrupt):
        fast.warm_up(xs, progress=stop)
    assert not fast.ready
    assert [call.why for call in fast.readiness().pending] == ["", ""]
    served(fast, xs[:1], lambda x: x * 2)
    fast.warm_up(xs)
    assert fast.ready
    assert fast.stats().captures == 3
    served(fast, xs, lambda x: x * 2)


def test_seconds(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1)
    xs = [rand(0, 8), rand(0, 4), rand(0, 2)]

    def slow(done: int, total: int, what: str) -> None:
        if done == 1:
            time.sleep(60.01 - 60)

    with pytest.warns(ol.GraphWarning, match=r"OL314\] 3 of 3 .* are not captured") as caught:
        found = fast.warm_up(xs, budget_s=1e-9)
    assert "float32[8] on " in str(caught[0].message)
    assert caught[0].filename == __file__
    assert [call.why for call in found.pending] == ["budget_s=1e-09 was spent"] * 3
    assert fast.ready, "calls are served, and captured as they come"
    for _ in range(3):
        assert_same(fast(xs[1]), xs[1] * 2)
    assert len(fast.readiness().captured) == 1, "one was captured as it came"
    assert fast.warm_up(xs, budget_s=600, progress=slow).ready
    assert fast.stats().captures == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast.warm_up(xs, budget_s=1e-9)  # nothing is left to do


@on_accelerators
@pytest.mark.parametrize("own", [False, True], ids=["of the run", "of the pool"])
def test_bytes(device: torch.device, rand: Rand, own: bool) -> None:
    size = 1 << (22 if device.type == "cuda" else 19)
    xs = [rand(0, size + 256 * k) for k in (3, 2, 1)]
    with torch.no_grad():
        alone = ol.Pool()
        room: list[int] = []
        kept = ol.graph(lambda x: x * 2, pool=alone, outputs="static")
        for x in xs:
            kept.capture(x)
            room.append(alone.memory_bytes)
        most = (room[1] + room[2]) // 2
        pool = ol.Pool(max_bytes=most if own else None)
        fast = ol.graph(lambda x: x * 2, pool=pool, outputs="static", warmup=1)
        with pytest.warns(ol.GraphWarning, match=r"OL314\] 1 of 3 "):
            found = fast.warm_up(xs, max_bytes=None if own else most)
        assert len(found.captured) == 2
        assert f"max_bytes={most}" in found.pending[0].why
        assert pool.memory_bytes <= most
        assert pool.max_bytes == (most if own else None)
        served(fast, xs[:2], lambda x: x * 2)
        for _ in range(3):
            assert_same(fast(xs[2]).clone(), xs[2] * 2)
        assert own or len(fast.recordings) == 3, "the limit was of the run alone"


@on_accelerators
def test_too_few_bytes_for_any(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1)
    xs = [rand(0, n) for n in (8, 4)]
    with torch.no_grad():
        with pytest.warns(ol.GraphWarning, match=r"OL314\] 2 of 2 "):
            assert not fast.warm_up(xs, max_bytes=1).captured
        assert fast.ready
        assert fast.stats().captures == 0, "it was foreseen"
        fast.warm_up(xs)
        served(fast, xs, lambda x: x * 2)
        with pytest.warns(ol.GraphWarning, match=r"OL314\] 1 of 3 "):
            fast.warm_up([*xs, rand(0, 2)], max_bytes=1)
        served(fast, xs, lambda x: x * 2)


# Refusals.


def test_a_refusal_does_not_end_the_rest(rand: Rand) -> None:
    fast = ol.graph(picky)
    xs = [rand(0, n, 2) for n in (4, 3, 2)]
    with pytest.warns(ol.GraphWarning, match=r"OL314\] 1 of 3 ") as caught:
        found = fast.warm_up(xs)
    assert "OL101" in str(caught[0].message)
    assert LINE in str(caught[0].message)
    (refused,) = found.refused
    assert (refused.code, LINE in str(refused.where)) == ("OL101", True)
    assert refused.call == f"float32[3, 2] on {xs[0].device}"
    assert not fast.ready, "a call of three rows raises"
    json.dumps(dataclasses.asdict(found))
    served(fast, [xs[0], xs[2]], lambda x: x * 2)


def test_a_refused_call_runs_eagerly_from_its_first_on(rand: Rand) -> None:
    fast = ol.graph(picky, on_refusal="eager")
    xs = [rand(0, n, 2) for n in (4, 3)]
    with pytest.warns(ol.GraphWarning, match="OL101.*this signature runs eagerly"):
        found = fast.warm_up(xs)
    assert len(found.refused) == 1
    assert fast.ready
    assert_same(fast(xs[1]), picky(xs[1]))
    assert fast.stats().warmup_calls == 0
    assert fast.stats().eager_reasons == {"OL101": 1}
    assert 'onelaunch_eager_calls_total{callable="picky",reason="OL101"} 1\n' in fast.metrics()


@pytest.mark.filterwarnings(r"ignore:.*OL311:onelaunch.GraphWarning")
def test_a_refused_module_runs_in_pieces_from_its_first_call_on(
    device: torch.device, rand: Rand
) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h / max(h.max().item(), 1.0)

    fast: Any = ol.graph(Halves().to(device).eval(), on_refusal="split", warmup=1)
    x = rand(0, 3, 4)
    with torch.no_grad():
        found = fast.warm_up([x])
        assert fast.ready
        assert found.refused[0].code == "OL101"
        for _ in range(3):
            fast(x)
    assert fast.stats().replays == 2
    assert 'onelaunch_replays_total{callable="Halves"} 2\n' in fast.metrics()


def test_it_raises_where_nothing_can_be_captured(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * x.sum().item())
    with pytest.raises(ol.CaptureError, match="OL101"):
        fast.warm_up([rand(0, 4), rand(0, 2)])
    assert len(fast.readiness().refused) == 2
    some = ol.graph(picky)
    some.warm_up([rand(0, 2)])
    with pytest.raises(ol.CaptureError, match="OL101"):
        some.warm_up([rand(0, 3)])
    with pytest.raises(ol.CaptureError, match="OL101"):
        fast(fast(fast(fast(rand(0, 4)))))


def test_lasting_state_is_captured_once_it_is_there(rand: Rand) -> None:
    seen: dict[str, Any] = {}

    def f(x: Tensor) -> Tensor:
        if "scale" not in seen:
            seen["scale"] = x.new_full((), 3.0)
        return x * seen["scale"]

    fast = ol.graph(f, on_refusal="eager", warmup=1)
    x = rand(0, 4)
    found = fast.warm_up([x])
    assert found.refused[0].code == "OL110"
    for _ in range(4):
        assert_same(fast(x), x * 3)
    assert fast.stats().replays == 3
    assert fast.warm_up([x]).ready


def test_errors_of_the_callable_come_through(rand: Rand) -> None:
    fast = ol.graph(lambda x: x.reshape(4, -1) * 2)
    with pytest.raises(RuntimeError, match="shape"):
        fast.warm_up([rand(0, 8), rand(0, 3)])
    assert not fast.ready
    served(fast, [rand(1, 8)], lambda x: x.reshape(4, -1) * 2)


def test_inside_of_a_capture(rand: Rand) -> None:
    inner = ol.graph(lambda x: x + 1)

    def f(x: Tensor) -> Tensor:
        inner.warm_up([x])
        return x * 2

    with pytest.raises(ol.CaptureError, match="cannot capture here"):
        ol.graph(f).capture(rand(0, 3))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"examples": torch.ones(2)}, r"examples is a Tensor.*warm_up\(\[x\]\)"),
        ({"examples": {"x": 1}}, "examples is a dict"),
        ({"examples": 3}, "examples is an int"),
        ({"examples": [], "progress": 3}, "progress=3"),
        ({"examples": [], "budget_s": -1}, "budget_s=-1"),
        ({"examples": [], "budget_s": "1"}, "budget_s='1'"),
        ({"examples": [], "max_bytes": 0}, "max_bytes=0"),
        ({"examples": [], "max_bytes": 1.5}, "max_bytes=1.5"),
    ],
)
def test_bad_arguments(options: Any, match: str) -> None:
    with pytest.raises(ol.ArgumentError, match=f"(?s){match}"):
        ol.graph(torch.relu).warm_up(**options)


# A health check.


def test_it_is_ready_after_its_warm_up(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2)
    assert not fast.ready
    found: list[bool] = []

    def asked(done: int, total: int, what: str) -> None:
        thread = threading.Thread(target=lambda: found.append(fast.ready))
        thread.start()
        thread.join()

    fast.warm_up([rand(0, 4), rand(0, 2)], progress=asked)
    assert found == [False, False, True]
    fast.reset()
    assert not fast.ready
    assert not fast.readiness().pending


def test_a_recording_that_went_is_pending(rand: Rand) -> None:
    fast: Any = ol.graph(lambda x: x * 2)
    fast.warm_up([rand(0, 4)])
    fast._table.drop(fast._table.entries[0])
    (pending,) = fast.readiness().pending
    assert pending.why == "its recording was freed since"
    assert fast.ready


def test_names_of_a_module_are_its_own(device: torch.device, rand: Rand) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ready = 3
            self.register_buffer("metrics", torch.ones((), device=device))

        def warm_up(self) -> str:
            return "own"

        def forward(self, x: Tensor) -> Tensor:
            return x * self.ready * self.metrics

    fast: Any = ol.graph(Own(), warmup=1)
    assert (fast.ready, fast.warm_up()) == (3, "own")
    assert fast.metrics is fast.get_buffer("metrics")
    fast.__graphed__.warm_up([rand(0, 4)])
    assert fast.__graphed__.ready
    assert len(fast.readiness().captured) == 1
    assert "onelaunch_replays_total" in fast.__graphed__.metrics()
    fast.ready = 2
    assert_same(fast(rand(0, 4)), rand(0, 4) * 2)
    assert list(fast.state_dict()) == ["metrics"]


# Progress.


def test_a_bar(rand: Rand, capsys: pytest.CaptureFixture[str]) -> None:
    def relu(x: Tensor) -> Tensor:
        return x.relu()

    ol.graph(relu).warm_up([rand(0, 4), rand(0, 2)], progress=True)
    said = capsys.readouterr()
    assert not said.out
    assert "relu" in said.err
    assert "2/2" in said.err


def test_a_function_is_told(device: torch.device, rand: Rand) -> None:
    told: list[tuple[int, int, str]] = []
    xs = [rand(0, 4), rand(0, 2)]
    ol.graph(torch.relu).warm_up(xs, progress=lambda *now: told.append(now))
    where = xs[0].device
    assert told == [(0, 2, f"float32[4] on {where}"), (1, 2, f"float32[2] on {where}"), (2, 2, "")]


# Metrics.


def test_eager_calls_have_their_reasons(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, buckets=ol.Buckets(0, (2, 4)), max_recordings=1, warmup=1)
    fast.warm_up([rand(0, 2, 2)])
    with pytest.warns(ol.GraphWarning, match="OL310"):
        fast(rand(0, 9, 2))
    fast(rand(0, 0, 2))
    fast(rand(0, 3, 2))
    found = fast.stats()
    assert found.eager_reasons == {"OL310": 1, "empty": 1}
    assert found.eager_calls == 2
    text = fast.metrics()
    for line in (
        "# TYPE onelaunch_eager_calls_total counter",
        'onelaunch_eager_calls_total{callable="<lambda>",reason="empty"} 1',
        'onelaunch_captures_total{callable="<lambda>"} 2',
        'onelaunch_replays_total{callable="<lambda>"} 1',
        f'onelaunch_padded_ratio{{callable="<lambda>"}} {found.padding}',
        f'onelaunch_capture_seconds_total{{callable="<lambda>"}} {found.capture_seconds}',
        f'onelaunch_pool_bytes{{callable="<lambda>"}} {fast.memory_bytes}',
    ):
        assert line in text.splitlines()


def test_signatures_beyond_the_most(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, max_recordings=1, warmup=1)
    with pytest.warns(ol.GraphWarning, match=r"OL314[\s\S]*1 recordings exist"):
        found = fast.warm_up([rand(0, 4), rand(0, 2)])
    assert fast.ready
    assert len(found.pending) == 1
    fast(rand(0, 2))
    with pytest.warns(ol.GraphWarning, match="OL301"):
        fast(rand(0, 2))
    for _ in range(2):
        fast(rand(0, 2))
    assert fast.stats().eager_reasons == {"OL301": 3}


@pytest.mark.parametrize("inside", [False, True])
def test_sizes_of_tensors_made_outside_of_inference_mode(
    device: torch.device, rand: Rand, inside: bool
) -> None:
    """A tensor of a bucket's own size has the recording of those that are padded."""
    net = torch.nn.Linear(4, 3).to(device)
    fast = ol.graph(net, buckets=ol.Buckets(0, (2, 4)))
    with torch.inference_mode(inside):
        example, calls = rand(0, 1, 4), [rand(n, n, 4) for n in (2, 1, 4, 3)]
    with torch.inference_mode():
        fast.warm_up([example])
        for x in calls:
            torch.testing.assert_close(fast(x), net(x))  # a product of other rows rounds otherwise
    assert replays(fast) == len(calls)
