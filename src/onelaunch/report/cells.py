"""The texts of a report: figures with units, in the order of reading."""

from __future__ import annotations

from onelaunch.bench.profile import us
from onelaunch.bench.rows import Comparison, Row
from onelaunch.bench.timers import Timing

COLUMNS = ("engine", "wall / call", "host", "GPU", "error", "build", "memory")
_ORDER = {"ok": 0, "unchecked": 1, "interrupted": 2, "wrong": 3, "failed": 4, "missing": 5}


def in_order(comparison: Comparison) -> list[Row]:
    """Sort the rows: the fastest first, then the wrong and failed, then the missing."""
    return sorted(
        comparison.rows,
        key=lambda row: (_ORDER[row.status], row.wall.median_us if row.wall else 0.0),
    )


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
    if found is None:
        return ""
    value, unit = us(found.median_us).split()
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}[unit]
    spread = found.spread_us / 2
    if spread > found.median_us:
        return f"{value} {unit} ±{us(spread)}"
    return f"{value} {unit} ±{spread / scale:.{2 if float(value) < 10 else 1}f}"


def seconds(value: float) -> str:
    return us(value * 1e6) if value < 1 else f"{value:.1f} s"


def memory(count: int) -> str:
    """Write bytes in the unit that leaves a short number."""
    if count < 2**10:
        return f"{count} B" if count else "0"
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def remark(row: Row) -> str:
    """Write the doubts about a row: its status and reason, noise, an overwritten result."""
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    said = ["noisy"] if row.noisy else []
    if row.fresh_output is False:
        said.append("result overwritten by the next call")
    return ", ".join(said)


def verdict(comparison: Comparison) -> str:
    """Name the engine to take, in a sentence or two."""
    best = comparison.best
    if best is None or best.wall is None:
        return f"{nothing_found(comparison)}, so none can be named the fastest."
    text = f"Fastest correct engine: {best.title}, {us(best.wall.median_us)} per call"
    times = times_eager(comparison)
    return " ".join([f"{text}, {times:.2f}x eager." if times else f"{text}.", *doubts(comparison)])


def headline(comparison: Comparison) -> str:
    """Name the engine to take, in a few words."""
    best, times = comparison.best, times_eager(comparison)
    if best is None or best.wall is None:
        return f"{nothing_found(comparison)}."
    if times:
        return f"{best.title} runs {times:.2f}x as fast as eager"
    if unsettled(comparison):
        return f"{best.title} was the fastest, but the times had not settled"
    return f"{best.title} is the fastest correct engine"


def nothing_found(comparison: Comparison) -> str:
    if any(row.status == "unchecked" for row in comparison.rows):
        return "No engine could be checked"
    return "No engine was right and timed"


def times_eager(comparison: Comparison) -> float | None:
    """Return eager's time in times of the best engine's; None if that says nothing."""
    best, eager = comparison.best, _eager(comparison)
    if best is None or best.wall is None or eager is best or eager is None or eager.wall is None:
        return None
    return None if unsettled(comparison) else eager.wall.median_us / best.wall.median_us


def unsettled(comparison: Comparison) -> bool:
    """Return whether the times of eager and the best engine still moved when time was up."""
    best, eager = comparison.best, _eager(comparison)
    return any(row is not None and row.noisy for row in (best, eager))


def doubts(comparison: Comparison) -> list[str]:
    """Say what else is to be known of the best engine, in sentences."""
    best, fastest = comparison.best, comparison.fastest
    said: list[str] = []
    if best is not None and unsettled(comparison):
        said.append(
            "The times had not settled, so this may be chance: close other programs, or measure "
            "longer (--seconds)."
        )
    if best is not None and fastest is not None and fastest is not best and fastest.wall:
        said.append(
            f"{fastest.title} takes {us(fastest.wall.median_us)}, if you are done with each "
            "result before the next call overwrites it."
        )
    return said


def _eager(comparison: Comparison) -> Row | None:
    return next((row for row in comparison.rows if row.engine == "eager"), None)


def header(comparison: Comparison) -> str:
    """Describe the check and the timing."""
    where = comparison.environment.get("gpu") or comparison.environment.get("cpu") or "this machine"
    said = [f"{comparison.workload} on {where}, torch {comparison.environment.get('torch')}."]
    if not any(row.status == "unchecked" for row in comparison.rows):
        said.append(
            f"Checked against {comparison.reference}: a relative error up to "
            f"{comparison.tolerance:.0e} passes."
        )
    rounds = "1 round" if comparison.rounds == 1 else f"{comparison.rounds} interleaved rounds"
    said.append(f"{rounds}; median ± half the distance between the quartiles.")
    if any(row.noisy for row in comparison.rows):
        said.append("~: noisy, the wall time still moved by more than 2% when time was up.")
    return " ".join(said)
