"""The slots of contents that no dict or list of Python holds: arrays in host memory (NumPy's,
`array.array` and `memoryview`), and TorchScript modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onelaunch.call.tree import is_plain
from onelaunch.frames.stack import Use
from onelaunch.state.slots import MISSING, Slot

_MOST_BYTES = 1 << 14  # largest array that is compared at each call, at 0.1 us for a KB
_NAMED = re.compile(r"\.(\w+)")
_MOST_ITEMS = 64  # of a container, which is copied for each of them


@dataclass(frozen=True)
class ScriptAttribute:
    """A reader of an attribute of a TorchScript module."""

    name: str

    def __call__(self, module: Any) -> object:
        return module.getattr(self.name)

    def write(self, module: Any, value: object) -> None:
        module.setattr(self.name, value)


@dataclass(frozen=True)
class ScriptLeaf(ScriptAttribute):
    """A reader of one value in a list, tuple or dict of a TorchScript module. Python gets a new
    copy of the container at each read."""

    index: int

    def __call__(self, module: Any) -> object:
        return pytree.tree_leaves(module.getattr(self.name))[self.index]

    def write(self, module: Any, value: object) -> None:
        leaves, spec = pytree.tree_flatten(module.getattr(self.name))
        if value is not MISSING and self.index < len(leaves):  # its length is not restored
            leaves[self.index] = value
            module.setattr(self.name, pytree.tree_unflatten(leaves, spec))


def of_script(
    prefix: str, module: Any, read: frozenset[str] = frozenset()
) -> Iterator[tuple[Slot, Use]]:
    """Return the slots of a TorchScript module outside Python: its numbers, tensors and mode.

    Args:
        read: the attributes that the code of its parents names.
    """
    inner, concrete = module._c, vars(module).get("_concrete_type")
    tensors: tuple[Any, ...] = (torch._C.ParameterDict(inner), torch._C.BufferDict(inner))
    keys = [*(key for held in tensors for key in dict(held.items())), "training"]
    if concrete is not None:
        keys += concrete.get_attributes()
    else:  # a traced or loaded module tells no more than its code
        methods = [inner._get_method(name) for name in inner._method_names()]
        read |= {name for method in methods for name in _NAMED.findall(method.code)}
        keys += sorted(read)
    for key in dict.fromkeys(keys):
        if not inner.hasattr(key):  # as `training` of a frozen module
            continue
        value, readers = inner.getattr(key), [ScriptAttribute(key)]
        if isinstance(value, list | tuple | dict):
            count = len(pytree.tree_leaves(value))
            # One more, to see it grow; none of a table of numbers, which would be read for each.
            readers = [ScriptLeaf(key, i) for i in range(count + 1)] if count <= _MOST_ITEMS else []
        elif not (value is None or is_plain(value) or isinstance(value, Tensor)):
            continue
        for reader in readers:
            yield Slot("contents", inner, reader, f"{prefix}{key}", None), Use.READ
    for key, part in module.named_children():
        yield from of_script(f"{prefix}{key}.", part, read)


class ArrayItem(NamedTuple):
    """A reader of one object in a NumPy array of objects."""

    place: int

    def __call__(self, array: Any) -> object:
        return array.flat[self.place]

    def write(self, array: Any, value: object) -> None:
        array.flat[self.place] = value


def is_array(value: object) -> bool:
    return isinstance(value, memoryview) or type(value).__module__ in ("numpy", "array")


def slots_of_array(name: str, array: Any) -> Iterator[Slot]:
    """Return the slots of an array: its bytes, its layout and the objects in it. A large array has
    none."""
    if _nbytes(array) > _MOST_BYTES:
        return
    yield Slot("contents", array, type(array).tobytes, name, None)
    if type(array).__hash__ is None:  # an array, and no number of NumPy's
        yield Slot("contents", array, _layout_of, f"the layout of {name}", None)
    holds = getattr(getattr(array, "dtype", None), "hasobject", False)
    for index in range(array.size) if holds else ():
        yield Slot("contents", array, ArrayItem(index), f"{name}.flat[{index}]", None)


def _layout_of(array: Any) -> str:
    """Describe the layout of an array, which code may set in place."""
    view = memoryview(array)
    return f"{view.format} {view.shape} {view.strides} {view.readonly}"


def _nbytes(value: Any) -> int:
    try:
        return memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return _MOST_BYTES + 1
