"""Whether what a recording relies on, behind its arguments, is still as it was.

Four things are checked at every call: that the modes of torch are those of the capture, that each
slot holds the very object it held (the parameter, the submodule, the flag), that each tensor read
by address is still there, laid out as it was (`p.data = ...`, `set_`, `resize_` move a tensor
without replacing it), and in grad mode that each of them requires grad or not, as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.dtensor import local
from onelaunch.call.tree import Constant, is_plain
from onelaunch.errors import kind_of
from onelaunch.state.host_values import version_of
from onelaunch.state.native import native
from onelaunch.state.slots import (
    Slot,
    checker,
    code_of,
    defaults_of,
    gradient_of,
    is_same_method,
    keyword_defaults_of,
    same_hooks,
)

Reader = tuple[Callable[[], object], object]
"""A mode: how to read it, and the very object that must come back."""


class StateGuard:
    """The state that a recording was captured in.

    Args:
        slots: (slot, what it must hold); tensors, modules and code by identity, plain values by
            type and bits.
        tensors: tensors that the graph reads or writes by address; kept alive.
        sized: (container, names): what must keep its length; of a dict of attributes only a key
            among the names may not come or go.
        modes: modes of torch, and what they must be.
        leaves: tensors whose hooks ran in the capture, or would have.

    Attributes:
        check: whether all is as it was; changes nothing. 0.3 us, and 0.03 us for each tensor; with
            Python older than 3.12 another 0.02 us for each slot. Without a compiler on the machine
            the same in Python, ten times slower.
    """

    check: Callable[[], bool]

    def __init__(
        self,
        slots: Iterable[tuple[Slot, object]],
        tensors: Iterable[Tensor],
        sized: Sequence[tuple[Any, frozenset[str] | None]] = (),
        modes: Sequence[Reader] = (),
        leaves: Sequence[Tensor] = (),
        asks: bool = False,
    ) -> None:
        # Dicts of attributes first: those need no look unless they change.
        ordered = sorted(slots, key=lambda pair: not _is_attribute(pair[0]))
        self._slots = [slot for slot, _ in ordered]
        self._values = [value for _, value in ordered]
        self._watched = [i for i, s in enumerate(self._slots) if not _stays(s)]
        self._sized = [
            _Size(container, names)
            for container, names in sorted(sized, key=lambda pair: not isinstance(pair[0], dict))
        ]
        self._modes = list(modes)
        self.tensors = list(tensors)
        self._places = [_Place.of(t) for t in self.tensors]
        # Without grad mode what requires grad is nobody's business, and may change, unless the
        # callable asks.
        wanting = torch.is_grad_enabled() or asks
        self._grads = [t.requires_grad for t in self.tensors] if wanting else []
        self._same_hooks = same_hooks(leaves) if leaves else None
        self.check = self._native_check() or self._python_check

    def agrees(self, other: StateGuard) -> bool:
        """Whether it checks just what another does, so that one of them can serve both.

        Recordings that share a guard find it in the processor's caches: one of BERT, with all that
        it looks at, is some 100 KB.
        """
        return (
            self._same_hooks is None
            and other._same_hooks is None
            and self._modes == other._modes
            and self._grads == other._grads
            and len(self._slots) == len(other._slots)
            and len(self.tensors) == len(other.tensors)
            and len(self._sized) == len(other._sized)
            and all(a.id == b.id for a, b in zip(self._slots, other._slots, strict=True))
            and all(map(_fits, self._values, other._values))
            and all(a.agrees(b) for a, b in zip(self._places, other._places, strict=True))
            and all(a.agrees(b) for a, b in zip(self._sized, other._sized, strict=True))
        )

    def _native_check(self) -> Callable[[], bool] | None:
        """The check in C, for all that C can see; the rest around it."""
        guard = native().guard
        if guard is None:
            return None
        seen = [i for i in self._watched if _is_seen_by_c(self._slots[i])]
        watched = sum(_is_attribute(self._slots[i]) for i in seen)
        values = [self._values[i] for i in seen]
        lengths = [len(size.container) for size in self._sized]
        plain = [t for t in self.tensors if _is_laid_out_for_c(t)]
        native_guard = guard(
            tuple(read for read, _ in self._modes),
            tuple(expected for _, expected in self._modes),
            tuple(self._slots[i].holder for i in seen),
            tuple(_key_for_c(self._slots[i]) for i in seen),
            values,
            watched,
            tuple(size.container for size in self._sized),
            lengths,
            sum(isinstance(size.container, dict) for size in self._sized),
            tuple(plain),
            bool(self._grads),
        )
        quick = native_guard.check
        if quick() is not True:
            return None  # a container that shows Python something else than it holds
        unseen = [i for i in self._watched if not _is_seen_by_c(self._slots[i])]
        rest = [i for i in unseen if self._slots[i].key is not gradient_of]
        same_gradients = checker(
            [(self._slots[i].holder, _gradient(self._values[i])) for i in unseen if i not in rest]
        )
        others = [p for p in self._places if not any(p.tensor is t for t in plain)]

        def settle() -> bool:
            """Let equal values take the place of those captured, and look once more.

            What is taken is what was looked at: another thread may change it in between.
            """
            now = [len(size.container) for size in self._sized]
            contents = [self._slots[i].read() for i in seen]
            if not all(size.kept() for size in self._sized):
                return False
            if not all(map(_fits, contents, (self._values[i] for i in seen))):
                return False
            lengths[:] = now
            values[:] = contents
            return quick() is True

        hooks_kept = self._same_hooks
        if not unseen and not others and hooks_kept is None:
            return lambda: (found := quick()) is True or (found is None and settle())

        def check() -> bool:
            found = quick()
            if found is not True and (found is False or not settle()):
                return False
            return (
                same_gradients()
                and (hooks_kept is None or hooks_kept())
                and all(map(self._holds, rest))
                and all(place.kept() for place in others)
                and (not others or self._same_grads())
            )

        return check

    def _python_check(self) -> bool:
        return (
            all(read() is expected for read, expected in self._modes)
            and all(size.kept() for size in self._sized)
            and all(map(self._holds, self._watched))
            and all(place.kept() for place in self._places)
            and self._same_grads()
            and (self._same_hooks is None or self._same_hooks())
        )

    def _same_grads(self) -> bool:
        return all(
            t.requires_grad is was for t, was in zip(self.tensors, self._grads, strict=False)
        )

    def _holds(self, index: int) -> bool:
        """Whether a slot holds what it must."""
        return _fits(self._slots[index].read(), self._values[index])

    def moved(self) -> str | None:
        """The name of a tensor that is gone from its slot or memory for good, or None.

        A flag that differs can come back, so a recording waits for it; a moved parameter does not.
        """
        for slot, value in zip(self._slots, self._values, strict=True):
            if isinstance(value, Tensor) and slot.read() is not value:
                return slot.name
            if slot.key is version_of and slot.read() != value:
                return slot.name
        for index, place in enumerate(self._places):
            if not place.kept():
                return self._name(place.tensor, index)
        return None

    def difference(self) -> str | None:
        """The name of what differs, with what it was and is, or None."""
        moved = self.moved()
        if moved is not None:
            return f"{moved} moved"
        for size in self._sized:
            if not size.kept():
                return f"{kind_of(size.container)} changed its length"
        for index, slot in enumerate(self._slots):
            if not self._holds(index):
                was, now = slot.shown(self._values[index]), slot.shown(slot.read())
                return f"{slot.name}: captured {was}, got {'another' if now == was else now}"
        if not all(read() is expected for read, expected in self._modes):
            return "a mode of torch"
        if self._same_hooks is not None and not self._same_hooks():
            return "a parameter's hooks"
        for index, (t, was) in enumerate(zip(self.tensors, self._grads, strict=False)):
            if t.requires_grad is not was:
                return f"{self._name(t, index)}.requires_grad: captured {was}, got {not was}"
        return None

    def held(self) -> Iterator[tuple[Slot, object]]:
        """The slots, and what they must hold."""
        return zip(self._slots, self._values, strict=True)

    def names(self) -> list[str]:
        """The slots whose tensors are read by address."""
        return [
            slot.name
            for slot, value in zip(self._slots, self._values, strict=True)
            if isinstance(value, Tensor)
        ]

    def _name(self, t: Tensor, index: int) -> str:
        for slot, value in zip(self._slots, self._values, strict=True):
            if value is t:
                return slot.name
        return f"tensor {index}"

    def untraced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of `tensors` that no guarded slot holds."""
        held = {id(local(v)) if isinstance(v, Tensor) else id(v) for v in self._values}
        return [t for t in tensors if id(local(t)) not in held]


def _fits(content: object, value: object) -> bool:
    """Whether `content` may stand where `value` stood: the same object, the same method of the same
    object, or a plain equal value."""
    if content is value or is_same_method(content, value):
        return True
    if type(content) is tuple and type(value) is tuple:
        return len(content) == len(value) and all(map(_fits, content, value))  # pyright: ignore
    return is_plain(value) and Constant(value).matches(content)


def _gradient(value: object) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _stays(slot: Slot) -> bool:
    """Whether what a slot holds can never be another: what is in a tuple."""
    return slot.kind == "item" and isinstance(slot.holder, tuple)


def _is_seen_by_c(slot: Slot) -> bool:
    return slot.kind in ("cell", "of") or (
        slot.kind == "item" and isinstance(slot.holder, dict | list)
    )


_PARTS: Any = {code_of: 0, defaults_of: 1, keyword_defaults_of: 2}
"""What C calls the parts of a function."""


def _key_for_c(slot: Slot) -> object:
    return _PARTS.get(slot.key, slot.key) if slot.kind == "of" else slot.key


def _is_laid_out_for_c(t: Tensor) -> bool:
    """C sees no subclass's own layout, and no lazy conjugation."""
    return type(t) in (Tensor, torch.nn.Parameter) and not t.is_complex()


class _Place:
    """Where a tensor lies, and how."""

    def __init__(self, tensor: Tensor, state: tuple[object, ...]) -> None:
        self.tensor = tensor
        self._state = state

    @classmethod
    def of(cls, t: Tensor) -> _Place:
        return cls(t, _layout(t))

    def kept(self) -> bool:
        return _layout(self.tensor) == self._state

    def agrees(self, other: _Place) -> bool:
        return self.tensor is other.tensor and self._state == other._state


def _layout(t: Tensor) -> tuple[object, ...]:
    t = local(t)
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


class _Size:
    """The length of a container, and for a dict of attributes which names it has."""

    def __init__(self, container: Any, names: frozenset[str] | None) -> None:
        self.container = container
        self._names = names
        self._state = self._read()

    def _read(self) -> object:
        if self._names is None:
            return len(self.container)
        return self._names & self.container.keys()

    def kept(self) -> bool:
        return self._read() == self._state

    def agrees(self, other: _Size) -> bool:
        same = self.container is other.container and self._names == other._names
        return same and self._state == other._state


def _is_attribute(slot: Slot) -> bool:
    """Whether a slot is looked at only when a watched dict changed.

    Those of objects and modules are watched; globals change too often. Which dict an object has
    no watched dict tells: that is looked at every time.
    """
    return slot.kind == "item" and slot.owner is not None and isinstance(slot.holder, dict)
