"""What a health check asks: the calls that a service was warmed up for, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onelaunch.call.numbers import any_number, numbers_read
from onelaunch.call.spec import CallSpec


@dataclass(frozen=True)
class PendingCall:
    """A call of `warm_up` without a recording.

    Attributes:
        call: its tensors.
        why: the reason: a budget was spent, or the recording was freed. Empty: it was not tried
            yet.
    """

    call: str
    why: str = ""


@dataclass(frozen=True)
class RefusedCall:
    """A call of `warm_up` that cannot be captured.

    Attributes:
        call: its tensors.
        code, what, where: the refusal, and its line.
    """

    call: str
    code: str
    what: str
    where: str | None


@dataclass(frozen=True)
class Readiness:
    """The state of the calls that `warm_up` was given; ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        ready: True once each call was tried, and none of them would raise. Calls that a budget left
            out do not count against it: they warm up and are captured as they come.
        captured: the calls with a recording, each as the text of its tensors.
        pending: the calls without a recording, and why.
        refused: the calls that cannot be captured.
    """

    ready: bool
    captured: tuple[str, ...]
    pending: tuple[PendingCall, ...]
    refused: tuple[RefusedCall, ...]


def readiness_of(
    planned: Mapping[CallSpec, PendingCall | RefusedCall],
    recorded: Iterable[CallSpec],
    refusals_raise: bool,
) -> Readiness:
    """Return the readiness of a callable. `planned`: the calls, each with the reason that it has no
    recording if it has none."""
    specs = set(recorded)
    places = [numbers for spec in specs if (numbers := numbers_read(spec.tree))]
    captured: list[str] = []
    pending: list[PendingCall] = []
    refused: list[RefusedCall] = []
    for spec, last in list(planned.items()):  # a copy: another thread may be warming up
        forms = [spec, *(replace(spec, tree=any_number(spec.tree, each)) for each in places)]
        if not specs.isdisjoint(forms):
            captured.append(last.call)
        elif isinstance(last, RefusedCall):
            refused.append(last)
        else:
            pending.append(last)
    tried = bool(planned) and all(call.why for call in pending)
    ready = tried and not (refused and refusals_raise)
    return Readiness(ready, tuple(captured), tuple(pending), tuple(refused))
