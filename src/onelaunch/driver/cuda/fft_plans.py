"""cuFFT's plans: their tables are read by a recording's kernels, and torch may free them.

Torch keeps the plans of each device in a cache, and frees the least recently used plan when the
cache is full. Nobody else can hold a plan. So a recording with an FFT is launched only while all
plans of its capture are surely there. The cache must not be full, nor cleared or resized since.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.protocol import Launch, Released
from onelaunch.errors import CaptureError

_torch: Any = torch
_FREED = "torch has freed plans of cuFFT"
MORE_PLANS = "torch.backends.cuda.cufft_plan_cache.max_size = 16384, before the first call"


class PlanCache:
    """Torch's cache of the plans of one device. `lock`: held while plans are freed on request, and
    from the check of a launch to its end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.lock = threading.RLock()
        self.frees = 0  # the number of times that the cache was cleared or resized

    def is_filling(self) -> bool:
        """Return whether no plan was freed for lack of room since the cache was last emptied. The
        number of plans only grows until the cache is full, and the next one takes a place."""
        size = _torch._cufft_get_plan_cache_size(self.index)
        return size < _torch._cufft_get_plan_cache_max_size(self.index)


@functools.cache
def plan_cache(index: int) -> PlanCache:
    """Return the cache of a device, which counts frees from the first call on."""
    _notice_frees()
    return PlanCache(index)


@functools.cache
def _notice_frees() -> None:
    _torch._cufft_clear_plan_cache = _noticed(_torch._cufft_clear_plan_cache)
    size = vars(torch.backends.cuda.cuFFTPlanCache)["max_size"]
    size.setter = _noticed(size.setter)


def _noticed(free: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of torch's functions that free plans, so that the cache is told."""

    @functools.wraps(free)
    def noticed(device_index: int, *args: Any, **kwargs: Any) -> Any:
        cache = plan_cache(device_index)
        with cache.lock:
            cache.frees += 1
            torch.cuda.synchronize(device_index)  # launches under way read the tables
            return free(device_index, *args, **kwargs)

    return noticed


class Plans:
    """The plans of one capture; make it before the capture begins."""

    def __init__(self, index: int) -> None:
        self._cache = plan_cache(index)
        self._frees = self._cache.frees

    def are_kept(self) -> bool:
        """Return whether every plan of the capture is surely still there."""
        return self._cache.frees == self._frees and self._cache.is_filling()

    def used_by(self, graph: torch.cuda.CUDAGraph) -> Plans | None:
        """Return these plans if a graph has an FFT, else None. Refuse (OL109) lost plans."""
        # With a size of 0 nobody can tell whether an FFT has run: no plan is kept.
        kept = _torch._cufft_get_plan_cache_size(self._cache.index)
        if (self._cache.is_filling() and not kept) or not _has_fft(graph):
            return None
        if not self.are_kept():
            room = _torch._cufft_get_plan_cache_max_size(self._cache.index)
            raise CaptureError(
                "OL109",
                f"an FFT, while torch's cache of cuFFT's plans is full with {room}",
                why="kernels read the plan's tables, which torch frees with the plan",
                fix=MORE_PLANS,
            )
        return self

    def checked(self, launch: Launch) -> Launch:
        """Return a launch that raises `Released` once a plan may be gone. 0.6 us."""

        def launch_if_kept(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
            with self._cache.lock:
                if not self.are_kept():
                    raise Released(_FREED)
                launch(sources, targets)

        return launch_if_kept

    @property
    def lost(self) -> str | None:
        return None if self.are_kept() else _FREED


def _has_fft(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether a kernel of a graph is one of cuFFT's, or may be one. Every transform has a
    kernel with "fft" in its name, beside others for packing."""
    names = nodes.kernel_names(graph.raw_cuda_graph())
    return any(name is None or "fft" in name.lower() for name in names)
