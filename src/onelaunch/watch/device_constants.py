"""Host values that each call brings to the device alike: a recording has them there already.

A replay runs no Python, so nobody would fill the host memory that a captured copy reads. So the
values are copied before the capture, which takes these copies in place of its own. If the capture
meets a value without a copy, it is attempted again with that copy. Values that differ from attempt
to attempt are refused. Also here: `masked_fill` by a number that lies on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import mapped
from onelaunch.driver.refusals import error_here
from onelaunch.identity import id
from onelaunch.state.host_values import bytes_of
from onelaunch.watch.host_memory import named

MISSES = 8
"""Number of attempts with unforeseen host values after which a capture is refused."""

_INTO_FIRST = ("aten::copy_", "aten::copy")
_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")
_INDEXES = ("aten::index", "aten::_unsafe_index", *_PUTS)
_COPIES = frozenset({"aten::_to_copy", "aten::_copy_from", "aten::where", *_INTO_FIRST, *_INDEXES})

Key = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]


def bits_of(t: Tensor) -> Key:
    """Return a key that is equal for host tensors with the same bits in the same layout."""
    digest = blake2b(bytes_of(t.detach()), digest_size=16).digest()
    return t.dtype, tuple(t.shape), t.stride(), digest


def copied_to_device(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], kind: str
) -> list[Tensor]:
    """Return the host tensors that an operation copies to devices of a kind."""
    if name not in _COPIES:
        return []
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == kind
        return [args[0]] if to_device and args[0].device.type == "cpu" else []
    if name in _INTO_FIRST or name == "aten::_copy_from":
        target, source = args[:2] if name in _INTO_FIRST else args[1::-1]
        return [source] if target.device.type == kind and source.device.type == "cpu" else []
    if name == "aten::where" and any(t.device.type == kind for t in args):
        return [t for t in args if t.device.type == "cpu"]  # 0-dim, which CUDA copies there
    if name in _INDEXES and args[0].device.type == kind:
        index = [t for t in args[1] if t is not None]
        if any(t.dtype in (torch.bool, torch.uint8) for t in index):
            return []  # for a mask, the host reads the number
        return [t for t in (*index, *args[2:3]) if t.device.type == "cpu"]
    return []


class DeviceConstants:
    """The device's copies of host values. An attempt that lacks a copy is repeated with it.

    Args:
        foreseen: host tensors that the warm-up copied.
    """

    def __init__(self, device: torch.device, foreseen: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._copies: dict[Key, Tensor] = {}
        self.copied: list[Tensor] = []
        """The host tensors that have copies."""
        self._misses = 0
        # The values that this attempt copies, in order; and the attempt before, if it failed.
        self._order: list[Key] = []
        self._before: list[Key] = []
        self.missing: dict[Key, Tensor] = {}
        self.used: dict[Key, Tensor] = {}
        """The copies that this attempt uses."""
        for t in foreseen:
            self.missing[bits_of(t)] = t

    def of(self, t: Tensor) -> Tensor | None:
        """Return the device's copy of a host tensor; None if there is none yet."""
        key, place = bits_of(t), len(self._order)
        self._order.append(key)
        copy = self._copies.get(key)
        if place < len(self._before) and key != self._before[place]:
            copy, self._misses = None, MISSES  # it varies: more attempts are of no use
        if copy is None:
            self.missing[key] = t.detach().clone()
        else:
            self.used[key] = copy
        return copy

    def swapped(self, name: str, args: Any, host: Sequence[Tensor]) -> Any:
        """Return the arguments of an operation with the device's copies of host tensors.

        Raises:
            CaptureError: OL103, a copy is missing.
        """
        copies: dict[int, Tensor] = {}
        for t in host:
            copy = self.of(t)
            if copy is None:
                name = name.removeprefix("aten::")
                raise error_here("OL103", f"`{name}` copies {named(t)} across")
            copies[id(t)] = copy
        return mapped(args, lambda value: copies.get(id(value), value))

    def misses(self) -> bool:
        """Return whether a failed attempt is to be repeated with the copies that it lacked."""
        self._misses += bool(self.missing)
        self._before = self._order if self.missing else []
        return bool(self.missing) and not self.exhausted

    @property
    def exhausted(self) -> bool:
        """True after `MISSES` attempts that lacked a copy."""
        return self._misses >= MISSES

    def make(self) -> None:
        """Make the copies that are missing, outside of a capture."""
        missing, self.missing, self.used, self._order = self.missing, {}, {}, []
        with torch.inference_mode(False), torch.no_grad():
            for key, t in missing.items():
                self._copies[key] = t.to(self._device)
                self.copied.append(t)


FILLS = frozenset({"aten::masked_fill", "aten::masked_fill_"})


def fill_on_device(
    name: str, args: Sequence[Any], is_here: Callable[[Tensor], bool]
) -> Callable[..., Tensor] | None:
    """Return a function that does ``x.masked_fill(mask, value)`` with a tensor for a value, with
    the same bits; None for a number or a host tensor.

    Args:
        name: one of `FILLS`.
        is_here: returns whether a tensor is on the device.
    """
    target, _, value = args
    if not isinstance(value, Tensor) or value.dtype != target.dtype or not is_here(value):
        return None
    return _fill if name.endswith("_") else _filled


def _fill(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return target.copy_(torch.where(mask, value, target))


def _filled(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return _fill(target.masked_fill(mask, 0), mask, value)  # in the layout that torch gives it
