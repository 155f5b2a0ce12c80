"""The rules on the source, for the functions of the user's that ran: only lines that ran count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from onelaunch.bench.workload import Workload
from onelaunch.doctor.paths import in_library
from onelaunch.doctor.place import Spot
from onelaunch.doctor.run import Listener
from onelaunch.doctor.source.scan import scan_functions
from onelaunch.errors import ArgumentError
from onelaunch.rules.finding import Finding, merged
from onelaunch.source import code_of, is_users


class Source(Listener):
    """The listener that notes the lines that run, and reads them afterwards.

    It uses the interpreter's tracing function. Where a debugger or a measure of coverage has that,
    it leaves it alone, and finds nothing.
    """

    def __init__(self) -> None:
        self._lines: dict[str, set[int]] = {}
        self._own: dict[CodeType, set[int] | None] = {}
        self._root: CodeType | None = None
        self._on_host = False

    @contextmanager
    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> Generator[None]:
        self._root = code_of(workload.fn)
        self._on_host = workload.device.type == "cpu"
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace the lines of a function of the user's; a quarter of a microsecond for others."""
        code = frame.f_code
        if code not in self._own:
            file = code.co_filename
            own = is_users(file) and not in_library(file) and Path(file).is_file()
            self._own[code] = self._lines.setdefault(file, set()) if own else None
        return None if self._own[code] is None else self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._own[frame.f_code]
        if lines is not None:
            lines.add(frame.f_lineno)
        return self._line

    def findings(self) -> list[Finding]:
        """See `Listener`: what a bare graph gets wrong in silence."""
        return [finding for finding in self._read if finding.severity != "blocks-capture"]

    def blocking(self, found: list[Finding], replayed: bool) -> list[Finding]:
        """Return what blocks a capture, and no capture has refuted.

        Args:
            found: the findings of the other means; they know best why their lines are at fault.
            replayed: whether a capture succeeded. Without a GPU that says nothing of copies to
                the host, which do nothing there.
        """
        known = {(f.file, f.line) for f in found if f.severity == "blocks-capture"}
        keys = {f.key for f in found}
        unseen = {"OL103"} if self._on_host else set[str]()
        return [
            f
            for f in self._read
            if f.severity == "blocks-capture"
            and (f.key in keys or (f.file, f.line) not in known)
            and (not replayed or f.key in keys or f.code in unseen)
        ]

    @cached_property
    def _read(self) -> list[Finding]:
        found: list[Finding] = []
        for file, lines in self._lines.items():
            root = self._root
            first = root.co_firstlineno if root and root.co_filename == file else None
            # The file may be a document that has the code in it, or a program that wrote it.
            with suppress(ArgumentError):
                found += scan_functions(file, Path(file).read_bytes(), lines, first)
        return merged(found)
