"""A guard's expectations of tensors and containers, as data that a capture makes once.

A check of another request's objects is built from the same data, and never from those objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.wrappers import local
from onelaunch.state.native_guard import native_guard


class Layout(NamedTuple):
    """The memory and layout of a tensor."""

    address: int
    kind: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool
    requires_grad: bool | None = None
    """None if either value will do."""
    number: int | None = None
    """The number of the dtype in C; None where C does not see the layout."""

    @classmethod
    def of(cls, t: Tensor, grads_matter: bool) -> Layout:
        """Return the layout of a tensor; a wrapper has its local tensor's."""
        requires_grad = t.requires_grad if grads_matter else None
        return tuple.__new__(cls, (*_read(t), requires_grad, _number(t)))

    def kept(self, t: Tensor) -> bool:
        """Return whether a tensor has this layout and address."""
        return _read(t) == self[:7] and self.grad_kept(t)

    def moved(self, t: Tensor) -> bool:
        """Return whether a tensor has another layout or address; `requires_grad` is ignored."""
        return _read(t) != self[:7]

    def differs(self, t: Tensor) -> bool:
        """Return whether a tensor has another layout; the address is ignored."""
        return _read(t)[1:] != self[1:7]

    def grad_kept(self, t: Tensor) -> bool:
        return self.requires_grad is None or t.requires_grad is self.requires_grad

    @property
    def for_c(self) -> tuple[object, ...]:
        """The arguments of `remember` in guard.c."""
        return self.kind, self.address, self.number, self.shape, self.stride, self.requires_grad


_Read = tuple[int, type, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


def _read(t: Tensor) -> _Read:
    kind, t = type(t), local(t)
    return t.data_ptr(), kind, tuple(t.shape), t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _number(t: Tensor) -> int | None:
    """Return the number of a tensor's dtype in C. None for subclasses and complex tensors: C does
    not see their layout."""
    number: Callable[[Tensor], int] | None = native_guard().number
    seen = type(t) in (Tensor, torch.nn.Parameter) and not t.is_complex()
    return number(t) if number is not None and seen else None


class Size(NamedTuple):
    """The expected length of a container, or the expected names in a dict of attributes."""

    length: int
    names: frozenset[str] | None
    """The names that must not come or go; None: the length must stay."""
    present: frozenset[str] = frozenset()
    """The names that are in the dict."""

    @classmethod
    def of(cls, container: Any, names: frozenset[str] | None) -> Size:
        if names is None:
            return _of_length(len(container))
        return cls(len(container), names, names & container.keys())

    def kept(self, container: Any) -> bool:
        """Return whether a container has the length or the names."""
        if self.names is None:
            return len(container) == self.length
        return self.names & container.keys() == self.present

    def agrees(self, other: Size) -> bool:
        """Return whether another size makes the same check."""
        same = self.names == other.names and self.present == other.present
        return same and (self.names is not None or self.length == other.length)


@functools.lru_cache(maxsize=256)
def _of_length(length: int) -> Size:
    return Size(length, None)
