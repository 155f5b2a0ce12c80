"""Tensors that torch makes from Python numbers, and copies to the device unseen by modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.call.ambient import default_device
from onelaunch.driver.host_reads import is_by_list, without_notice
from onelaunch.unwinding import FunctionMode

_FACTORIES: tuple[Any, ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_INDEXING: tuple[Any, ...] = (Tensor.__getitem__, Tensor.__setitem__)


class HostFactories(FunctionMode):
    """A mode that makes such tensors on the host, and copies them by an operation that modes see.

    Then ``torch.tensor([1, 2], device="cuda")`` and ``x[:, [0, 2]]`` make a host tensor and a copy
    of it, and autograd keeps the copy.

    Args:
        device: the device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type

    def __enter__(self) -> HostFactories:
        without_notice.begin()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        without_notice.end()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            device = self._target(func, args, kwargs)
            if device is not None:
                return _by_way_of_the_host(func, args, kwargs, device)
        elif func in _INDEXING and args[0].device.type == self._kind and _is_on_host(args[1]):
            args = (args[0], _brought(args[1], args[0].device), *args[2:])
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
