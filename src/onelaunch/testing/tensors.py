"""Tensors of the emulated device, `torch.device("tape")`: a GPU's ways with a program, anywhere.

They are computed by the CPU's kernels, and live in memory of their own. So a host read is seen by
the dispatcher, devices cannot be mixed, capturable optimizers take its tensors, and memory is
reused and poisoned as `arena` says. It does not emulate streams (everything is synchronous),
generators of its own (the CPU's default generator serves it), pinned memory, autocast, and the
choice of kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.spec import contiguous_stride, extent_bytes
from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.driver.aten import Operator, copy_bits, mapped, operator, tensors
from onelaunch.driver.function_modes import joined
from onelaunch.driver.host_reads import HostReads, is_asked_for_class
from onelaunch.testing.arena import (
    NAME,
    Arena,
    Block,
    bind,
    block_of,
    device_storage,
    host,
    host_over,
    ordinary,
)
from onelaunch.testing.kernels import refuse_seeds, with_seeds_on_host
from onelaunch.testing.memory import Call, HostMemory
from onelaunch.testing.recorder import is_recording
from onelaunch.unwinding import function_modes

# May read a tensor of the host: a copy from it, and (as on CUDA) the indices of an indexing.
_TAKES_HOST = frozenset(
    {"aten::copy_", "aten::copy", "aten::index.Tensor", "aten::index_put_", "aten::index_put"}
)


class TapeTensor(Tensor):
    """A tensor on the emulated device; made by torch's own functions with ``device="tape"``."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # its own dispatch comes back with the tensors in it
        op = operator(func)
        with torch._C.DisableTorchFunction():
            if op.composite:
                return op.decomposed(args, kwargs)
            return run_now(op, args, kwargs)

    def __coerce_same_metadata_as_tangent__(self, meta: object, kind: object = None) -> Tensor:
        """Return itself: AOTAutograd takes it for a plain tensor, and finds a subclass."""
        return self

    # torch refuses these to a tensor subclass, or prints it by calling them. As on CUDA, they copy
    # to the host first.

    def tolist(self) -> Any:
        """List the values, nested as the dimensions are."""
        return _read(self, ".tolist()").tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if is_recording() and is_asked_for_class():
            return type(self).__name__
        return f"{repr(_read(self, 'print or repr'))[:-1]}, device='{self.device}')"

    def __format__(self, format_spec: str) -> str:
        return format(_read(self, "format"), format_spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if hasattr(self, "_is_param"):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_host, (self.detach().cpu(), self.requires_grad, hasattr(self, "_is_param"))


def _read(t: Tensor, how: str) -> Tensor:
    for mode in itertools.chain.from_iterable(map(joined, function_modes())):
        if isinstance(mode, HostReads):  # it sees torch's own functions alone
            mode.read(t, how)
    return t.detach().cpu()


def _from_host(host: Tensor, requires_grad: bool, is_param: bool) -> Tensor:
    t = host.to(NAME)
    return torch.nn.Parameter(t, requires_grad) if is_param else t.requires_grad_(requires_grad)


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> TapeTensor:
    """Make a tensor over the device's `storage`, its first element at `offset`, in elements."""
    t = Tensor._make_wrapper_subclass(TapeTensor, (0,), dtype=dtype, device=torch.device(NAME, 0))
    bind(t, storage, offset, size, stride)
    return t


class ArenaMemory(HostMemory):
    """Blocks of an arena, for the tensors of the emulated device.

    The calls of a recording hold addresses, as the kernels of a CUDA graph do, and keep nothing
    allocated: dead results are reused.
    """

    tensor_class = TapeTensor
    compiler = "aten"

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._unowned: dict[int, Block] = {}
        """id of a block's host storage -> the block, until a tensor of the device owns it."""

    @property
    def held_bytes(self) -> int:
        return 0

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if _names_device(kwargs.get("device")):
            return True
        return any(isinstance(t, TapeTensor) for t in tensors((args, kwargs)))

    def transfers(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = [t for t in tensors((args, kwargs)) if t.numel()]  # of nothing, nothing is copied
        on_device = {isinstance(t, TapeTensor) for t in given}
        if op.name == "aten::_to_copy" and kwargs.get("device") is not None:
            return bool(on_device - {_names_device(kwargs["device"])})
        return op.name in _TAKES_HOST and len(on_device) > 1

    @staticmethod
    def on_host(t: Tensor) -> Tensor:
        return host(t) if isinstance(t, TapeTensor) else t

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        block = self._allocate(extent_bytes(t.shape, t.stride(), t.dtype))
        self._unowned[block.host._cdata] = block
        placed = host_over(block.host, t.dtype, t.shape, t.stride(), 0)
        if defined:
            copy_bits(placed, t)
        return placed

    def run(
        self,
        call: Call | None,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an operation that is not composite; without `call` outside of a capture.

        Some of its arguments are `TapeTensor`s, or a keyword argument names the device.
        """
        captured = call is not None
        if captured:  # CUDA's kernels take the value of a host's number at the capture, for ever
            args, kwargs = mapped(args, _frozen), mapped(kwargs, _frozen)
        call = call or self._call
        if op.name == "aten::_efficientzerotensor":  # torch's has no memory
            op = operator(torch.ops.aten.zeros.default)
        if op.idle and op.written(args, kwargs):
            return self._change_metadata(op, args, kwargs, call)
        device = kwargs.get("device")
        to_host = device is not None and not _names_device(device)
        if device is None:
            _check_one_device(op, args, kwargs)
        elif not to_host:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        self._size_outputs(op, args, kwargs)
        given = tensors((args, kwargs))
        mine = [t for t in given if isinstance(t, TapeTensor)]
        storages = {block_of(t).host._cdata: t.untyped_storage() for t in mine}
        views = frozenset(storages)
        hosts = {id(t): host(t) for t in mine}
        originals = {id(hosts.get(id(t), t)): t for t in given}

        def unwrap(value: Any) -> Any:
            return hosts.get(id(value), value)

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in originals:
                return originals.get(id(value), value)
            key = value.untyped_storage()._cdata
            if key not in storages:
                storages[key] = device_storage(self._unowned.pop(key))
            return _wrapped(storages[key], value, mine[0] if key in views else None)

        refuse_seeds(op, args, captured, TapeTensor)
        args, kwargs = mapped(args, unwrap), mapped(kwargs, unwrap)
        if to_host:
            return op.func(*args, **kwargs)
        result = mapped(call(op, args, kwargs), wrap)
        return result if captured else with_seeds_on_host(op, result, host)

    def _call(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op.func(*args, **kwargs)
        placed = self.place_fresh(op, (args, kwargs), tensors(result))
        return mapped(result, lambda value: placed.get(id(value), value))

    def _allocate(self, nbytes: int) -> Block:
        block = self._arena.allocate(nbytes)
        self._made[block.host._cdata] = block.host
        return block

    def _size_outputs(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give ``out=`` tensors of another size the memory that the result needs."""
        outs = {n: kwargs[n] for n in op.outs if isinstance(kwargs.get(n), TapeTensor)}
        if not outs:
            return
        trial = {n: torch.empty(0, dtype=t.dtype, device="cpu") for n, t in outs.items()}
        generator = (kwargs.get("generator") or torch.default_generator) if op.random else None
        state = generator and generator.get_state()
        op.func(*mapped(args, _host_or_same), **mapped(kwargs, _host_or_same) | trial)
        if generator and state is not None:
            generator.set_state(state)
        for name, t in outs.items():
            size, stride = trial[name].shape, trial[name].stride()
            if t.shape != size:
                block = self._allocate(extent_bytes(size, stride, t.dtype))
                bind(t, device_storage(block), 0, size, stride)

    def _change_metadata(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Tensor:
        t: Tensor = args[0]
        match op.name.removeprefix("aten::"):
            case "set_.source_Tensor" | "shallow_copy_data_":
                s = args[1]
                bind(t, s.untyped_storage(), s.storage_offset(), s.shape, s.stride())
            case "set_.source_Storage":
                bind(t, args[1], 0, (args[1].nbytes() // t.itemsize,), (1,))
            case "set_.source_Storage_storage_offset":
                _, storage, offset, size, *strides = args
                bind(t, storage, offset, size, strides[0] if strides else contiguous_stride(size))
            case "resize_":
                self._resize(t, args[1], call)
            case "resize_as_":
                self._resize(t, args[1].shape, call)
            case "detach_":
                pass
            case _:
                with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
                    op.func(*args, **kwargs)
        return t

    def _resize(self, t: Tensor, size: Sequence[int], call: Call) -> None:
        storage, offset = t.untyped_storage(), int(t.storage_offset())
        needed = (offset + math.prod(size)) * t.itemsize
        if needed > storage.nbytes():
            new = self._allocate(needed)
            n = min(storage.nbytes(), new.nbytes)
            ends = [host_over(b.host, torch.uint8, (n,), (1,), 0) for b in (new, block_of(t))]
            call(operator(torch.ops.aten.copy_.default), tuple(ends), {})
            storage = device_storage(new)
        bind(t, storage, offset, size, contiguous_stride(size))


def run_now(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on tensors of the device, in this thread's memory outside of captures."""
    return ArenaMemory(ordinary()).run(None, op, args, kwargs)


def _names_device(value: Any) -> bool:
    """Tell whether a ``device`` argument names the emulated device."""
    return value is not None and torch.device(value).type == NAME


def _frozen(value: Any) -> Any:
    on_host = isinstance(value, Tensor) and not isinstance(value, TapeTensor)
    return value.clone() if on_host and value.dim() == 0 else value


def _check_one_device(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op.name in _TAKES_HOST:
        return
    for t in tensors((args, kwargs)):
        if not isinstance(t, TapeTensor) and t.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {t.device}! (when running {op.name})"
            )


def _host_or_same(value: Any) -> Any:
    return host(value) if isinstance(value, TapeTensor) else value


def _wrapped(storage: torch.UntypedStorage, value: Tensor, base: Tensor | None) -> Tensor:
    """Make a device tensor over `storage`, laid out as CPU tensor `value`; a view of `base`."""
    inference = torch.is_inference_mode_enabled() and (base is None or base.is_inference())
    # Not `torch.inference_mode`: a Ctrl-C between two lines of it leaves the mode on (torch 2.13).
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/grad_mode.py
    with torch._C._InferenceMode(inference):
        offset = int(value.storage_offset())
        t = tensor_over(storage, value.dtype, value.shape, value.stride(), offset)
    torch._C._set_conj(t, value.is_conj())
    torch._C._set_neg(t, value.is_neg())
    return t
