"""The memory of a recording's tensors: plain CPU memory. `tensors.ArenaMemory` is the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, tensors
from onelaunch.testing.arena import Arena
from onelaunch.testing.repeats import storage_bytes

Call = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation on tensors of the host, and puts its fresh results into their places."""


class HostMemory:
    """The storages of plain CPU tensors: each result keeps that of the captured operation.

    Args:
        arena: the memory of the pool; plain CPU tensors use none of it.
    """

    tensor_class: type[Tensor] = Tensor
    compiler: Literal["inductor", "aten"] | None = None
    """See `Driver.compiler`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._reserved_before = arena.reserved_bytes
        self._made: dict[int, torch.UntypedStorage] = {}
        """id of a host storage -> the storage, of each result that a recorded operation made."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the recording holds outside of the arena."""
        return sum(s.nbytes() for s in self._made.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the recording holds, and by which the arena grew for it."""
        return self.held_bytes + self._arena.reserved_bytes - self._reserved_before

    def owns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call with these arguments runs on the device that is being recorded."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return all(t.device.type == "cpu" for t in tensors((args, kwargs)))

    def transfers(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call copies between the host and the device."""
        return False

    def run(self, call: Call, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on tensors of the device, by `call` on host tensors."""
        return call(op, args, kwargs)

    @staticmethod
    def on_host(t: Tensor) -> Tensor:
        """Make a host tensor over the same bytes as `t`."""
        return t

    @staticmethod
    def fixed(t: Tensor) -> Tensor:
        """Make an alias of host tensor `t` for every replay: the body may change the metadata of
        `t` later (`t_`, `resize_`)."""
        with torch._C._AutoDispatchBelowAutograd():
            return t.detach()

    def place(self, t: Tensor, defined: bool = True) -> Tensor:
        """Give the fresh host tensor `t` the address where every replay will write it.

        Its values need not be kept where they are not `defined` (by `torch.empty`).
        """
        storage = t.untyped_storage()
        self._made[storage._cdata] = storage
        return t

    def place_fresh(self, op: Operator, given: Any, results: list[Tensor]) -> dict[int, Tensor]:
        """Place the results of `op` whose storage is none of `given`: id of a result -> its alias
        in that place."""
        known = {t.untyped_storage()._cdata for t in tensors(given)}
        return {
            id(t): self.place(t, not op.idle)
            for t in results
            if not t._is_zerotensor() and t.untyped_storage()._cdata not in known
        }

    def external(self, t: Tensor) -> Tensor | None:
        """View all bytes around host tensor `t` if they existed before the capture, else None."""
        return None if self.made(t.untyped_storage()) else storage_bytes(t)

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a recorded operation made this memory."""
        return storage._cdata in self._made
