"""`diagnose`: the doctor's means in turn, each finding once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from onelaunch.bench.environment import environment
from onelaunch.bench.workload import OnProgress, Workload, tell_nobody
from onelaunch.doctor.blocks import Blocks
from onelaunch.doctor.capture import Captured, capture
from onelaunch.doctor.diagnosis import Diagnosis
from onelaunch.doctor.emulated import streams
from onelaunch.doctor.paths import shown
from onelaunch.doctor.pieces import pieces
from onelaunch.doctor.replay import undone
from onelaunch.doctor.run import trains, watch
from onelaunch.doctor.silent import silently_wrong
from onelaunch.doctor.slow.listener import Slow
from onelaunch.doctor.source.comments import kept
from onelaunch.doctor.source.ran import Source
from onelaunch.doctor.waits import Waits
from onelaunch.driver.capture_query import Asking
from onelaunch.rules.finding import Finding, merged
from onelaunch.source import line_of


def diagnose(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Diagnosis:
    """Find what stops a callable from being one launch, right and fast, by line.

    The callable runs on copies of its state and of its arguments, about 15 to 30 times: watched,
    recorded bare and replayed beside eager, captured and replayed. On a machine without a GPU the
    tensors of the CPU stand for a GPU's.

    Args:
        fn: as for `graph`: a function, bound method or `nn.Module`.
        args, kwargs: the arguments of one call.

    Returns:
        A `Diagnosis`: findings with their line, the reason, and the code to write instead.

    An exception of `fn` comes through as it is.

    Example:
        >>> import torch, onelaunch as ol
        >>> found = ol.diagnose(lambda x: x * x.sum().item(), torch.ones(3))
        >>> [finding.name for finding in found.findings]
        ['host-read']
    """
    return examine(Workload(fn, args, kwargs))


def examine(workload: Workload, on_progress: OnProgress = tell_nobody) -> Diagnosis:
    """Diagnose a workload; see `diagnose`.

    Args:
        on_progress: is told each step, and the part that is done, from 0 to 1.
    """
    with streams(), undone(workload):
        return _examined(workload, on_progress)


def _examined(workload: Workload, on_progress: OnProgress) -> Diagnosis:
    on_progress("watching an eager run", 0.0)
    backward = trains(workload)
    seen = _watched(workload, backward)
    on_progress("replaying a bare graph beside eager", 0.2)
    silent = silently_wrong(workload, backward)
    on_progress("capturing", 0.5)
    captured = capture(workload.copy(), backward)
    found = [*seen.source.findings(), *seen.slow.findings(), *seen.blocks.on_cuda]
    found += [f for f in seen.blocks.findings() if not _refuted(f, captured)]
    known = {(f.file, f.line) for f in found}  # where more is known than that the host waits
    waits = [f for f in seen.waits.findings() if (f.file, f.line) not in known]
    found += [f for f in waits if not _refuted(f, captured)]
    found += [f for f in silent if not _is_told(f, captured)]
    found += [] if captured.refused is None else [_at_users_line(captured.refused, found)]
    found += captured.warned
    found += seen.source.blocking(found, captured.replayed)
    parts = None
    if captured.refused is not None:
        on_progress("capturing its pieces", 0.8)
        parts = pieces(workload.copy(), backward)
    place = line_of(workload.fn)
    return Diagnosis(
        target=name_of(workload.fn),
        findings=tuple(kept(merged(found))),
        replayed=captured.replayed,
        means=("source", "run", "capture", "replay"),
        pieces=parts,
        file="" if place is None else shown(place.filename),
        environment={name: value for name, value in environment().items() if value is not None},
    )


class _Watched(NamedTuple):
    """The listeners of a watched run."""

    blocks: Blocks
    waits: Waits
    source: Source
    slow: Slow


def _watched(workload: Workload, backward: bool) -> _Watched:
    """Watch a run. A callable that asks whether it is captured is told no; and if what it does
    then blocks a capture, yes, as `graph` does."""
    asking, told_no = Asking(False), _Watched(Blocks(), Waits(), Source(), Slow())
    with asking.answering():
        watch(workload.copy(), told_no, backward)
    if not asking.asked or not told_no.blocks.findings():
        return told_no
    told_yes = _Watched(Blocks(), Waits(), Source(), Slow())
    try:
        with Asking(True).answering():
            watch(workload.copy(), told_yes, backward)
    except Exception:  # noqa: BLE001  what it does in a capture may fail outside of one
        return told_no
    return told_yes


def _at_users_line(refused: Finding, found: list[Finding]) -> Finding:
    """Return the finding of a refusal at the line of the user's, where the run found the same in
    the library that this line calls."""
    place = f"{refused.file}:{refused.line}:"
    for known in found:
        if known.code == refused.code and (known.library or "").startswith(place):
            return known.also(refused)
    return refused


def _is_told(finding: Finding, captured: Captured) -> bool:
    """Return whether a refusal tells why replays differ. OL117 says no more than that runs do."""
    refused = captured.refused is not None and captured.refused.code != "OL117"
    return finding.code == "OL500" and refused


def _refuted(finding: Finding, captured: Captured) -> bool:
    """Return whether a capture shows that a line of the eager run blocks nothing, or is at fault
    for another reason, which the capture's own finding has."""
    if captured.refused is None:
        return captured.replayed
    own = captured.refused
    return (finding.file, finding.line) == (own.file, own.line) and finding.code != own.code


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a callable, as messages have it."""
    return getattr(fn, "__qualname__", type(fn).__name__)
