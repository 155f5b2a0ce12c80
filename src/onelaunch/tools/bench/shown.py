"""A comparison as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onelaunch.tools.bench.environment import known, machine_of
from onelaunch.tools.bench.rows import Comparison, Row
from onelaunch.tools.bench.timers import Timing
from onelaunch.tools.report.document import Bars, Document, Layer, ReportTable, Style, Text
from onelaunch.tools.report.units import memory, seconds, us, with_spread

COLUMNS = ("engine", "wall / call", "host", "GPU", "error", "build", "memory")
MOST = 5.0
"""Times of eager's end, or of the fastest's, at which the axis ends at the latest."""
_ORDER = {"ok": 0, "unchecked": 1, "interrupted": 2, "wrong": 3, "failed": 4, "missing": 5}
_STYLES: dict[str, Style] = {
    "wrong": "bad",
    "failed": "warn",
    "missing": "dim",
    "interrupted": "dim",
}


def document(comparison: Comparison) -> Document:
    """Show what to take first, then the times and errors of all, then why others have none."""
    best = comparison.best
    rows = in_order(comparison)
    timed = [row for row in rows if row.wall is not None]
    others = [r for r in rows if r.wall is None or r.status not in ("ok", "unchecked")]
    limit = comparison.profile.summary if comparison.profile else ""
    figures = ReportTable(
        "All engines",
        COLUMNS if timed else (),
        tuple(map(cells, timed)),
        styles=tuple("best" if row is best else _STYLES.get(row.status, "") for row in timed),
    )
    reasons = ReportTable(
        "Not timed, or failed",
        (),
        tuple((row.title, remark(row)) for row in others),
        styles=tuple(_STYLES.get(row.status, "") for row in others),
    )
    charts = _walls(comparison, timed), comparison.timelines
    ended = "Interrupted: this is what was known by then."
    return Document(
        command="compare",
        title=comparison.workload,
        answer=tuple(verdict(comparison)),
        facts=tuple(_facts(comparison)),
        code=best.code if best is not None else "",
        parts=(
            *((Text("What bounds this call", limit),) if limit else ()),
            *(chart for chart in charts if chart),
            figures,
            reasons,
        ),
        context=tuple(_context(comparison)),
        remarks=(*comparison.remarks, *((ended,) if comparison.interrupted else ())),
        notes=tuple(f"{row.title}: {note}" for row in comparison.rows for note in row.notes),
        environment=known(comparison.environment),
    )


def in_order(comparison: Comparison) -> list[Row]:
    """Sort the rows: the fastest first, then the wrong and failed, then the missing."""
    return sorted(comparison.rows, key=lambda row: (_ORDER[row.status], _wall_us(row)))


def cells(row: Row) -> tuple[str, ...]:
    """Write one text for each of `COLUMNS`; the spread of the wall time stands for all.

    ``*`` marks an engine whose results the next call overwrites, ``~`` a time that still moved.
    """
    wall = timing(row.wall)
    return (
        f"{row.title} *" if row.fresh_output is False else row.title,
        f"~{wall}" if row.noisy else wall,
        "" if row.host is None else us(row.host.median_us),
        "" if row.gpu is None else us(row.gpu.median_us),
        "" if row.error is None or row.status == "unchecked" else f"{row.error:.1e}",
        "" if row.build_seconds is None else seconds(row.build_seconds),
        "" if row.memory_bytes is None else memory(row.memory_bytes),
    )


def timing(found: Timing | None) -> str:
    """Write median and spread: ``41.2 us ±0.3``."""
    return "" if found is None else with_spread(found.median_us, found.spread_us)


def remark(row: Row) -> str:
    """Write the doubts about a row: its status and reason, noise, an overwritten result."""
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    said = ["noisy"] if row.noisy else []
    said += ["result overwritten by the next call"] if row.fresh_output is False else []
    return ", ".join(said)


def verdict(comparison: Comparison) -> Iterator[str]:
    """Name the engine to take, in a sentence, and what else is to be known of it."""
    best, fastest = comparison.best, comparison.fastest
    if best is None or best.wall is None:
        unchecked = any(row.status == "unchecked" for row in comparison.rows)
        what = "No engine could be checked" if unchecked else "No engine was right and timed"
        yield f"{what}, so none can be named the fastest."
        return
    said = f"Fastest correct engine: {best.title}, {us(best.wall.median_us)} per call"
    times, alike = times_eager(comparison), times_eager(comparison, "no_grad")
    said += f", {times:.2f}x eager" if times else ""
    yield f"{said}, {alike:.2f}x eager without gradients." if alike else f"{said}."
    if any(row is not None and row.noisy for row in (best, _row(comparison))):
        yield (
            "The times had not settled, so this may be chance: close other programs, or measure "
            "longer (--seconds)."
        )
    if fastest is not None and fastest is not best and fastest.wall:
        yield (
            f"{fastest.title} takes {us(fastest.wall.median_us)}, if you are done with each "
            "result before the next call overwrites it."
        )


def times_eager(comparison: Comparison, name: str = "eager") -> float | None:
    """Return eager's time in times of the best engine's; None if that says nothing.

    Args:
        name: ``"no_grad"`` for eager in the grad mode of the other engines: it records for no
            backward, and neither do they.
    """
    best, eager = comparison.best, _row(comparison, name)
    if best is None or best.wall is None or eager is best or eager is None or eager.wall is None:
        return None
    return None if best.noisy or eager.noisy else eager.wall.median_us / best.wall.median_us


def _row(comparison: Comparison, engine: str = "eager") -> Row | None:
    return next((row for row in comparison.rows if row.engine == engine), None)


def _context(comparison: Comparison) -> Iterator[str]:
    """Describe the check and the timing."""
    said = f"{comparison.workload} on {machine_of(comparison.environment)}."
    if not any(row.status == "unchecked" for row in comparison.rows):
        said += (
            f" Checked against {comparison.reference}: a relative error up to "
            f"{comparison.tolerance:.0e} passes."
        )
    rounds = "1 round" if comparison.rounds == 1 else f"{comparison.rounds} interleaved rounds"
    said += f" {rounds}; median ± half the distance between the quartiles."
    if any(row.noisy for row in comparison.rows):
        said += " ~: noisy, the wall time still moved by more than 2% when time was up."
    yield said
    if any(row.wall and row.fresh_output is False for row in comparison.rows):
        yield "*: the next call overwrites the result."


def _facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    best = comparison.best
    if best is None or best.wall is None:
        return
    yield "per call", us(best.wall.median_us)
    for name, said in (("no_grad", "eager without gradients"), ("eager", "eager")):
        if times := times_eager(comparison, name):
            yield said, f"{us(best.wall.median_us * times)}, {times:.2f}x"
    if best.error is not None:
        passes = f" ({comparison.tolerance:.0e} passes)" if comparison.tolerance else ""
        yield f"relative error{passes}", f"{best.error:.1e}"


def _wall_us(row: Row) -> float:
    return row.wall.median_us if row.wall else 0.0


def _end(row: Row) -> float:
    """Return the right end of a row's drawing."""
    parts = (t.median_us for t in (row.host, row.gpu) if t is not None)
    return max(_wall_us(row) + (row.wall.spread_us / 2 if row.wall else 0.0), *parts, 0.0)


def _walls(comparison: Comparison, rows: list[Row]) -> Bars | None:
    """Draw the wall times, the fastest first; None where nothing was timed."""
    if not rows:
        return None
    on_gpu = any(row.gpu is not None for row in rows)
    yardstick = next((row for row in rows if row.engine == "eager"), min(rows, key=_wall_us))
    longest = max(end for row in rows if (end := _end(row)) <= MOST * _end(yardstick))
    beyond = [row.title for row in rows if _end(row) > longest]

    def value(row: Row) -> dict[str, Any]:
        half = row.wall.spread_us / 2 if row.wall else 0.0
        return {
            "name": cells(row)[0],
            "shown": f"{'~' if row.noisy else ''}{us(_wall_us(row))}",
            "best": row is comparison.best,
            "kind": "best" if row is comparison.best else "",
            "wall": _wall_us(row),
            "low": max(0.0, _wall_us(row) - half),
            "high": _wall_us(row) + half,
            "host": row.host.median_us if row.host else 0.0,
            "gpu": row.gpu.median_us if row.gpu else 0.0,
        }

    caption = "Shorter is better. The line at a bar's end is the spread between the quartiles."
    if any(row.noisy for row in rows):
        caption += " ~: had not settled."
    if beyond:
        caption += f" Cut off, since it would hide the others: {', '.join(beyond)}."
    parts = Layer("host", "", "host", (), 4, 3), Layer("gpu", "", "accent", (), 4, 9)
    key = ("bar", "wall time"), ("host", "until the host returns"), ("accent", "the GPU's work")
    return Bars(
        name="walls",
        title="Wall time per call",
        caption=caption,
        values=tuple(map(value, rows)),
        key=key if on_gpu else (),
        layers=(
            Layer("wall", kinds=(("best", "accent-soft"),)),
            *(parts if on_gpu else ()),
            Layer("high", "low", "ink", mark="rule"),
        ),
        longest=longest,
    )
