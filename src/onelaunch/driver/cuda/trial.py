"""Launches of a graph before its first real one, which leave memory as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from time import perf_counter

import torch

from onelaunch.driver.cuda import memory, nodes

_ROUNDS = 4
_ROUND_MS = 0.5
_MOST_LAUNCHES = 50
_LONG_MS = 20  # the time of a launch above which one round has to do
_APART_BYTES = 64 << 20  # the size of a copy above which its memory goes back to the device
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
    with memory.own_segments(index) if large else contextlib.nullcontext():
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


def times(executables: Sequence[int], ports: Sequence[int], index: int) -> list[float]:
    """Return the milliseconds of a call of each executable of the same nodes, as a user sees it.
    Calls follow each other, each points its ports anew, and the host has to keep up. `ports`: the
    nodes that are pointed elsewhere: copies, and kernels of our own."""
    stream = torch.cuda.current_stream(index)
    runs = [(executable, [_setter(executable, n) for n in ports]) for executable in executables]
    for run in runs:
        _time(*run, stream, 1)  # to warm up
    taken = _time(*runs[0], stream, 1)
    count = min(_MOST_LAUNCHES, max(1, int(_ROUND_MS / max(taken, 1e-3))))
    best = [float("inf") for _ in runs]
    for _ in range(_ROUNDS if taken < _LONG_MS else 1):
        for number, run in enumerate(runs):
            best[number] = min(best[number], _time(*run, stream, count))
    return best


def _setter(executable: int, node: int) -> nodes.Setter:
    if nodes.kind(node) == "MEMCPY":
        return nodes.CopyNode(node).setter(executable)
    kernel = nodes.KernelNode.read(node)
    assert kernel is not None
    return kernel.setter(executable)


def _time(
    executable: int, setters: Sequence[nodes.Setter], stream: torch.cuda.Stream, count: int
) -> float:
    function, exec_ = nodes.launcher(executable)
    handle = nodes.stream_handle(stream.cuda_stream)
    stream.synchronize()
    began = perf_counter()
    for _ in range(count):
        nodes.apply(setters)
        (code,) = function(exec_, handle)
        if code:
            raise nodes.failure("cuGraphLaunch", code)
    stream.synchronize()
    return 1e3 * (perf_counter() - began) / count
