"""Graph nodes through `cuda.bindings`: their contents, and pointing them elsewhere.

The only module that names cuda.bindings, which is imported at first use. Graphs, nodes, streams
and addresses are plain integers in what this module takes and returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onelaunch.driver.cuda.memcpy import Memcpy

_NEEDED = (
    "cuFuncGetParamInfo",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphNodeSetEnabled",
    "cuStreamGetCaptureInfo",
)


class Setter(NamedTuple):
    """A prepared call, `function(*arguments)`, that sets a node of an executable graph. It returns
    a tuple of one code, zero if it worked. `memory`: what the arguments point at."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    memory: object


class NodeError(RuntimeError):
    """A refusal of the CUDA driver, of an operation on a graph or one of its nodes."""


@functools.cache
def _cu() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def versions() -> tuple[int, str]:
    """Read the driver's CUDA version, 1000 * major + 10 * minor, and that of cuda-bindings."""
    number = _call("cuDriverGetVersion")
    return int(number), str(importlib.import_module("cuda.bindings").__version__)


def missing() -> list[str]:
    """List the functions that the installed bindings lack."""
    return [name for name in _NEEDED if not hasattr(_cu(), name)]


def _call(name: str, *arguments: Any) -> Any:
    code, *results = getattr(_cu(), name)(*arguments)
    if int(code) != 0:
        raise failure(name, code)
    return results[0] if len(results) == 1 else results


def is_address(word: int) -> bool:
    """Tell whether it is an address that the driver knows."""
    kind = _cu().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return int(_cu().cuPointerGetAttribute(kind, word)[0]) == 0


def is_device_memory(word: int) -> bool:
    """Tell whether an address is of a device's memory, and not the host's."""
    kind = _cu().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    code, memory = _cu().cuPointerGetAttribute(kind, word)
    return int(code) == 0 and int(memory) == int(_cu().CUmemorytype.CU_MEMORYTYPE_DEVICE)


def address_range(word: int) -> tuple[int, int] | None:
    """Find the allocation around an address that the driver knows, by its first and last."""
    code, *ends = _cu().cuMemGetAddressRange(word)
    if int(code) != 0:
        return None
    start, nbytes = map(int, ends)
    return start, start + nbytes


def failure(name: str, code: Any) -> NodeError:
    """Make the exception for a code that the driver returned."""
    return NodeError(f"{name}: {getattr(code, 'name', code)}")


# Streams and captures.


def new_stream() -> int:
    """Make a stream of the current device that nobody else has, and that ignores the legacy one."""
    flag = _cu().CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(_call("cuStreamCreate", flag))


def launcher(executable: int) -> tuple[Callable[..., Any], Any]:
    """Find the function that launches, and its first argument; `stream_handle` makes the second."""
    return _cu().cuGraphLaunch, _cu().CUgraphExec(executable)


def stream_handle(stream: int) -> Any:
    """Convert a stream to the form that saves the bindings a conversion at each launch."""
    return _cu().CUstream(stream)


@contextlib.contextmanager
def relaxed() -> Generator[None]:
    """Let this thread allocate and free while others capture."""
    mode = _cu().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", before)


def begin_capture(stream: int) -> None:
    """Begin a capture that PyTorch does not know of."""
    mode = _cu().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _call("cuStreamBeginCapture", stream, mode)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy device memory in the order of the stream; a node if the stream is being captured."""
    _call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def latest(stream: int) -> int:
    """Find the node that was captured last on a stream under capture."""
    node = last(stream)
    assert node is not None
    return node


def last(stream: int) -> int | None:
    """Find the node that later work of a stream under capture waits for; None: none, or several.
    By the driver itself, as it is asked twice for each operation: 2 us, by the bindings 60."""
    status, ends, edges, count = (kind() for kind in _CAPTURE_INFO)
    given = (ctypes.byref(one) for one in (ends, edges, count))
    _direct("cuStreamGetCaptureInfo_v3", stream, ctypes.byref(status), None, None, *given)
    return ends[0] if count.value == 1 else None


_CAPTURE_INFO: Any = (
    *(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)),
    *(ctypes.c_void_p, ctypes.c_size_t),
)


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def wait(stream: int, other: int) -> None:
    """Let later work of a stream come after all work of another; in a capture, without a node."""
    event = _call("cuEventCreate", _cu().CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        _call("cuEventRecord", event, other)
        _call("cuStreamWaitEvent", stream, event, 0)
    finally:
        _call("cuEventDestroy", event)


# Kernels of our own.


def can_compile() -> bool:
    """Tell whether the bindings have NVIDIA's compiler for kernels."""
    try:
        importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        return False
    return True


def compiled(source: str, name: str, architecture: str) -> Any:
    """Compile a kernel for the current device, and load it. About 0.1 s."""
    image = binary(source, architecture)
    with relaxed():
        return _call("cuModuleGetFunction", _call("cuModuleLoadData", image), name.encode())


def binary(source: str, architecture: str) -> bytes:
    """Compile kernels to machine code for an architecture; needs no device."""
    rtc = importlib.import_module("cuda.bindings.nvrtc")
    program = _checked(rtc.nvrtcCreateProgram(source.encode(), b"onelaunch.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode()]
    _checked(rtc.nvrtcCompileProgram(program, len(options), options))
    size = _checked(rtc.nvrtcGetCUBINSize(program))
    image = b" " * size
    _checked(rtc.nvrtcGetCUBIN(program, image))
    _checked(rtc.nvrtcDestroyProgram(program))
    return image


def _checked(answer: tuple[Any, ...]) -> Any:
    code, *results = answer
    if int(code) != 0:
        raise failure("nvrtc", code)
    return results[0] if results else None


def launch(
    kernel: Any,
    blocks: int,
    threads: int,
    values: tuple[int, ...],
    types: tuple[Any, ...],
    stream: int,
) -> None:
    """Launch a kernel of `compiled` on a row of blocks; a node if the stream is being captured."""
    _call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0)


def launch_with(
    kernel: Any, blocks: tuple[int, int], threads: int, argument: ctypes.Structure, stream: int
) -> None:
    """Launch a kernel with a structure as its only argument; otherwise as `launch`."""
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    at = ctypes.addressof(pointer)
    _call("cuLaunchKernel", kernel, *blocks, 1, threads, 1, 1, 0, stream, at, 0)


OWN = "onelaunch_"  # prefix of the names of our own kernels


# Nodes of a graph.


def handles(graph: int) -> list[int]:
    """List the nodes of a graph, in the order in which they were captured."""
    handle = _cu().CUgraph(graph)
    _, number = _call("cuGraphGetNodes", handle, 0)
    if not number:
        return []
    listed, _ = _call("cuGraphGetNodes", handle, number)
    return [int(node) for node in listed[:number]]


def kind(node: int) -> str:
    """Name the kind of a node: ``"KERNEL"``, ``"MEMCPY"``, ``"MEMSET"``, ``"EMPTY"`` and so on."""
    number = _call("cuGraphNodeGetType", _node(node))
    return str(_cu().CUgraphNodeType(int(number)).name).removeprefix("CU_GRAPH_NODE_TYPE_")


def kernel_names(graph: int) -> Iterator[str | None]:
    """Name the kernels of a graph; None where the driver does not tell."""
    for node in handles(graph):
        if kind(node) == "KERNEL":
            parameters = _call("cuGraphKernelNodeGetParams", _node(node))
            if int(parameters.func):
                yield _call("cuFuncGetName", parameters.func).decode()
            elif int(parameters.kern):
                yield _call("cuKernelGetName", parameters.kern).decode()
            else:
                yield None


def edges(graph: int) -> dict[tuple[int, int], int]:
    """Return the edges of a graph, each from the node that comes first, with their 8 bytes of data.
    The data is zero unless the second kernel may start while the first runs. The driver itself is
    asked: the bindings would return pointers to data that they have freed."""
    room = _LEAST_ROOM
    while True:
        arrays, number = [(ctypes.c_uint64 * room)() for _ in range(3)], ctypes.c_size_t(room)
        _direct("cuGraphGetEdges_v2", graph, *arrays, ctypes.byref(number))
        if number.value < room:
            before, after, data = (array[: number.value] for array in arrays)
            return dict(zip(zip(before, after, strict=True), data, strict=True))
        room *= 8


_LEAST_ROOM = 1 << 12


def connect(graph: int, edges_: Mapping[tuple[int, int], int]) -> None:
    """Put edges, with their data, in the place of all that a graph has."""
    steps = ("cuGraphRemoveDependencies_v2", edges(graph)), ("cuGraphAddDependencies_v2", edges_)
    for name, listed in steps:
        if listed:
            columns = *zip(*listed, strict=True), tuple(listed.values())
            arrays = ((ctypes.c_uint64 * len(listed))(*column) for column in columns)
            _direct(name, graph, *arrays, ctypes.c_size_t(len(listed)))


def _direct(name: str, handle: int, *arguments: Any) -> None:
    """Call the driver without the bindings."""
    code = getattr(_library(), name)(ctypes.c_void_p(handle), *arguments)
    if code:
        raise failure(name, code)


@contextlib.contextmanager
def instantiated(graph: int) -> Generator[int]:
    """Make an executable of a graph, for a while."""
    executable = _call("cuGraphInstantiate", _cu().CUgraph(graph), 0)
    try:
        yield int(executable)
    finally:
        _call("cuGraphExecDestroy", executable)


def destroy(node: int) -> None:
    _call("cuGraphDestroyNode", _node(node))


def set_enabled(executable: int, node: int, enabled: bool) -> None:
    exec_ = _cu().CUgraphExec(executable)
    _call("cuGraphNodeSetEnabled", exec_, _node(node), int(enabled))


def memset_address(node: int) -> int:
    return int(_call("cuGraphMemsetNodeGetParams", _node(node)).dst)


def memset_setter(executable: int | None, node: int, by: int) -> Setter:
    """Prepare the call that moves the target of a memset node in an executable graph by some bytes;
    with None in the graph itself."""
    cu, parameters = _cu(), _call("cuGraphMemsetNodeGetParams", _node(node))
    parameters.dst = int(parameters.dst) + by
    if executable is None:
        return Setter(cu.cuGraphMemsetNodeSetParams, (_node(node), parameters), None)
    arguments = (cu.CUgraphExec(executable), _node(node), parameters, _call("cuCtxGetCurrent"))
    return Setter(cu.cuGraphExecMemsetNodeSetParams, arguments, None)


def _node(node: int) -> Any:
    return _cu().CUgraphNode(node)


class CopyNode:
    """A memcpy node with its own parameters, whose addresses can be set in an executable graph."""

    def __init__(self, node: int) -> None:
        self.node = node
        self._parameters = _call("cuGraphMemcpyNodeGetParams", _node(node))
        self.fields = Memcpy.from_address(self._parameters.getPtr())
        """The parameters in place; a store to `srcDevice` or `dstDevice` counts at `setter`."""
        self.linear = self.fields.Height <= 1 and self.fields.Depth <= 1
        """True if it copies one run of bytes, which the driver demands for an update."""

    def source(self) -> ctypes.c_uint64:
        """View `fields.srcDevice` as a word."""
        return ctypes.c_uint64.from_buffer(self.fields, Memcpy.__dict__["srcDevice"].offset)

    def target(self) -> ctypes.c_uint64:
        """View `fields.dstDevice` as a word."""
        return ctypes.c_uint64.from_buffer(self.fields, Memcpy.__dict__["dstDevice"].offset)

    def setter(self, executable: int) -> Setter:
        """Prepare the call that takes `fields` to the executable graph."""
        context = _call("cuCtxGetCurrent")
        exec_ = _cu().CUgraphExec(executable)
        function = _cu().cuGraphExecMemcpyNodeSetParams
        return Setter(function, (exec_, _node(self.node), self._parameters, context), None)


@dataclass
class KernelNode:
    """A kernel node and a copy of its argument bytes. `blocks`: the arguments, each as bytes; one
    block of all arguments where `packed`."""

    node: int
    name: str
    shape: tuple[int, ...]  # grid, block and shared memory
    blocks: list[ctypes.Array[ctypes.c_char]]
    packed: bool  # true if the kernel was launched with one buffer of arguments (`extra`)

    @classmethod
    def read(cls, node: int) -> KernelNode | None:
        """Read the node's arguments; None where the driver does not tell them."""
        parameters = _call("cuGraphKernelNodeGetParams", _node(node))
        blocks = _arguments(parameters)
        if blocks is None:
            return None
        name = _call("cuFuncGetName", parameters.func).decode()
        shape = tuple(int(getattr(parameters, field)) for field in _SHAPE)
        packed = not int(parameters.kernelParams)
        own = [ctypes.create_string_buffer(block, len(block)) for block in blocks]
        return cls(node, name, shape, own, packed)

    def word(self, block: int, offset: int) -> ctypes.c_uint64:
        """View the 8 bytes at an offset of a block as a word."""
        return ctypes.c_uint64.from_buffer(self.blocks[block], offset)

    def setter(self, executable: int | None) -> Setter:
        """Prepare the call that takes `blocks` to an executable graph, or None: the graph."""
        cu = _cu()
        old = _call("cuGraphKernelNodeGetParams", _node(self.node))
        new = cu.CUDA_KERNEL_NODE_PARAMS()
        new.func = old.func
        for field, value in zip(_SHAPE, self.shape, strict=True):
            setattr(new, field, value)
        addresses = [ctypes.addressof(block) for block in self.blocks]
        if self.packed:
            size = ctypes.c_size_t(ctypes.sizeof(self.blocks[0]))
            words = (1, addresses[0], 2, ctypes.addressof(size), 0)
            array = (ctypes.c_void_p * len(words))(*words)
            new.extra = ctypes.addressof(array)
        else:
            size = None
            array = (ctypes.c_void_p * len(addresses))(*addresses)
            new.kernelParams = ctypes.addressof(array)
        kept = array, size, self.blocks
        if executable is None:
            return Setter(cu.cuGraphKernelNodeSetParams, (_node(self.node), new), kept)
        arguments = (cu.CUgraphExec(executable), _node(self.node), new)
        return Setter(cu.cuGraphExecKernelNodeSetParams, arguments, kept)


def arguments(node: int) -> Sequence[bytes] | None:
    return _arguments(_call("cuGraphKernelNodeGetParams", _node(node)))


def _arguments(parameters: Any) -> Sequence[bytes] | None:
    if not int(parameters.func):
        return None
    if int(parameters.kernelParams):
        return [*_listed(parameters)]
    return [packed_arguments(int(parameters.extra))] if int(parameters.extra) else ()


_SHAPE = (
    *("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"),
    "sharedMemBytes",
)


def _listed(parameters: Any) -> Iterator[bytes]:
    array = ctypes.cast(int(parameters.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    get = _cu().cuFuncGetParamInfo
    index = 0
    while True:
        code, _, size = (*get(parameters.func, index), 0, 0)[:3]
        if int(code) != 0:  # there are `index` arguments
            return
        yield ctypes.string_at(array[index] or 0, int(size))
        index += 1


def packed_arguments(extra: int) -> bytes:
    """Copy the arguments of a kernel that was launched with a buffer of arguments."""
    # Pairs of a key and a pointer: 1 is the buffer, 2 the place of its size, 0 the end.
    array = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    offsets: dict[int, int] = {}
    position = 0
    while (key := array[position]) is not None:
        offsets[key] = array[position + 1] or 0
        position += 2
    size = ctypes.c_size_t.from_address(offsets[2]).value
    return ctypes.string_at(offsets[1], size)


def apply(setters: Iterable[Setter]) -> None:
    """Take all prepared parameters to their executable graphs."""
    for function, arguments, _ in setters:
        (code,) = function(*arguments)
        if code:
            raise failure(function.__name__, code)


def try_all(setters: Iterable[Setter]) -> None:
    """Try all prepared parameters after a failure; the device may refuse them as well."""
    for function, arguments, _ in setters:
        function(*arguments)
