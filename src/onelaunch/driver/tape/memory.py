"""Where the tensors of a recording live: in ordinary host memory, or on the emulated device."""

# Recording is done with the dispatcher's own tools, which torch keeps in `torch._C`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, mapped, storage_bytes, tensors
from onelaunch.driver.emulated import device as emulated
from onelaunch.driver.emulated.arena import Arena, Block
from onelaunch.driver.emulated.device import Placer, TapeTensor
from onelaunch.driver.tape.recorder import Recorder


class HostMemory:
    """Plain CPU tensors: each result keeps the storage that the captured operation gave it."""

    def __init__(self) -> None:
        self._own: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the recording holds."""
        return sum(s.nbytes() for s in self._own.values())

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Every call whose tensors are on the CPU."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return all(t.device.type == "cpu" for t in tensors((args, kwargs)))

    def run(
        self, recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation as it is."""
        return recorder.call(op, args, kwargs)

    def fixed(self, t: Tensor) -> Tensor:
        """An alias of its own: the body may change the metadata of `t` later (`t_`, `resize_`)."""
        with torch._C._AutoDispatchBelowAutograd():
            return t.detach()

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """`t` itself, kept."""
        storage = t.untyped_storage()
        self._own[storage._cdata] = storage
        return t

    def external(self, t: Tensor) -> Tensor | None:
        """The bytes of the storage of `t`, if no recorded operation made it."""
        return None if self.made(t.untyped_storage()) else storage_bytes(t)

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is the storage of a result."""
        return storage._cdata in self._own


class ArenaMemory(HostMemory):
    """Tensors of the emulated device: results go to the pool's arena, dead ones are reused.

    The calls of the recording hold addresses, as the kernels of a CUDA graph do, and keep nothing
    allocated.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._before = arena.reserved_bytes
        self._placer = _Owning(arena, self._own)

    @property
    def nbytes(self) -> int:
        """Bytes by which the arena grew."""
        return self._arena.reserved_bytes - self._before

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Calls with a tensor of the device, or that make one."""
        if emulated.names_device(kwargs.get("device")):
            return True
        return any(isinstance(t, TapeTensor) for t in tensors((args, kwargs)))

    def run(
        self, recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation on CPU tensors over the device's memory."""
        _refuse_transfers(recorder, op, args, kwargs)
        args, kwargs = mapped(args, _frozen), mapped(kwargs, _frozen)
        return emulated.run(op, args, kwargs, recorder.call, self._placer)

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """`t`, moved to a block of the pool."""
        return self._placer.place(t, defined)


class _Owning(Placer):
    def __init__(self, arena: Arena, own: dict[int, torch.UntypedStorage]) -> None:
        super().__init__(arena)
        self._own = own

    def allocate(self, nbytes: int) -> Block:
        block = super().allocate(nbytes)
        self._own[block.host._cdata] = block.host
        return block


def _frozen(value: Any) -> Any:
    # A number of the host: CUDA's kernels take its value at the capture, for ever.
    if isinstance(value, Tensor) and not isinstance(value, TapeTensor) and value.dim() == 0:
        return value.clone()
    return value


def _refuse_transfers(
    recorder: Recorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = [t for t in tensors((args, kwargs)) if t.numel()]  # of nothing, nothing is copied
    on_device = {isinstance(t, TapeTensor) for t in given}
    mixed = op.name in emulated.TAKES_HOST and len(on_device) > 1
    if op.name == "aten::_to_copy" and kwargs.get("device") is not None:
        mixed = bool(on_device - {emulated.names_device(kwargs["device"])})
    if mixed:
        what = f"`{op.label}` copied between the host and the device during a capture."
        raise recorder.refuse("OL103", what)
