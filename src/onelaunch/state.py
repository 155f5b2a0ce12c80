"""What a callable can reach behind its arguments: parameters, attributes, closures, globals.

A graph reads memory by address and repeats the branches that Python took, so everything that led it
there is part of what must be unchanged. `walk` finds the places (slots) and what they hold;
`guard.StateGuard` watches those that mattered.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onelaunch.names import names_read
from onelaunch.objects import (
    MODULE_DICTS,
    Containers,
    attributes_read,
    code_in,
    dicts_of,
    is_library_class,
    library_calls,
    members_of,
    methods_of,
    module_globals,
    slots_of,
)
from onelaunch.slots import (
    MISSING,
    Slot,
    code_of,
    gradient_of,
    read_hooks,
    read_last_hooks,
)
from onelaunch.tree import Constant, is_plain

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = _HOOKS[:2]
_MODULES: Any = nn.modules.module


@dataclass(slots=True)
class Walk:
    """Every slot that a callable reaches, with what it held."""

    held: dict[tuple[int, object], tuple[Slot, object]] = field(
        default_factory=lambda: cast(Any, {})
    )
    containers: Containers = field(default_factory=lambda: cast(Containers, {}))
    names: set[str] = field(default_factory=lambda: cast(set[str], set()))
    """The attributes and globals that the code of the callable names."""
    owned: list[tuple[dict[str, Any], object]] = field(default_factory=lambda: cast(Any, []))
    """(dict, owner): where objects and modules keep their attributes."""
    hooks: list[dict[int, Any]] = field(default_factory=lambda: cast(Any, []))
    """The dicts of hooks of every submodule, and those of all modules; those of the graphed module
    itself run outside. Without grad mode no backward runs, and those of backwards do not count."""
    functions: list[types.FunctionType] = field(default_factory=lambda: cast(Any, []))
    """The functions whose code was read."""

    def is_read(self, slot: Slot) -> bool:
        """Whether the callable's code names what the slot holds, or holds what holds it."""
        if slot.owner is not None:
            return slot.key in self.names or slot.key in unwalked_names(type(slot.owner))
        if id(slot.holder) in self.containers:
            return slot.via is None or self.is_read(slot.via)
        return True

    def runs_backward(self) -> bool:
        """Whether the callable runs a backward, as far as its code shows."""
        return any("backward" in name or name == "autograd" for name in self.names)

    def sized(self) -> Iterator[tuple[Any, frozenset[str] | None]]:
        """What must not grow or shrink: containers, and dicts of attributes, for which only the
        names given matter."""
        for attributes, owner in self.owned:
            outer = not isinstance(owner, nn.Module) or attributes is owner.__dict__
            names = self.names | unwalked_names(type(owner))
            yield attributes, frozenset(names) if outer else None
        kinds = dict.fromkeys(kind for _, owner in self.owned for kind in type(owner).__mro__)
        for kind in kinds:
            if not is_library_class(kind):  # which may get what it had of another
                yield members_of(kind), frozenset(self.names)
        for slot, value in self.held.values():
            if id(value) in self.containers and self.is_read(slot):
                yield value, None
        for hooks in self.hooks:
            yield hooks, None

    def ways(self, owners: Iterable[object]) -> Iterator[tuple[Slot, object]]:
        """What leads to the attributes of `owners`: their dicts, their classes, and code.

        Other tools replace these: `module._modules = ...`, a patched method of a class, a notebook
        that reloads a function in place.
        """
        hooks = {id(entries) for entries in self.hooks}
        classes: dict[type, None] = {}
        for owner in owners:
            if isinstance(owner, type):
                classes[owner] = None
                continue
            name, attributes = type(owner).__qualname__, vars(owner)
            yield Slot("of", owner, type, f"the class of a `{name}`", owner), type(owner)
            # A thread-local object has a dict for each thread.
            how = "of" if type(owner).__dictoffset__ else "contents"
            yield Slot(how, owner, vars, f"`__dict__` of a `{name}`", owner), attributes
            classes.update(dict.fromkeys(type(owner).__mro__))
            for kind in MODULE_DICTS + _HOOKS if isinstance(owner, nn.Module) else ():
                entries = attributes.get(kind)
                if entries and (kind in MODULE_DICTS or id(entries) in hooks):
                    yield Slot("item", attributes, kind, f"`{kind}` of a `{name}`", owner), entries
        for kind in classes:
            yield from methods_of(kind)
        for fn in self.functions:
            yield Slot("of", fn, code_of, f"the code of `{fn.__qualname__}`", None), fn.__code__

    def tensors(self) -> Iterator[tuple[Slot, Tensor]]:
        """The slots that hold tensors."""
        for slot, value in self.held.values():
            if isinstance(value, Tensor):
                yield slot, value


_LEAVES = frozenset({bool, int, float, str, type(None)})
"""Types of most values that a walk meets, which lead nowhere."""


def walk(roots: Iterable[tuple[str, object]]) -> Walk:
    """Find all that the roots reach. Costs a few microseconds for each object visited.

    Code of installed libraries is not read for the globals it names: a tensor that only such code
    reaches is held and watched by its address.

    Args:
        roots: (name, object) pairs: the callable, and arguments compared by identity.
    """
    found = Walk()
    roots = list(roots)
    tops = {id(value) for _, value in roots}
    seen: set[int] = set()
    kinds: set[type] = set()
    hooked = _HOOKS if torch.is_grad_enabled() else _FORWARD_HOOKS
    # Breadth first, so that names are short, and without recursion, so that chains may be long.
    queue: deque[tuple[str, object, Slot | None]] = deque((n, value, None) for n, value in roots)
    methods: list[_Method] = []
    modules: dict[str, types.ModuleType] = {}
    while (
        queue
        or _named(methods, found.names, queue)
        or _opened(modules, found, queue)
        or _hooked(found, queue, seen)
    ):
        name, value, via = queue.popleft()
        if id(value) in seen or is_plain(value):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and id(value) not in tops:
            if not found.hooks:
                found.hooks += [getattr(_MODULES, f"_global{kind}") for kind in hooked]
                every = [h for hooks in found.hooks for h in hooks.values()]
                queue.extend(("a hook of every module", hook, None) for hook in every)
            found.hooks += [value.__dict__[kind] for kind in hooked]
            hooks = [h for kind in hooked for h in value.__dict__[kind].values()]
            queue.extend((f"a hook of {name}", hook, None) for hook in hooks)
        elif isinstance(value, types.FunctionType):
            found.names |= names_read(value.__code__)
            found.functions.append(value)
        elif isinstance(value, types.ModuleType):
            modules[name] = value
        if isinstance(value, nn.Module) and type(value) not in kinds:
            kinds.add(type(value))  # it may be a library's, whose functions are not read
            found.names |= attributes_read(type(value))
        found.owned += [(attributes, value) for attributes in dicts_of(value)]
        for slot in slots_of(name, value, found.containers, via):
            content = slot.read()
            if isinstance(content, Tensor) and content.is_leaf and content.grad is not None:
                gradient = Slot("contents", content, gradient_of, f"{slot.name}.grad", None, slot)
                found.held[gradient.id] = (gradient, content.grad)
            if content is MISSING:
                continue
            if via is not None and slot.via is None:
                slot = Slot(*slot[:5], via)  # `_replace` takes three times as long
            found.held[slot.id] = (slot, content)
            if not isinstance(content, Tensor) and type(content) not in _LEAVES:
                queue.append((slot.name, content, slot))
        for inside_name, inside in code_in(name, value):
            # Of a class only what the callable's code names: `fit` may read what `step` does not.
            if isinstance(value, type) and isinstance(inside, types.FunctionType):
                methods.append(_Method(value, inside_name, inside, via))
            else:
                queue.append((inside_name, inside, via))
    return found


def _opened(
    modules: dict[str, types.ModuleType],
    found: Walk,
    queue: deque[tuple[str, object, Slot | None]],
) -> bool:
    """Move what is named of modules that are no globals, but attributes or items, to `queue`."""
    for slot in module_globals(modules, found.names):
        if slot.id not in found.held:
            _, content = found.held[slot.id] = (slot, slot.read())
            queue.append((slot.name, content, slot))
    return bool(queue)


def _hooked(found: Walk, queue: deque[tuple[str, object, Slot | None]], seen: set[int]) -> bool:
    """Move the hooks of leaves to `queue`, where the code runs a backward and so runs these."""
    if torch.is_grad_enabled() and found.runs_backward():
        for slot, t in found.tensors():
            for hooks in (read_hooks(t), read_last_hooks(t)) if t.requires_grad else ():
                new = [h for h in (hooks or {}).values() if id(h) not in seen]
                queue.extend((f"a hook of {slot.name}", hook, None) for hook in new)
    return bool(queue)


class _Method(NamedTuple):
    """A function of a class, which waits until it is known that it is called."""

    kind: type
    name: str
    function: types.FunctionType
    via: Slot | None

    def is_called(self, names: set[str]) -> bool:
        """By code that names so, by Python, or by the class's bases in a library."""
        key = self.name.rpartition(".")[2]
        return key in names or key.startswith("__") or key in library_calls(self.kind, names)


def _named(
    methods: list[_Method], names: set[str], queue: deque[tuple[str, object, Slot | None]]
) -> bool:
    """Move the methods that are called, as far as the code read so far shows, to `queue`."""
    called = [method.is_called(names) for method in methods]
    queue.extend((m.name, m.function, m.via) for m, c in zip(methods, called, strict=True) if c)
    methods[:] = [m for m, c in zip(methods, called, strict=True) if not c]
    return any(called)


@functools.lru_cache(maxsize=1024)
def unwalked_names(kind: type) -> frozenset[str]:
    """The names that methods of a class could read of an instance, of those which `walk` does not
    read: the methods of modules, and of classes of installed packages."""
    if issubclass(kind, nn.Module):
        return attributes_read(kind)
    names: set[str] = set()
    for parent in kind.__mro__:
        if is_library_class(parent):
            names |= attributes_read(parent)
    return frozenset(names)


class Change(NamedTuple):
    """A slot whose content the callable replaced."""

    slot: Slot
    before: object
    after: object


def changes(before: Walk, after: Walk) -> list[Change]:
    """What differs between two walks of the same roots."""
    found: list[Change] = []
    for key, (slot, value) in after.held.items():
        old = before.held.get(key, (slot, MISSING))[1]
        if old is not value and not (is_plain(old) and Constant(old).matches(value)):
            found.append(Change(slot, old, value))
    for key, (slot, value) in before.held.items():
        if key not in after.held and slot.read() is MISSING:
            found.append(Change(slot, value, MISSING))
    return found


def restore(found: Iterable[Change]) -> None:
    """Undo changes, as after a capture that failed."""
    for change in found:
        if change.slot.read() is change.after:
            change.slot.write(change.before)


def is_state(value: object) -> bool:
    """Whether a change of this value could change what the callable computes."""
    return isinstance(value, Tensor | nn.Module | torch.Generator) or is_plain(value)
