"""A profile in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onelaunch.bench.profile import us
from onelaunch.bench.timeline import Lane
from onelaunch.profiler.breakdown import Part
from onelaunch.profiler.profile import Profile
from onelaunch.report.cells import memory

BAR = 60
NAME = 72
_LANES: tuple[tuple[Lane, str], ...] = (("host", "host"), ("gpu", "GPU"))
_INK = {
    "operators": ("█", "blue"),
    "launches": ("▓", "yellow"),
    "waits": ("▒", "red"),
    "idle": ("·", "dim"),
    "kernels": ("█", "green"),
    "copies": ("▓", "magenta"),
    "gaps": ("·", "dim"),
    "Python": ("░", "yellow"),
}


def show_profile(profile: Profile, console: Console) -> None:
    """Print the answer, where the time goes, what is heaviest, the roofline, and the remedies."""
    console.print()
    console.print(Text(profile.summary, style="bold"))
    console.print()
    for lane, title in _LANES:
        parts = [part for part in profile.parts if part.lane == lane]
        if parts:
            console.print(_bar(title, parts, profile.wall_us))
    for table in (_heaviest(profile), _roofline(profile), _remedies(profile)):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    console.print(Text(_header(profile), style="dim"))
    for said in profile.unseen:
        console.print(Text(said, style="dim"))
    for said in profile.remarks:
        console.print(Text(said, style="yellow"))


def _bar(title: str, parts: list[Part], wall_us: float) -> Text:
    """Draw the parts of a lane in a line, and name each with its time in the next."""
    bar, legend = Text(f"{title:>5}  "), Text(" " * 7)
    reached = drawn = 0.0
    for part in parts:
        ink, style = _INK[part.name]
        reached += part.us / max(wall_us, 1e-9) * BAR
        bar.append(ink * (round(reached) - round(drawn)), style)
        drawn = reached
        if part.us > 0:
            legend.append(f"{ink} ", style)
            legend.append(f"{part.name} {us(part.us)}   ")
    return bar.append("\n").append(legend)


def _heaviest(profile: Profile) -> Table:
    on_gpu = profile.limit.gpu_us is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("heaviest kernels" if on_gpu else "heaviest operators", overflow="fold")
    for name in ("time", "runs", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    launched = any(heavy.operators for heavy in profile.heaviest)
    if launched:
        table.add_column("launched by", overflow="fold")
    for heavy in profile.heaviest:
        cells = (_short(heavy.name), us(heavy.us), f"{heavy.runs:g}", f"{heavy.share:.0%}")
        table.add_row(*map(Text, cells), *([", ".join(heavy.operators)] * launched))
    return table


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 3]}..."


def _roofline(profile: Profile) -> Table:
    """Set what the call moves and computes beside what the machine reached."""
    roof, peaks = profile.roofline, profile.peaks
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("roofline")
    for name in ("this call", "peak, measured", "at the peak"):
        table.add_column(name, justify="right", no_wrap=True)
    bandwidth = f"{peaks.bytes_per_us / 1e3:,.1f} GB/s"
    table.add_row("bytes of all operators", memory(roof.nbytes), bandwidth, us(roof.memory_us))
    least = us(roof.least_bytes / peaks.bytes_per_us)
    table.add_row("bytes, were it one kernel", memory(roof.least_bytes), bandwidth, least)
    for dtype, flops in roof.flops.items():
        peak = peaks.flops_per_us.get(dtype)
        at_peak = us(flops / peak) if peak else "-"
        rate = f"{_flops(peak * 1e6)}/s" if peak else "-"
        table.add_row(f"products in {dtype}", _flops(flops), rate, at_peak)
    return table


def _flops(count: float) -> str:
    for factor, unit in ((1e3, "FLOP"), (1e6, "kFLOP"), (1e9, "MFLOP"), (1e12, "GFLOP")):
        if count < factor:
            return f"{count / factor * 1e3:.3g} {unit}"
    return f"{count / 1e12:.3g} TFLOP"


def _remedies(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("remedy", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("then", justify="right", no_wrap=True)
    table.add_column("by", overflow="fold")
    table.add_column("if", overflow="fold")
    for remedy in profile.remedies:
        gain = f"{remedy.at_most:.1f}x" if remedy.at_most >= 1.1 else f"{remedy.at_most:.2f}x"
        cells = (remedy.name, gain, us(remedy.wall_us), remedy.how, remedy.assumes)
        table.add_row(*map(Text, cells))
    return table


def _header(profile: Profile) -> str:
    where = profile.environment.get("gpu") or profile.environment.get("cpu") or "this machine"
    torch = profile.environment.get("torch")
    return (
        f"{profile.workload} on {where}, torch {torch}: {us(profile.wall_us)} per call, "
        f"{us(profile.limit.host_us)} of it until it returns. Times are medians; the parts and the "
        "heaviest are from a trace."
    )
