"""The errors that onelaunch raises; their codes and texts are in `onelaunch.error_catalogue`.

    GraphError
    ├── ArgumentError   an option or argument that is not valid; also a ValueError
    ├── CaptureError    the callable cannot be captured as written
    └── ReplayError     a call that no recording fits, under ``on_mismatch="raise"``

An exception raised by the user's own callable is never wrapped: it comes through as it is.
"""

from __future__ import annotations

import enum
import functools
import traceback
import types
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, cast

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.finding import Finding, of_refusal


class _InParts(Exception):
    """A message in four parts: what happened, where, why, and the code that fixes it; see
    `GraphError`. `code`: a key of `CATALOGUE`, which has the usual `why` and `fix`."""

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: object = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        entry = CATALOGUE[code]
        self.code = code
        self.what = what
        self.where = None if where is None else str(where)
        self.why = why or entry.why
        self.fix = fix or entry.fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines.append(f"  why:   {self.why}")
        lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.what, self.where, self.why, self.fix)


class GraphError(_InParts, RuntimeError):
    """The base of the errors that onelaunch raises, with a message in four parts.

    Attributes:
        code: the code that `onelaunch explain` knows, such as ``"OL101"``.
        what: what happened, with the values.
        where: the place: ``file:line`` and its source, or the argument; None if there is none.
        why: the reason.
        fix: the code to write instead.
    """

    def warning(self, came: str, code: str | None = None) -> GraphWarning:
        """Make a warning of this error; the consequence comes first.

        Args:
            came: the consequence, such as ``"such calls run eagerly"``.
            code: the warning's code, if it differs from the error's, which is then named too.
        """
        what = self.what if code is None else f"[{self.code}] {self.what}"
        parts = {"where": self.where, "why": self.why, "fix": self.fix}
        return GraphWarning(code or self.code, f"{came}: {what}", **parts)


class ArgumentError(GraphError, ValueError):
    """An option or argument that is not valid; `what` names it and its value."""


def bad(what: str, where: str, why: str, fix: str) -> ArgumentError:
    """Make the error for a mistake in an argument, an option or a file."""
    return ArgumentError("OL401", what, where=where, why=why, fix=fix)


class CaptureError(GraphError):
    """A callable that cannot be captured as written; `where` names the user's line."""

    may_pass = False
    """True if the next run may not do what is refused: perhaps this was the only time."""

    @property
    def finding(self) -> Finding | None:
        """The finding that `diagnose` has for it: file, line, source and fix as data.

        None for a refusal that is no fault of a line, such as a pool that is full.
        """
        return of_refusal(self.code, self.what, self.where, self.fix)


class CaptureSignal(Exception):
    """A fact that a run under capture shows to the caller of the capture. It is no refusal."""


class ReplayError(GraphError):
    """A call that no recording fits, where the caller asked for an error instead of a recording."""


class GraphWarning(_InParts, UserWarning):
    """A call that ran correctly, but not as one launch; or replays that omit an effect of Python.

    It has the attributes of a `GraphError`.
    """


def describe_type(value: object) -> str:
    """Return the kind of a value for a message: "a Linear", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def text_of(value: object, depth: int = 3) -> str:
    """Return the text of a value for a message, or its kind. A class may make its texts in Python,
    where that may fail, or read the device."""
    return repr(value) if _made_in_c(value, depth) else describe_type(value)


def _made_in_c(value: object, depth: int) -> bool:
    if not isinstance(type(value).__repr__, types.WrapperDescriptorType):
        return isinstance(value, enum.Enum)
    if isinstance(value, types.MethodType | functools.partial):  # the text of another object inside
        return False
    if isinstance(value, dict):
        value = [*cast(dict[Any, Any], value).items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        parts = cast(Iterable[object], value)
        return depth > 0 and all(_made_in_c(part, depth - 1) for part in parts)
    return True


def _rebuild(
    kind: type[_InParts], code: str, what: str, where: str | None, why: str, fix: str
) -> _InParts:
    error = kind.__new__(kind)  # a kind may make its parts from others
    _InParts.__init__(error, code, what, where=where, why=why, fix=fix)
    return error


def let_go(error: BaseException | None) -> None:
    """Clear the frames of a refusal, whose tensors are memory of the pool."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # it still runs: an update would add the error to a copy
                frame.clear()
                _ = frame.f_locals  # updates an earlier copy
        error = error.__cause__ or error.__context__


@contextmanager
def letting_go() -> Generator[None]:
    """Clear the frames of a refusal on its way to the caller. Some hold the refusal itself, and in
    such a cycle the caller's frame would stay with its tensors."""
    try:
        yield
    except CaptureError as error:
        let_go(error)
        raise
