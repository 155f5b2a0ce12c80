"""The machine by which work is judged: an A100, whose figures NVIDIA has published.

A diagnosis must be the same on any machine, so that none of this is measured. Later GPUs compute
faster still beside their memory, by which more of a model waits for memory and launches.
"""

from __future__ import annotations

import torch

BYTES_PER_US = 2.0e6
"""1,935 to 2,039 GB/s of memory."""
LAUNCH_US = 5.0
"""The time that PyTorch takes to launch one kernel from Python, about."""
WORTH = 10**8
"""Flops that take as long as a launch in float32, 19.5 per ps: less is not worth a finding."""
LEAST_BYTES = 2 * 10**6
"""Traffic of about a microsecond: with less, a layer waits for its launch and not for memory."""

_PER_US = {
    torch.float64: 19.5e6,
    torch.float32: 156e6,  # TF32
    torch.float16: 312e6,
    torch.bfloat16: 312e6,
    torch.int8: 624e6,
}
_SMALLEST_TENSOR_CORES = (7, 0)
_SMALLEST_TF32 = (8, 0)


def busy_us(flops: int, moved: int, dtype: torch.dtype) -> float:
    """Return how long work takes at best: its arithmetic, or its traffic if that is longer."""
    return max(flops / _PER_US.get(dtype, 19.5e6), moved / BYTES_PER_US)


def balance(dtype: torch.dtype) -> float:
    """Return the operations for which a byte is moved: with fewer, the arithmetic waits."""
    return _PER_US.get(dtype, 19.5e6) / BYTES_PER_US


def has_half(device: torch.device) -> bool:
    """Return whether half precision is fast; a CPU stands for a GPU."""
    return _capability(device) >= _SMALLEST_TENSOR_CORES


def has_tf32(device: torch.device) -> bool:
    """Return whether there is TF32; a CPU stands for a GPU."""
    return _capability(device) >= _SMALLEST_TF32


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return _SMALLEST_TF32
    return torch.cuda.get_device_capability(device)
