"""Caches that torch keeps from one operation to the next, and a capture must not share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch

from onelaunch.driver.cuda.streams import bindings, capture_stream


@contextlib.contextmanager
def no_shared_caches(index: int) -> Generator[None]:
    """Let no cuBLAS workspace or autocast weight enter or outlive a capture.

    A workspace that two recordings share is freed by the first reset (pytorch#193402). Torch has
    one for each thread and stream that multiplied matrices, and frees all or none. A graph captured
    by hand may use the workspace of its stream by address. So workspaces of this thread are taken
    again afterwards, at the same addresses unless somebody took memory there. Walks the blocks of
    the allocator, about 1 ms.
    """
    before = _allocated(index)
    _drop()
    freed = before - _allocated(index) if before else before
    try:
        yield
    finally:
        _drop()
        for raw in {raw for raw, _ in freed}:
            # Without memory for it, the stream's next product will say so.
            with contextlib.suppress(RuntimeError), torch.cuda.stream(_streams(index)[raw]):
                torch.cuda.current_blas_handle()


def _drop() -> None:
    bindings._cuda_clearCublasWorkspaces()
    torch.clear_autocast_cache()


def _allocated(index: int) -> set[tuple[int, int]]:
    """List (stream, address) of the blocks allocated on streams of torch's pool. Graphs and the
    default stream, on which nobody captures, do not count. Nor do onelaunch's streams, or foreign
    streams: their owner may have destroyed them."""
    ours = (0, capture_stream(index).cuda_stream)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    found = {
        (segment["stream"], block["address"])
        for segment in segments
        if segment["device"] == index
        and segment["stream"] not in ours
        and tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    return {at for at in found if at[0] in _streams(index)} if found else found


_A_POOL = 32
"""Number of streams that torch hands out in turn, of each priority."""


@functools.cache
def _streams(index: int) -> dict[int, torch.cuda.Stream]:
    """Return handle -> torch's own stream. The streams live as long as the process."""
    device = torch.device("cuda", index)
    each = (torch.cuda.Stream(device, priority=-p) for p in range(4) for _ in range(_A_POOL))
    return {stream.cuda_stream: stream for stream in each}
