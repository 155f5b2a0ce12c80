"""The table of `parallel`, and the lanes of one recording, from results/parallel.json."""

from __future__ import annotations

from typing import Any

HEAD = ("", "by hand, or reduce-overhead", "chain", '`parallel="auto"`', "gain", "nodes", "memory")
TEXT = (
    "Wall time per call, microseconds. Compiled rows stand beside `reduce-overhead`, the others "
    "beside a graph by hand; nodes: all / in the longest chain; memory: the pool's, MiB, chain / "
    "auto. Equal bit for bit to the chain of the same kernels."
)


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each job that has run."""
    return [
        (row["title"], "failed", "-", "-", "-", "-", "-") if "failed" in row else _row(row)
        for row in results["rows"].values()
    ]


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    wall = {engine: found["median"] for engine, found in row["wall us"].items()}
    beside = wall.get("by-hand", wall.get("reduce-overhead", float("nan")))
    pools = [row["pool bytes"][engine] / 2**20 for engine in ("onelaunch", "onelaunch-auto")]
    return (
        row["title"],
        f"{beside:,.0f}",
        f"{wall['onelaunch']:,.0f}",
        f"{wall['onelaunch-auto']:,.0f}",
        f"{row['gain']:.2f}x" + ("" if row["same bits"] else ", other bits"),
        f"{row['nodes']} / {row['longest chain']}",
        " / ".join(f"{pool:,.0f}" for pool in pools),
    )


_SHORT = ("critics", "critics-step", "hrnet", "googlenet", "bert-compiled")


def summary(results: dict[str, Any]) -> str:
    """Some of the rows, in a sentence."""
    rows = [results["rows"][name] for name in _SHORT]
    found = [(row["title"], {e: t["median"] for e, t in row["wall us"].items()}) for row in rows]
    gains = [
        f"{title} {wall['onelaunch']:,.0f} to {wall['onelaunch-auto']:,.0f}"
        for title, wall in found
    ]
    gpu = results["environment"]["gpu"].partition(" (")[0]
    return f"{'; '.join(gains)} microseconds on an {gpu}, with the same bits.\n"


def missed(results: dict[str, Any]) -> str:
    """What was to be reached and was not; empty where all was."""
    found = [
        f"{row['title']} {row['gain']:.2f}x, to reach {row['target']}x"
        for row in results["rows"].values()
        if "failed" not in row and row["gain"] < row["target"]
    ]
    return f"\nMissed: {'; '.join(found)}.\n" if found else ""


def picture(results: dict[str, Any]) -> str:
    """The lanes of the first step that has some."""
    row = next(row for name, row in results["rows"].items() if name == "critics-step")
    return f"```text\n{row['picture']}\n```\n"
