"""What torch keeps from one operation to the next: caches, which a capture must not share, and a
choice that it makes at the first attention."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.driver.cuda.streams import bindings, capture_stream


@contextlib.contextmanager
def no_shared_caches(index: int) -> Generator[None]:
    """Let no cuBLAS workspace or autocast weight enter or outlive a capture. A workspace that two
    recordings share is freed by the first reset (pytorch#193402). Torch has one for each thread and
    stream that multiplied matrices, and frees all or none. A graph captured by hand may use the
    workspace of its stream by address. So workspaces of this thread are taken again afterwards, at
    the same addresses unless somebody took memory there. Walks the allocator's blocks: 1 ms."""
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


_FIRST_ORDER = [1, 2, 0, 3, 4]
"""Torch's own order of the kernels of attention, as numbers of `SDPBackend`, before the first."""
_settled: list[bool] = []


def settle_attention(device: torch.device) -> None:
    """Have torch choose the order of the kernels of attention, once in a process. It does so at the
    first attention (on H100 cuDNN's come first), which would leave a mode of its call changed. An
    order that the program has set stays."""
    if _settled or not torch.cuda.is_initialized():
        return
    _settled.append(True)
    if bindings._get_sdp_priority_order() != _FIRST_ORDER:
        return
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # of kernels that the program has turned off
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
            torch._fused_sdp_choice(x, x, x)


def _drop() -> None:
    bindings._cuda_clearCublasWorkspaces()
    torch.clear_autocast_cache()


def _allocated(index: int) -> set[tuple[int, int]]:
    """List (stream, address) of the blocks allocated on streams of torch's pool. Graphs and the
    default stream, on which nobody captures, do not count. Nor do onelaunch's streams, or foreign
    streams: their owner may have destroyed them."""
    ours = (0, capture_stream(index).cuda_stream)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    blocks = {
        (segment["stream"], block["address"])
        for segment in segments
        if segment["device"] == index
        and segment["stream"] not in ours
        and tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    return {at for at in blocks if at[0] in _streams(index)} if blocks else blocks


_A_POOL = 32  # number of streams that torch hands out in turn, of each priority


@functools.cache
def _streams(index: int) -> dict[int, torch.cuda.Stream]:
    """Return handle -> torch's own stream. The streams live as long as the process."""
    device = torch.device("cuda", index)
    each = (torch.cuda.Stream(device, priority=-p) for p in range(4) for _ in range(_A_POOL))
    return {stream.cuda_stream: stream for stream in each}
