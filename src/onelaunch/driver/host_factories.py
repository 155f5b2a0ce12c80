"""Tensors that torch makes from Python numbers, and copies to the device unseen by modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from onelaunch.call.ambient import default_device
from onelaunch.driver.function_modes import UnnoticedMode, call
from onelaunch.driver.host_reads import FACTORIES, is_places, parts_of

_C: Any = torch._C
_saving_hooks: Callable[[bool], object] = _C._autograd._top_saved_tensors_default_hooks
_ALIGN: tuple[Any, ...] = (torch.ctc_loss, torch.nn.functional.ctc_loss)
_LENGTHS = ("input_lengths", "target_lengths")
_PUTS: tuple[Any, ...] = (Tensor.index_put, torch.index_put, Tensor.index_put_, torch.index_put_)


class HostFactories(UnnoticedMode):
    """A mode that makes tensors of Python numbers on the host, and copies them by an operation that
    modes see. Then ``torch.tensor([1, 2], device="cuda")`` and ``x[:, [0, 2]]`` make a host tensor
    and a copy, and autograd keeps the copy. In a capture the `Observer` swaps it for a copy that
    the recording keeps; see `watch.device_constants`. `whole`: True if a backward, if there is one,
    runs while the mode is on. `masks`: whether the host counts its own masks, and the device's
    masks are filled. Compiled code has ways of its own."""

    concerns = frozenset({*FACTORIES, *_PUTS, Tensor.__getitem__, Tensor.__setitem__, *_ALIGN})

    def __init__(self, device: torch.device, whole: bool = False, masks: bool = True) -> None:
        super().__init__()
        self._masks = masks
        self._kind = device.type
        self._whole = whole

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of torch's, by way of the host if it makes a tensor."""
        if func is Tensor.__setitem__ or func in _PUTS:
            done = self._filled(func, args, kwargs)
            if done is not None:
                return done[0]
        if self._kind == "cpu":  # nothing is brought anywhere
            return call(func, types, args, kwargs)
        if func in _ALIGN:
            args = (*args[:2], *map(_read_by_host, args[2:4]), *args[4:])
            kwargs |= {name: _read_by_host(kwargs[name]) for name in _LENGTHS if name in kwargs}
        if func in FACTORIES:
            device = self._target(func, args, kwargs)
            if device is not None:
                return _by_way_of_the_host(func, args, kwargs, device)
        elif func is Tensor.__getitem__ and args[0].device.type == self._kind:
            args = (args[0], self._brought(args[1], args[0].device))
        elif func is Tensor.__setitem__ and args[0].device.type == self._kind:
            x, index, value = args
            index = self._brought(index, x.device)
            if _is_gathered(index) and isinstance(value, bool | int | float | complex):
                # Else autograd brings a number to the device too, in the backward.
                value = torch.tensor(value, dtype=x.dtype).to(x.device)
            args = (x, index, value)
        elif func in _PUTS and len(args) > 2 and args[0].device.type == self._kind:
            x, index, *rest = args
            args = (x, self._brought(tuple(index), x.device), *rest)
        return call(func, types, args, kwargs)

    def _filled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor | None] | None:
        """Do ``x[mask] = value`` and the like without counting the mask, and return the result in a
        tuple. None where that is impossible."""
        if len(args) < 3 or kwargs.get("accumulate", any(args[3:])):
            return None
        x, index, value = args[:3]
        if not self._masks or x.device.type != self._kind or self._must_save_alike():
            return None
        mask = index[0] if func in _PUTS and len(index) == 1 else index
        if not _is_masked_by(mask, x):
            return None
        if isinstance(value, torch.SymFloat) and x.device.type != "cpu":
            # A stand-in for a number: torch would put a tensor of the device, and count the mask.
            value = torch.full((), cast(Any, value), dtype=x.dtype, device=x.device)
        if not isinstance(value, Tensor) or not _fills(value, x, mask):
            return None
        wide = mask[(..., *[None] * (x.dim() - mask.dim()))]
        filled = torch.where(wide, _row(value, x, mask), x)
        if func in _PUTS[:2]:
            return (filled,)
        if x.requires_grad and torch.is_grad_enabled():
            x.masked_fill_(wide, 0)  # its gradient is eager's; that of `copy_` would add zeros
        with torch.no_grad():
            x.copy_(filled)
        return (None if func is Tensor.__setitem__ else x,)

    def _brought(self, index: Any, device: torch.device) -> Any:
        return _brought(index, device, self._must_save_alike() or not self._masks)

    def _must_save_alike(self) -> bool:
        """Return whether autograd must save the same tensors as in eager. A checkpoint compares
        them with its second forward, in a backward where this mode may be off."""
        return not self._whole and torch.is_grad_enabled() and _saving_hooks(False) is not None

    def _target(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
        """Return the new tensor's device, if it is ours and the data are no tensor."""
        method = func is Tensor.new_tensor
        data = args[method] if len(args) > method else next(iter(kwargs.values()))
        if isinstance(data, Tensor):
            return None
        device = kwargs.get("device")
        if device is None and func is torch.as_tensor and len(args) > 2:
            device = args[2]
        if device is None:
            device = args[0].device if method else default_device()
        device = torch.device(device)
        return device if device.type == self._kind else None


def _read_by_host(lengths: Any) -> Any:
    """Return the lengths of `ctc_loss` as numbers, if torch reads them on the host. Under a
    dispatch mode torch would compute with them instead, beside tensors of the device."""
    on_host = isinstance(lengths, Tensor) and lengths.device.type == "cpu"
    return lengths.tolist() if on_host else lengths


def _by_way_of_the_host(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> Tensor:
    wants_grad = kwargs.get("requires_grad", False)
    options: dict[str, Any] = {"dtype": kwargs.get("dtype"), "device": "cpu"}
    if func is Tensor.new_tensor:
        data = args[1] if len(args) > 1 else kwargs["data"]
        host = args[0].new_tensor(data, **options)
    else:
        data = args[0] if args else next(v for k, v in kwargs.items() if k in ("data", "obj"))
        if func is torch.as_tensor and len(args) > 1:
            options["dtype"] = args[1]
        # A copy: torch would not report writes to a shared array.
        host = torch.tensor(data, **options)
    moved = host.to(device)
    return moved.requires_grad_() if wants_grad else moved


def _is_masked_by(mask: Any, x: Tensor) -> TypeGuard[Tensor]:
    """Return whether an index is one mask on the device, as large as the first dimensions."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype is torch.bool
        and mask.device == x.device
        and mask.dim() > 0
        and mask.shape == x.shape[: mask.dim()]
    )


def _fills(value: Tensor, x: Tensor, mask: Tensor) -> bool:
    """Return whether each place of a mask gets the same value: a number or a row. The gradient of a
    value would be summed in another order than eager's."""
    if value.dtype != x.dtype or (value.requires_grad and torch.is_grad_enabled()):
        return False
    if value.numel() == 1:
        return x.device.type != "cpu"  # where torch does it by a fill
    rest, row = x.shape[mask.dim() :], value.shape
    if len(row) == len(rest) + 1 and row[0] == 1:
        row = row[1:]
    sizes = zip(reversed(row), reversed(rest), strict=False)
    fits = len(row) <= len(rest) and all(size in (1, of) for size, of in sizes)
    return fits and value.device == x.device


def _row(value: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    if value.numel() == 1:
        return value.to(x.device).view(())
    return value[0] if value.dim() > x.dim() - mask.dim() else value


def _is_gathered(index: Any) -> bool:
    """Return whether an index has tensors of places in it; a mask is filled by a number."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return bool(tensors) and all(t.dtype not in (torch.bool, torch.uint8) for t in tensors)


def _brought(index: Any, device: torch.device, alike: bool) -> Any:
    """Return an index with tensors on the device for its lists, arrays and host tensors; itself if
    it has none. `alike`: whether host tensors and masks stay, as autograd saves them unchanged."""
    given = parts_of(index)
    parts: list[Any] = []
    for part in given:
        places = torch.tensor(part) if is_places(part) else part
        on_host = isinstance(places, Tensor) and places.device.type == "cpu" and places.dim() > 0
        if not on_host or (alike and (part is places or places.dtype is torch.bool)):
            parts.append(part)
        elif places.dtype is torch.bool:  # a mask would be counted on the device
            parts += [at.to(device) for at in places.nonzero().unbind(1)]
        else:
            parts.append(places.to(device))
    same = len(parts) == len(given) and all(a is b for a, b in zip(parts, given, strict=True))
    return index if same else tuple(parts)
