"""The table of what `benchmarks.claims` found."""

from __future__ import annotations

from typing import Any

HEAD = ("table", "claims", "hold", "ahead of another", "still ahead")


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Count the claims of each table."""
    made: list[tuple[str, ...]] = []
    for table in dict.fromkeys(row["table"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["table"] == table]
        compared = [row for row in rows if row["theirs"]]
        still = sum((row["found_lead"] or 0.0) >= 1.0 for row in compared)
        held = sum(row["holds"] for row in rows)
        made.append((table, *map(str, (len(rows), held, len(compared), still))))
    return made


def named(row: dict[str, Any]) -> str:
    """Name a claim within its table."""
    group, ours = row["group"].partition(":")[2].partition("#")[0], row["ours"]
    figure = row.get("figure", "wall")
    shown = figure not in ("", "wall") and not ours.endswith(figure)
    return f"{group}, {ours}{f', {figure}' if shown else ''}"


def text_of(results: dict[str, Any]) -> str:
    """Name the rows that do not hold, and the code that ran."""
    broken = [
        f"{row['table']}, {named(row)} ({row['said']})"
        for row in results["rows"]
        if not row["holds"]
    ]
    said = f"Not held: {'; '.join(broken)}. " if broken else ""
    return f"{said}Of the code `{results['source']}`, on"
