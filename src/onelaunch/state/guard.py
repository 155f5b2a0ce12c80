"""The check before each replay that a recording's state is unchanged.

It checks at every call that torch's modes are those of the capture; that each slot holds the same
object (the parameter, the submodule, the flag, the global, what a closure's cell holds); that each
container that was read, a module's hooks among them, is as long as it was; that each tensor read by
address has the same memory and layout (`p.data = ...`, `set_`, `resize_` move a tensor without
replacing it); and in grad mode, that each of these tensors requires grad, and has hooks, as then.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.tree import Constant, is_plain
from onelaunch.call.wrappers import is_memory, local
from onelaunch.errors import kind_of
from onelaunch.frames.peek import attributes_of
from onelaunch.state.counterparts import Counterparts, ids_in
from onelaunch.state.host_values import version_of
from onelaunch.state.native_guard import native_guard
from onelaunch.state.slots import (
    Slot,
    Unchanging,
    code_of,
    defaults_of,
    gradient_of,
    is_same_method,
    keyword_defaults_of,
    same_gradients,
    same_hooks,
)

Reader = tuple[Callable[[], object], object]
"""A mode: its reader, and the object that the reader must return."""


class StateGuard:
    """A guard of the state that a recording was captured in.

    Args:
        slots: (slot, expected content); tensors, modules and code are compared by identity, plain
            values by type and bits.
        tensors: tensors that the graph reads or writes by address; kept alive.
        sized: (container, names): containers that must keep their length; in a dict of attributes
            only keys among the names must not come or go.
        modes: torch's modes, with their expected values.
        leaves: tensors whose hooks ran in the capture, or would have.

    Attributes:
        check: returns whether all is unchanged, and changes nothing. 0.3 us, and 0.03 us for each
            tensor; with Python older than 3.12 another 0.02 us for each slot. Without a compiler on
            the machine it runs in Python, ten times slower.
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
        # Dicts of attributes first: they are read only after one has changed.
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
        self._layouts = [_Layout.of(t) for t in self.tensors]
        # Without grad mode `requires_grad` has no effect and may change, unless it is read.
        grads_matter = torch.is_grad_enabled() or asks
        self._grads = [t.requires_grad for t in self.tensors] if grads_matter else []
        self._same_hooks = same_hooks(leaves) if leaves else None
        self._division: _Division | None = None
        self.check = self._native_check() or self._python_check

    def agrees(self, other: StateGuard) -> bool:
        """Return whether it makes the same checks as another guard, so that one can serve both.

        Recordings that share a guard find it in the processor's caches: one of BERT, with all the
        memory that it reads, is some 100 KB.
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
            and all(a.agrees(b) for a, b in zip(self._layouts, other._layouts, strict=True))
            and all(a.agrees(b) for a, b in zip(self._sized, other._sized, strict=True))
        )

    def tensor_ids(self) -> frozenset[int]:
        """Return the ids of the tensors in its slots, which they are as long as `check` is True."""
        return frozenset(id(value) for value in self._values if isinstance(value, Tensor))

    @property
    def is_transferable(self) -> bool:
        """True if all that it checks is in slots, containers and tensors: no hooks of leaves."""
        return self._same_hooks is None

    def transferred(self, parts: Counterparts) -> StateGuard | None:
        """Return the same guard over other objects; None if they are of other lengths or sizes.

        The first time costs microseconds for each slot; from then on, for each that changes.
        """
        division = self._division
        if division is None or not division.fixed_ids.isdisjoint(parts.replaced):
            division = self._divided(parts)
        made = copy.copy(self)
        made._division = division
        made._slots, made._values = self._slots.copy(), self._values.copy()
        for i in division.slots:
            made._slots[i], made._values[i] = parts.slot(self._slots[i]), parts.of(self._values[i])
        made.tensors, made._layouts = self.tensors.copy(), self._layouts.copy()
        for i in division.tensors:
            made.tensors[i] = parts.of(self.tensors[i])
            made._layouts[i] = _Layout.of(made.tensors[i])
        made._sized = self._sized.copy()
        for i in division.sized:
            made._sized[i] = _Size(parts.of(self._sized[i].container), self._sized[i].names)
        alike = (
            made._same_grads()
            and all(made._layouts[i].is_alike(self._layouts[i]) for i in division.tensors)
            and all(made._sized[i].is_alike(self._sized[i]) for i in division.sized)
        )
        if not alike:
            return None
        fixed = division.fixed
        own = made._part(division.slots, division.tensors, division.sized, []).check
        made.check = lambda: fixed() and own()
        return made

    def _divided(self, parts: Counterparts) -> _Division:
        """Return what changes with the objects of a request, and the check of the rest."""
        pairs = [list(ids_in(pair)) for pair in self.held()]
        slots, fixed_slots = _split(pairs, parts)
        tensors, fixed_tensors = _split([[id(t)] for t in self.tensors], parts)
        sized, fixed_sized = _split([[id(size.container)] for size in self._sized], parts)
        fixed = self._part(fixed_slots, fixed_tensors, fixed_sized, self._modes)
        ids = frozenset[int]().union(*(pairs[i] for i in fixed_slots), map(id, fixed.tensors))
        ids = ids.union(id(size.container) for size in fixed._sized)
        return _Division(slots, tensors, sized, fixed.check, ids)

    def _part(
        self, slots: list[int], tensors: list[int], sized: list[int], modes: list[Reader]
    ) -> StateGuard:
        """Return a guard that makes a part of this one's checks."""
        part = copy.copy(self)
        part._slots = [self._slots[i] for i in slots]
        part._values = [self._values[i] for i in slots]
        part._watched = [i for i, s in enumerate(part._slots) if not _stays(s)]
        part.tensors = [self.tensors[i] for i in tensors]
        part._layouts = [self._layouts[i] for i in tensors]
        part._grads = [self._grads[i] for i in tensors] if self._grads else []
        part._sized = [self._sized[i] for i in sized]
        part._modes = modes
        part.check = part._native_check() or part._python_check
        return part

    def places(self) -> Iterator[tuple[Tensor, int]]:
        """Return the tensors that are read by address, each with that address."""
        for layout in self._layouts:
            yield layout.tensor, layout.address

    def _native_check(self) -> Callable[[], bool] | None:
        """Return the check in C for all that C can read, with the rest around it; None without
        C."""
        guard = native_guard().guard
        if guard is None:
            return None
        in_c: list[int] = []
        not_in_c: list[int] = []
        for i in self._watched:
            (in_c if _is_readable_in_c(self._slots[i]) else not_in_c).append(i)
        watched = sum(_is_attribute(self._slots[i]) for i in in_c)
        values = [self._values[i] for i in in_c]
        lengths = [len(size.container) for size in self._sized]
        plain = [t for t in self.tensors if _is_laid_out_for_c(t)]
        modes = tuple(read for read, _ in self._modes), tuple(value for _, value in self._modes)
        holders = tuple(self._slots[i].holder for i in in_c)
        keys = tuple(_key_for_c(self._slots[i]) for i in in_c)
        containers = tuple(size.container for size in self._sized)
        dicts = sum(isinstance(container, dict) for container in containers)

        def expecting(values: list[object]) -> Callable[[], bool | None]:
            sized = containers, lengths, dicts
            made = guard(
                *modes, holders, keys, values, watched, *sized, tuple(plain), bool(self._grads)
            )
            return made.check

        check_in_c = expecting(values)
        if check_in_c() is not True and not expecting([self._slots[i].read() for i in in_c])():
            return None  # a container whose methods show other contents than it has
        rest = [i for i in not_in_c if self._slots[i].key is not gradient_of]
        gradients_kept = same_gradients(
            [(self._slots[i].holder, _gradient(self._values[i])) for i in not_in_c if i not in rest]
        )
        others = [p for p in self._layouts if not _is_laid_out_for_c(p.tensor)]

        def settle() -> bool:
            """Let equal values take the place of the captured ones, and check once more.

            The values taken are the ones compared: another thread may change a slot in between.
            """
            now = [len(size.container) for size in self._sized]
            contents = [self._slots[i].read() for i in in_c]
            if not all(size.kept() for size in self._sized):
                return False
            if not all(map(_fits, contents, (self._values[i] for i in in_c))):
                return False
            lengths[:] = now
            values[:] = contents
            return check_in_c() is True

        hooks_kept = self._same_hooks
        if not not_in_c and not others and hooks_kept is None:
            return lambda: (found := check_in_c()) is True or (found is None and settle())

        def check() -> bool:
            found = check_in_c()
            if found is not True and (found is False or not settle()):
                return False
            return (
                gradients_kept()
                and (hooks_kept is None or hooks_kept())
                and all(map(self._holds, rest))
                and all(layout.kept() for layout in others)
                and (not others or self._same_grads())
            )

        return check

    def _python_check(self) -> bool:
        return (
            all(read() is expected for read, expected in self._modes)
            and all(size.kept() for size in self._sized)
            and all(map(self._holds, self._watched))
            and all(layout.kept() for layout in self._layouts)
            and self._same_grads()
            and (self._same_hooks is None or self._same_hooks())
        )

    def _same_grads(self) -> bool:
        return all(
            t.requires_grad is was for t, was in zip(self.tensors, self._grads, strict=False)
        )

    def _holds(self, index: int) -> bool:
        """Return whether a slot holds its expected content."""
        return _fits(self._slots[index].read(), self._values[index])

    def moved(self) -> str | None:
        """Return the name of a tensor that left its slot or memory for good, or None.

        A flag that differs can come back, so a recording waits for it; a moved parameter does not,
        so `Table` drops its recording.
        """
        for slot, value in zip(self._slots, self._values, strict=True):
            if isinstance(value, Tensor) and slot.read() is not value:
                return slot.name
            if slot.key is version_of and slot.read() != value:
                return slot.name
        for index, layout in enumerate(self._layouts):
            if not layout.kept():
                return self._name(layout.tensor, index)
        return None

    def difference(self) -> str | None:
        """Return the first difference: a name, with captured and current value; or None."""
        moved = self.moved()
        if moved is not None:
            return f"{moved} moved"
        for size in self._sized:
            if not size.kept():
                return f"{self._container_name(size.container)} changed its length"
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

    def changed(self) -> list[tuple[Slot, object]]:
        """Return the slots that hold other contents, with those that they are to hold."""
        return [pair for i, pair in enumerate(self.held()) if not self._holds(i)]

    def held(self) -> Iterator[tuple[Slot, object]]:
        """Return the slots with their expected contents."""
        return zip(self._slots, self._values, strict=True)

    def names(self) -> list[str]:
        """Return the names of slots whose tensors are read by address."""
        return [
            slot.name
            for slot, value in zip(self._slots, self._values, strict=True)
            if is_memory(value)
        ]

    def _container_name(self, container: object) -> str:
        """Return the name of the slot or the attribute that holds a container, or its kind."""
        for slot, value in self.held():
            if value is container:
                return slot.name
        for slot in self._slots:
            for name, value in (attributes_of(slot.owner) or {}).items():
                if value is container:
                    owner = slot.name.removesuffix(str(slot.key)).removesuffix(".")
                    return f"{owner}.{name}" if owner else name
        return kind_of(container)

    def _name(self, t: Tensor, index: int) -> str:
        for slot, value in zip(self._slots, self._values, strict=True):
            if value is t:
                return slot.name
        return f"tensor {index}"

    def untraced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that no guarded slot holds."""
        held = {id(local(v)) if isinstance(v, Tensor) else id(v) for v in self._values}
        return [t for t in tensors if id(local(t)) not in held]


class _Division(NamedTuple):
    """A guard in two parts: the checks that change with the objects of a request, by index, and the
    check of the rest.

    Attributes:
        fixed: the check of the rest.
        fixed_ids: ids of all objects in the rest.
    """

    slots: list[int]
    tensors: list[int]
    sized: list[int]
    fixed: Callable[[], bool]
    fixed_ids: frozenset[int]


def _split(ids: Sequence[Sequence[int]], parts: Counterparts) -> tuple[list[int], list[int]]:
    """Return the indices of what `parts` replaces, and the other ones."""
    changed = [not parts.replaced.isdisjoint(found) for found in ids]
    return [i for i, c in enumerate(changed) if c], [i for i, c in enumerate(changed) if not c]


def _fits(content: object, value: object) -> bool:
    """Return whether `content` may replace `value`: the same object, the same method of the same
    object, or an equal plain value."""
    if content is value or is_same_method(content, value):
        return True
    if type(content) is tuple and type(value) is tuple:
        return len(content) == len(value) and all(map(_fits, content, value))  # pyright: ignore
    return is_plain(value) and Constant(value).matches(content)


def _gradient(value: object) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _stays(slot: Slot) -> bool:
    """Return whether a slot's content can never change: an item of a tuple, or the like."""
    return slot.kind == "item" and isinstance(slot.holder, tuple | Unchanging)


def _is_readable_in_c(slot: Slot) -> bool:
    if slot.kind == "contents":
        return isinstance(slot.holder, contextvars.ContextVar)
    return slot.kind != "item" or isinstance(slot.holder, dict | list)


_PARTS: Any = {code_of: 0, defaults_of: 1, keyword_defaults_of: 2}
"""The numbers that C has for the parts of a function."""


def _key_for_c(slot: Slot) -> object:
    return _PARTS.get(slot.key, slot.key) if slot.kind == "of" else slot.key


def _is_laid_out_for_c(t: Tensor) -> bool:
    """Return whether C sees the tensor's layout; not of subclasses, nor lazy conjugation."""
    return type(t) in (Tensor, torch.nn.Parameter) and not t.is_complex()


class _Layout:
    """The memory and layout of a tensor."""

    def __init__(self, tensor: Tensor, state: tuple[int, *tuple[object, ...]]) -> None:
        self.tensor = tensor
        self._state = state

    @classmethod
    def of(cls, t: Tensor) -> _Layout:
        return cls(t, _layout(t))

    def kept(self) -> bool:
        return _layout(self.tensor) == self._state

    def agrees(self, other: _Layout) -> bool:
        return self.tensor is other.tensor and self.is_alike(other)

    def is_alike(self, other: _Layout) -> bool:
        """Return whether it is the same memory in the same layout, of whichever tensor."""
        return self._state == other._state

    @property
    def address(self) -> int:
        return self._state[0]


def _layout(t: Tensor) -> tuple[int, *tuple[object, ...]]:
    kind, t = type(t), local(t)
    return t.data_ptr(), kind, t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


class _Size:
    """The length of a container; for a dict of attributes, the names of interest in it."""

    def __init__(self, container: Any, names: frozenset[str] | None) -> None:
        self.container = container
        self.names = names
        self._state = self._read()

    def _read(self) -> object:
        if self.names is None:
            return len(self.container)
        return self.names & self.container.keys()

    def kept(self) -> bool:
        return self._read() == self._state

    def agrees(self, other: _Size) -> bool:
        same = self.container is other.container and self.names == other.names
        return same and self.is_alike(other)

    def is_alike(self, other: _Size) -> bool:
        """Return whether the length, or the names, are the same, of whichever container."""
        return self._state == other._state


def _is_attribute(slot: Slot) -> bool:
    """Return whether a slot is checked only after a watched dict has changed.

    Dicts of objects and modules are watched; globals change too often. An object may get a new
    dict, which no watched dict reports: that is checked every time.
    """
    return slot.kind == "item" and slot.owner is not None and isinstance(slot.holder, dict)
