"""A look for code that no watched run has executed. It costs a run little, unlike a watch."""

from __future__ import annotations

import sys
import types
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

from onelaunch.call_events import Matters, hook, set_profile
from onelaunch.frames.codes import ASKS_FOR_BUILD, LOOKS_UP, CodeFacts
from onelaunch.frames.origins import is_machinery
from onelaunch.gc_pause import no_collection
from onelaunch.identity import id


class UnwatchedCode:
    """A look for code that is read and that no watched run has executed.

    Args:
        watched: the code of watched runs.

    Attributes:
        found: True once such code ran.
    """

    def __init__(self, watched: Iterable[types.CodeType]) -> None:
        self.found = False
        self._passed = list(watched)
        self._matters = dict.fromkeys(map(id, self._passed), Matters.RESULTS)
        self._hook = hook(self._meet, self._matters)

    @contextmanager
    def looking(self) -> Generator[None]:
        """Look at a run in this thread. A microsecond for each piece of code, at its first call."""
        before = sys.getprofile()
        with no_collection():
            self._hook.begin()
            try:
                yield
            finally:
                set_profile(before)
                self._hook.end()

    def _meet(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if id(code) in self._matters:
            return
        unread = is_machinery(code.co_filename) or code in LOOKS_UP or code in ASKS_FOR_BUILD
        facts = CodeFacts(code, unread)
        if facts.aside or facts.matters or not (facts.unread or facts.is_unread(frame)):
            self.found = True
        elif not facts.depends:
            self._passed.append(code)  # so that its id is not given to other code
            self._matters[id(code)] = Matters.RESULTS
