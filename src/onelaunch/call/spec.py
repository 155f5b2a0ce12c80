"""Signatures of calls: the facts that must be equal for a replay to be legal.

A `CallSpec` is hashable data about one call: the tree of arguments with its constants, the tensors,
their overlaps, and torch's modes in force. State behind the arguments (parameters, attributes) is
not here: see `state`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.ambient import MODES
from onelaunch.call.tree import Container, Tree
from onelaunch.call.wrappers import is_compound
from onelaunch.errors import text_of


class TensorSpec(NamedTuple):
    """The properties of a tensor by which a kernel may be chosen."""

    kind: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    conj: bool
    neg: bool
    inference: bool

    @staticmethod
    def of(t: Tensor) -> TensorSpec:
        return TensorSpec(
            type(t),
            tuple(t.shape),
            t.stride(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_conj(),
            t.is_neg(),
            t.is_inference(),
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"

    @property
    def extent_bytes(self) -> int:
        return extent_bytes(self.shape, self.stride, self.dtype)

    @property
    def dense(self) -> bool:
        """True if the elements fill a run of memory, so that a memcpy can carry them."""
        if 0 in self.shape:
            return True
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The signature of one call."""

    tree: Tree
    tensors: tuple[TensorSpec, ...]
    overlaps: tuple[tuple[int, int, int | None], ...]
    """(i, j, bytes): tensors i and j share memory, and j starts some bytes after i. (i, j, None):
    both are the same tensor."""
    modes: tuple[object, ...]
    device: torch.device

    def without_sizes(self) -> CallSpec:
        """Return the part of the signature that calls of all sizes share."""
        tensors = tuple(t._replace(shape=(len(t.shape),), stride=()) for t in self.tensors)
        return replace(self, tensors=tensors)

    def __str__(self) -> str:
        return ", ".join(str(t) for t in self.tensors) or "no tensors"

    def __repr__(self) -> str:  # all fields would fill the screen
        return f"<CallSpec {self}>"

    def difference(self, other: CallSpec, paths: Sequence[str]) -> tuple[str, str]:
        """Return where and how `other` differs: ``("args[0], dim 1", "captured 8, got 9")``."""
        for mine, theirs, path in zip(self.tensors, other.tensors, paths, strict=False):
            if mine == theirs:
                continue
            if len(mine.shape) == len(theirs.shape) and mine.dtype == theirs.dtype:
                for dim, (a, b) in enumerate(zip(mine.shape, theirs.shape, strict=True)):
                    if a != b:
                        return f"{path}, dim {dim}", f"captured {a}, got {b}"
            for field in TensorSpec._fields:
                a, b = getattr(mine, field), getattr(theirs, field)
                if a != b:
                    return f"{path}.{field}", f"captured {a}, got {b}"
        if self.tree != other.tree:
            return tree_difference(self.tree, other.tree)
        if self.overlaps != other.overlaps:
            return "arguments", "they share memory in another way than the captured ones"
        for name, a, b in zip(
            ("autocast, grad mode or matmul precision", *(name for name, _ in MODES)),
            self.modes,
            other.modes,
            strict=True,
        ):
            if a != b and isinstance(a, str) and isinstance(b, str):  # the text of torch's guard
                return _state_difference(name, a, b)
            if a != b:
                return name, f"captured {a}, got {b}"
        return "default device", f"captured {self.device}, got {other.device}"


def _state_difference(name: str, mine: str, theirs: str) -> tuple[str, str]:
    """Return which mode differs in the text of torch's `GlobalStateGuard`."""
    try:
        captured, got = json.loads(mine), json.loads(theirs)
    except ValueError:  # torch may change the text
        return name, "set otherwise than in the capture"
    for key, value in captured.items():
        if value != got.get(key):
            if key == "autocast_state":
                return _autocast_difference(value, got[key])
            return str(key).replace("_", " "), _captured_and_got(key, value, got.get(key))
    return name, "set otherwise than in the capture"


_AUTOCASTS = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
"""The devices of a `GlobalStateGuard`'s autocast, in its order."""
_DTYPES = {5: "float16", 6: "float32", 7: "float64", 15: "bfloat16"}
"""c10::ScalarType -> its name, for dtypes that can be the default or autocast's."""


def _captured_and_got(key: str, captured: Any, got: Any) -> str:
    """Describe a mode then and now. Torch's text has numbers for dtypes."""
    if key.endswith("dtype"):
        captured, got = _DTYPES.get(captured, captured), _DTYPES.get(got, got)
    elif key.endswith("enabled"):
        captured, got = (("off", "on")[bool(value)] for value in (captured, got))
    return f"captured {captured}, got {got}"


def _autocast_difference(captured: dict[str, Any], got: dict[str, Any]) -> tuple[str, str]:
    """Name the device whose autocast differs: on or off, else its dtype, else the cache."""
    for key in ("enabled", "dtype"):
        for kind, a, b in zip(_AUTOCASTS, captured.get(key, ()), got.get(key, ()), strict=False):
            if a != b:
                return f"autocast on {kind}", _captured_and_got(key, a, b)
    a, b = captured.get("cached_enabled"), got.get("cached_enabled")
    return "autocast", f"captured cache_enabled={a}, got cache_enabled={b}"


def tree_difference(mine: Tree, theirs: Tree, path: str = "") -> tuple[str, str]:
    """Return where and how two trees of calls differ, as `CallSpec.difference` does."""
    if not isinstance(mine, Container) or not isinstance(theirs, Container):
        return path, f"captured {mine!r}, got {theirs!r}"
    if mine.kind is not theirs.kind or len(mine.children) != len(theirs.children):
        return path, (
            f"captured {mine.kind.__name__} of {len(mine.children)}, "
            f"got {theirs.kind.__name__} of {len(theirs.children)}"
        )
    if mine.keys != theirs.keys:
        return path, f"captured keys {text_of(list(mine.keys))}, got {text_of(list(theirs.keys))}"
    for index, (a, b) in enumerate(zip(mine.children, theirs.children, strict=True)):
        if a != b:
            place = path + mine.steps()[index] if path else ("args", "kwargs")[index]
            return tree_difference(a, b, place)
    return path, "the same"


def extent_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize


def has_strides(t: Tensor) -> bool:
    """Return whether a tensor is memory with sizes and strides: not nested, not compound."""
    return t.layout is torch.strided and not t.is_nested and not is_compound(t)


def layout_of(t: Tensor) -> str:
    """Return a text with the layout of a tensor that has no strides."""
    return "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"


def overlaps_itself(t: Tensor) -> bool:
    """Return whether several elements of a tensor may share an address: expanded, unfolded."""
    reach = 1
    for step, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and step < reach:
            return True
        reach += (n - 1) * step
    return False


def lies_on(t: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is plain memory of a device of this kind."""
    return t.device.type == device.type and has_strides(t)


def contiguous_stride(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides of a dense tensor. `order`: its dimensions, the outermost first."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
