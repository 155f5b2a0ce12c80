"""The Python functions that ran, where each was called from, and the lines that changed a place."""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

from onelaunch.call_events import Matters, hook, is_profiled, profiling
from onelaunch.frames.codes import functions_in
from onelaunch.frames.origins import is_installed
from onelaunch.source import is_users, line_of
from onelaunch.state.slots import Slot
from onelaunch.tools.doctor.run import run_watched
from onelaunch.tools.doctor.spot import NOWHERE, Spot, shown

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE_ATTR"}
_ASSIGNS = r"(\*\*|//|[-+*/%@&|^])?=(?!=)"
_MUTATES = re.compile(
    r"\.(append|appendleft|extend|insert|add|update|setdefault|pop|popleft|popitem|remove|discard"
    rf"|clear|sort|reverse|rotate|fill|put)\(|\]\s*{_ASSIGNS}|[-+*/|]=|\bdel\b"
)


class Ran:
    """A watch over a run's Python code.

    Args:
        spot: finds the line that runs at the time.
        called: told of functions in C that Python code calls: of modules and classes, and methods
            of instances of `owners`.

    Attributes:
        places: each function of the user's or of a library, with the place of its first line and
            the way there at its first call.
        returned: the place where the user's outermost function returned.
    """

    def __init__(
        self, spot: Callable[[], Spot], called: Callable[[Any], None], owners: tuple[type, ...]
    ) -> None:
        self.places: dict[CodeType, Spot] = {}
        self.returned: Spot = NOWHERE
        self._spot = spot
        self._called = called
        self._matters: dict[int, Matters] = {}
        self._outermost: FrameType | None = None
        self._running = False
        self._hook = hook(self._function, self._matters, {type(None)}, self._in_c, owners)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch a run in this thread; does nothing while a profiler has the interpreter's hook."""
        if is_profiled():
            yield
            return
        with profiling(self._hook):
            try:
                yield
            finally:
                self._hook.end()

    def _function(self, frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        if code is run_watched.__code__:
            self._running = event == "call"
        elif not is_users(code.co_filename):
            self._matters[id(code)] = Matters.RESULTS
        elif self._running and event == "call":
            if code not in self.places:
                self.places[code] = self._spot()
            if is_installed(code.co_filename):
                self._matters[id(code)] = Matters.RESULTS
            elif self._outermost is None:
                self._outermost = frame
        elif frame is self._outermost:
            self.returned, self._outermost = self._spot(), None

    def _in_c(self, frame: FrameType, event: str, called: Any) -> None:
        if self._running:
            self._called(called)

    def line(self, code: CodeType, line: int) -> Spot:
        """Return the place of a line of a function that ran."""
        file, first = code.co_filename, self.places[code]
        text = linecache.getline(file, line)
        if is_installed(file) and first.library is not None:
            return replace(first, library=f"{shown(file)}:{line}: {text.strip()}")
        column = len(text) - len(text.lstrip()) + 1
        return replace(first, line=line, column=column, source=text.strip())

    def store(self, slot: Slot, container: str, fn: object) -> Spot:
        """Return the line that stored to a slot: the user's own code first, of the slot's class.

        Args:
            container: the name in code of the container that the slot is an item of; empty for
                others.
            fn: the callable, whose first line it is where no other is found.
        """
        kinds = () if slot.owner is None else _class_of(slot.owner).__mro__
        members = (member for kind in kinds for member in vars(kind).values())
        methods = {f.__code__ for member in members for f in functions_in(member)}
        codes = sorted(self.places, key=lambda c: (is_installed(c.co_filename), c not in methods))
        key = slot.key if isinstance(slot.key, str) else ""
        finds = [_mutations(code, container) for code in codes] if container else []
        if not finds:
            name = key or re.sub(r"\W.*", "", slot.name.rpartition(".")[2])
            finds = [_stores(code, name) for code in codes]
        for code, lines in zip(codes, finds, strict=True):
            for line in lines:
                return self.line(code, line)
        return begin_of(fn)

    def matching(self, pattern: str, own: bool = False) -> Spot | None:
        """Return a line that matches, of the function that was called last; None if there is none.

        Args:
            own: leave out the code of libraries.
        """
        for code in reversed(list(self.places)):
            if own and is_installed(code.co_filename):
                continue
            for line in sorted({line for *_, line in code.co_lines() if line is not None}):
                if re.search(pattern, linecache.getline(code.co_filename, line)):
                    return self.line(code, line)
        return None

    def stored_item(self, key: object) -> Spot | None:
        """Return the user's own line that stored an item under a key."""
        quoted = re.escape(repr(key)).replace("'", "[\"']")
        return self.matching(rf"\[\s*{quoted}\s*\]\s*{_ASSIGNS}", own=True)


def begin_of(fn: object) -> Spot:
    """Return the place where a callable begins; nowhere for one of torch's."""
    place = line_of(fn)
    if place is None:
        return NOWHERE
    text = linecache.getline(place.filename, place.lineno)
    column = len(text) - len(text.lstrip()) + 1
    return Spot(shown(place.filename), place.lineno, column, place.source)


def _class_of(owner: object) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _stores(code: CodeType, name: str) -> Iterator[int]:
    """Return the lines of a function that assign a name: of an attribute, global or cell."""
    for step in dis.get_instructions(code):
        line = step.positions.lineno if step.positions is not None else None
        if step.opname in _STORES and step.argval == name and line is not None:
            yield line


def _mutations(code: CodeType, container: str) -> Sequence[int]:
    """Return the lines of a function that change a container: those with its name first, then
    others of a function that names it."""
    lines = sorted({line for *_, line in code.co_lines() if line is not None})
    texts = {line: linecache.getline(code.co_filename, line) for line in lines}
    named = {
        line for line, text in texts.items() if re.search(rf"\b{re.escape(container)}\b", text)
    }
    changing = [line for line in lines if _MUTATES.search(texts[line])]
    return sorted(changing, key=lambda line: line not in named) if named else []
