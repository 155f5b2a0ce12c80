"""The slots of a TorchScript module, whose contents lie outside Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onelaunch.call.tree import is_plain
from onelaunch.frames.stack import Use
from onelaunch.state.slots import MISSING, Slot

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
    inner, known = module._c, vars(module).get("_concrete_type")
    tensors: tuple[Any, ...] = (torch._C.ParameterDict(inner), torch._C.BufferDict(inner))
    keys = [*(key for held in tensors for key in dict(held.items())), "training"]
    if known is not None:
        keys += known.get_attributes()
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
