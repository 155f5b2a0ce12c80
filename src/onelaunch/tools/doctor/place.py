"""The user's line of an event, the way there from the callable, and the library's line below."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from onelaunch.frames.origins import is_installed
from onelaunch.source import PLUMBING, is_standard, is_users
from onelaunch.tools.doctor.spot import NOWHERE, Spot, shown


def here(outermost: CodeType) -> Spot:
    """Return the line that runs now, below the frame that runs a code.

    The line is the innermost one of the user's; where all code is a library's, its innermost line.
    Frames of torch and of onelaunch do not count.
    """
    frames = [f for f in _below(outermost) if _counts(f.f_code.co_filename)]
    own = [f for f in frames if not is_installed(f.f_code.co_filename)]
    inner = own[0] if own else next(iter(frames), None)
    if inner is None:
        return NOWHERE
    way = (own or frames)[:0:-1]
    below = frames[0] if own and frames[0] is not inner else None
    file, line = inner.f_code.co_filename, inner.f_lineno
    return Spot(
        shown(file),
        line,
        _column(inner),
        linecache.getline(file, line).strip(),
        tuple(f"{shown(f.f_code.co_filename)}:{f.f_lineno} in {f.f_code.co_name}" for f in way),
        None if below is None else _text(below),
    )


def _counts(file: str) -> bool:
    return is_users(file) or (is_standard(os.path.abspath(file)) and file not in PLUMBING)


def _below(outermost: CodeType) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not outermost:
        yield frame
        frame = frame.f_back


def _text(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{shown(file)}:{line}: {linecache.getline(file, line).strip()}"


def _column(frame: FrameType) -> int:
    positions = list(frame.f_code.co_positions())
    number = frame.f_lasti // 2
    line, _, column, _ = positions[number] if 0 <= number < len(positions) else (None,) * 4
    if line is None or column is None:
        return 1
    before = linecache.getline(frame.f_code.co_filename, line).encode()[:column]  # it counts bytes
    return len(before.decode(errors="ignore")) + 1
