"""The tables of what `benchmarks.coverage` found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.coverage_models.summary import RIGHT, SPLIT, UNDECIDED, tried
from onelaunch.error_catalogue import CATALOGUE

HEAD = (
    *("engine", "models", "one launch", "pieces", "refused", "wrong or failed"),
    "to the first replay",
)
TITLES = {
    "onelaunch split": '`on_refusal="split"`',
    "onelaunch backend": '`torch.compile(backend="onelaunch")`',
}
LEFT_OUT = {
    "not built": "could not be built small, or eager did not run them alike twice",
    "not run": "were not run by any engine, as time was up",
}
REFUSALS_HEAD = ("refusal", "models", "lines", 'right by `on_refusal="split"`', "named and tried")
REFUSALS_TEXT = (
    "Models in inference and in training that are refused in one piece, and the lines that are to "
    "blame; the last column counts those whose refusal has the line and names a way that was then "
    "tried with the model, and was right."
)

DOCTOR_HEAD = ("on a GPU", "diagnosed", "right", "wrong", "no time left")
DOCTOR_TEXT = "Right is the refusal at its line, or nothing that blocks a capture."


def rows_of(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """How many models each engine runs right, by mode."""
    return [
        (
            f"{TITLES.get(name, name)}, {mode}",
            str(found["cases"] - sum(row.get(kind, 0) for kind in UNDECIDED)),
            *(str(row.get(kind, 0)) for kind in RIGHT),
            str(row.get("refused", 0) + row.get("no replay", 0)),
            str(sum(row.get(kind, 0) for kind in ("wrong", "crashed", "failed"))),
            first_replay(row),
        )
        for mode, found in results["counts"].items()
        for name, row in found["engines"].items()
    ]


def first_replay(row: dict[str, Any]) -> str:
    seconds = row.get("median seconds to first replay")
    return "-" if seconds is None else f"{seconds:.2f}"


def text_of(results: dict[str, Any]) -> str:
    """What was run, and what was left out."""
    modes = results["counts"].items()
    built = " and ".join(f"{found['cases']:,} models in {mode}" for mode, found in modes)
    versions = [f"{name} {version}" for name, version in results["libraries"].items() if version]
    text = (
        f"{built[0].upper()}{built[1:]}, from {', '.join(versions)}; the median time to the first "
        "replay, in seconds."
    )
    first, _, parts = results.get("part", "1/1").partition("/")
    text += f" Part {first} of {parts} of all models." if parts != "1" else ""
    for kind, why in LEFT_OUT.items():
        count = sum(found[kind] for _, found in modes)
        text += f" {count} {why}." if count else ""
    rows = [row for case in results["cases"].values() for row in case.get("engines", {}).values()]
    if count := sum(row.get("verdict") == "undecided" for row in rows):
        text += (
            f" {count} results of compiled code are left out: two of eager are as far apart where "
            "the parameters differ by a part in a million."
        )
    return text


def summary_of(results: dict[str, Any]) -> str:
    """The models that run in inference, in three sentences."""
    libraries = ", ".join(name for name, version in results["libraries"].items() if version)
    rows = {row[0]: row[1:] for row in rows_of(results)}
    models, whole, _, _, wrong, _ = rows["onelaunch, inference"]
    _, split_whole, pieces, refused, *_ = rows[f"{TITLES[SPLIT]}, inference"]
    by_hand = rows["by hand, inference"]
    return (
        f"Of {models} models of {libraries}, {whole} run as one launch. The others are refused, "
        f"and {wrong} give wrong values or fail. A graph by hand runs {by_hand[1]}. With "
        f"{TITLES[SPLIT]}, {split_whole} are one launch, {pieces} run in pieces, and {refused} are "
        "refused."
    )


def refusals(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Models that are refused, by code, the most frequent first."""
    ran = [case["engines"] for case in results["cases"].values() if "engines" in case]
    refused = [rows for rows in ran if rows.get("onelaunch", {}).get("verdict") == "refused"]
    codes = Counter(rows["onelaunch"]["code"] for rows in refused)
    return [
        _of_code(code, [rows for rows in refused if rows["onelaunch"]["code"] == code])
        for code, _ in codes.most_common()
    ]


def _of_code(code: str, refused: list[dict[str, Any]]) -> tuple[str, ...]:
    lines = {rows["onelaunch"]["line"] for rows in refused}
    known = [rows for rows in refused if "fix" in rows["onelaunch"]]
    title = CATALOGUE[code].title
    anchor = re.sub(r"[^\w\- ]", "", f"{code}: {title}".lower()).replace(" ", "-")
    return (
        f"[{code}](errors.md#{anchor}), {title}",
        str(len(refused)),
        str(len(lines)),
        _count(rows.get(SPLIT, {}).get("verdict") in RIGHT for rows in refused),
        f"{_count(map(tried, known))} of {len(known)}" if known else "-",
    )


def _count(which: Iterable[bool]) -> str:
    return str(sum(which))


def diagnosed(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """How often the doctor names what a GPU refuses, and nothing else."""
    rows: list[tuple[str, ...]] = []
    for on_gpu, right in (("refused", "named"), ("one launch", "clean")):
        cases = [row for row in results["cases"].values() if row["on the GPU"]["verdict"] == on_gpu]
        found = Counter(row["verdict"] for row in cases)
        done = found.total() - found["not run"]
        counts = done, found[right], done - found[right], found["not run"]
        rows.append((on_gpu, *map(str, counts)))
    return rows
