"""Launches of a graph before its first real one, which leave memory as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from onelaunch.driver.cuda import memory, nodes

_ROUNDS = 4
_ROUND_MS = 0.8
_MOST_LAUNCHES = 20
_LONG_MS = 20
"""The time of a launch above which one round has to do."""
_APART_BYTES = 64 << 20
"""The size of a copy above which its memory goes back to the device."""
_PART_OF_FREE = 4
"""The part of the free memory, as a divisor, that may be taken to save what a graph writes."""


def fits(spans: Sequence[tuple[int, int]], index: int) -> bool:
    """Tell whether there is memory to save addresses `[start, stop)`."""
    return _PART_OF_FREE * _total(spans) <= torch.cuda.mem_get_info(index)[0]


@contextlib.contextmanager
def preserved(spans: Sequence[tuple[int, int]], index: int) -> Generator[None]:
    """Put memory back afterwards, in the order of the current stream, which is waited for."""
    large = _total(spans) > _APART_BYTES
    stream = torch.cuda.current_stream(index)
    with memory.apart(index) if large else contextlib.nullcontext():
        kept = [(a, memory.empty(b - a, torch.device("cuda", index))) for a, b in spans]
        for start, copy in kept:
            nodes.copy(copy.data_ptr(), start, copy.nbytes, stream.cuda_stream)
        try:
            yield
        finally:
            for start, copy in kept:
                nodes.copy(start, copy.data_ptr(), copy.nbytes, stream.cuda_stream)
            stream.synchronize()
        del kept
    if large:
        memory.give_back()


def _total(spans: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


def gain(chain: int, branches: int, index: int) -> float:
    """Measure the gain of branches over the chain, two executables of the same nodes."""
    stream = torch.cuda.current_stream(index).cuda_stream
    for executable in (chain, branches):
        _time(executable, stream, 1)  # to warm up
    taken = _time(chain, stream, 1)
    count = min(_MOST_LAUNCHES, max(1, int(_ROUND_MS / max(taken, 1e-3))))
    best = [float("inf"), float("inf")]
    for _ in range(_ROUNDS if taken < _LONG_MS else 1):
        for which, executable in enumerate((chain, branches)):
            best[which] = min(best[which], _time(executable, stream, count))
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
