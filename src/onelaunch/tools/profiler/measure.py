"""`profile`: times first, then counts, peaks and a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onelaunch.call import tree
from onelaunch.errors import bad
from onelaunch.tools.bench.environment import environment
from onelaunch.tools.bench.profile import limit_of, time_calls
from onelaunch.tools.bench.timers import TimerName
from onelaunch.tools.bench.trace import record
from onelaunch.tools.bench.workload import (
    OnProgress,
    Workload,
    name_of,
    takes_a_call,
    tell_nobody,
    validated,
)
from onelaunch.tools.profiler.breakdown import Seen, parts_on_cpu, parts_on_gpu, seen_in
from onelaunch.tools.profiler.counting import CallWork, count
from onelaunch.tools.profiler.peaks import Peaks, measure_peaks
from onelaunch.tools.profiler.profile import Bound, Profile
from onelaunch.tools.profiler.remedies import remedies_on_cpu, remedies_on_gpu
from onelaunch.tools.profiler.roofline import HALF, Roofline, roofline

WARM_CALLS = 5  # a graphed callable replays from the fifth call on
TRACED = 3
SMALL = 0.1
"""Work that reaches less of the roofline waits for neither memory nor arithmetic."""
UNSEEN = (
    "On a CPU there are no launches, no gaps between kernels, no copies to and from a GPU, and no "
    "waits for one: profile on the machine with the GPU to see them."
)
UNTRACED = (
    "torch.profiler saw no kernel: another tool may be attached to the GPU, or this process may "
    "not profile. Copies count as kernels, and the heaviest are not known."
)


@takes_a_call
def profile(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Find where a call's time goes, what bounds it, and the most that each remedy can gain.

    The callable runs on a copy of its state and of its arguments, some 50 times, a long one about
    20 times: timed, counted, and then traced by torch.profiler. A module in eval mode is called
    without gradients; other callables see to that themselves. The peaks of the machine are measured
    with it, once in a process: a second or two, 512 MiB at most.

    Args:
        fn: any callable that runs operators of torch; what it returns does not matter.
        args: positional arguments.
        kwargs: keyword arguments.
        name: a name for the workload; the callable's by default. A target, ``"path.py:name"``,
            has remedies name commands for it.
        on_progress: called with a text and the part that is done, 0 to 1.

    Returns:
        A `Profile`: data, that prints by its `summary` and goes to JSON.

    Raises:
        ArgumentError: OL401, a bad argument, a callable that runs no operator, or another profiler
            at work.
        Exception: whatever `fn` itself raises on these arguments, unchanged.

    Example:
        >>> import torch, onelaunch as ol
        >>> found = ol.profile(torch.nn.Linear(64, 64).eval(), (torch.randn(8, 64),))
        >>> found.roofline.flops
        {'float32': 65536}
    """
    workload = validated(fn, args, kwargs, "profile")
    if torch.autograd._profiler_enabled():
        what, why = "another profiler is at work in this thread", "a trace would end it"
        raise bad(what, "profile", why, "profile(model, (x,))")
    tell = on_progress or tell_nobody
    tell("running it", 0.0)
    with prepared(workload) as own:
        return _profiled(own, name or name_of(fn), tell)


@contextlib.contextmanager
def prepared(workload: Workload) -> Generator[Workload]:
    """Give a copy of a workload that has run, in the grad mode for it, and keep the random state.

    A module in eval mode runs without gradients, and other callables as the caller has it.
    """
    infers = isinstance(workload.fn, nn.Module) and not workload.fn.training
    devices = [workload.device] if workload.device.type == "cuda" else []
    grad = torch.is_grad_enabled() and not infers
    with torch.random.fork_rng(devices), torch.set_grad_enabled(grad):
        own = workload.copy()
        result: Any = None
        for _ in range(WARM_CALLS):
            result = own()
        places = (t.device for t in tree.flatten(result).tensors)
        yield replace(own, results_on=next((d for d in places if d.type != "cpu"), None))


def _profiled(workload: Workload, name: str, tell: OnProgress) -> Profile:
    device = workload.device
    tell("timing it", 0.1)
    times = time_calls(workload)
    tell("counting its arithmetic and bytes", 0.4)
    work = count(workload, device)
    if not work.works:
        what, why = "the callable runs no operator of torch", "there is nothing to profile"
        raise bad(what, name, why, "profile what computes with tensors: `return net, (images,)`")
    tell("measuring the peaks of this machine", 0.5)
    dtypes = {w.dtype for w in work.works if w.flops}
    if dtypes & {"float32", "float64"}:
        dtypes.add(HALF)
    peaks = measure_peaks(device, work.least_bytes, frozenset(dtypes))
    tell("tracing it", 0.8)
    calls = record(workload, device, TRACED)
    assert calls, "whether a profiler is at work was checked"
    return laid_out(name, times, work, peaks, seen_in(calls))


def laid_out(
    name: str, times: Mapping[TimerName, float], work: CallWork, peaks: Peaks, seen: Seen
) -> Profile:
    """Make a profile from the measurements.

    Args:
        times: medians in microseconds; without ``"gpu"`` on a CPU.
    """
    roof, heaviest, remarks = roofline(work, peaks), seen.heaviest, _remarks(work, peaks)
    target = name if ":" in name else None
    wall = times["wall"]
    on_gpu = "gpu" in times
    if on_gpu and not seen.kernels:
        remarks.append(UNTRACED)
        seen = replace(seen, kernels_us=times["gpu"])
    kernels = round(seen.kernels) or None if on_gpu else None
    parts = parts_on_gpu(seen, wall, times["host"]) if on_gpu else parts_on_cpu(seen, wall)
    if not on_gpu:  # the profiler slows operators down, too
        operating = sum(part.us for part in parts if part.name != "Python")
        heaviest = tuple(replace(heavy, us=heavy.share * operating) for heavy in heaviest)
    return Profile(
        workload=name,
        bound=bound_of(seen, roof, times),
        wall_us=wall,
        limit=replace(limit_of(times["host"], times.get("gpu")), kernels=kernels),
        launches=seen.launches if on_gpu else None,
        parts=parts,
        heaviest=heaviest,
        roofline=roof,
        peaks=peaks,
        remedies=remedies_on_gpu(parts, wall, seen.launches, roof, peaks, target, work.backward)
        if on_gpu
        else remedies_on_cpu(parts, wall, roof, peaks, target, work.backward),
        unseen=() if on_gpu else (UNSEEN,),
        remarks=tuple(remarks),
        environment=environment(),
    )


def bound_of(seen: Seen, roof: Roofline, times: Mapping[TimerName, float]) -> Bound:
    """Name what a call waits for most.

    Args:
        times: medians in microseconds; without ``"gpu"`` on a CPU.
    """
    busy = times["wall"]
    if "gpu" in times:
        busy = seen.kernels_us + seen.copies_us
        if times["host"] * (1.0 - seen.waiting) > busy:
            return "launches"
    return roof.waits_for if roof.roofline_us >= SMALL * busy else "overhead"


def _remarks(work: CallWork, peaks: Peaks) -> list[str]:
    said: list[str] = []
    if work.unknown:
        names = ", ".join(work.unknown)
        said.append(f"The arithmetic inside {names} is not counted: torch has no formula for it.")
    without = sorted({w.dtype for w in work.works if w.flops} - peaks.flops_per_us.keys())
    if without:
        said.append(f"The peak of products in {', '.join(without)} could not be measured.")
    return said
