"""The tables of what `benchmarks.first_replay` found."""

from __future__ import annotations

from typing import Any

FRESH_HEAD = ("engine", "inference", "forward and backward", "a step with Adam")
FRESH_TEXT = (
    "Seconds from before the engine's import to the end of an MLP's first replay, after `import "
    "torch` and an eager call: median ± distance of the quartiles."
)
WARM_HEAD = ("model", "onelaunch", "by hand", "a further bucket", "by hand, a further size")
WARM_TEXT = "Seconds from the first call to the end of the first replay, in a warm process."
KINDS = ("inference", "pair", "step")
TITLES = {"by-hand": "torch.cuda.graph by hand"}
NAMES = {
    "resnet50": "ResNet-50",
    "bert": "BERT-base",
    "llama": "Llama, 12 layers",
    "hrnet": "HRNet-W18",
}


def fresh_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each engine in fresh processes."""
    found = {(row["engine"], row["kind"]): row["seconds"] for row in results["fresh"]}
    engines = dict.fromkeys(row["engine"] for row in results["fresh"])
    return [
        (TITLES.get(engine, engine), *(_seconds(found.get((engine, kind))) for kind in KINDS))
        for engine in engines
    ]


def warm_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each model in a warm process."""
    made: list[tuple[str, ...]] = []
    for row in results["warm"]:
        name = f"small {row['model']}" if row.get("small") else NAMES[row["model"]]
        if row["status"] != "ok":
            made.append((NAMES[row["model"]], row["status"], "-", "-", "-"))
            continue
        ways = ("onelaunch", "by-hand", "onelaunch bucket", "by-hand bucket")
        made.append((name, *(_seconds(row["seconds"].get(way)) for way in ways)))
    return made


def missed(results: dict[str, Any]) -> str:
    """Name what was to be reached and was not; empty where all was."""
    found = [
        f"{t['what']} {t['found']:.2f}, to reach {t['most']}"
        for t in results["targets"]
        if not t["met"]
    ]
    return f"\nMissed: {'; '.join(found)}.\n" if found else ""


def _seconds(timing: dict[str, float] | None) -> str:
    return "-" if timing is None else f"{timing['median']:.3f} ± {timing['spread']:.3f}"
