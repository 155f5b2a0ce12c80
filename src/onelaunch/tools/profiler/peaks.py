"""The best rates of a machine, measured: bytes and matrix products per second."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from onelaunch.tools.bench.timers import HostTimer, timers_for

ABOUT_US = 1_000.0  # of a run, by which a timer sets the number of its samples
TIMES = 10  # in one sample, for whose sake an event or a reading of the clock takes nothing
LEAST_BYTES = 2**16
MOST_BYTES = 2**28
SMALLEST = 256  # of the matrices
LARGEST = 8192
ENOUGH_US = 3_000.0  # a product that takes so long is large enough


@dataclass(frozen=True)
class Peaks:
    """Peaks that a machine reached, measured in this process.

    Attributes:
        working_set: the bytes on which bandwidth was measured.
        bytes_per_us: read and written; 1,000 are 1 GB/s.
        flops_per_us: of the best matrix product, by dtype; 1,000,000 are 1 TFLOP/s.
        launch_us: the host's time for the launch of the smallest graph; on a CPU, for the smallest
            operator.
    """

    working_set: int
    bytes_per_us: float
    flops_per_us: dict[str, float] = field(default_factory=dict)
    launch_us: float = 0.0


def measure_peaks(device: torch.device, nbytes: int, dtypes: frozenset[str]) -> Peaks:
    """Measure what a device reaches; each figure once in a process. 0.1 to 1 s, 512 MiB at most.

    Args:
        nbytes: the bytes that a call moves at least. Bandwidth is measured with a working set of
            about this size, since a cache is faster than memory.
        dtypes: of matrix products, under the settings in force (TF32, threads).
    """
    moved = min(MOST_BYTES, max(LEAST_BYTES, 2 ** math.ceil(math.log2(max(1, nbytes)))))
    settings = torch.get_float32_matmul_precision(), torch.get_num_threads()
    with torch.no_grad(), _current(device):
        found = {dtype: _products(device, dtype, settings) for dtype in sorted(dtypes)}
        flops = {dtype: peak for dtype, peak in found.items() if peak}
        return Peaks(moved, _traffic(device, moved), flops, _launch(device))


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def _traffic(device: torch.device, nbytes: int) -> float:
    """Measure the bytes per us that a copy or a sum reads and writes, whichever is more. Writing
    costs some machines twice the time of reading."""
    a = torch.zeros(nbytes // 8, dtype=torch.float32, device=device)
    b = torch.zeros_like(a)
    ways = (
        (2 * a.nbytes, lambda: b.copy_(a)),
        (3 * a.nbytes, lambda: torch.add(a, b, out=b)),
        (a.nbytes, a.sum),
    )
    return max(
        moved * TIMES / _best_us(functools.partial(_several, call), device) for moved, call in ways
    )


def _several(call: Callable[[], object]) -> None:
    for _ in range(TIMES):
        call()


@functools.cache
def _products(device: torch.device, dtype: str, settings: object) -> float:
    """Measure the flops per us of products of larger and larger square matrices; 0 where `mm` does
    not take the dtype."""
    best, size = 0.0, SMALLEST
    while size <= LARGEST:
        try:
            a = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
            taken = _best_us(functools.partial(torch.mm, a, a), device)
        except RuntimeError:
            break
        best = max(best, 2 * size**3 / taken)
        if taken > ENOUGH_US:
            break
        size *= 2
    return best


@functools.cache
def _launch(device: torch.device) -> float:
    """Measure how long the host takes to launch a graph of one kernel; on a CPU, one operator."""
    x = torch.zeros(1, device=device)
    x.add_(1)
    if device.type != "cuda":
        return _best_us(functools.partial(_several, lambda: x.add_(1)), device) / TIMES
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    return min(HostTimer(torch.cuda.synchronize).sample(graph.replay, 10.0))


def _best_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of some runs, since others may use the machine, too; on a GPU without its
    launch."""
    call()
    return min(timers_for(device)[-1].sample(call, ABOUT_US))
