"""`prefetch`: batches on the device before they are needed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

Batch = TypeVar("Batch")


class Prefetch(Generic[Batch]):
    """The batches of a loader on a device; see `prefetch`. As often as the loader can be read."""

    def __init__(self, loader: Iterable[Batch], device: torch.device | str) -> None:
        self.loader = loader
        self.device = torch.device(device)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        if self.device.type == "cuda":
            from onelaunch.driver.cuda.prefetch import copied_ahead

            return copied_ahead(batches, self.device, mapped)
        return (mapped(batch, lambda t: t.to(self.device)) for batch in batches)

    def __len__(self) -> int:
        """That of the loader, if it has one."""
        return len(cast(Sized, self.loader))

    def __repr__(self) -> str:
        return f"<onelaunch.prefetch of a {type(self.loader).__name__} to {self.device}>"


def prefetch(loader: Iterable[Batch], device: torch.device | str) -> Prefetch[Batch]:
    """The batches of `loader` on `device`, the copy of each overlapped with the work on the last.

    On a GPU a batch is copied from pinned memory, on a stream of its own, while the batch before it
    is worked on; `tensor.to(device, non_blocking=True)` alone would wait its turn among the
    kernels. A loader that pins (`DataLoader(..., pin_memory=True)`) saves the copy to pinned
    memory. On a CPU the batches come as they are.

    Args:
        loader: anything that can be iterated. Its batches: tensors in tuples, lists, dicts, named
            tuples and dataclasses, nested at will; all else in them comes through as it is.
        device: where to.

    Returns:
        What can be iterated as often as `loader`, and has its length. Its tensors are the
        caller's, to keep and to change. Two batches are on the device at a time, and up to four
        more while work that was queued on them is not done.

    Raises:
        Whatever the loader raises, after the batches before it.

    Example:
        >>> import torch, onelaunch as ol
        >>> [batch["x"].sum().item() for batch in ol.prefetch([{"x": torch.ones(3)}], "cpu")]
        [3.0]
    """
    return Prefetch(loader, device)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor in its containers changed, one that is there twice only once."""
    seen: dict[int, Tensor] = {}

    def once(t: Tensor) -> Tensor:
        if id(t) not in seen:
            seen[id(t)] = change(t)
        return seen[id(t)]

    return _mapped(value, once)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        made = copy.copy(cast(Any, value))  # whatever kind of mapping it is
        for key, part in list(cast(Mapping[Any, Any], value).items()):
            made[key] = _mapped(part, change)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change) for part in cast(tuple[Any, ...], value)))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in cast(tuple[Any, ...], value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), change))
        return made
    return value
