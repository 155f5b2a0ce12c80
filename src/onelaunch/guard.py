"""Whether what a recording relies on, behind its arguments, is still as it was.

Two things are checked at every call: that each slot holds the very object it held (the parameter,
the submodule, the flag), and that each tensor read by address is still there, laid out as it was
(`p.data = ...`, `set_`, `resize_` move a tensor without replacing it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from onelaunch.state import MISSING, Slot
from onelaunch.tree import Constant, is_plain

_C: Any = torch._C


class StateGuard:
    """The state that a recording was captured in.

    Args:
        slots: (slot, what it must hold); tensors, modules and code by identity, plain values by
            type and bits.
        tensors: tensors that the graph reads or writes by address; kept alive.
        hooks: the dicts of hooks of the submodules, whose hooks run inside the capture.
    """

    def __init__(
        self,
        slots: Iterable[tuple[Slot, object]],
        tensors: Iterable[Tensor],
        hooks: Sequence[dict[int, Any]] = (),
    ) -> None:
        dicts: list[tuple[Slot, object]] = []
        others: list[tuple[Slot, object]] = []
        for slot, value in slots:
            plain_dict = slot.kind == "item" and isinstance(slot.holder, dict)
            (dicts if plain_dict else others).append((slot, value))
        self._slots = [slot for slot, _ in dicts]
        self._holders = [slot.holder for slot, _ in dicts]
        self._keys = [slot.key for slot, _ in dicts]
        self._values = [value for _, value in dicts]
        self._others = others
        self._hooks = [(hooked, tuple(hooked.values())) for hooked in hooks]
        self._hooked = any(hooked for hooked in hooks)
        self._registrations = RemovableHandle.next_id
        self.tensors = list(tensors)
        self._addresses = [t.data_ptr() for t in self.tensors]
        self._layouts = [(t.shape, t.stride(), t.dtype) for t in self.tensors]
        self.check = self._build()

    def _build(self) -> Any:
        """The check, with all that it needs bound."""
        holders, keys, values = self._holders, self._keys, self._values
        others = [(slot.read, value) for slot, value in self._others]
        tensors, addresses, layouts = self.tensors, self._addresses, self._layouts
        get, compare = dict.get, self._same_values
        plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        address = Tensor.data_ptr if plain else methodcaller("data_ptr")

        def check() -> bool:
            # Every registration of a hook anywhere takes a number; a removal can matter only
            # where there was one to remove.
            if (self._hooked or RemovableHandle.next_id != self._registrations) and (
                not self._same_hooks()
            ):
                return False
            if not all(map(is_, map(get, holders, keys), values)) and not compare():
                return False
            for read, value in others:
                content = read()
                if content is not value and not (
                    is_plain(value) and Constant(value).matches(content)
                ):
                    return False
            if list(map(address, tensors)) != addresses:
                return False
            return all(
                t.shape == shape and t.stride() == stride and t.dtype is dtype
                for t, (shape, stride, dtype) in zip(tensors, layouts, strict=True)
            )

        return check

    def _same_hooks(self) -> bool:
        self._registrations = RemovableHandle.next_id
        same = all(tuple(hooked.values()) == before for hooked, before in self._hooks)
        if not same:
            self._registrations = -1
        return same

    def _same_values(self) -> bool:
        """Compare by value where identity failed: an equal float is another object each time."""
        for index, value in enumerate(self._values):
            content = self._holders[index].get(self._keys[index], MISSING)
            if content is value:
                continue
            if not is_plain(value) or not Constant(value).matches(content):
                return False
            self._values[index] = content
        return True

    def moved(self) -> str | None:
        """The name of a tensor that is gone from its slot or memory for good, or None.

        A flag that differs can come back, so a recording waits for it; a moved parameter does not.
        """
        for slot, value in zip(self._slots, self._values, strict=True):
            if isinstance(value, Tensor) and slot.read() is not value:
                return slot.name
        for slot, value in self._others:
            if isinstance(value, Tensor) and slot.read() is not value:
                return slot.name
        for index, t in enumerate(self.tensors):
            if t.data_ptr() != self._addresses[index]:
                return self._name(t, index)
            if (t.shape, t.stride(), t.dtype) != self._layouts[index]:
                return self._name(t, index)
        return None

    def difference(self) -> str | None:
        """The name of what differs, with what it was and is, or None."""
        moved = self.moved()
        if moved is not None:
            return f"{moved} moved"
        if not self._same_hooks():
            return "hooks of a submodule"
        pairs = [*zip(self._slots, self._values, strict=True), *self._others]
        for slot, value in pairs:
            content = slot.read()
            if content is not value and not (is_plain(value) and Constant(value).matches(content)):
                return f"{slot.name}: captured {value!r:.40}, got {content!r:.40}"
        return None

    def names(self) -> list[str]:
        """The slots whose tensors are read by address."""
        pairs = [*zip(self._slots, self._values, strict=True), *self._others]
        return [slot.name for slot, value in pairs if isinstance(value, Tensor)]

    def _name(self, t: Tensor, index: int) -> str:
        for slot, value in [*zip(self._slots, self._values, strict=True), *self._others]:
            if value is t:
                return slot.name
        return f"tensor {index}"

    def untraced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of `tensors` that no guarded slot holds."""
        held = {id(value) for value in self._values} | {id(value) for _, value in self._others}
        return [t for t in tensors if id(t) not in held]
