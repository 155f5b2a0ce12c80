"""A guard's expectations of tensors and containers, as data that a capture makes once.

A check of another request's objects is built from the same data, and never from those objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.wrappers import local
from onelaunch.state.native_guard import native_guard

_Facts = tuple[int, type, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]
"""Address, class, sizes, strides, dtype, and whether it is a conjugate or negative view."""


class Layout(NamedTuple):
    """The memory and layout of a tensor."""

    facts: _Facts
    requires_grad: bool | None
    """None if either value will do."""
    number: int | None
    """The number of the dtype in C; None where C does not see the layout."""

    @classmethod
    def of(cls, t: Tensor, grads_matter: bool) -> Layout:
        """Return the layout of a tensor; a wrapper has its local tensor's."""
        return cls(_facts_of(t), t.requires_grad if grads_matter else None, _number(t))

    def kept(self, t: Tensor) -> bool:
        """Return whether a tensor has this layout and address."""
        return _facts_of(t) == self.facts and self.grad_kept(t)

    def moved(self, t: Tensor) -> bool:
        """Return whether a tensor has another layout or address; `requires_grad` is ignored."""
        return _facts_of(t) != self.facts

    def differs(self, t: Tensor) -> bool:
        """Return whether a tensor has another layout; the address is ignored."""
        return _facts_of(t)[1:] != self.facts[1:]

    def reshaped(self, t: Tensor) -> bool:
        """Return whether a tensor has other sizes or strides."""
        return _facts_of(t)[2:4] != self.facts[2:4]

    def grad_kept(self, t: Tensor) -> bool:
        return self.requires_grad is None or t.requires_grad is self.requires_grad

    @property
    def for_c(self) -> tuple[object, ...]:
        """The arguments of `remember` in guard.c."""
        address, kind, shape, stride, *_ = self.facts
        return kind, address, self.number, shape, stride, self.requires_grad


def _facts_of(t: Tensor) -> _Facts:
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
            return cls(len(container), None)
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
