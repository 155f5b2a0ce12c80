"""The check before each replay that a recording's state is unchanged.

It checks at every call:

- torch's modes are those of the capture;
- each slot holds the same object: the parameter, the submodule, the flag, the global, the content
  of a closure's cell;
- each container that was read is as long as it was, a module's hooks among them;
- each tensor read by address has the same memory and layout: `p.data = ...`, `set_` and `resize_`
  move a tensor without replacing it;
- in grad mode, each such tensor requires grad as it did, and a backward in the call runs the same
  hooks.

The expectations are data, which the capture makes once. The checks in C and in Python are built
from the data, and so is the guard of another request, with its own objects in place.
"""

from __future__ import annotations

import contextvars
import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.tree import Constant, is_plain
from onelaunch.call.wrappers import is_memory, local
from onelaunch.errors import describe_type
from onelaunch.frames.peek import attributes_of, object_of
from onelaunch.identity import id
from onelaunch.state.counterparts import Counterparts, ids_in
from onelaunch.state.expected import Layout, Size
from onelaunch.state.hooks import same_hooks
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
        leaves: tensors that a backward in the call leads to. Their hooks, and the hooks of the
            nodes behind them, must stay.
        asks: True if the callable reads `requires_grad`.

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
        ordered: list[tuple[Slot, object]] = []
        others: list[tuple[Slot, object]] = []
        for pair in slots:
            kind, holder, _, _, owner, _ = pair[0]
            # Dicts of objects and modules are watched; globals change too often. That an object
            # has its old dict is checked every time, as no watched dict reports it.
            of_dict = owner is not None and kind == "item" and isinstance(holder, dict)
            (ordered if of_dict else others).append(pair)
        self._attributes = len(ordered)
        """The number of its slots that are read only after a watched dict has changed."""
        ordered += others
        self._slots = [slot for slot, _ in ordered]
        self._values = [value for _, value in ordered]
        self._watched = [i for i, slot in enumerate(self._slots) if not _stays(slot)]
        dicts = [pair for pair in sized if isinstance(pair[0], dict)]  # they come first
        dicts += [pair for pair in sized if not isinstance(pair[0], dict)]
        self._sized = [(container, Size.of(container, names)) for container, names in dicts]
        self._modes = list(modes)
        self.tensors = list(tensors)
        # Without grad mode `requires_grad` has no effect and may change, unless it is read.
        grads_matter = torch.is_grad_enabled() or asks
        self._layouts = [Layout.of(t, grads_matter) for t in self.tensors]
        self._same_hooks = same_hooks(leaves) if leaves else None
        self._division: _Division | None = None
        self._own: StateGuard | None = None
        """After a transfer, the part of the checks for the new objects."""
        self.check = self._native_check() or self._python_check

    def agrees(self, other: StateGuard) -> bool:
        """Return whether another guard makes the same checks.

        Recordings that share a guard find it in the processor's caches: BERT's, with all the
        memory that it reads, is some 100 KB.
        """
        return (
            self._same_hooks is None
            and other._same_hooks is None
            and self._modes == other._modes
            and len(self._slots) == len(other._slots)
            and len(self._sized) == len(other._sized)
            and all(a.id == b.id for a, b in zip(self._slots, other._slots, strict=True))
            and all(map(_fits, self._values, other._values))
            and list(map(id, self.tensors)) == list(map(id, other.tensors))
            and self._layouts == other._layouts
            and all(
                a is b and size.agrees(other_size)
                for (a, size), (b, other_size) in zip(self._sized, other._sized, strict=True)
            )
        )

    def tensor_ids(self) -> frozenset[int]:
        """Return the ids of the tensors that its slots hold while `check` is True."""
        return frozenset(id(value) for value in self._values if isinstance(value, Tensor))

    @property
    def is_transferable(self) -> bool:
        """True if it checks slots, containers and tensors alone: no hooks of leaves."""
        return self._same_hooks is None

    def transferred(self, parts: Counterparts) -> StateGuard:
        """Return a guard with the same expectations of other objects.

        The first time costs microseconds for each slot; a later time, for each slot that changes.
        """
        division = self._division
        if division is None or not division.fixed_ids.isdisjoint(parts.replaced):
            division = self._divided(parts)
        other = copy.copy(self)
        other._division = division
        other._slots, other._values = self._slots.copy(), self._values.copy()
        for i in division.slots:
            other._slots[i], other._values[i] = (
                parts.slot(self._slots[i]),
                parts.of(self._values[i]),
            )
        other.tensors, other._sized = self.tensors.copy(), self._sized.copy()
        for i in division.tensors:
            other.tensors[i] = parts.of(self.tensors[i])
        for i in division.sized:
            container, size = self._sized[i]
            other._sized[i] = parts.of(container), size
        own = other._part(division.slots, division.tensors, division.sized, [])
        fixed, own_check = division.fixed.check, own.check
        other.check = lambda: fixed() and own_check()
        other._own = own
        return other

    def _divided(self, parts: Counterparts) -> _Division:
        """Divide the checks by whether they change with the objects of a request."""
        pairs = [list(ids_in(pair)) for pair in self.held()]
        slots, fixed_slots = _split(pairs, parts)
        tensors, fixed_tensors = _split([[id(t)] for t in self.tensors], parts)
        sized, fixed_sized = _split([[id(container)] for container, _ in self._sized], parts)
        fixed = self._part(fixed_slots, fixed_tensors, fixed_sized, self._modes)
        ids = frozenset[int]().union(*(pairs[i] for i in fixed_slots), map(id, fixed.tensors))
        ids = ids.union(id(container) for container, _ in fixed._sized)
        return _Division(slots, tensors, sized, fixed, ids)

    def _part(
        self, slots: list[int], tensors: list[int], sized: list[int], modes: list[Reader]
    ) -> StateGuard:
        part = copy.copy(self)
        part._attributes = bisect_left(slots, self._attributes)
        part._slots = [self._slots[i] for i in slots]
        part._values = [self._values[i] for i in slots]
        part._watched = [i for i, s in enumerate(part._slots) if not _stays(s)]
        part.tensors = [self.tensors[i] for i in tensors]
        part._layouts = [self._layouts[i] for i in tensors]
        part._sized = [self._sized[i] for i in sized]
        part._modes = modes
        part._own = None
        part.check = part._native_check() or part._python_check
        return part

    def places(self) -> Iterator[tuple[Tensor, int]]:
        """Return (tensor, expected address) for the tensors that are read by address."""
        for t, layout in zip(self.tensors, self._layouts, strict=True):
            yield t, layout.facts[0]

    def _native_check(self) -> Callable[[], bool] | None:
        """Return a check in C, and in Python for the rest; None without C."""
        guard = native_guard().guard
        if guard is None:
            return None
        slots = self._slots
        watched = bisect_left(self._watched, self._attributes)
        in_c = self._watched[:watched]
        not_in_c: list[int] = []
        for i in self._watched[watched:]:
            (in_c if _is_readable_in_c(slots[i]) else not_in_c).append(i)
        values = [self._values[i] for i in in_c]
        lengths = [size.length for _, size in self._sized]
        pairs = list(zip(self.tensors, self._layouts, strict=True))
        tensors = tuple([t for t, layout in pairs if layout.number is not None])
        layouts = tuple([layout.for_c for layout in self._layouts if layout.number is not None])
        modes = tuple(read for read, _ in self._modes), tuple(value for _, value in self._modes)
        holders = tuple([slots[i].holder for i in in_c])
        keys = tuple([_key_for_c(slots[i]) for i in in_c])
        containers = tuple([container for container, _ in self._sized])
        dicts = [isinstance(container, dict) for container in containers].count(True)

        check_in_c: Callable[[], bool | None] = guard(
            *modes, holders, keys, values, watched, containers, lengths, dicts, tensors, layouts
        ).check
        if check_in_c() is not True:
            now = [slots[i].read() for i in in_c]
            if guard((), (), holders, keys, now, watched, (), [], 0, (), ()).check() is not True:
                return None  # the methods of a container hide its contents
        rest = [i for i in not_in_c if slots[i].key is not gradient_of]
        of_leaves = [i for i in not_in_c if slots[i].key is gradient_of]
        leaves = [(slots[i].holder, self._values[i]) for i in of_leaves]
        gradients_kept = same_gradients(
            [(leaf, g if isinstance(g, Tensor) else None) for leaf, g in leaves]
        )
        others = [(t, layout) for t, layout in pairs if layout.number is None]

        def settle() -> bool:
            """Let equal values take the place of the captured values, and check once more.

            Each slot is read once, as another thread may change it.
            """
            now = [len(container) for container in containers]
            contents = [slots[i].read() for i in in_c]
            if not self._sizes_kept():
                return False
            if not all(map(_fits, contents, (self._values[i] for i in in_c))):
                return False
            lengths[:] = now
            values[:] = contents
            return check_in_c() is True

        hooks_kept = self._same_hooks
        if not not_in_c and not others and hooks_kept is None:
            return lambda: (verdict := check_in_c()) is True or (verdict is None and settle())

        def check() -> bool:
            verdict = check_in_c()
            if verdict is not True and (verdict is False or not settle()):
                return False
            return (
                gradients_kept()
                and (hooks_kept is None or hooks_kept())
                and all(map(self._holds, rest))
                and all(layout.kept(t) for t, layout in others)
            )

        return check

    def _python_check(self) -> bool:
        return (
            all(read() is expected for read, expected in self._modes)
            and self._sizes_kept()
            and all(map(self._holds, self._watched))
            and all(layout.kept(t) for t, layout in zip(self.tensors, self._layouts, strict=True))
            and (self._same_hooks is None or self._same_hooks())
        )

    def _sizes_kept(self) -> bool:
        return all(size.kept(container) for container, size in self._sized)

    def _holds(self, index: int) -> bool:
        return _fits(self._slots[index].read(), self._values[index])

    def moved(self) -> str | None:
        """Return the name of a tensor that left its slot or memory for good, or None.

        A flag that differs can come back, so a recording waits for it; a moved parameter does not,
        so `Table` drops its recording.
        """
        return None if self.check() else self._gone(Layout.moved)

    def moved_elsewhere(self) -> str | None:
        """Return the result of `moved` for the time when the new tensors have changed places with
        the former tensors."""
        return self._gone(Layout.differs)

    def _gone(self, differs: Callable[[Layout, Tensor], bool]) -> str | None:
        if self._own is not None:
            assert self._division is not None
            return self._division.fixed.moved() or self._own._gone(differs)
        for slot, value in zip(self._slots, self._values, strict=True):
            if isinstance(value, Tensor) and slot.read() is not value:
                return slot.name
            if slot.key is version_of and slot.read() != value:
                return slot.name
        for index, (t, layout) in enumerate(zip(self.tensors, self._layouts, strict=True)):
            if differs(layout, t):
                return self._name(t, index)
        return None

    def difference(self) -> str | None:
        """Return the first difference: a name, with captured and current value; or None."""
        moved = self.moved()
        if moved is not None:
            return f"{moved} moved"
        for container, size in self._sized:
            if not size.kept(container):
                return f"{self.container_name(container)} changed its length"
        for index, slot in enumerate(self._slots):
            if not self._holds(index):
                was, now = slot.shown(self._values[index]), slot.shown(slot.read())
                return f"{slot.name}: captured {was}, got {'another' if now == was else now}"
        if not all(read() is expected for read, expected in self._modes):
            return "a mode of torch"
        if self._same_hooks is not None and not self._same_hooks():
            return "a parameter's hooks"
        for index, (t, layout) in enumerate(zip(self.tensors, self._layouts, strict=True)):
            if not layout.grad_kept(t):
                now = t.requires_grad
                return f"{self._name(t, index)}.requires_grad: captured {not now}, got {now}"
        return None

    def changed(self) -> list[tuple[Slot, object]]:
        """Return (slot, expected content) for the slots that hold other contents."""
        return [pair for i, pair in enumerate(self.held()) if not self._holds(i)]

    def held(self) -> Iterator[tuple[Slot, object]]:
        return zip(self._slots, self._values, strict=True)

    def lengths(self) -> Iterator[tuple[Any, int]]:
        """Return (container, expected length) for the containers that keep their length."""
        for container, size in self._sized:
            if size.names is None:
                yield container, size.length

    def names(self) -> list[str]:
        return [slot.name for slot, value in self.held() if is_memory(value)]

    def container_name(self, container: object) -> str:
        """Return the name of the slot or the attribute that holds a container, or its kind."""
        for slot, value in self.held():
            if value is container:
                return slot.name
        for slot in self._slots:
            for name, value in (attributes_of(slot.owner) or {}).items():
                if value is container:
                    owner = slot.name.removesuffix(str(slot.key)).removesuffix(".")
                    return f"{owner}.{name}" if owner else name
        return describe_type(container)

    def _name(self, t: Tensor, index: int) -> str:
        return next((slot.name for slot, value in self.held() if value is t), f"tensor {index}")

    def untraced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that no guarded slot holds."""
        held = {id(local(v)) for v in self._values if isinstance(v, Tensor)}
        return [t for t in tensors if id(local(t)) not in held]


class _Division(NamedTuple):
    """The checks of a guard in two parts.

    Attributes:
        slots, tensors, sized: indices of the checks that change with the objects of a request.
        fixed: a guard with the other checks.
        fixed_ids: ids of all objects in `fixed`.
    """

    slots: list[int]
    tensors: list[int]
    sized: list[int]
    fixed: StateGuard
    fixed_ids: frozenset[int]


def _split(ids: Sequence[Sequence[int]], parts: Counterparts) -> tuple[list[int], list[int]]:
    """Return the indices of the entries with an id that `parts` replaces, and the other indices."""
    changed = [not parts.replaced.isdisjoint(own) for own in ids]
    return [i for i, c in enumerate(changed) if c], [i for i, c in enumerate(changed) if not c]


def _fits(content: object, value: object) -> bool:
    """Return whether `content` is as good as `value`: the same object, the same method of the same
    object, or an equal plain value."""
    if content is value or is_same_method(content, value):
        return True
    if type(content) is tuple and type(value) is tuple:
        return len(content) == len(value) and all(map(_fits, content, value))  # pyright: ignore
    return is_plain(value) and Constant(value).matches(content)


def _stays(slot: Slot) -> bool:
    """Return whether a slot's content can never change: an item of a tuple, or the like."""
    kind, holder, key, *_ = slot
    if type(holder) is dict:
        return False
    return (kind == "item" and isinstance(holder, (tuple, Unchanging))) or key is object_of


def _is_readable_in_c(slot: Slot) -> bool:
    if slot.kind == "contents":
        return isinstance(slot.holder, contextvars.ContextVar)
    return slot.kind != "item" or isinstance(slot.holder, (dict, list))


_PARTS: Any = {code_of: 0, defaults_of: 1, keyword_defaults_of: 2}
"""Reader of a part of a function -> its number in C."""


def _key_for_c(slot: Slot) -> object:
    return _PARTS.get(slot.key, slot.key) if slot.kind == "of" else slot.key
