"""The arithmetic and the memory traffic of the operators of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onelaunch.call import tree
from onelaunch.driver.aten import Operator, tensors
from onelaunch.watch.operations import HigherOrder, Watching, WatchingCompiled

_aten: Any = torch.ops.aten
# Those that the registry of torch lacks, counted by the formula of their likes.
_LIKE = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        _aten._scaled_dot_product_flash_attention
    ),
    "aten::_int_mm": _aten.mm,
}
# The formulas of these read lengths from memory, which may be a GPU's.
_BY_LENGTHS = frozenset({"aten::_flash_attention_forward", "aten::_efficient_attention_forward"})
# Much arithmetic inside, and no formula for it.
_UNKNOWN = frozenset(
    {"aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn_layer", *_BY_LENGTHS}
)
# What was in their first argument is not read.
_OVERWRITE = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
# Of their first argument as much is read as they return.
_LOOK_UP = frozenset({"aten::embedding", "aten::index", "aten::index_select", "aten::gather"})


@dataclass(frozen=True)
class Work:
    """The work of one operator.

    Attributes:
        name: as in a trace, ``"aten::addmm"``.
        flops: of its matrix products, convolutions and attention; 0 for all else.
        nbytes: that it reads and writes, each element once.
        dtype: of its arithmetic, ``"float32"``.
    """

    name: str
    flops: int
    nbytes: int
    dtype: str


@dataclass
class CallWork:
    """The work of a call.

    Attributes:
        least_bytes: the bytes that the call reads from outside and leaves behind, each element
            once: the traffic if nothing in between went through memory.
        unknown: operators whose arithmetic no formula tells.
        backward: whether the call runs a backward.
    """

    works: list[Work] = field(default_factory=list)
    least_bytes: int = 0
    unknown: list[str] = field(default_factory=list)
    backward: bool = False

    @property
    def flops(self) -> int:
        """The arithmetic of all operators."""
        return sum(work.flops for work in self.works)

    @property
    def nbytes(self) -> int:
        """The traffic of all operators, what is in between included."""
        return sum(work.nbytes for work in self.works)


def count(call: Callable[[], object], device: torch.device) -> CallWork:
    """Run a call, and count the work of its operators on a device.

    Operators are counted as eager runs them: compiled code is not entered. Where an operator
    compiles a function itself, as `flex_attention` does, it runs again beside compiled code.
    """
    counter = _Counter(device)
    try:
        with counter:
            result = call()
    except HigherOrder as error:
        error.mend_dynamo()
        counter = _BesideCompiled(device)
        with counter:
            result = call()
        name = error.what.split("`")[1]
        counter.count.unknown += [name, "compiled code"]
    counter.leave(result)
    return counter.count


def flops_of(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int | None:
    """Return the arithmetic of an operation; None if it is neither product nor convolution."""
    from torch.utils.flop_counter import flop_registry  # imports triton, where there is one

    packet = _LIKE.get(op.name, op.func._overloadpacket)
    formula: Any = flop_registry.get(packet)
    if formula is None or op.name in _BY_LENGTHS:
        return None
    return int(formula(*args, **kwargs, out_val=result))


class _Counter(Watching):
    """A mode that counts the operators that run under it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.count = CallWork()
        self._device = device.type
        self._made: dict[int, StorageWeakRef] = {}
        """The memory that the call allocates, which reserves its numbers."""
        self._read: dict[int, dict[tuple[Any, ...], tuple[int, Tensor]]] = {}
        """The outside memory that the call reads: storage -> places in it."""
        self._left: dict[int, int] = {}
        """The bytes that it writes outside, by storage."""

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op.func(*args, **kwargs)
        self.count.backward |= torch._C._current_graph_task_id() != -1
        self._note(op, args, kwargs, result)
        return result

    def _note(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], res: Any) -> None:
        written = plain(op.written(args, kwargs))
        given = plain((args, kwargs))
        held = {_memory(t) for t in given}
        fresh = [t for t in plain(res) if _memory(t) not in held]
        for t in fresh:
            self._made.setdefault(_memory(t), StorageWeakRef(t.untyped_storage()))
        views = not written and not fresh and tensors(res)
        if op.idle or op.describes or views or not self._is_here([*given, *fresh]):
            return
        read = plain((args, {name: v for name, v in kwargs.items() if name not in op.outs}))
        if op.base in _OVERWRITE:
            read = read[1:]
        read = list({id(t): t for t in read}.values())
        sizes = [size_of(t) for t in read]
        if op.base in _LOOK_UP and sizes:
            sizes[0] = min(sizes[0], sum(map(size_of, fresh)))
        for t, size in zip(read, sizes, strict=True):
            self._from_outside(t, size)
        for t in written:
            if _memory(t) not in self._made:
                self._left[_memory(t)] = max(self._left.get(_memory(t), 0), size_of(t))
        nbytes = sum(sizes) + sum(map(size_of, written)) + sum(map(size_of, fresh))
        flops = flops_of(op, args, kwargs, res)
        if not nbytes and not flops:
            return
        if op.name in _UNKNOWN or op.func.namespace not in ("aten", "prims", "prim"):
            self.count.unknown.append(op.base)
        dtype = next((t.dtype for t in [*read, *fresh] if t.is_floating_point()), None)
        name = str(dtype or (read or fresh or written)[0].dtype).removeprefix("torch.")
        self.count.works.append(Work(op.base, flops or 0, nbytes, name))

    def _from_outside(self, t: Tensor, size: int) -> None:
        memory = _memory(t)
        if memory in self._made:
            return
        place = (t.storage_offset(), t.numel())
        self._read.setdefault(memory, {})[place] = (size, t)

    def _is_here(self, all_: list[Tensor]) -> bool:
        """Return whether an operation is work of the device, and neither of the host beside it nor
        a copy between the two."""
        return bool(all_) and all(t.device.type == self._device or t.dim() == 0 for t in all_)

    def leave(self, result: Any) -> None:
        """Add up the bytes that the call read from outside, left there or returns."""
        for places in self._read.values():
            whole = max(t.untyped_storage().nbytes() for _, t in places.values())
            self.count.least_bytes += min(whole, sum(size for size, _ in places.values()))
        returned = {_memory(t): size_of(t) for t in plain(tree.flatten(result).tensors)}
        made = {m: size for m, size in returned.items() if m in self._made}
        self.count.least_bytes += sum(self._left.values()) + sum(made.values())
        self.count.unknown = sorted(set(self.count.unknown))
        self._made.clear()
        self._read.clear()


class _BesideCompiled(_Counter, WatchingCompiled):
    """A mode that counts what runs beside compiled code, and does not see into that."""


def plain(value: Any) -> list[Tensor]:
    """List the tensors that have a single memory and shape."""
    return [
        t
        for t in tensors(value)
        if t.layout is torch.strided and not t.is_nested and torch._C._has_storage(t)
    ]


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def size_of(t: Tensor) -> int:
    """Count the bytes of a tensor, those that it shows several times once."""
    sizes = zip(t.shape, t.stride(), strict=True)
    elements = math.prod(size for size, stride in sizes if stride or not size)
    return min(elements * t.element_size(), t.untyped_storage().nbytes())
