"""The parameters of a copy, as the CUDA driver lays them out."""

from __future__ import annotations

import ctypes

_END = (
    ("XInBytes", ctypes.c_size_t),
    ("Y", ctypes.c_size_t),
    ("Z", ctypes.c_size_t),
    ("LOD", ctypes.c_size_t),
    ("MemoryType", ctypes.c_uint),
    ("Host", ctypes.c_void_p),
    ("Device", ctypes.c_uint64),
    ("Array", ctypes.c_void_p),
    ("Reserved", ctypes.c_void_p),
    ("Pitch", ctypes.c_size_t),
    ("Height", ctypes.c_size_t),
)


class Memcpy(ctypes.Structure):
    """The struct CUDA_MEMCPY3D, to set an address in prepared parameters by an attribute."""

    _fields_ = (
        *((f"{end}{name}", kind) for end in ("src", "dst") for name, kind in _END),
        *((name, ctypes.c_size_t) for name in ("WidthInBytes", "Height", "Depth")),
    )

    srcDevice: int
    dstDevice: int
    WidthInBytes: int
    Height: int
    Depth: int
