"""The stress figures, in full. With `ONELAUNCH_RESULTS` set they go to stress.json there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from tests.device import stress
from tests.device.drop_in import allocated, assert_same, random_tensor
from tests.device.results import report

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.device("cuda", 0)


def show(capsys: pytest.CaptureFixture[str], name: str, figures: dict[str, Any]) -> None:
    with capsys.disabled():
        report("stress.json", name, figures)


def kernels_of(f: Any) -> list[str]:
    """Names of the kernels that a call runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        f()
        torch.cuda.synchronize()
    return [e.key for e in seen.key_averages()]


@pytest.mark.parametrize("seed", range(4))
def test_mixed_calls(device: torch.device, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """100,000 calls in all, in processes side by side where there are workers."""
    show(capsys, f"mixed calls, seed {seed}", stress.mixed_calls(device, 25_000, seed))


def test_threads_on_streams(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    wide = random_tensor(0, 4096, 4096, device=device)
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        wide @ wide
        stop.record()
        stop.synchronize()
    slow_ms = start.elapsed_time(stop)
    del wide
    figures = stress.threads_on_streams(device, threads=8, calls=1000, slow_size=4096)
    show(capsys, "threads on streams", {**figures, "slow kernel ms": round(slow_ms, 2)})
    assert slow_ms > 2


@pytest.mark.parametrize("inputs", ["copy", "rebind"])
@pytest.mark.parametrize(
    ("kind", "dtype", "rows", "width"),
    [("small", torch.float32, 32, 64), ("tma", torch.bfloat16, 128, 1024)],
)
def test_queued(
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    inputs: str,
    dtype: torch.dtype,
    rows: int,
    width: int,
) -> None:
    figures = stress.queued(device, 5000, inputs, dtype, rows, width)
    if kind == "tma":
        x = random_tensor(0, rows, width, device=device).to(dtype)
        w = random_tensor(0, width, width, device=device).to(dtype)
        figures["kernels"] = [k for k in kernels_of(lambda: x @ w) if "Memset" not in k]
    show(capsys, f"queued {kind} {inputs}", figures)


def test_out_of_memory_during_a_capture(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capture finds less memory than the warm-up did; afterwards everything goes on."""
    mib = 1 << 20
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    budget = torch.cuda.memory_reserved() + 2048 * mib
    torch.cuda.set_per_process_memory_fraction(budget / total, device)

    def f(x: Tensor) -> Tensor:
        big = torch.ones(256 * mib, device=device)
        return x * 2 + big[0] + torch.rand_like(x) * 0

    # It draws too: torch keeps the seed of all graphs on the device from the first such capture on.
    other: Any = ol.graph(lambda x: x * 5 + torch.rand_like(x) * 0, warmup=1)
    fast: Any = ol.graph(f, warmup=1)
    refused = 0
    try:
        with torch.no_grad():
            x = random_tensor(0, 8, device=device)
            for _ in range(3):
                other(x)
            fast(x)
            torch.cuda.empty_cache()
            hog = torch.empty(1400 * mib, dtype=torch.uint8, device=device)
            before = allocated(device)
            for _ in range(3):
                state = torch.cuda.get_rng_state(device)
                with pytest.raises(ol.CaptureError) as caught:
                    fast(x)
                assert caught.value.code == "OL111"
                refused += 1
                assert allocated(device) == before
                assert_same(torch.cuda.get_rng_state(device), state)
                assert_same(x + 1, random_tensor(0, 8, device=device) + 1)
                assert_same(other(x), x * 5)
                again: Any = ol.graph(lambda x: x * 3, warmup=1)
                for _ in range(3):
                    assert_same(again(x), x * 3)
                again.reset()
            del hog
            torch.cuda.empty_cache()
            for _ in range(3):
                assert_same(fast(x), x * 2 + 1)
            replays = fast.recordings[0].replays
            assert replays == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    show(capsys, "out of memory", {"refused captures": refused, "replays afterwards": replays})
