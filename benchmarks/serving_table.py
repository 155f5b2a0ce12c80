"""The tables of what `benchmarks.serving` found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TITLES = {
    "eager": "eager",
    "compile-dynamic": "torch.compile(dynamic=True)",
    "reduce-overhead": "torch.compile reduce-overhead, padded",
    "by-hand": "buckets by hand",
    "onelaunch": "onelaunch",
    "onelaunch-batcher": "onelaunch, batcher",
    "onelaunch-background": 'onelaunch capture="background"',
    "onelaunch-later": 'onelaunch compile="later"',
    "onelaunch-compile": "onelaunch compile=True",
    "onelaunch-compile-batcher": "onelaunch compile=True, batcher",
    "onelaunch-compile, cold": "onelaunch compile=True, cache cold",
}
START_TEXT = (
    "Seconds from the start of a process, the shorter of two starts. Inductor's cache is full, but "
    "where it is cold. `ready`: all sizes are captured, or compiled code has taken over."
)
Table = tuple[tuple[str, ...], list[tuple[str, ...]], str]
"""The head, the rows, and the text below."""


def targets(results: dict[str, Any]) -> Table:
    """A row for each target, with what was found."""
    rows: list[tuple[str, ...]] = []
    for target in results["targets"]:
        bound = "least" if "least" in target else "most"
        found = f"{target['found']:.3g}" + ("" if target["met"] else ", missed")
        rows.append((target["what"], f"at {bound} {target[bound]:g}", found))
    return ("what", "to reach", "found"), rows, "By `python -m benchmarks.serving`."


def rates(results: dict[str, Any]) -> Table:
    """A row for each engine under load."""
    rows: list[tuple[str, ...]] = []
    for name, row in results["parts"].get("rates", {}).items():
        if not row.get("rate"):
            rows.append((TITLES[name], row.get("status", "never"), "-", "-", "-"))
            continue
        padding = "-" if row.get("padding") is None else f"{row['padding']:.0%}"
        times = f"{row['p50 ms']:.1f}", f"{row['p99 ms']:.1f}"
        rows.append((TITLES[name], f"{row['rate']:,.0f}", *times, padding))
    scale = results["scale"]
    text = (
        f"The highest rate with a p99 of at most {scale['limit_ms']:g} ms. Requests come at random "
        f"(Poisson), each of 1 to {scale['most_rows']} sentences of 2 to {scale['lengths'][-1]} "
        f"tokens, for BERT of {scale['layers']} layers, {scale['width']} wide."
    )
    return ("engine", "requests per second", "p50, ms", "p99, ms", "padding"), rows, text


def start(results: dict[str, Any]) -> Table:
    """A row for each phase of a start, with a column for each engine."""
    engines = results["parts"].get("start", {}).get("rows", {})
    phases = next(iter(engines.values()), {"phases": {}})["phases"]
    rows = [(p, *(f"{row['phases'][p]:.2f}" for row in engines.values())) for p in phases]
    answer = [f"{row['first answer']:.2f}" for row in engines.values()]
    rows.insert(-1, ("until the first answer", *answer))
    return ("phase", *(TITLES[name] for name in engines)), rows, START_TEXT


TABLES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "targets": targets,
    "rates": rates,
    "start": start,
}
