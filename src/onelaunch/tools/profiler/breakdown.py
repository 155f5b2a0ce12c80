"""The parts of a call's time, and what is heaviest in it, from traced calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from onelaunch.tools.bench.timeline import Lane
from onelaunch.tools.bench.trace import REPLAY, Nested, TracedCall, TraceEvent, nested
from onelaunch.tools.report.document import busy_us

PartName = Literal["operators", "launches", "waits", "idle", "kernels", "copies", "gaps", "Python"]
HEAVIEST = 10
_COPIES = frozenset({"aten::copy_"})


@dataclass(frozen=True)
class Part:
    """A part of a call's wall time. The parts of a lane add up to it.

    Attributes:
        name: of the host, ``"operators"``: torch's operators and, beside a GPU, the Python around
            them; ``"launches"`` of kernels and graphs; ``"waits"`` for the GPU; ``"idle"``: the
            call has returned, and the GPU still works; on a CPU ``"copies"`` and ``"Python"``. Of
            the GPU, ``"kernels"``, ``"copies"``, and the ``"gaps"`` in which it has nothing to do.
        us: for a call.
    """

    name: PartName
    lane: Lane
    us: float


@dataclass(frozen=True)
class Heavy:
    """All runs of a kernel (on a CPU, of an operator) in a call.

    Attributes:
        us: together; an operator's without the operators inside of it.
        runs: how often.
        share: of the time of all kernels, or of all operators.
        operators: the operators that launched it; none in a replay.
    """

    name: str
    us: float
    runs: float
    share: float
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """Times of one call, by the traced calls.

    Attributes:
        launches: of kernels, copies and graphs.
        kernels: that ran on the GPU.
        kernels_us: while at least one kernel ran.
        copies_us: while the GPU copied, and no kernel ran.
        launching, waiting: shares of the host's time.
        operating, copying: the same for operators and for copies, where there is no GPU.
    """

    launches: float
    kernels: float
    kernels_us: float
    copies_us: float
    launching: float
    waiting: float
    operating: float
    copying: float
    heaviest: tuple[Heavy, ...]


def seen_in(calls: Sequence[TracedCall]) -> Seen:
    """Add up what traced calls show, and divide by their number."""
    number = len(calls)
    events = [event for call in calls for event in call.events]
    inside = [[*nested(call.events)] for call in calls]
    host = [one for nests in inside for one in nests]
    work = [[e for e in call.events if e.on_gpu] for call in calls]
    kernels = [[e for e in busy if e.kind == "kernel"] for busy in work]
    kernels_us = sum(map(busy_us, kernels))
    own = [n for n in host if n.event.kind == "operator"]
    copies = sum(n.self_us for n in own if n.event.name in _COPIES)
    host_us = sum(call.host_us for call in calls) or 1.0
    return Seen(
        launches=(_count(events, "launch") + _bare_replays(calls)) / number,
        kernels=sum(map(len, kernels)) / number,
        kernels_us=kernels_us / number,
        copies_us=(sum(map(busy_us, work)) - kernels_us) / number,
        launching=_time(host, "launch") / host_us,
        waiting=_time(host, "wait") / host_us,
        operating=min(1.0, (sum(n.self_us for n in own) - copies) / host_us),
        copying=min(1.0, copies / host_us),
        heaviest=_heaviest_kernels(events, number)
        if any(kernels)
        else _heaviest_operators(own, number),
    )


def parts_on_gpu(seen: Seen, wall_us: float, host_us: float) -> tuple[Part, ...]:
    """Divide the wall time of a call: twice, as the host and as the GPU spends it.

    The profiler slows launches down, so its times of the host are scaled to `host_us`, measured
    without it. It does not slow the GPU's work.
    """
    host_us = min(host_us, wall_us)
    launching, waiting = seen.launching * host_us, seen.waiting * host_us
    kernels = min(seen.kernels_us, wall_us)
    copies = min(seen.copies_us, wall_us - kernels)
    return (
        Part("operators", "host", max(0.0, host_us - launching - waiting)),
        Part("launches", "host", launching),
        Part("waits", "host", waiting),
        Part("idle", "host", wall_us - host_us),
        Part("kernels", "gpu", kernels),
        Part("copies", "gpu", copies),
        Part("gaps", "gpu", wall_us - kernels - copies),
    )


def parts_on_cpu(seen: Seen, wall_us: float) -> tuple[Part, ...]:
    """Divide the wall time of a call on a CPU, by the shares that the profiler saw."""
    operating, copying = seen.operating * wall_us, seen.copying * wall_us
    return (
        Part("operators", "host", operating),
        Part("copies", "host", copying),
        Part("Python", "host", max(0.0, wall_us - operating - copying)),
    )


def _count(events: Iterable[TraceEvent], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def _time(host: Iterable[Nested], kind: str) -> float:
    return sum(one.self_us for one in host if one.event.kind == kind)


def _bare_replays(calls: Sequence[TracedCall]) -> int:
    """Count the replays without a launch inside. The profiler does not see a graph's launch by the
    driver's interface, only the annotation around it and its kernels."""
    found = 0
    for call in calls:
        launches = [e for e in call.events if e.kind == "launch" and "Graph" in e.name]
        for replay in call.events:
            if replay.kind == "annotation" and replay.name.startswith(REPLAY):
                span = replay.start_us, replay.stop_us
                found += not any(span[0] <= e.start_us <= span[1] for e in launches)
    return found


def _heaviest_kernels(events: Sequence[TraceEvent], number: int) -> tuple[Heavy, ...]:
    named = {e.operator: e.name for e in events if e.kind == "operator" and e.operator}
    runs: dict[str, list[TraceEvent]] = {}
    for event in events:
        if event.on_gpu:
            runs.setdefault(event.name, []).append(event)
    total = sum(e.duration_us for found in runs.values() for e in found) or 1.0
    made: list[Heavy] = []
    for name, found in runs.items():
        time = sum(e.duration_us for e in found)
        operators = sorted({named[e.operator] for e in found if e.operator in named})
        made.append(Heavy(name, time / number, len(found) / number, time / total, tuple(operators)))
    return _first(made)


def _heaviest_operators(own: Sequence[Nested], number: int) -> tuple[Heavy, ...]:
    times: dict[str, list[float]] = {}
    for one in own:
        times.setdefault(one.event.name, []).append(one.self_us)
    total = sum(map(sum, times.values())) or 1.0
    return _first(
        Heavy(name, sum(found) / number, len(found) / number, sum(found) / total)
        for name, found in times.items()
    )


def _first(heavy: Iterable[Heavy]) -> tuple[Heavy, ...]:
    return tuple(sorted(heavy, key=lambda one: -one.us)[:HEAVIEST])
