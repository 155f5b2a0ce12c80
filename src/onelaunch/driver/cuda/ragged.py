"""Nodes that copy rows of a tensor whose real sizes vary by launch, and add the missing rows.

A kernel serves both ways. It fills a tensor from a tensor of other sizes, and clamps the rows where
the source ends. A launch patches the caller's address and sizes into its arguments, which costs as
much as re-pointing a memcpy node, 0.5 to 0.8 us.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.kernels import OwnKernel
from onelaunch.driver.cuda.streams import anything
from onelaunch.sizes.dims import Varying

_SOURCE = r"""
template <typename T>
__device__ void rows(const char* source, char* target, unsigned p0, unsigned q0, unsigned p1,
                     unsigned q1, unsigned a, unsigned b, unsigned long long bytes, unsigned filled,
                     unsigned long long value) {
    const T* from = (const T*)source;
    T* to = (T*)target;
    T fill;
    for (unsigned i = 0; i < sizeof(T); ++i) ((char*)&fill)[i] = ((char*)&value)[i % 8];
    unsigned long long c = bytes / sizeof(T);
    unsigned long long total = (unsigned long long)a * p1 * b * q1 * c;
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
         i < total; i += step) {
        unsigned long long k = i % c, r = i / c;
        unsigned q = r % q1; r /= q1;
        unsigned m = r % b; r /= b;
        unsigned p = r % p1, n = r / p1;
        if ((q >= q0 && (filled & 2)) || (p >= p0 && (filled & 1))) { to[i] = fill; continue; }
        unsigned ps = p < p0 ? p : p0 - 1, qs = q < q0 ? q : q0 - 1;
        to[i] = from[((((unsigned long long)n * p0 + ps) * b + m) * q0 + qs) * c + k];
    }
}

extern "C" __global__ void onelaunch_rows(
        const char* source, char* target, unsigned p0, unsigned q0, unsigned p1, unsigned q1,
        unsigned a, unsigned b, unsigned long long bytes, unsigned filled,
        unsigned long long value) {
    unsigned long long bits = (unsigned long long)source | (unsigned long long)target | bytes;
    if (!(bits & 15)) rows<uint4>(source, target, p0, q0, p1, q1, a, b, bytes, filled, value);
    else if (!(bits & 7))
        rows<unsigned long long>(source, target, p0, q0, p1, q1, a, b, bytes, filled, value);
    else if (!(bits & 3))
        rows<unsigned>(source, target, p0, q0, p1, q1, a, b, bytes, filled, value);
    else if (!(bits & 1))
        rows<unsigned short>(source, target, p0, q0, p1, q1, a, b, bytes, filled, value);
    else rows<unsigned char>(source, target, p0, q0, p1, q1, a, b, bytes, filled, value);
}
"""
_TYPES = (
    *(ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint),
    *(ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint64),
)
_BLOCK = 256
_BLOCKS = 1024
"""Limit of blocks in a launch. More do not help a copy on any device of today."""
_SOURCE_END, _TARGET_END = (0, 2, 3), (1, 4, 5)
"""The arguments that a launch patches: the address and two sizes of either end."""


def _trial(compiled: Any, index: int, stream: int) -> None:
    place = anything(index).data_ptr()
    nodes.launch(compiled, 1, _BLOCK, (place, place, 1, 1, 1, 1, 1, 1, 1, 0, 0), _TYPES, stream)


kernel = OwnKernel(_SOURCE, "onelaunch_rows", _trial)


def _launch(index: int, values: Sequence[int], nbytes: int, stream: int) -> None:
    blocks = max(1, min(_BLOCKS, nbytes // (16 * _BLOCK)))
    nodes.launch(kernel.on(index), blocks, _BLOCK, tuple(values), _TYPES, stream)


@dataclass
class RowNode:
    """A captured launch of the kernel. `dims`: dimensions of the caller's tensor whose sizes are
    patched; the second may be -1."""

    kernel: nodes.KernelNode
    dims: tuple[int, int]
    rest: tuple[int, int, int]  # the address and sizes of the recording's own memory
    words: tuple[Any, Any, Any]

    def prepared(self, port: int, setter: nodes.Setter) -> tuple[Any, ...]:
        """List the parts that a launch uses, flat: see `point`."""
        function, arguments, _ = setter
        return (port, *self.words, *self.dims, function, arguments)


def point(prepared: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor]) -> None:
    """Point the nodes at the caller's tensors and their sizes."""
    for port, address, first, second, dim, other, function, arguments in prepared:
        t = tensors[port]
        shape = t.shape
        address.value = t.data_ptr()
        first.value = shape[dim]
        if other >= 0:
            second.value = shape[other]
        (code,) = function(*arguments)
        if code:
            raise nodes.failure(function.__name__, code)


def captured(
    source: int, target: int, varying: Varying, index: int, stream: int, grows: bool
) -> RowNode:
    """Capture the node that takes the caller's rows to the recording, or the recording's first
    rows to the caller. It has all rows. `source`, `target`: addresses."""
    (place, *sizes), own = (_SOURCE_END, target) if grows else (_TARGET_END, source)
    a, p, b, q, nbytes = _blocks(varying)
    filled = sum(1 << i for i, value in enumerate(varying.fill) if value is not None)
    values = (source, target, p, q, p, q, a, b, nbytes, filled, _pattern(varying))
    _launch(index, values, a * p * b * q * nbytes, stream)
    node = nodes.KernelNode.read(nodes.latest(stream))
    assert node is not None
    first, second = (ctypes.c_uint.from_buffer(node.blocks[i]) for i in sizes)
    dims = (*varying.dims, -1)[:2]
    return RowNode(node, (dims[0], dims[1]), (own, p, q), (node.word(place, 0), first, second))


def _blocks(varying: Varying) -> tuple[int, int, int, int, int]:
    """Write the shape as [a, p, b, q, bytes], where p and q are the dimensions that vary."""
    first = varying.dims[0]
    last = varying.dims[-1]
    shape = varying.shape
    a, p = math.prod(shape[:first]), shape[first]
    if len(varying.dims) == 1:
        return a, p, 1, 1, math.prod(shape[first + 1 :]) * varying.dtype.itemsize
    between = math.prod(shape[first + 1 : last])
    return a, p, between, shape[last], math.prod(shape[last + 1 :]) * varying.dtype.itemsize


def _pattern(varying: Varying) -> int:
    """Repeat the bits of the fill value to 8 bytes."""
    value = next((v for v in varying.fill if v is not None), 0)
    one = torch.full((1,), value, dtype=varying.dtype, device="cpu")
    return struct.unpack("<Q", (bytes(one.view(torch.uint8).tolist()) * 8)[:8])[0]
