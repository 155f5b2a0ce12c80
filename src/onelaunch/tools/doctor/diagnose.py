"""`diagnose`: the doctor's means in turn, each finding once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.finding import Finding
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.workload import (
    OnProgress,
    Workload,
    name_of,
    takes_a_call,
    tell_nobody,
    validated,
)
from onelaunch.tools.doctor.blocks import Blocks
from onelaunch.tools.doctor.capture import Captured, capture
from onelaunch.tools.doctor.diagnosis import Diagnosis
from onelaunch.tools.doctor.emulated import streams
from onelaunch.tools.doctor.pieces import pieces
from onelaunch.tools.doctor.replay import undone
from onelaunch.tools.doctor.run import trains, watch
from onelaunch.tools.doctor.silent import silently_wrong
from onelaunch.tools.doctor.slow.listener import Slow
from onelaunch.tools.doctor.source.comments import kept
from onelaunch.tools.doctor.waits import Waits
from onelaunch.tools.rules.findings import merged
from onelaunch.watch.operations import HigherOrder


@takes_a_call
def diagnose(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Diagnosis:
    """Find what stops a callable from being one launch, right and fast, by line.

    The callable runs on copies of its state and of its arguments, about 15 to 30 times. It is
    watched, recorded bare and replayed beside eager, then captured and replayed. On a machine
    without a GPU the tensors of the CPU stand for a GPU's.

    Args:
        fn: as for `graph`: a function, bound method or `nn.Module`.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        A `Diagnosis`: findings with their line, the reason, and the code to write instead.

    Raises:
        ArgumentError: OL401, a bad argument.
        Exception: whatever `fn` itself raises on these arguments, unchanged.

    Example:
        >>> import torch, onelaunch as ol
        >>> found = ol.diagnose(lambda x: x * x.sum().item(), (torch.ones(3),))
        >>> [finding.name for finding in found.findings]
        ['host-read']
    """
    return examine(validated(fn, args, kwargs, "diagnose"))


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
    seen, silent = None, list[Finding]()
    with suppress(HigherOrder):  # which does not run under modes, and the capture names
        seen = _watched(workload, backward)
        on_progress("replaying a bare graph beside eager", 0.2)
        silent = silently_wrong(workload, backward)
    on_progress("capturing", 0.5)
    captured = capture(workload.copy(), backward)
    found = [] if seen is None else _of_run(seen, captured)
    found += [f for f in silent if not _is_told(f, captured)]
    found += [] if captured.refused is None else [_at_users_line(captured.refused, found)]
    found += captured.warned
    parts = None
    if captured.refused is not None:
        on_progress("capturing its pieces", 0.8)
        parts = pieces(workload.copy(), backward)
    return Diagnosis(
        target=name_of(workload.fn),
        findings=tuple(kept(merged(found))),
        replayed=captured.replayed,
        means=("run", "capture", "replay"),
        pieces=parts,
        environment={name: value for name, value in environment().items() if value is not None},
    )


class _Watched(NamedTuple):
    """The listeners of a watched run."""

    blocks: Blocks
    waits: Waits
    slow: Slow


def _watched(workload: Workload, backward: bool) -> _Watched:
    """Watch a run. A callable that asks whether it is captured is told no; and if what it does
    then blocks a capture, yes, as `graph` does."""
    asking, told_no = CaptureAnswer(False), _Watched(Blocks(), Waits(), Slow())
    with asking.in_force():
        watch(workload.copy(), told_no, backward)
    if not asking.asked or not told_no.blocks.findings():
        return told_no
    told_yes = _Watched(Blocks(), Waits(), Slow())
    try:
        with CaptureAnswer(True).in_force():
            watch(workload.copy(), told_yes, backward)
    except Exception:  # noqa: BLE001  what it does in a capture may fail outside of one
        return told_no
    return told_yes


def _of_run(seen: _Watched, captured: Captured) -> list[Finding]:
    """Return the findings of an eager run that no capture refutes."""
    found = [*seen.slow.findings(), *seen.blocks.on_cuda]
    found += [f for f in seen.blocks.findings() if not _refuted(f, captured)]
    known = {(f.file, f.line) for f in found}  # where more is known than that the host waits
    waits = [f for f in seen.waits.findings() if (f.file, f.line) not in known]
    return found + [f for f in waits if not _refuted(f, captured)]


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
    """Return whether a capture refutes a finding of the eager run: it went through, or its own
    finding has another reason for the same line."""
    if captured.refused is None:
        return captured.replayed
    own = captured.refused
    return (finding.file, finding.line) == (own.file, own.line) and finding.code != own.code
