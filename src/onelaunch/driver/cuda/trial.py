"""A choice between the branches of a graph and its chain, by launches of both."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from onelaunch.driver.cuda import memory, nodes
from onelaunch.driver.cuda.memory import Ranges

LEAST_GAIN = 1.02
"""The gain from which branches replace the chain."""
_ROUNDS = 4
_ROUND_MS = 1.5
_MOST_LAUNCHES = 20
_APART_BYTES = 64 << 20
"""From here on, memory for what is saved goes back to the device."""
_PART_OF_FREE = 4
"""What the graph writes outside its pool is saved if it takes no more than this part of the free
memory."""


def gain(
    chain: int, branches: int, written: Sequence[tuple[int, int]], pool: Ranges, index: int
) -> float | None:
    """Measure the gain of branches over the chain, on the current stream. Memory outside the pool
    is afterwards as it was. Return None if it cannot be saved. The stream is waited for.

    Args:
        chain, branches: executables of the same nodes, whose ports point at real tensors.
        written: the addresses `[start, stop)` that they write.
        pool: the addresses of their pool.
    """
    lasting = [(a, b) for a, b in written if a < b and not pool.overlaps(a, b)]
    nbytes = sum(b - a for a, b in lasting)
    free, _ = torch.cuda.mem_get_info(index)
    if _PART_OF_FREE * nbytes > free:
        return None
    large = nbytes > _APART_BYTES
    stream = torch.cuda.current_stream(index)
    raw = stream.cuda_stream
    with memory.apart(index) if large else contextlib.nullcontext():
        kept = [(a, memory.empty(b - a, torch.device("cuda", index))) for a, b in lasting]
        for start, copy in kept:
            nodes.copy(copy.data_ptr(), start, copy.nbytes, raw)
        try:
            found = _measured(chain, branches, raw)
        finally:
            for start, copy in kept:
                nodes.copy(start, copy.data_ptr(), copy.nbytes, raw)
            stream.synchronize()
        del kept
    if large:
        memory.give_back()
    return found


def _measured(chain: int, branches: int, stream: int) -> float:
    count = 0
    best = [float("inf"), float("inf")]
    for number in range(1 + _ROUNDS):
        for which, executable in enumerate((chain, branches)):
            taken = _time(executable, stream, max(count, 1))
            if number:  # the first is to warm up
                best[which] = min(best[which], taken)
        if not count:
            taken = _time(chain, stream, 1)
            count = min(_MOST_LAUNCHES, max(1, int(_ROUND_MS / max(taken, 1e-3))))
    return best[0] / best[1]


def _time(executable: int, stream: int, count: int) -> float:
    """Return the milliseconds of a launch."""
    function, exec_ = nodes.launcher(executable)
    handle = nodes.stream_handle(stream)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        (code,) = function(exec_, handle)
        if code:
            raise nodes.failure("cuGraphLaunch", code)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count
