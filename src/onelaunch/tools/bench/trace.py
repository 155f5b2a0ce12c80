"""The events that torch.profiler records of some calls, as plain data."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

Kind = Literal["operator", "annotation", "launch", "wait", "runtime", "kernel", "copy"]
"""``operator``: of torch, on the host. ``annotation``: a range that a program names. ``launch``,
``wait`` and ``runtime``: calls into CUDA, that give the GPU work, that may wait for it, and others.
``kernel`` and ``copy``: work of the GPU; a memset is a kernel."""

CALL = "onelaunch profile: call"
REPLAY = "onelaunch replay: "
_HOST: dict[str, Kind] = {"cpu_op": "operator", "user_annotation": "annotation"}
_GPU: dict[str, Kind] = {"kernel": "kernel", "gpu_memset": "kernel", "gpu_memcpy": "copy"}
_RUNTIME = ("cuda_runtime", "cuda_driver")
_SUBMITS = ("cudaMemcpyAsync", "cudaMemsetAsync")
_WAITS = ("cudaMemcpy", "cudaMemcpy2D", "cudaFree")


@dataclass(frozen=True)
class TraceEvent:
    """A stretch of time in a trace.

    Attributes:
        start_us: since the call began.
        track: the thread, or the stream of the GPU.
        operator: the number of the operator that it is, or that it belongs to; 0: none.
        correlation: the number that a launch and its work on the GPU share; 0: none.
    """

    name: str
    kind: Kind
    start_us: float
    duration_us: float
    track: str = ""
    operator: int = 0
    correlation: int = 0

    @property
    def stop_us(self) -> float:
        """The end, since the call began."""
        return self.start_us + self.duration_us

    @property
    def on_gpu(self) -> bool:
        """True for work of the GPU."""
        return self.kind in ("kernel", "copy")


class TracedCall(NamedTuple):
    """One traced call, in the order of its events' begin.

    Attributes:
        host_us: until it returned.
        stop_us: until host and GPU were done.
    """

    host_us: float
    events: tuple[TraceEvent, ...]

    @property
    def stop_us(self) -> float:
        return max([self.host_us, *(event.stop_us for event in self.events)])


class Nested(NamedTuple):
    """An event of the host among the others of its thread.

    Attributes:
        depth: events that it runs inside of.
        self_us: its time without those inside of it.
    """

    event: TraceEvent
    depth: int
    self_us: float


def record(
    call: Callable[[], object], device: torch.device, calls: int = 1
) -> list[TracedCall] | None:
    """Trace some calls; None where another profiler is at work, which must not be disturbed.

    Call it after all timing: on CUDA the profiler stays attached and slows launches down.
    """
    if torch.autograd._profiler_enabled():
        return None

    def some() -> None:
        for n in range(calls + 1):  # the first pays for the profiler's own start
            with record_function(CALL if n else "onelaunch profile: first call"):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        export(some, device, file)
        return read(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def export(run: Callable[[], object], device: torch.device, file: Path) -> None:
    """Run under torch.profiler, and write its Chrome trace to a file, which Perfetto opens too."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    # Without `acc_events` it warns that the events of earlier steps are gone; there is one step.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
    profiler.export_chrome_trace(str(file))


def read(trace_events: Iterable[dict[str, Any]]) -> list[TracedCall]:
    """Read the ``traceEvents`` of a Chrome trace by torch.profiler: the calls named `CALL` in it.

    The host's events are those that lie within a call, in any thread. The GPU's work belongs to
    the last call that began before it, since each is waited for before the next.
    """
    whole = [event for event in trace_events if event.get("ph") == "X" and "dur" in event]
    calls = sorted((e for e in whole if e.get("name") == CALL and _is(e, _HOST)), key=_start)
    pageable = {
        _number(e, "correlation") for e in whole if _is(e, _GPU) and "Pageable" in e["name"]
    }
    found: list[tuple[dict[str, Any], list[TraceEvent]]] = [(call, []) for call in calls]
    for event in whole:
        kind = _kind(event, pageable)
        owner = next((one for one in reversed(found) if _start(one[0]) <= _start(event)), None)
        if kind is None or owner is None or event is owner[0]:
            continue
        begin = _start(owner[0])
        made = TraceEvent(
            event["name"],
            kind,
            _start(event) - begin,
            float(event["dur"]),
            str(event.get("tid", "")),
            _number(event, "External id"),
            _number(event, "correlation"),
        )
        if made.on_gpu or made.stop_us <= float(owner[0]["dur"]):
            owner[1].append(made)
    return [
        TracedCall(
            float(call["dur"]), tuple(sorted(events, key=lambda e: (e.start_us, -e.duration_us)))
        )
        for call, events in found
    ]


def _kind(event: dict[str, Any], pageable: set[int]) -> Kind | None:
    """Return the kind of an event; None if it is none of the call's, as the profiler's overhead."""
    category, name = event.get("cat"), event["name"]
    if category not in _RUNTIME:
        return _HOST.get(str(category)) or _GPU.get(str(category))
    if "Synchronize" in name or name in _WAITS:
        return "wait"
    if name in _SUBMITS and _number(event, "correlation") in pageable:
        return "wait"  # memory that is not pinned: the call waits for the copy
    return "launch" if "Launch" in name or name in _SUBMITS else "runtime"


def nested(events: Iterable[TraceEvent]) -> Iterator[Nested]:
    """Find how the host's events lie inside each other, thread by thread."""
    tracks: dict[str, list[TraceEvent]] = {}
    for event in events:
        if not event.on_gpu:
            tracks.setdefault(event.track, []).append(event)
    for track in tracks.values():
        yield from _nested(track)


def _nested(track: list[TraceEvent]) -> Iterator[Nested]:
    """Find it for the events of one thread, in the order in which they end."""
    open_: list[tuple[TraceEvent, list[float]]] = []  # with the times of what is inside
    for event in [*track, None]:
        while open_ and (event is None or open_[-1][0].stop_us <= event.start_us):
            done, inside = open_.pop()
            yield Nested(done, len(open_), max(0.0, done.duration_us - sum(inside)))
        if event is not None:
            if open_:
                open_[-1][1].append(event.duration_us)
            open_.append((event, []))


def _is(event: dict[str, Any], categories: dict[str, Kind]) -> bool:
    return event.get("cat") in categories


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _number(event: dict[str, Any], name: str) -> int:
    return int(event.get("args", {}).get(name, 0))
