"""The counts of a coverage run: how often each engine was right, and how soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

BAD = ("wrong", "crashed", "failed")
RIGHT = ("one launch", "pieces")
SPLIT = "onelaunch split"
NAMED = 'on_refusal="split"'
"""The way to do without that a refusal names, and that is tried: the engine `SPLIT`."""
UNDECIDED = ("undecided", "not run")
"""Verdicts that say nothing of an engine."""
VERDICTS = (*RIGHT, "refused", "no replay", "wrong", "crashed", "failed", "skipped", *UNDECIDED)


def counts(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Count verdicts by mode and engine."""
    found: dict[str, Any] = {}
    for mode in ("inference", "training"):
        ours = [case for name, case in cases.items() if name.endswith(f" {mode}")]
        ran = [case["engines"] for case in ours if "engines" in case]
        if ours:
            found[mode] = {
                "cases": len(ran),
                "not built": sum("not built" in case for case in ours),
                "not run": sum("not run" in case for case in ours),
                "engines": {name: _of_engine(ran, name) for name in _engines(ran)},
                "targets": _targets(ran),
            }
    return found


def _engines(ran: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for rows in ran for name in rows))


def _of_engine(ran: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    rows = [rows.get(name, {"verdict": "not run"}) for rows in ran]
    verdicts = Counter(row["verdict"] for row in rows)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    found: dict[str, Any] = {kind: verdicts[kind] for kind in VERDICTS if verdicts[kind]}
    if name == "reduce-overhead":
        found["one graph"] = sum(bool(row.get("one_graph")) for row in rows)
    if seconds:
        found["median seconds to first replay"] = round(median(seconds), 3)
    return found


def _targets(ran: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is asked of onelaunch, beside the engines that ran."""

    def verdict(rows: Mapping[str, Any], name: str) -> str:
        return rows.get(name, {}).get("verdict", "not run")

    found: dict[str, Any] = {}
    whole = [rows for rows in ran if rows.get("reduce-overhead", {}).get("one_graph")]
    whole = [rows for rows in whole if verdict(rows, "reduce-overhead") in RIGHT]
    if whole:
        met = sum(verdict(rows, "onelaunch") == "one launch" for rows in whole)
        found["one launch, of those of reduce-overhead in one graph"] = _share(met, len(whole))
    split = [rows for rows in ran if verdict(rows, SPLIT) not in ("not run", "skipped")]
    if split:
        met = sum(verdict(rows, SPLIT) in RIGHT for rows in split)
        found["split right, of all that eager runs"] = _share(met, len(split))
    theirs = [rows for rows in ran if verdict(rows, "reduce-overhead") in RIGHT]
    theirs = [rows for rows in theirs if "onelaunch backend" in rows]
    theirs = [rows for rows in theirs if verdict(rows, "onelaunch backend") != "undecided"]
    if theirs:
        met = sum(verdict(rows, "onelaunch backend") in RIGHT for rows in theirs)
        found["backend right, of those of reduce-overhead"] = _share(met, len(theirs))
    refused = [rows for rows in ran if verdict(rows, "onelaunch") == "refused"]
    refused = [rows for rows in refused if "fix" in rows["onelaunch"]]
    if refused:
        met = sum(map(tried, refused))
        found["refusals with a line and a fix that was tried"] = _share(met, len(refused))
    right = sum(verdict(rows, "onelaunch") in RIGHT for rows in ran)
    found["right, of all that eager runs"] = _share(right, len(ran))
    for other in ("by hand", "reduce-overhead"):
        ratios = [
            rows["onelaunch"]["seconds"] / rows[other]["seconds"]
            for rows in ran
            if rows.get(other, {}).get("seconds") and rows.get("onelaunch", {}).get("seconds")
        ]
        if ratios:
            found[f"median time to the first replay, of that of {other}"] = round(median(ratios), 3)
    return found


def tried(rows: Mapping[str, Any]) -> bool:
    """Return whether the refusal in the rows of a model has a line, and names what was then tried
    with the model and was right."""
    refusal, split = rows["onelaunch"], rows.get(SPLIT, {})
    named = NAMED in refusal.get("fix", "")
    return bool(refusal.get("line")) and named and split.get("verdict") in RIGHT


def _share(met: int, of: int) -> dict[str, Any]:
    return {"met": met, "of": of, "share": round(met / of, 4) if of else None}


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join results of one kind of GPU and software: parts of the cases, or other engines of them.

    Raises:
        ValueError: they are of different GPUs or software.
    """
    first = results[0]
    if any(_software(found) != _software(first) for found in results):
        raise ValueError("the results are not of one GPU, torch and libraries")
    cases: dict[str, Any] = {}
    seconds: Counter[str] = Counter()
    for found in results:
        seconds.update(found["seconds"])
        for name, case in found["cases"].items():
            before = cases.get(name, {})
            if "engines" not in before:
                cases[name] = {**case}
            elif "engines" in case:
                cases[name] = {**before, "engines": _joined(before["engines"], case["engines"])}
    ordered = dict(sorted(cases.items(), key=lambda item: item[0].split(" ")[::-1]))
    joined = {**first, "seconds": dict(seconds), "cases": ordered}
    return joined | {"counts": counts(ordered)}


def _software(found: Mapping[str, Any]) -> list[Any]:
    here = found["environment"]
    return [found["device"], found["libraries"], here["gpu"], here["torch"], here["onelaunch"]]


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of both; one that ran goes before one that did not."""
    ran = {k: row for k, row in now.items() if row["verdict"] != "not run" or k not in before}
    return {**before, **ran}
