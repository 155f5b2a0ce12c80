"""A look for code that no watched run has executed. It costs a run little, unlike a watch."""

from __future__ import annotations

import types
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

from onelaunch.call_events import Matters, hook, profiling
from onelaunch.frames.codes import LISTS_MODULE, UNREAD, CodeFacts
from onelaunch.frames.origins import is_machinery
from onelaunch.gc_pause import no_collection
from onelaunch.identity import id


class UnwatchedCode:
    """A look for code that is read and that no watched run has executed.

    Args:
        watched: the code of watched runs.

    Attributes:
        found: such code that ran.
    """

    def __init__(self, watched: Iterable[types.CodeType]) -> None:
        self.found: list[types.CodeType] = []
        self._passed = list(watched)
        self._matters = dict.fromkeys(map(id, self._passed), Matters.RESULTS)
        self._hook = hook(self._meet, self._matters)

    @contextmanager
    def looking(self) -> Generator[None]:
        """Look at a run in this thread. A microsecond for each piece of code, at its first call."""
        with no_collection(), profiling(self._hook):
            try:
                yield
            finally:
                self._hook.end()

    def _meet(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if id(code) in self._matters:
            return
        facts = CodeFacts(code, is_machinery(code.co_filename) or code in UNREAD)
        notable = facts.aside or (facts.matters and code not in LISTS_MODULE)
        if notable or not (facts.unread or facts.is_unread(frame)):
            self.found.append(code)
        elif facts.depends:
            return
        self._passed.append(code)  # so that its id is not given to other code
        self._matters[id(code)] = Matters.RESULTS
