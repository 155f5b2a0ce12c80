"""An emulated device, `torch.device("tape")`: what a GPU does to a program, on any machine.

Its tensors are computed by the CPU's kernels, and live in memory of their own. So a host read is
seen by the dispatcher, devices cannot be mixed, capturable optimizers take its tensors, and memory
is reused and poisoned as `arena` says. What it does not emulate: streams (everything is
synchronous), generators of its own (the CPU's default generator serves it), pinned memory,
autocast, and the choice of kernels.

Nothing happens at import; `install` registers the device, once for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver import arena
from onelaunch.driver.arena import Arena, Block
from onelaunch.driver.operators import Operator, copy_bits, mapped, operator, tensors

NAME = "tape"

# Index tensors of the host are copied to the device first, as on CUDA.
_HOST_INDICES = frozenset({"aten::index.Tensor", "aten::index_put_", "aten::index_put"})

_default_arena = Arena()
_library: torch.library.Library | None = None

Call = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]


def install() -> None:
    """Register the device with torch; again is no work. Takes over the PrivateUse1 backend."""
    global _library
    if _library is not None:
        return
    from torch.utils import backend_registration

    from onelaunch.driver import emulated_module

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=emulated_module.Module()
    )
    _library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):
        func = operator_named(name)
        _library.impl(name, _factory(func), "PrivateUse1")


def operator_named(name: str) -> torch._ops.OpOverload:
    """The overload called ``aten::<name>``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _factory(func: torch._ops.OpOverload) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: run(operator(func), args, kwargs)


def memory_allocated() -> int:
    """Bytes of the tensors on the device, rounded up to multiples of 512 each."""
    return arena.allocated_bytes()


def memory_reserved() -> int:
    """Bytes that the device's arenas hold, in use or not."""
    return arena.reserved_bytes()


class TapeTensor(Tensor):
    """A tensor on the emulated device; made by torch's own functions with ``device="tape"``."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        with torch._C.DisableTorchFunction():
            if op.composite:
                return func.decompose(*args, **kwargs)
            return run(op, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            copied = _like(self, self.detach().clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_host, (self.detach().cpu(), self.requires_grad, hasattr(self, "_is_param"))


def _like(original: Tensor, copied: Tensor) -> Tensor:
    copied.requires_grad_(original.requires_grad)
    if hasattr(original, "_is_param"):
        copied._is_param = True
    return copied


def _from_host(host: Tensor, requires_grad: bool, is_param: bool) -> Tensor:
    t = host.to(NAME)
    return torch.nn.Parameter(t, requires_grad) if is_param else t.requires_grad_(requires_grad)


def is_device(value: Any) -> bool:
    """Whether `value` names the emulated device."""
    return value is not None and torch.device(value).type == NAME


def run(
    op: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call | None = None,
    memory: Arena | None = None,
) -> Any:
    """Run one operation on tensors of the device.

    Args:
        op: the operation, not a composite one.
        args: its arguments; some are `TapeTensor`s, or `kwargs` names the device.
        kwargs: its keyword arguments.
        call: what runs it on CPU tensors over the same memory; the operation itself by default.
        memory: where fresh results live; the ordinary arena by default.
    """
    mine = [t for t in tensors((args, kwargs)) if isinstance(t, TapeTensor)]
    if op.idle and mine and op.written(args, kwargs):
        return _change_metadata(op, args, kwargs)
    _one_device(op, args, kwargs)
    storages = {block_of(t).host._cdata: t.untyped_storage() for t in mine}
    hosts = {id(t): host(t) for t in mine}
    wrappers = {id(hosts[id(t)]): t for t in mine}
    to_host = kwargs.get("device") is not None and not is_device(kwargs["device"])
    if is_device(kwargs.get("device")):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    outs = {id(t): t for t in op.written(args, kwargs) if t.numel() == 0}
    resized = {key: torch.empty_like(hosts[key]) for key in outs}
    swap = hosts | resized

    def unwrap(value: Any) -> Any:
        return swap.get(id(value), value) if isinstance(value, Tensor) else value

    result = (call or _call)(op, mapped(args, unwrap), mapped(kwargs, unwrap))
    for key, t in outs.items():
        _settle(t, resized[key], memory)
        wrappers[id(resized[key])] = t

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or to_host:
            return value
        if id(value) in wrappers:
            return wrappers[id(value)]
        storage = storages.get(value.untyped_storage()._cdata)
        if storage is None:
            storage, value = _to_device(value, memory)
        return wrap_over(storage, value)

    return mapped(result, wrap)


def _call(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.func(*args, **kwargs)
