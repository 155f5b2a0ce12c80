"""Tensors that torch makes from Python numbers, and copies to the device unseen by modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.call.ambient import default_device
from onelaunch.driver.host_reads import UnnoticedMode, is_by_list

_FACTORIES: tuple[Any, ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_INDEXING: tuple[Any, ...] = (Tensor.__getitem__, Tensor.__setitem__)


class HostFactories(UnnoticedMode):
    """A mode that makes such tensors on the host, and copies them by an operation that modes see.

    Then ``torch.tensor([1, 2], device="cuda")`` and ``x[:, [0, 2]]`` make a host tensor and a copy
    of it, and autograd keeps the copy. In a capture the `Observer` swaps it for one that the
    recording keeps; see `watch.lifted`.

    Args:
        device: the device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._kind == "cpu":  # nothing is brought anywhere
            return func(*args, **kwargs)
        if func in _FACTORIES:
            device = self._target(func, args, kwargs)
            if device is not None:
                return _by_way_of_the_host(func, args, kwargs, device)
        elif func in _INDEXING and args[0].device.type == self._kind:
            if _is_on_host(args[1]):
                args = (args[0], _brought(args[1], args[0].device), *args[2:])
            if func is Tensor.__setitem__ and _is_gathered(args[1]) and _is_number(args[2]):
                # Else autograd brings a number to the device too, in the backward.
                value = torch.tensor(args[2], dtype=args[0].dtype).to(args[0].device)
                args = (args[0], args[1], value)
        return func(*args, **kwargs)

    def _target(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
        """Return the new tensor's device, if it is our device and the data are no tensor; or
        None."""
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
    made = host.to(device)
    return made.requires_grad_() if wants_grad else made


def _is_on_host(index: Any) -> bool:
    """Return whether an index contains lists of numbers or host tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return is_by_list(index) or any(
        isinstance(part, Tensor) and part.device.type == "cpu" and part.dim() for part in parts
    )


def _is_gathered(index: Any) -> bool:
    """Return whether an index has tensors of places in it; a mask is filled by a number."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return bool(tensors) and all(t.dtype not in (torch.bool, torch.uint8) for t in tensors)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _brought(index: Any, device: torch.device) -> tuple[Any, ...]:
    """Return an index with its lists and host tensors replaced by tensors on the device."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        given = torch.tensor(part) if is_by_list(part) else part
        if not isinstance(given, Tensor) or given.device.type != "cpu" or not given.dim():
            parts.append(part)
        elif given.dtype is torch.bool:  # a mask would be counted on the device
            parts += [places.to(device) for places in given.nonzero().unbind(1)]
        else:
            parts.append(given.to(device))
    return tuple(parts)
