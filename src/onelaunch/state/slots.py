"""The places that hold what a callable reads."""

from __future__ import annotations

import contextvars
import functools
import operator
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

Kind = Literal["item", "cell", "of", "contents"]
"""How a slot is read: ``holder[key]``, ``holder.cell_contents`` or ``key(holder)``; the last as
``"contents"`` where the guard's C does not know the key."""


class Slot(NamedTuple):
    """One place that holds a value: a dict entry, a list item, or a closure cell."""

    kind: Kind
    holder: Any
    key: Any
    name: str
    owner: Any
    """The object whose attribute the slot is, or None."""
    via: Slot | None = None
    """The slot that led here: its content is, or holds, this slot's holder."""

    @property
    def id(self) -> tuple[int, object]:
        return (id(self.holder), self.key)

    def read(self) -> object:
        """What the slot holds, or `MISSING`; whatever a class of containers shows of itself."""
        holder = self.holder
        kind: type = type(holder)
        if kind is dict and self.kind == "item":  # nearly all of them
            return holder.get(self.key, MISSING)
        try:
            if self.kind == "cell":
                return holder.cell_contents
            if self.kind in ("of", "contents"):
                return self.key(holder)
            if isinstance(holder, dict):
                return dict.get(cast(dict[Any, Any], holder), self.key, MISSING)
            if isinstance(holder, tuple):
                return tuple.__getitem__(cast(tuple[Any, ...], holder), self.key)
            return holder[self.key]
        except (AttributeError, LookupError, ValueError, TypeError):
            return MISSING

    def shown(self, value: object) -> str:
        """A value of the slot in a message: the numbers of an array, whose bytes are read."""
        if self.kind == "contents" and isinstance(value, bytes):
            with suppress(TypeError, ValueError, NotImplementedError):  # `cast` knows plain numbers
                kind: Any = memoryview(self.holder).format
                value = memoryview(value).cast(kind).tolist()
        return repr(value)[:40]

    def write(self, value: object) -> None:
        """Put `value` in, as the callable did."""
        if self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind in ("of", "contents") or isinstance(self.owner, type):
            self._assign(value)
        elif value is MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value

    def _assign(self, value: object) -> None:
        """Write an attribute whose place is no dict that may be written: a class's, or a slot."""
        if self.key is gradient_of:
            self.holder.grad = None if value is MISSING else value
            return
        if isinstance(self.key, ScriptAttribute):
            self.holder.setattr(self.key.name, value)
            return
        if isinstance(self.holder, contextvars.ContextVar):
            self.holder.set(value)
            return
        if isinstance(value, bytes):
            _put_back(self.holder, value)
            return
        member = getattr(self.key, "__self__", None)
        if isinstance(member, types.MemberDescriptorType):
            holder, name = self.holder, member.__name__
        elif isinstance(self.owner, type):
            holder, name = self.owner, self.key
        else:
            return  # what a set holds is no tensor, and its changes stay
        delattr(holder, name) if value is MISSING else setattr(holder, name, value)


def _put_back(array: Any, content: bytes) -> None:
    """Have an array hold what was read of it, unless it has grown: then its changes stay."""
    view = memoryview(array)
    if view.nbytes != len(content) or view.readonly or "O" in view.format:
        return
    if view.c_contiguous:
        view.cast("B")[:] = content
    else:  # numpy's
        array[...] = type(array)(array.shape, array.dtype, content)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class ScriptAttribute:
    """Reads an attribute of a TorchScript module."""

    name: str

    def __call__(self, module: Any) -> object:
        return module.getattr(self.name)


def function_of(partial: functools.partial[Any]) -> object:
    """What a partial calls, and what it gives; as its state is set, all of them are others."""
    return partial.func


def arguments_of(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return partial.args


def keywords_of(partial: functools.partial[Any]) -> dict[str, Any]:
    return partial.keywords


def code_of(fn: types.FunctionType) -> types.CodeType:
    """The code of a function, which can be replaced in place."""
    return fn.__code__


def defaults_of(fn: types.FunctionType) -> tuple[Any, ...] | None:
    return fn.__defaults__


def keyword_defaults_of(fn: types.FunctionType) -> dict[str, Any] | None:
    return fn.__kwdefaults__


def is_same_method(a: object, b: object) -> bool:
    """Whether both are one function bound to one object; each look at it makes another method."""
    if not (isinstance(a, types.MethodType) and isinstance(b, types.MethodType)):
        return False
    return a.__self__ is b.__self__ and a.__func__ is b.__func__


@dataclass(frozen=True)
class _Look:
    """Reads what Python can ask of the tensor in a slot but for its elements."""

    kind: Kind
    key: Any

    def __call__(self, holder: Any) -> str:
        t = Slot(self.kind, holder, self.key, "", None).read()
        if not isinstance(t, Tensor):
            return "no tensor"
        strides = t.stride() if t.layout is torch.strided else None
        return f"{type(t)} {t.dtype} {t.device} {t.requires_grad} {tuple(t.shape)} {strides}"


def look_at(slot: Slot) -> Slot:
    """A slot of what the tensor in a slot is, whichever it is."""
    name = f"what tensor `{slot.name}` is"
    return Slot("contents", slot.holder, _Look(slot.kind, slot.key), name, None)


def gradient_of(t: Tensor) -> Tensor:
    """Raises where there is none: the slot is empty."""
    if not t.is_leaf or t.grad is None:
        raise LookupError
    return t.grad


def has_gradient(t: Tensor) -> bool:
    """Whether a leaf has a gradient."""
    return read_gradient(t) is not None


_base: Any = torch._C.TensorBase
read_gradient: Callable[[Tensor], Tensor | None] = _base.grad.__get__
"""`leaf.grad` without Python's share of it: 0.05 us."""


read_hooks: Any = _base._backward_hooks.__get__
read_last_hooks: Any = _base._post_accumulate_grad_hooks.__get__
"""The dicts of a tensor's hooks, or None: 0.05 us each."""


def same_hooks(leaves: Sequence[Tensor]) -> Callable[[], bool]:
    """What tells whether each leaf has the hooks that it has now: 0.1 us for each."""
    hooks, last_hooks = list(map(read_hooks, leaves)), list(map(read_last_hooks, leaves))
    dicts = [entries for entries in (*hooks, *last_hooks) if entries]

    def all_keys() -> list[list[int]]:
        dicts = (*map(read_hooks, leaves), *map(read_last_hooks, leaves))
        return [list(entries or ()) for entries in dicts]

    keys, expected = list(map(list, dicts)), all_keys()

    def same() -> bool:
        return (
            all(map(operator.is_, map(read_hooks, leaves), hooks))
            and all(map(operator.is_, map(read_last_hooks, leaves), last_hooks))
            and (not dicts or list(map(list, dicts)) == keys)
        ) or all_keys() == expected

    return same


def checker(gradients: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], bool]:
    """What tells whether each leaf has the gradient given, or none where that is None: 0.05 us
    for each."""
    leaves = [leaf for leaf, _ in gradients]
    expected = [gradient for _, gradient in gradients]
    return lambda: all(map(operator.is_, map(read_gradient, leaves), expected))
