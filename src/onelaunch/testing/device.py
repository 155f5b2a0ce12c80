"""An emulated device, `torch.device("tape")`: a GPU's ways with a program, on any machine.

Its tensors are computed by the CPU's kernels, and live in memory of their own. So a host read is
seen by the dispatcher, devices cannot be mixed, capturable optimizers take its tensors, and memory
is reused and poisoned as `arena` says. It does not emulate streams (everything is
synchronous), generators of its own (the CPU's default generator serves it), pinned memory,
autocast, and the choice of kernels.

Nothing happens at import; `register_device` does it, once for the process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from onelaunch.call.spec import contiguous_stride, extent_bytes
from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.driver.aten import Operator, copy_bits, mapped, operator, tensors
from onelaunch.driver.host_reads import HostReads, is_asked_for_class
from onelaunch.driver.tape.recorder import is_recording, recording
from onelaunch.testing import engine
from onelaunch.testing.arena import Arena, Block
from onelaunch.testing.attention import install_attention, refuse_seeds, with_seeds_on_host
from onelaunch.testing.recurrent import install_recurrent
from onelaunch.testing.storage import (
    NAME,
    bind,
    block_of,
    device_storage,
    host,
    host_over,
    ordinary,
    tensor_over,
)
from onelaunch.testing.torch_module import Module
from onelaunch.unwinding import function_modes

# May read a tensor of the host: a copy from it, and (as on CUDA) the indices of an indexing.
TAKES_HOST = frozenset(
    {"aten::copy_", "aten::copy", "aten::index.Tensor", "aten::index_put_", "aten::index_put"}
)

_library: torch.library.Library | None = None

RunOnHost = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]


def register_device() -> None:
    """Register the device with torch; a second call does nothing."""
    global _library
    if _library is not None:
        return
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=Module(), device_guard=engine.Guard()
    )
    engine.install()
    # `torch.accelerator` takes what allocates a device's memory for an allocator of torch's, and
    # AOTInductor empties its cache. To say that there is none yet leaves it nothing to do.
    torch._C._accelerator_isAllocatorInitialized = lambda: False  # pyright: ignore
    install_attention()
    install_recurrent()
    _library = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    for func in (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten._efficientzerotensor.default,
    ):
        _library.impl(func.name().removeprefix("aten::"), _factory(func), "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    _library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before
        _library.impl("histc", _histc, "CPU", allow_override=True)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    # CUDA counts integers too, as routers of experts rely on; a CPU's kernel takes floats alone.
    exact = x if x.is_floating_point() else x.double()
    counts = torch.ops.aten.histc.out(exact, bins, min, max, out=exact.new_empty(bins))
    return counts.to(x.dtype)


def _factory(func: torch._ops.OpOverload) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: run(
        operator(func), args, kwargs | {"device": torch.device(NAME)}
    )


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # `torch.tensor(values, device="tape")` comes here: it hides its copy from modes and subclasses.
    recorder = recording()
    if recorder is not None and source.numel():
        raise recorder.note_refusal(
            "OL103", "A tensor was made from values of the host in a capture."
        )
    return run(operator(torch.ops.aten.copy_.default), (target, source), {})


def _local_scalar_dense(t: Tensor) -> Any:
    # `torch.tensor([t])` comes here: it hides its reads too.
    _refuse_read("torch.tensor of a list of tensors")
    return host(t).item()


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
            return run(op, args, kwargs)

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
    _refuse_read(how)
    for mode in function_modes():  # these functions are not torch's, which the mode would see
        if isinstance(mode, HostReads):
            mode.read(t, how)
    return t.detach().cpu()


def _refuse_read(how: str) -> None:
    recorder = recording()
    if recorder is not None:
        raise recorder.note_refusal("OL101", f"The host read a tensor ({how}) in a capture.")


def _from_host(host: Tensor, requires_grad: bool, is_param: bool) -> Tensor:
    t = host.to(NAME)
    return torch.nn.Parameter(t, requires_grad) if is_param else t.requires_grad_(requires_grad)


def names_device(value: Any) -> bool:
    """Tell whether a ``device`` argument names the emulated device."""
    return value is not None and torch.device(value).type == NAME


class Placer:
    """A place for the fresh results of operations: an arena, and the blocks just taken from it."""

    def __init__(self, memory: Arena) -> None:
        self._arena = memory
        self._fresh: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block for a result; `storage` hands it over to a tensor."""
        block = self._arena.allocate(nbytes)
        self._fresh[block.host._cdata] = block
        return block

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """Move the fresh CPU tensor `t`, with its strides, to a block of the device.

        Values that are not `defined` (of `torch.empty`) are not copied.
        """
        block = self.allocate(extent_bytes(t.shape, t.stride(), t.dtype))
        placed = host_over(block, t.dtype, t.shape, t.stride(), 0)
        if defined:
            copy_bits(placed, t)
        return placed

    def storage(self, host: Tensor) -> torch.UntypedStorage:
        """Make the device's storage over a block just allocated, which it keeps from now on."""
        return device_storage(self._fresh.pop(host.untyped_storage()._cdata))


def run(
    op: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: RunOnHost | None = None,
    placer: Placer | None = None,
) -> Any:
    """Run one operation on tensors of the device.

    Args:
        op: the operation, not a composite one.
        args: its arguments; some are `TapeTensor`s, or `kwargs` names the device.
        kwargs: its keyword arguments.
        call: runs it on CPU tensors over the same memory, and places its fresh results.
        placer: their place; the ordinary arena by default.
    """
    placer = placer or Placer(ordinary())
    if op.name == "aten::_efficientzerotensor":  # torch's has no memory
        op = operator(torch.ops.aten.zeros.default)
    captured, call = call is not None, call or _calling(placer)
    given = tensors((args, kwargs))
    mine = [t for t in given if isinstance(t, TapeTensor)]
    to_host = kwargs.get("device") is not None and not names_device(kwargs["device"])
    if op.idle and op.written(args, kwargs):
        return _change_metadata(op, args, kwargs, call, placer)
    if kwargs.get("device") is None:
        _check_one_device(op, args, kwargs)
    elif not to_host:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    _size_outputs(op, args, kwargs, placer)
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
            storages[key] = placer.storage(value)
        return wrap_over(storages[key], value, mine[0] if key in views else None)

    refuse_seeds(op, args, captured, TapeTensor)
    args, kwargs = mapped(args, unwrap), mapped(kwargs, unwrap)
    if to_host:
        return op.func(*args, **kwargs)
    result = mapped(call(op, args, kwargs), wrap)
    return result if captured else with_seeds_on_host(op, result, host)


def _calling(placer: Placer) -> RunOnHost:
    def call(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op.func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        is_fresh = [t for t in tensors(result) if t.untyped_storage()._cdata not in known]
        placed = {id(t): placer.place(t, not op.idle) for t in is_fresh}
        return mapped(result, lambda value: placed.get(id(value), value))

    return call


def _check_one_device(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op.name in TAKES_HOST:
        return
    for t in tensors((args, kwargs)):
        if not isinstance(t, TapeTensor) and t.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {t.device}! (when running {op.name})"
            )


def _size_outputs(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], placer: Placer
) -> None:
    """Give ``out=`` tensors of another size the memory that the result needs."""
    outs = [(name, kwargs[name]) for name in op.outs if isinstance(kwargs.get(name), TapeTensor)]
    if not outs:
        return
    trial = {name: torch.empty(0, dtype=t.dtype, device="cpu") for name, t in outs}
    state = torch.get_rng_state()
    op.func(*mapped(args, _host_or_same), **mapped(kwargs, _host_or_same) | trial)
    torch.set_rng_state(state)
    for name, t in outs:
        size, stride = trial[name].shape, trial[name].stride()
        if t.shape != size:
            block = placer.allocate(extent_bytes(size, stride, t.dtype))
            over = host_over(block, t.dtype, (), (), 0)
            bind(t, placer.storage(over), 0, size, stride)


def _host_or_same(value: Any) -> Any:
    return host(value) if isinstance(value, TapeTensor) else value


def _change_metadata(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], call: RunOnHost, placer: Placer
) -> Tensor:
    t: Tensor = args[0]
    kind = op.name.removeprefix("aten::")
    if kind == "set_.source_Tensor":
        source = args[1]
        bind(t, source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    elif kind == "set_.source_Storage":
        bind(t, args[1], 0, (args[1].nbytes() // t.itemsize,), (1,))
    elif kind == "set_.source_Storage_storage_offset":
        _, storage, offset, size, *strides = args
        bind(t, storage, offset, size, strides[0] if strides else contiguous_stride(size))
    elif kind in ("resize_", "resize_as_"):
        _resize(t, args[1].shape if kind == "resize_as_" else args[1], call, placer)
    elif kind != "detach_":
        with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
            op.func(*args, **kwargs)
    return t


def _resize(t: Tensor, size: Sequence[int], call: RunOnHost, placer: Placer) -> None:
    storage, offset = t.untyped_storage(), int(t.storage_offset())
    if (offset + math.prod(size)) * t.itemsize > storage.nbytes():
        new = placer.allocate((offset + math.prod(size)) * t.itemsize)
        n = min(storage.nbytes(), new.nbytes)
        to, source = (host_over(b, torch.uint8, (n,), (1,), 0) for b in (new, block_of(t)))
        call(operator(torch.ops.aten.copy_.default), (to, source), {})
        storage = placer.storage(to)
    bind(t, storage, offset, size, contiguous_stride(size))


def wrap_over(storage: torch.UntypedStorage, value: Tensor, base: Tensor | None) -> Tensor:
    """Make a device tensor over `storage`, laid out as CPU tensor `value`; a view of `base`."""
    inference = torch.is_inference_mode_enabled() and (base is None or base.is_inference())
    # Not `torch.inference_mode`: a Ctrl-C between two lines of it leaves the mode on (torch 2.13).
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/grad_mode.py
    with torch._C._InferenceMode(inference):
        t = tensor_over(
            TapeTensor,
            storage,
            value.dtype,
            value.shape,
            value.stride(),
            int(value.storage_offset()),
        )
    torch._C._set_conj(t, value.is_conj())
    torch._C._set_neg(t, value.is_neg())
    return t
