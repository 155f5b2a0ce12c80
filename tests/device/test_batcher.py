"""A batcher: requests of many threads as batches, each result that of its own call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, in_threads, on_cpu

pytestmark = pytest.mark.cpu
BUCKETS = ol.Buckets(dim=0, sizes=(1, 2, 4, 8))


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same kernels at each size, so the bits are eager's."""
    return x.relu() * 2, x + 1


def warm(fn: Any, *examples: Any, buckets: ol.Buckets = BUCKETS, **options: Any) -> Any:
    fast = ol.graph(fn, buckets=buckets, **options)
    with torch.inference_mode():
        fast.warm_up(examples)
    return fast


@contextmanager
def held(batcher: ol.Batcher) -> Iterator[None]:
    """Keep the thread of a batcher from taking requests meanwhile."""
    with batcher._changed:
        yield


# Results.


def test_eight_threads_put_500_requests(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    model.eval().requires_grad_(False)
    fast = warm(model, rand(0, 1, 16))
    inputs = [rand(i, 1 + i % 3, 16) for i in range(500)]
    futures: list[Any] = [None] * 500

    def client(start: int) -> None:
        for i in range(start, 500, 8):
            futures[i] = batcher.put(inputs[i])

    with fast.batcher(max_wait_ms=2) as batcher:
        in_threads(*(functools.partial(client, i) for i in range(8)))
    for x, future in zip(inputs, futures, strict=True):
        torch.testing.assert_close(future.result(0).cpu(), model(x).cpu())
    found = fast.stats()
    assert (found.warmup_calls, found.eager_calls, found.captures) == (0, 0, 4)
    assert found.replays < 400, "requests share launches"
    assert sum(rows * calls for rows, calls in found.sizes.items()) == sum(
        x.shape[0] for x in inputs
    )
    assert set(batcher.times) <= {1, 2, 4, 8}
    assert all(ms > 0 for ms in batcher.times.values())


def test_results_are_the_calls_own(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    inputs = [rand(i, 1 + i % 2, 3) for i in range(7)]
    before = [x.clone() for x in inputs]
    with fast.batcher(max_wait_ms=50) as batcher:
        with held(batcher):
            futures = [batcher.put(x) for x in inputs]
        results = [future.result(10) for future in futures]
    for x, was, result in zip(inputs, before, results, strict=True):
        assert_same(x, was)
        with torch.inference_mode():
            assert_same(result, rowwise(x.clone()))
    assert len({t.untyped_storage()._cdata for result in results for t in result}) == 14
    with torch.inference_mode():
        results[0][0].fill_(9)
    assert not any((t == 9).all() for result in results[1:] for t in result)
    assert fast.stats().replays < 7


def test_arguments_are_trees_and_may_be_shared(rand: Rand) -> None:
    def f(items: dict[str, Tensor], weight: Tensor, *, scale: float) -> dict[str, list[Tensor]]:
        y = (items["a"] + items["b"]) @ weight * scale
        return {"y": [y, items["a"].transpose(0, 1) * 1]}

    buckets = ol.Buckets(0, (2, 8), dims={"weight": None})
    weight, other = rand(0, 5, 2), rand(1, 5, 2)
    fast = ol.graph(f, buckets=buckets, warmup=1)
    calls = [
        (({"a": rand(i, 2, 5), "b": rand(i + 9, 2, 5)}, w), {"scale": scale})
        for i, (w, scale) in enumerate([(weight, 1.0), (weight, 1.0), (other, 1.0), (weight, 2.0)])
    ]
    with fast.batcher(max_wait_ms=1) as batcher:
        for _ in range(4):
            with held(batcher):
                futures = [batcher.put(*args, **kwargs) for args, kwargs in calls]
            for (args, kwargs), future in zip(calls, futures, strict=True):
                expected, found = f(*args, **kwargs)["y"], future.result(10)["y"]
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a.cpu(), b.cpu())
                    assert a.stride() == b.stride()


def test_two_dimensions_join_requests_of_one_length(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.exp() * 2

    buckets = ol.Buckets((0, 1), ((1, 4), (4, 8)))
    fast = warm(f, rand(0, 1, 4), buckets=buckets)
    inputs = [rand(i, 1, length) for i, length in enumerate((3, 7, 3, 7, 3, 7, 8, 3, 7))]
    with fast.batcher(max_wait_ms=1) as batcher:
        with held(batcher):
            futures = [batcher.put(x) for x in inputs]
        for x, future in zip(inputs, futures, strict=True):
            torch.testing.assert_close(future.result(10).cpu(), f(x).cpu())
        assert fast.stats().sizes == {(4, 3): 1, (4, 7): 1, (1, 8): 1}
        assert set(batcher.times) == {(4, 4), (4, 8), (1, 8)}


def test_requests_that_no_bucket_serves_run_alone(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3), on_refusal="eager")
    with warnings.catch_warnings(), fast.batcher(max_wait_ms=0) as batcher:
        warnings.simplefilter("ignore", ol.GraphWarning)
        for rows in (0, 9, 20):
            result = batcher.put(rand(rows, rows, 3)).result(10)
            with torch.inference_mode():
                assert_same(result, rowwise(rand(rows, rows, 3)))
    assert fast.stats().eager_reasons == {"empty": 1, "OL310": 2}


# Order and time.


def test_requests_run_in_their_order(rand: Rand) -> None:
    done: list[int] = []
    fast = warm(rowwise, rand(0, 1, 3))
    with fast.batcher(max_wait_ms=0) as batcher, held(batcher):
        for i in range(30):
            batcher.put(rand(i, 1, 3)).add_done_callback(lambda _, i=i: done.append(i))
    assert done == list(range(30))
    assert fast.stats().sizes == {8: 3, 4: 1, 2: 1}


def test_a_request_waits_no_longer_than_it_may(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    x = rand(0, 1, 3)
    with fast.batcher(max_wait_ms=150) as batcher:
        started = time.perf_counter()
        batcher.put(x).result(10)
        assert 0.14 < time.perf_counter() - started < 10
    with fast.batcher(max_wait_ms=1e9) as batcher:
        futures = [batcher.put(x) for _ in range(8)]
        assert not concurrent.futures.wait(futures, 10).not_done, "the largest size is full"


def test_measure_times_each_size_before_the_first_request(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    with fast.batcher(max_wait_ms=1) as batcher:
        assert batcher.times == {}
        batcher.measure(rand(0, 3, 3))
        assert set(batcher.times) == {1, 2, 4, 8}
        assert fast.stats().sizes == {}
        assert fast.stats().warmup_calls == 0
        first = dict(batcher.times)
        batcher.put(rand(1, 1, 3)).result(10)
        assert [s for s, ms in batcher.times.items() if ms != first[s]] == [1]


def test_a_time_that_was_too_long_is_tried_again(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    x = rand(0, 1, 3)
    with fast.batcher(max_wait_ms=0) as batcher:
        batcher.measure(x)
        batcher._times[8,] = wrong = 1000 * batcher._times[4,]
        for _ in range(2000):
            with held(batcher):
                futures = [batcher.put(x) for _ in range(8)]
            concurrent.futures.wait(futures, 10)
            if fast.stats().sizes.get(8):
                break
        assert 4 in fast.stats().sizes
        assert batcher.times[8] < wrong / 10


def test_the_modes_of_the_maker_hold(device: torch.device, rand: Rand) -> None:
    weight = rand(0, 3, 3).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return x @ weight

    def served() -> Tensor:
        with fast.batcher(max_wait_ms=0) as batcher:
            return batcher.put(rand(0, 1, 3)).result(10)

    fast = ol.graph(f, buckets=BUCKETS)
    assert served().is_inference()
    with torch.no_grad():
        result = served()
    assert not result.is_inference()
    assert not result.requires_grad
    if device.type != "tape":  # it has no autocast
        with torch.autocast(device.type, torch.bfloat16):
            result = served()
        assert result.dtype == torch.bfloat16
        assert served().dtype == torch.float32


# What fails.


def test_a_bad_request_fails_alone(device: torch.device, rand: Rand) -> None:
    if device.type == "cuda":
        pytest.skip("an index out of range ends the process's use of a GPU")
    table = nn.Embedding(5, 3).to(device).requires_grad_(False)
    good = [torch.tensor([i % 5], device=device) for i in range(5)]
    bad = torch.tensor([77], device=device)
    for first in (True, False):
        fast = warm(table, good[0])
        with fast.batcher(max_wait_ms=20) as batcher:
            if not first:
                batcher.put(good[0]).result(10)
            with held(batcher):
                failed = batcher.put(bad)
                futures = [batcher.put(x) for x in good]
                odd = batcher.put(torch.zeros(2, 3, device=device))
            for x, future in zip(good, futures, strict=True):
                assert torch.equal(future.result(10).cpu(), table(x).cpu())
            assert isinstance(failed.exception(10), IndexError)
            assert odd.exception(10) is not None
            assert torch.equal(batcher.put(good[1]).result(10).cpu(), table(good[1]).cpu())


def test_rows_that_depend_on_others_are_refused(rand: Rand) -> None:
    def shifted(x: Tensor) -> Tensor:
        return x - x.amax(0)

    for action in ("raise", "eager"):
        fast = ol.graph(shifted, buckets=BUCKETS, on_refusal=action)
        with fast.batcher(max_wait_ms=20) as batcher, warnings.catch_warnings():
            warnings.simplefilter("ignore", ol.GraphWarning)
            with held(batcher):
                futures = [batcher.put(rand(i, 1, 3)) for i in range(3)]
            if action == "raise":
                assert all(f.exception(10).code == "OL140" for f in futures)
                with pytest.raises(ol.CaptureError, match="OL140"):
                    batcher.measure(rand(0, 1, 3))
            else:
                assert all(not f.result(10).any() for f in futures), "each row alone"
                batcher.measure(rand(0, 1, 3))
                assert batcher.times == {}


def test_a_callable_that_changes_state_runs_one_by_one(device: torch.device, rand: Rand) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), device=device))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    model = Counts()
    fast: Any = ol.graph(model, buckets=BUCKETS, on_refusal="eager", warmup=1)
    with fast.batcher(max_wait_ms=20) as batcher, warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        with held(batcher):
            futures = [batcher.put(rand(i, 1, 3)) for i in range(6)]
        for i, future in enumerate(futures):
            assert torch.equal(future.result(10).cpu(), (rand(i, 1, 3) * 2).cpu())
    assert model.calls.item() == 6


def test_a_cancelled_request_costs_nothing(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    with fast.batcher(max_wait_ms=0, max_waiting=4) as batcher:
        with held(batcher):
            futures = [batcher.put(rand(i, 1, 3)) for i in range(4)]
            assert all(future.cancel() for future in futures[:3])
            futures += [batcher.put(rand(i, 1, 3)) for i in range(3)]
        for future in futures[3:]:
            future.result(10)
        done, waits = concurrent.futures.wait(futures, 10)
        assert len(done) == 7
        assert not waits
    assert sum(rows * calls for rows, calls in fast.stats().sizes.items()) == 4


def test_a_full_queue_refuses(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    with fast.batcher(max_wait_ms=0, max_waiting=3) as batcher:
        with held(batcher):
            futures = [batcher.put(rand(i, 1, 3)) for i in range(3)]
            assert len(batcher) == 3
            assert 'onelaunch_waiting_requests{callable="rowwise"} 3' in fast.metrics()
            with pytest.raises(ol.GraphError, match=r"\[OL211\] 3 requests wait"):
                batcher.put(rand(3, 1, 3))
        for future in futures:
            future.result(10)
        batcher.put(rand(3, 1, 3)).result(10)


# The end.


def test_close_runs_what_waits(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    batcher = fast.batcher(max_wait_ms=1e9)
    futures = [batcher.put(rand(i, 1, 3)) for i in range(3)]
    batcher.close()
    assert all(future.done() and not future.cancelled() for future in futures)
    assert not batcher._thread.is_alive()
    batcher.close()
    with pytest.raises(ol.GraphError, match=r"\[OL211\] the batcher is closed"):
        batcher.put(rand(0, 1, 3))


def test_after_an_exception_the_rest_is_cancelled(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))
    batcher = fast.batcher(max_wait_ms=float("inf"))
    futures = [batcher.put(rand(i, 1, 3)) for i in range(3)]
    with pytest.raises(KeyboardInterrupt), batcher:
        raise KeyboardInterrupt
    assert len(concurrent.futures.wait(futures, 10).done) == 3
    assert all(future.cancelled() for future in futures)


def test_asyncio_awaits_it(rand: Rand) -> None:
    fast = warm(rowwise, rand(0, 1, 3))

    async def serve() -> list[Any]:
        puts = (asyncio.wrap_future(batcher.put(rand(i, 1, 3))) for i in range(5))
        return await asyncio.gather(*puts)

    with fast.batcher(max_wait_ms=1) as batcher:
        for i, result in enumerate(asyncio.run(serve())):
            with torch.inference_mode():
                assert_same(result, rowwise(rand(i, 1, 3)))


INTERRUPTED = """
import signal, threading, torch, onelaunch as ol
main = threading.get_ident()
fast = ol.graph(torch.sin, buckets=ol.Buckets(0, (1, 8)))
batcher = fast.batcher(max_wait_ms=1e9)
future = batcher.put(torch.ones(1, 3))
threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
future.result()
"""


@on_cpu
def test_a_process_ends_after_ctrl_c(device: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode not in (0, -6, -11), done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr


def test_bad_arguments(rand: Rand) -> None:
    fast = ol.graph(rowwise, buckets=BUCKETS)
    for options in ({"max_wait_ms": -1}, {"max_wait_ms": "5"}, {"max_wait_ms": float("nan")}):
        with pytest.raises(ol.ArgumentError, match="max_wait_ms="):
            fast.batcher(**options)  # type: ignore[arg-type]
    with pytest.raises(ol.ArgumentError, match="max_waiting=0"):
        fast.batcher(max_wait_ms=1, max_waiting=0)
    with pytest.raises(ol.ArgumentError, match="without buckets"):
        ol.graph(rowwise).batcher(max_wait_ms=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_the_child_of_a_fork_has_no_thread(rand: Rand) -> None:
    """A server that loads before it forks its workers: a request there would wait for good."""
    fast = ol.graph(lambda x: x * 2, buckets=ol.Buckets.powers_of_two(2))
    x = rand(0, 1, 3)
    with fast.batcher(max_wait_ms=1.0) as batcher:
        batcher.put(x).result(60)
        child = os.fork()
        if child == 0:  # whatever it raises, it runs no other test
            code = 2
            try:
                batcher.put(x)
            except ol.GraphError as error:
                code = 0 if error.code == "OL211" else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
