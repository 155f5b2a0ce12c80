"""A profile hook that notes the loads of a run's Python code, with the objects they are of.

The interpreter's profile hook watches every function that runs, in any package. When one returns,
the loads of its instructions (see `loads`) are looked up from the values of its variables. So
methods of objects made in the call, partials, enumerations and classes of libraries are seen like
anything else, and an object that merely shares a name with one that was read is not. Where nobody
can tell afterwards of which objects an attribute was loaded, as in `queue.pop().scale`, its name
counts for all that are reached (`Loads.loose`).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from onelaunch.call_events import Hook, hook, set_profile
from onelaunch.frames.callees import ASK, READS_ALL, is_called_by_c, is_unread
from onelaunch.frames.codes import HANDS_ON, RUNS_BACKWARD, CodeFacts
from onelaunch.frames.origins import is_machinery
from onelaunch.frames.peek import (
    LEAVES,
    MOST,
    attributes_of,
    elements,
    global_values,
    has_attributes,
    has_contents,
    is_key,
    items,
    iterated_container,
    keys_of,
    namespaces,
    peek,
)
from onelaunch.frames.reads import Reads, StandIn, raise_uses
from onelaunch.frames.stack import ITERATED, Loads, Symbol, Use
from onelaunch.frames.stores import SureStore
from onelaunch.gc_pause import no_collection
from onelaunch.source import PLUMBING, TORCH, Place, user_frame
from onelaunch.unwinding import DispatchMode

_LOOKS_UP = {
    nn.Module.__getattr__.__code__,
    nn.Module.__setattr__.__code__,
    nn.Module.__delattr__.__code__,
}
"""Code that looks up attributes of modules; the load that called it is noted already."""


class FrameWatch:
    """A watch that notes in `reads` the reads of functions that run while it is active.

    Args:
        step_aside: called before an operator that takes functions runs, to end the modes that watch
            the run: Dynamo compiles nothing under a mode, nor ever after what it met there
            (pytorch#190286).
    """

    def __init__(self, reads: Reads, step_aside: Callable[[], object] | None = None) -> None:
        self.reads = reads
        self._step_aside = step_aside
        self._joined = ExitStack()
        """The mode that joins other threads, while it is on."""
        self.skipped: set[int] = set()
        """ids of code whose calls are not noted; its results may be, by the code that called it."""
        self.leaves: set[type] = {*LEAVES, Tensor}
        """Types of results that have nothing to note, as far as they have been met."""
        self._hook = hook(self, self.skipped, self.leaves)
        # The collector's callbacks may run at any time, and are not the callable's.
        self._unread = _LOOKS_UP | {getattr(fn, "__code__", None) for fn in gc.callbacks}
        self._aside: list[FrameType] = []
        """Imports and compilations under way, whose reads are no part of the run."""
        self._codes: dict[int, CodeFacts] = {}
        """id of a code object -> facts about it."""
        self._arguments: dict[int, dict[str, Any]] = {}
        """id of a frame -> the arguments of its call, of the names that it assigns anew."""
        self._results: dict[int, dict[int, list[object]]] = {}
        """id of a frame -> the results of Python code called by each of its instructions."""
        self.stored: set[tuple[int, object]] = set()
        """(id of a container or dict of attributes, key): places that the run surely stored to."""
        self.handed_on: Place | None = None
        """The first line that gave work to another thread, of which nothing is seen."""
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch a run in this thread. Slows it down by some 25 us for each function that runs."""
        before = sys.getprofile()
        with no_collection(), self.active():
            self._hook.begin()
            try:
                yield
            finally:
                if sys.getprofile() is self._hook:
                    set_profile(before)

    @contextmanager
    def active(self) -> Generator[None]:
        """Be active during a run; another hook calls this one."""
        try:
            with self._joined:
                if torch.is_grad_enabled():
                    self._joined.enter_context(_Joining(self._hook))
                yield
        except BaseException as error:
            self._note_ended(error.__traceback__)
            raise
        finally:
            self._hook.end()
            self._arguments.clear()  # another thread may keep this as its hook
            self._results.clear()
            self.reads.sum_up()

    def _note_ended(self, traceback: types.TracebackType | None) -> None:
        """Note the frames that an error ended. One that a hook raises ends the hook, too."""
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            known = self._codes.get(id(frame.f_code))
            if known is not None and known.met:
                self._returned(frame, known, None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        known = self._codes.get(id(code)) or self._known(code)
        if known.aside:
            if event == "call":
                self._aside.append(frame)
            elif frame in self._aside:
                self._aside.remove(frame)
        elif self._aside:
            return
        elif event == "call":
            if known.code in HANDS_ON:
                if _is_callables_own(frame):
                    self.handed_on = self.handed_on or user_frame()
            elif known.matters:
                self._note_torch(known.code)
            if not known.unread:
                self._called(frame, known)
        else:
            self._returned(frame, known, arg)

    def _known(self, code: types.CodeType) -> CodeFacts:
        known = CodeFacts(code, code in self._unread or is_machinery(code.co_filename))
        self._codes[id(code)] = known
        if known.unread and not (known.aside or known.matters):
            self.skipped.add(id(code))
        return known

    def _note_torch(self, code: types.CodeType) -> None:
        """Note a call of torch's that matters in itself: a backward, or a higher-order operator."""
        if code in RUNS_BACKWARD:
            self.reads.backward = True
        else:
            self.reads.takes_functions = code.co_name
            self._joined.close()
            if self._step_aside is not None:
                self._step_aside()

    def _called(self, frame: FrameType, known: CodeFacts) -> None:
        if known.is_unread(frame):
            return
        if not known.met:
            known.meet()
            self.reads.codes.add(known.code)
        if known.replaced:
            values = frame.f_locals
            arguments = {n: v for n in known.replaced if has_contents(v := values.get(n))}
            if arguments:
                self._arguments[id(frame)] = arguments
        if known.iterates:  # at the end it is exhausted
            container = iterated_container(frame.f_locals.get(ITERATED))
            self._arguments.setdefault(id(frame), {})[ITERATED] = container

    def _returned(self, frame: FrameType, known: CodeFacts, result: object) -> None:
        arguments = self._arguments.pop(id(frame), {}) if self._arguments else {}
        results = self._results.pop(id(frame), {}) if self._results else {}
        parent = frame.f_back
        if not has_contents(result):
            self.leaves.add(type(result))
        elif parent is not None:
            caller = self._codes.get(id(parent.f_code)) or self._known(parent.f_code)
            if not caller.unread:
                at = self._results.setdefault(id(parent), {}).setdefault(parent.f_lasti, [])
                if len(at) < MOST:
                    at.append(result)
        if not known.unread and not known.is_unread(frame):
            for store in known.stores:
                if frame.f_lasti > store.offset:
                    self._note_store(store, frame.f_locals.get(store.variable))
            with self._lock:
                run = _Frame(self.reads, frame, known.loads, arguments, results)
                run.note(known.noted)
                if known.special is not None:
                    run.note_special(known.special)

    def _note_store(self, store: SureStore, value: object) -> None:
        for name in store.path:
            value = next(iter(peek(value, name)), None)
        holder = value if store.item else attributes_of(value)
        if holder is not None:
            self.stored.add((id(holder), store.key))


def _is_callables_own(frame: FrameType) -> bool:
    """Return whether it is not torch's compiler, or a progress bar, that gives the work."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename in PLUMBING:
        caller = caller.f_back
    file = "" if caller is None else caller.f_code.co_filename
    return not file.startswith(TORCH) and f"{os.sep}tqdm{os.sep}" not in file


class _Joining(DispatchMode):
    """A mode that also watches threads that work for this one: autograd's, for a device."""

    supports_higher_order_operators = True

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self._hook = hook

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Dynamo compiles what runs meanwhile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys.getprofile() is None:
            self._hook.begin()
        return func(*args, **(kwargs or {}))


class _Frame:
    """A function that has run, with the values of its symbols."""

    def __init__(
        self,
        reads: Reads,
        frame: FrameType,
        loads: Loads,
        arguments: Mapping[str, Any],
        results: Mapping[int, list[object]],
    ) -> None:
        self._reads = reads
        self._code = frame.f_code
        self._globals = frame.f_globals
        self._locals = frame.f_locals
        self._loads = loads
        self._reached = loads.reached(frame.f_lasti)
        self._arguments = arguments
        self._results = (
            {loads.instruction(at): found for at, found in results.items()} if results else _NONE
        )
        self._variables: dict[str, list[object]] = {}
        self._following = 0
        """Number of variables being followed, whose values are not all known yet."""
        self._known: dict[int, list[object]] = {}
        """id of a symbol -> its values."""

    def note(self, known: set[int]) -> None:
        """Note all loads and stores of the function's code.

        Args:
            known: ids of the globals with which this watch has noted the code's loads of names.
        """
        loads, reached = self._loads, self._reached
        if id(self._globals) not in known:
            known.add(id(self._globals))
            self._note_names()
        for name, uses in loads.arguments.items():
            for value in self._variable(name):
                self._attributes(value, uses)
        for base, uses in reached.attributes:
            for value in self._values(base):
                self._attributes(value, uses)
        for place, use in reached.items:
            self._note_item(place, use)
        for symbol in loads.opaque:
            self._note_opaque(self._values(symbol))
        for call in reached.calls:
            self._note_call(call)

    def note_special(self, argument: str) -> None:
        """Note the lookup of a special method, which no instruction loads: a subclass may get one
        of its own."""
        name = self._code.co_name
        for value in self._variable(argument):
            members = (vars(kind).get(name) for kind in type(value).__mro__)
            if any(getattr(member, "__code__", None) is self._code for member in members):
                self._attributes(value, {name: Use.READ})

    def _note_names(self) -> None:
        """Note the loads of globals and free variables."""
        reads, loads = self._reads, self._loads
        if (self._code, id(self._globals)) not in reads.noted:
            reads.noted.add((self._code, id(self._globals)))
            raise_uses(reads.of_globals(self._globals), loads.globals)
            inside = {(self._code, name): use for name, use in loads.variables.items()}
            raise_uses(reads.variables, inside)

    def _attributes(self, value: object, uses: dict[str, Use]) -> None:
        if has_attributes(value):
            raise_uses(self._reads.owner(value).names, uses)
            inside = attributes_of(value) or ()
            others = {name: use for name, use in uses.items() if name not in inside}
            if others:  # its class has them
                raise_uses(self._reads.owner(type(value)).names, others)

    def _note_item(self, place: Symbol, use: Use) -> None:
        (key,) = place.parts
        keys = [k for k in self._values(key) if is_key(k)]
        told = bool(keys) and self._loads.tells(key)
        for value in self._values(place.base):
            if value is self._globals:
                raise_uses(
                    self._reads.of_globals(self._globals), dict.fromkeys(map(str, keys), use)
                )
            elif isinstance(value, dict | list | deque | types.MappingProxyType):
                found = keys if told else [*keys, *keys_of(value)]
                raise_uses(self._reads.items, dict.fromkeys([(id(value), k) for k in found], use))

    def _note_call(self, call: Symbol) -> None:
        """Note what a callee that is not read may read of its arguments."""
        base = call.base
        if base is not None and base.kind == "call" and self._is_made_by_c(base):
            self._note_opaque(v for part in call.parts for v in self._values(part))
        if base is not None and base.kind == "attribute" and base.key == "__getattribute__":
            for part in call.parts[:-1]:  # `super()`, or `object` and an object
                self._note_getattr(part, call.parts[-1])
        for function in self._values(call.base):
            if type(function) is types.FunctionType and function.__module__ not in READS_ALL:
                continue  # nearly all that is read
            if id(function) not in ASK:
                if getattr(function, "__module__", None) in READS_ALL:
                    self._note_opaque(v for part in call.parts for v in self._values(part))
            elif function is vars or function is dir:
                self._note_opaque(v for part in call.parts for v in self._values(part))
            elif function is type and len(call.parts) == 1:
                for value in self._values(call.parts[0]):
                    if isinstance(value, StandIn):
                        value.tell()
            elif (function is getattr or function is hasattr) and len(call.parts) > 1:
                self._note_getattr(call.parts[0], call.parts[1])

    def _is_made_by_c(self, function: Symbol) -> bool:
        """Return whether what a call gives is an instance of a C class: `attrgetter("scale")`."""
        made = [v for v in self._values(function.base) if isinstance(v, type)]
        return any(map(is_called_by_c, made))

    def _note_getattr(self, base: Symbol, name: Symbol) -> None:
        names = [n for n in self._values(name) if type(n) is str]
        told = self._loads.tells(name)
        for value in self._values(base):
            if not has_attributes(value):
                continue
            if not names:
                self._reads.owner(value).opaque = True
            elif not told:
                self._reads.owner(value).asked = True
            for n in names:
                self._reads.owner(value).names[n] = Use.READ

    def _note_opaque(self, values: Iterable[object]) -> None:
        for value in values:
            if has_attributes(value) and not isinstance(value, _NOT_OPAQUE):
                self._reads.owner(value).opaque = True

    # Values of symbols.

    def _values(self, symbol: Symbol | None) -> list[object]:
        """Return the values that a symbol may have had. Runs no user code."""
        kind = "unknown" if symbol is None else symbol.kind
        if symbol is None or kind == "unknown":
            return []
        if kind == "variable":
            return self._variable(symbol.key)
        if kind == "global":
            return global_values(self._globals, symbol.key)
        if kind == "constant":
            return [symbol.key]
        known = self._known.get(id(symbol))
        if known is not None:
            return known
        found = self._find(symbol)
        if not self._following:
            self._known[id(symbol)] = found
        return found

    def _find(self, symbol: Symbol) -> list[object]:
        kind = symbol.kind
        found: list[object] = list(self._results.get(symbol.offset, ())) if self._results else []
        if kind == "attribute":
            for value in self._values(symbol.base):
                found += peek(value, symbol.key)
        elif kind == "namespace":
            found += namespaces(self._values(symbol.base))
        elif kind in ("item", "element"):
            keys = [v for part in symbol.parts for v in self._values(part)]
            inside = self._values(symbol.base)
            found += [v for o in inside for v in items(o, keys)]
            if symbol.base and symbol.base.kind in _MADE:  # its values are known by their items
                found += filter(has_contents, inside)
        elif kind in ("parts", "either"):
            found += [v for part in symbol.parts for v in self._values(part)]
        elif kind == "call":
            found += self._returned(symbol)
        elif kind == "module":
            found += self._module(symbol)
        return found if len(found) <= MOST else found[:MOST]

    def _variable(self, name: str) -> list[object]:
        """Return a variable's values: at the call, at the end, and all assigned in between."""
        if name in self._variables:
            return self._variables[name]
        found = self._variables[name] = [
            values[name] for values in (self._arguments, self._locals) if name in values
        ]
        loads = self._loads
        if name not in loads.assigned or (found and name in loads.once):
            return found
        if not found and name not in loads.cleared and name not in loads.free:
            return found  # no assignment to it ran
        seen = {id(v) for v in found}
        before = -1
        self._following += 1
        while before < len(found) < MOST:
            before = len(found)
            for symbol in self._loads.assigned[name]:
                for value in self._values(symbol):
                    if id(value) not in seen and (has_contents(value) or type(value) in (str, int)):
                        seen.add(id(value))
                        found.append(value)
        self._following -= 1
        return found

    def _returned(self, call: Symbol) -> list[object]:
        """Return the possible results of a call; of code not read, its arguments and items."""
        found: list[object] = []
        for function in self._values(call.base):
            if function is getattr and len(call.parts) > 1:
                names = [n for n in self._values(call.parts[1]) if type(n) is str]
                objects = self._values(call.parts[0])
                found += [v for o in objects for n in names for v in peek(o, n)]
                found += [v for o in objects for v in _held(o)] if not names else []
                found += [v for default in call.parts[2:] for v in self._values(default)]
            elif function is globals:
                found.append(self._globals)
            elif function is vars and len(call.parts) == 1:
                found += namespaces(self._values(call.parts[0]))
            elif function is type and len(call.parts) == 1:
                found += map(type, self._values(call.parts[0]))
            elif isinstance(function, weakref.ref):
                found.append(cast(Any, weakref.ref.__call__(function)))
            elif is_unread(function):
                arguments = [v for part in call.parts for v in self._values(part)]
                found += [v for v in arguments if has_contents(v)]
                found += [v for v in map(elements, arguments) for v in v if has_contents(v)]
        if call.base and call.base.kind == "call" and self._is_made_by_c(call.base):
            arguments = [v for part in call.parts for v in self._values(part)]
            found += [v for o in arguments for v in (*_held(o), *elements(o)) if has_contents(v)]
        return found

    def _module(self, symbol: Symbol) -> list[object]:
        level = next((v for v in self._values(symbol.parts[0]) if type(v) is int), 0)
        name: str = symbol.key
        if level:
            package = self._globals.get("__package__") or ""
            package = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = f"{package}.{name}".strip(".")
        # `import a.b` gives `a`, and `from a.b import c` the module `a.b`.
        found = [sys.modules.get(name), sys.modules.get(name.partition(".")[0])]
        return [module for module in found if module is not None]


_NONE: Mapping[int, list[object]] = {}
_MADE = ("call", "parts", "either")
"""Kinds of symbols for containers that the code itself makes."""
_NOT_OPAQUE = (types.ModuleType, types.FunctionType, type, nn.Module, dict, list, tuple, deque)
"""Types whose attributes a callee that is not read does not read one by one."""


def _held(value: object) -> Iterable[object]:
    """Return the values of an object's attributes, any of which may be read."""
    return list((attributes_of(value) or {}).values()) if has_attributes(value) else ()
