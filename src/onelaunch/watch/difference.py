"""The first difference between two runs of one call, and the message that names it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch.errors import CaptureError
from onelaunch.source import Place, user_frame

TRIES = 3
"""Number of captures in a row that may differ from the run before them."""
GROWING = 7
"""The same number where the state grows from capture to capture."""


class Operand(NamedTuple):
    """A tensor argument of an operation, without its values."""

    origin: object
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    device: torch.device | None = None
    requires_grad: bool = False


class RunDifference(NamedTuple):
    """A difference between a run and the one before it."""

    what: str
    place: Place | None
    """The line that acts differently now."""
    fix: str | None = None
    grows: bool = False
    """True if a tensor has become larger."""
    terms: tuple[int, ...] = ()
    """The terms of the stand-ins that the operation takes; see `capture.numbers`."""

    @property
    def tries(self) -> int:
        """The captures in a row that may differ so. Growth may end after some calls."""
        return GROWING if self.grows else TRIES

    def refusal(self) -> CaptureError:
        return CaptureError("OL117", self.what, where=self.place, fix=self.fix)


def of_operations(
    number: int, was: tuple[Any, ...] | None, now: tuple[Any, ...] | None
) -> RunDifference:
    """Return the difference between two noted operations of this number; None is no operation."""
    grows = now is not None and _grows(was, now)
    place = user_frame() if now is not None else None
    return RunDifference(_message(number, was, now), place, _WHOLE if grows else None, grows)


def of_memory(number: int, entry: tuple[Any, ...], place: Place | None) -> RunDifference:
    """Return the difference of an operation that got other memory of unknown origin."""
    step = f"operation {number + 1} of the call, {_named(entry)},"
    return RunDifference(f"{step} got {_ELSEWHERE}", place, IN_THREAD)


def of_made_memory() -> RunDifference:
    """Return the difference of a run that read memory of unknown origin that was gone later."""
    return RunDifference(f"the call got {_ELSEWHERE}", user_frame(), IN_THREAD)


def of_handed_on() -> RunDifference:
    """Return the difference of a run that handed on other memory of unknown origin."""
    return RunDifference(f"what the call returns or stores is {_ELSEWHERE}", None, IN_THREAD)


def of_handed_on_value(name: str, was: object, now: object) -> RunDifference:
    """Return the difference of a run that returned or stored another plain value."""
    what = f"`{name}` is {was} in the run before, and {now} in the capture"
    return RunDifference(what, None, "take it outside of the call: `y = fast(x); t = time.time()`")


def _message(number: int, was: tuple[Any, ...] | None, now: tuple[Any, ...] | None) -> str:
    step = f"operation {number + 1} of the call"
    if was is None or now is None or was[0] != now[0]:
        return f"{step} was {_named(was)} in the run before, and is {_named(now)} in the capture"
    before, then = _shown(*_differing(was[1:], now[1:]))
    return f"{step}, {_named(now)}, got {before} in the run before, and {then} in the capture"


_ELSEWHERE = (
    "one tensor in the run before, and another in the capture, made where none of its operations "
    "is seen"
)


def of_threads(place: Place) -> CaptureError:
    """Return the refusal of a run that gave work to another thread, where nobody watches."""
    what = "another thread works for it"
    return CaptureError("OL117", what, where=place, fix=IN_THREAD)


def of_failed_watch(error: str) -> CaptureError:
    """Return the refusal of a run whose watch an error of its own turned off."""
    return CaptureError(
        "OL117",
        f"onelaunch could not watch the call: {error}",
        why="what the call reads is not known, so that no replay could check it",
        fix="report it, with the callable; `ol.graph(fn, on_refusal='eager')` runs it as it is",
    )


IN_THREAD = (
    "compute it in the thread that makes the call: what other threads do is in no recording; or "
    "keep the tensor where the callable reaches it"
)
_WHOLE = (
    "make what grows of its full size at first, and write into it in place (for a cache of "
    "transformers: StaticCache, `generate(cache_implementation='static')`)"
)


def _grows(was: tuple[Any, ...] | None, now: tuple[Any, ...]) -> bool:
    if was is None or was[0] != now[0]:
        return False
    a, b = _differing(was[1:], now[1:])
    if not (isinstance(a, Operand) and isinstance(b, Operand)):
        return False
    alike = a.origin == b.origin and len(a.shape) == len(b.shape) and a.shape != b.shape
    return alike and all(n <= m for n, m in zip(a.shape, b.shape, strict=True))


def _named(entry: tuple[Any, ...] | None) -> str:
    return (
        "none" if entry is None else f"`{entry[0].removeprefix('aten.').removesuffix('.default')}`"
    )


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """Return the first parts in which two different values differ; the lengths of two lists."""
    are_lists = isinstance(was, (list, tuple)) and isinstance(now, (list, tuple))
    if not are_lists or _is_leaf(was) or _is_leaf(now):
        return was, now
    for a, b in zip(was, now, strict=False):  # pyright: ignore
        if a != b:
            return _differing(a, b)
    return len(was), len(now)  # pyright: ignore


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Operand) or (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type)  # pyright: ignore
    )


def _shown(was: Any, now: Any) -> tuple[str, str]:
    if isinstance(was, int):
        return f"{was} arguments", f"{now}"
    if isinstance(was, Operand) and isinstance(now, Operand) and was.origin == now.origin:
        for name in Operand._fields:
            a, b = getattr(was, name), getattr(now, name)
            if a != b:
                return f"a tensor of {name} {a}", f"one of {name} {b}"
    return _text(was), _text(now)


def _text(noted: Any) -> str:
    """Describe an argument of an operation; a tensor by its origin."""
    match noted:
        case Operand(origin=str(name)):
            return name
        case Operand(origin=("value", value)):
            return f"{value}"
        case Operand(origin=("memory", _)):
            return "a tensor of its own"
        case Operand(origin=(number, _)):
            return f"a result of operation {number + 1}"
        case Operand():
            return "a tensor"
        case (type() as kind, None) if kind is not type(None):
            return "a number of an optimizer"
        case (type() as kind, value):
            return repr(float.fromhex(value)) if kind is float else repr(value)
        case _:
            return repr(noted)
