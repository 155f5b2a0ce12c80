"""Values of the host's that a call brings to the device, the same at each call: kept there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from onelaunch.state.host_values import bytes_of

_INTO_FIRST = ("aten::copy_", "aten::copy")
_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

Key = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]


def bits_of(t: Tensor) -> Key:
    """Return what two host tensors have in common that hold the same bits in the same layout."""
    digest = blake2b(bytes_of(t.detach()), digest_size=16).digest()
    return t.dtype, tuple(t.shape), t.stride(), digest


def brought(name: str, args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> list[Tensor]:
    """Return the host tensors that an operation brings to devices of a kind."""
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == kind
        return [args[0]] if to_device and args[0].device.type == "cpu" else []
    if name in _INTO_FIRST or name == "aten::_copy_from":
        target, source = args[:2] if name in _INTO_FIRST else args[1::-1]
        return [source] if target.device.type == kind and source.device.type == "cpu" else []
    if name in _PUTS and args[0].device.type == kind and args[2].device.type == "cpu":
        masked = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return [] if masked else [args[2]]  # the host reads the number that it fills a mask with
    return []


class Lifted:
    """The device's copies of host values. An attempt that misses some is repeated with them.

    Args:
        device: where they are.
        foreseen: host tensors of the warm-up that will be wanted.
    """

    def __init__(self, device: torch.device, foreseen: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._made: dict[Key, Tensor] = {}
        self.missing: dict[Key, Tensor] = {}
        self.used: dict[Key, Tensor] = {}
        """What the attempt under way was given."""
        for t in foreseen:
            self.missing[bits_of(t)] = t

    def of(self, t: Tensor) -> Tensor | None:
        """Return the device's copy of a host tensor; None where there is none yet."""
        key = bits_of(t)
        found = self._made.get(key)
        if found is None:
            self.missing[key] = t.detach().clone()
        else:
            self.used[key] = found
        return found

    def make(self) -> None:
        """Make the copies that are missing, outside of a capture."""
        wanted, self.missing, self.used = self.missing, {}, {}
        with torch.inference_mode(False), torch.no_grad():
            for key, t in wanted.items():
                self._made[key] = t.to(self._device)
