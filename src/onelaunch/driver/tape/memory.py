"""The memory of a recording: ordinary host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, storage_bytes, tensors
from onelaunch.driver.tape.recorder import TapeRecorder


class HostMemory:
    """The storages of plain CPU tensors: each result keeps that of the captured operation."""

    def __init__(self) -> None:
        self._own: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the recording holds."""
        return sum(s.nbytes() for s in self._own.values())

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether all tensors of a call are on the CPU."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return all(t.device.type == "cpu" for t in tensors((args, kwargs)))

    def run(
        self, recorder: TapeRecorder, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return recorder.call(op, args, kwargs)

    @staticmethod
    def on_host(t: Tensor) -> Tensor:
        return t

    def fixed(self, t: Tensor) -> Tensor:
        """Make an alias, since the body may change the metadata of `t` later (`t_`, `resize_`)."""
        with torch._C._AutoDispatchBelowAutograd():
            return t.detach()

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """Keep the storage of `t`, and return `t` itself."""
        storage = t.untyped_storage()
        self._own[storage._cdata] = storage
        return t

    def external(self, t: Tensor) -> Tensor | None:
        """View the bytes of the storage of `t`, if no recorded operation made it."""
        return None if self.made(t.untyped_storage()) else storage_bytes(t)

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether it is the storage of a result."""
        return storage._cdata in self._own
