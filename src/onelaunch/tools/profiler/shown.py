"""A profile as a document: where the time goes, what is heaviest, the roofline, the remedies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.tools.bench.environment import known, machine_of
from onelaunch.tools.profiler.profile import Profile
from onelaunch.tools.report.document import Bars, Document, Layer, ReportTable
from onelaunch.tools.report.units import memory, us

NAME = 72


def document(profile: Profile) -> Document:
    """Show the parts of the time, then tables of kernels, peaks and remedies."""
    kernels = "kernels" if profile.limit.gpu_us is not None else "operators"
    heaviest = tuple(
        (_short(h.name), us(h.us), f"{h.runs:g}", f"{h.share:.0%}", ", ".join(h.operators))
        for h in profile.heaviest
    )
    remedies = tuple(
        (r.name, f"{r.at_most:.{1 if r.at_most >= 1.1 else 2}f}x", us(r.wall_us), r.how, r.assumes)
        for r in profile.remedies
    )
    peaks = ("roofline", "this call", "peak, measured", "at the peak")
    best = next(iter(profile.remedies), None)
    return Document(
        command="profile",
        title=profile.workload,
        answer=(profile.summary,),
        facts=(
            ("per call", us(profile.wall_us)),
            ("at the measured peaks", us(profile.roofline.roofline_us)),
            *(((f"at most, by {best.name}", f"{best.at_most:.1f}x"),) if best else ()),
        ),
        parts=(
            _parts(profile),
            ReportTable(
                f"Heaviest {kernels}",
                (f"heaviest {kernels}", "time", "runs", "share", "launched by"),
                heaviest,
                (4,),
            ),
            ReportTable("Roofline", peaks, tuple(_roofline(profile))),
            ReportTable("Remedies", ("remedy", "at most", "then", "by", "if"), remedies, (3, 4)),
        ),
        context=(
            f"{profile.workload} on {machine_of(profile.environment)}: "
            f"{us(profile.wall_us)} per call{_until(profile)}. "
            "Times are medians; the parts and the heaviest are from a trace.",
            *profile.unseen,
        ),
        remarks=profile.remarks,
        environment=known(profile.environment),
    )


def _until(profile: Profile) -> str:
    """Tell how long the host takes; nothing where all of the call is the host's."""
    host, wall = profile.limit.host_us, profile.wall_us
    return f", {us(host)} of it until it returns" if host < wall else ""


def _parts(profile: Profile) -> Bars:
    """Draw a bar for each part of the time of a lane, from where the one before it ends."""
    values: list[dict[str, Any]] = []
    for lane, said in (("host", "host"), ("gpu", "GPU")):
        end = 0.0
        for part in (part for part in profile.parts if part.lane == lane):
            names = {"name": f"{said}: {part.name}", "part": part.name, "shown": us(part.us)}
            values.append({**names, "best": False, "kind": said, "low": end, "high": end + part.us})
            end += part.us
    return Bars(
        name="parts",
        title="Where the time goes",
        caption="The parts of a call's wall time, one after another: as the host spends it, and "
        "beside it the GPU.",
        values=tuple(values),
        layers=(Layer("high", "low", "host", (("GPU", "accent"),)),),
        stacked=True,
    )


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 3]}..."


def _roofline(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Set the bytes and products of the call beside the peaks of the machine."""
    roof, peaks = profile.roofline, profile.peaks
    bandwidth = f"{peaks.bytes_per_us / 1e3:,.1f} GB/s"
    least = us(roof.least_bytes / peaks.bytes_per_us)
    yield "bytes of all operators", memory(roof.nbytes), bandwidth, us(roof.memory_us)
    yield "bytes, were it one kernel", memory(roof.least_bytes), bandwidth, least
    for dtype, flops in roof.flops.items():
        peak = peaks.flops_per_us.get(dtype)
        at_peak = (f"{_flops(peak * 1e6)}/s", us(flops / peak)) if peak else ("-", "-")
        yield f"products in {dtype}", _flops(flops), *at_peak


def _flops(count: float) -> str:
    for factor, unit in ((1e3, "FLOP"), (1e6, "kFLOP"), (1e9, "MFLOP"), (1e12, "GFLOP")):
        if count < factor:
            return f"{count / factor * 1e3:.3g} {unit}"
    return f"{count / 1e12:.3g} TFLOP"
