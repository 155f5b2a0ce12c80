"""Small copies that share a node: one kernel brings several inputs in, or takes results out.

All other copies of a launch are nodes that `graph.py` points elsewhere. A memcpy node costs the GPU
1 to 2 us, and the host 1 us to point elsewhere, whatever its size. A backward has a result for each
parameter. For a single tensor, or a large one, a memcpy node is the quicker copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.kernels import OwnKernel
from onelaunch.driver.cuda.streams import anything

MOST_BYTES = 256 << 10
"""Limit for one tensor. Above it a memcpy is no slower for being a node of its own."""

_MOST_TENSORS = 64  # tensors of a node

_SOURCE = r"""
struct Copies { const char* from[64]; char* to[64]; unsigned bytes[64]; };

template <typename T>
__device__ void copy(const char* from, char* to, unsigned bytes) {
    unsigned n = bytes / sizeof(T), step = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        ((T*)to)[i] = ((const T*)from)[i];
}

extern "C" __global__ void onelaunch_copies(const Copies copies) {
    const char* from = copies.from[blockIdx.y];
    char* to = copies.to[blockIdx.y];
    unsigned bytes = copies.bytes[blockIdx.y];
    unsigned long long bits = (unsigned long long)from | (unsigned long long)to | bytes;
    if (!(bits & 15)) copy<uint4>(from, to, bytes);
    else if (!(bits & 3)) copy<unsigned>(from, to, bytes);
    else copy<unsigned char>(from, to, bytes);
}
"""
_THREADS = 256
_BYTES_OF_A_BLOCK = 16 << 10
_BLOCKS = 16


class _Copies(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64 * _MOST_TENSORS),
        ("target", ctypes.c_uint64 * _MOST_TENSORS),
        ("nbytes", ctypes.c_uint * _MOST_TENSORS),
    )

    source: ctypes.Array[ctypes.c_uint64]
    target: ctypes.Array[ctypes.c_uint64]
    nbytes: ctypes.Array[ctypes.c_uint]


class Copy(NamedTuple):
    target: int
    source: int
    nbytes: int


def source(kernel: nodes.KernelNode, place: int) -> ctypes.c_uint64:
    """Find the word with the source address of a copy."""
    return kernel.word(0, 8 * place)


def target(kernel: nodes.KernelNode, place: int) -> ctypes.c_uint64:
    """Find the word with the target address of a copy."""
    return kernel.word(0, 8 * (_MOST_TENSORS + place))


Bundled = tuple[list[tuple[int, int, Any]], Any, tuple[Any, ...]]
"""Ports that share a node, each with its displacement and word to set; and the node's setter."""


def point(prepared: Sequence[Bundled], tensors: Sequence[Tensor]) -> None:
    for ends, function, arguments in prepared:
        for port, displacement, word in ends:
            word.value = tensors[port].data_ptr() - displacement
        (code,) = function(*arguments)
        if code:
            raise nodes.failure(function.__name__, code)


def bundles(copies: Sequence[Copy], index: int, stream: int) -> list[tuple[nodes.KernelNode, int]]:
    """Capture the nodes of these copies, in any order; returns each copy's node and place in it."""
    placed: list[tuple[nodes.KernelNode, int]] = []
    for start in range(0, len(copies), _MOST_TENSORS):
        some = copies[start : start + _MOST_TENSORS]
        _launch(kernel.on(index), some, stream)
        node = nodes.KernelNode.read(nodes.latest(stream))
        assert node is not None
        placed += [(node, place) for place in range(len(some))]
    return placed


def _launch(compiled: Any, copies: Sequence[Copy], stream: int) -> None:
    argument = _Copies()
    for place, copy in enumerate(copies):
        argument.target[place], argument.source[place], argument.nbytes[place] = copy
    blocks = -(-max(copy.nbytes for copy in copies) // _BYTES_OF_A_BLOCK)
    nodes.launch_with(compiled, (min(blocks, _BLOCKS), len(copies)), _THREADS, argument, stream)


def _trial(compiled: Any, index: int, stream: int) -> None:
    place = anything(index).data_ptr()
    _launch(compiled, [Copy(place, place, 1)], stream)


kernel = OwnKernel(_SOURCE, "onelaunch_copies", _trial)
