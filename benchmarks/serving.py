"""What serving costs and gains, under load from other processes: `results/serving.json`.

    python -m benchmarks.serving                       # everything, about seven minutes on an H200
    python -m benchmarks.serving --only rates          # this part anew, the others as they are
    python -m benchmarks.serving --only threads --minutes 30

Each part has a process of its own, and so has each engine of `rates`. All build at once, and are
measured one after the other. Without a GPU everything is small, and no target is judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    serving_background,
    serving_later,
    serving_rates,
    serving_sizes,
    serving_start,
    serving_threads,
)
from benchmarks.processes import chosen, earlier, parsed, run_together, wait_for_turn, write
from benchmarks.serving_engines import COMPILED, ENGINES, ON_GPUS_ONLY, SMALL, Scale
from onelaunch.tools.bench.environment import environment

BUILD_SECONDS = 70.0
"""For captures and compilers in the background, which go on under load where that is too short."""
START_SECONDS = 90.0
PART_SECONDS = 240.0
ROUNDS = 2
"""The starts of each engine's replica."""
LEAST_OF_BEST, LEAST_OF_HAND = 1.2, 1.0
MOST_OF_EAGERS_P99 = 3.0
MOST_OF_EAGERS_START = 1.1
MOST_OF_BY_HAND = 2.0
MOST_OF_PADDING = 0.5
MOST_OF_EAGERS_LONGEST, MOST_OF_COMPILED = 2.0, 1.05
MOST_HOST_GROWTH = 0.02
Figures = dict[str, Any]


def start_part(scale: Scale, device: torch.device, seconds: float) -> Figures:
    gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        limit = scale.later_seconds
        return serving_start.starts(Path(folder), gpu, scale == SMALL, ROUNDS if gpu else 1, limit)


PARTS: dict[str, Callable[[Scale, torch.device, float], Figures]] = {
    "background": lambda scale, device, _: serving_background.beside(scale, device),
    "start": start_part,
    "sizes": lambda scale, device, _: serving_sizes.sizes_ready(scale, device),
    "padding": lambda scale, device, _: serving_sizes.padded_share(scale, device),
    "later": lambda scale, device, _: serving_later.taken_over(scale, device),
    "threads": serving_threads.long_run,
}
NAMES = ("rates", *PARTS)


def one(name: str, scale: Scale, seconds: float) -> Figures:
    """Measure a part, or an engine's rate, ``rates:ENGINE``, when it is this process's turn."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    part, _, engine = name.partition(":")
    with torch.no_grad():
        if part != "rates":
            wait_for_turn()
            return PARTS[part](scale, device, seconds)
        made, took = serving_rates.build(engine, scale, device, BUILD_SECONDS)
        wait_for_turn()
        return {"build seconds": took, **serving_rates.rate_of(engine, made, scale, device)}


# Targets.


def judged(what: str, found: float, *, most: float = 0.0, least: float | None = None) -> Figures:
    """Return a figure with what it is to be at most, or at least."""
    if least is not None:
        return {"what": what, "found": found, "least": least, "met": found >= least}
    return {"what": what, "found": found, "most": most, "met": found <= most}


def judge_rates(rows: Figures) -> list[Figures]:
    rate = {name: row["rate"] for name, row in rows.items() if "rate" in row}
    ours = {name: found for name, found in rate.items() if name.startswith("onelaunch")}
    others = [found for name, found in rate.items() if name not in ours]
    made = [judged("wrong answers of onelaunch", sum(rows[name]["wrong"] for name in ours))]
    if ours and others and max(others):
        what = "requests a second at p99 of 20 ms, of the best other"
        made.append(judged(what, max(ours.values()) / max(others), least=LEAST_OF_BEST))
    plain = [found for name, found in ours.items() if name not in COMPILED]
    if plain and rate.get("by-hand"):
        what = "the same without a compiler, of buckets by hand"
        made.append(judged(what, max(plain) / rate["by-hand"], least=LEAST_OF_HAND))
    return made


def judge_background(part: Figures) -> list[Figures]:
    eager, during = part["eager"], part["while captured"]
    what = f"p99 while {part['sizes']} sizes are captured, of eager's"
    share = during["p99 ms"] / eager["p99 ms"]
    return [
        judged(what, share, most=MOST_OF_EAGERS_P99),
        judged("sizes captured meanwhile", part["captured"], least=part["sizes"]),
        judged("requests refused, lost or wrong meanwhile", during["bad"]),
    ]


def judge_start(part: Figures) -> list[Figures]:
    rows = part["rows"]
    eager = rows["eager"]["first answer"]
    return [
        judged(
            f"first answer after the start, {name}, of eager's",
            row["first answer"] / eager if row["right"] else float("inf"),
            most=MOST_OF_EAGERS_START,
        )
        for name, row in rows.items()
        if name in ("onelaunch", "onelaunch-later", "onelaunch-compile")
    ]


def judge_sizes(part: Figures) -> list[Figures]:
    if "by hand" not in part:
        return []
    what = f"{part['sizes']} sizes ready, of captures by hand"
    return [judged(what, part["warm_up"] / part["by hand"], most=MOST_OF_BY_HAND)]


def judge_padding(part: Figures) -> list[Figures]:
    return [
        judged(
            f"padding with batcher, of batches of fixed size, sizes {row['sizes']}, "
            f"max_wait_ms {row['max_wait_ms']:.1f}",
            row["rules"]["batcher"]["padding"] / row["rules"]["fixed"]["padding"],
            most=MOST_OF_PADDING,
        )
        for row in part["rows"]
    ]


def judge_later(part: Figures) -> list[Figures]:
    made: list[Figures] = []
    for name in ("from the first call", "after warm_up"):
        row, longest = part[name], part["eager"]["longest ms"]
        what = f'longest call with compile="later" {name}, of eager\'s longest'
        made.append(judged(what, row["longest ms"] / longest, most=MOST_OF_EAGERS_LONGEST))
    share = part["after warm_up"]["afterwards ms"] / part["compile=True ms"]
    share = share if part["after warm_up"]["taken over"] else float("inf")
    return [*made, judged("a call afterwards, of compile=True", share, most=MOST_OF_COMPILED)]


def judge_threads(part: Figures) -> list[Figures]:
    what = f"{part['threads']} threads, {part['seconds'] / 60:.1f} minutes"
    growth = max(0.0, part["host growth bytes"] / part["host bytes"])
    return [
        judged(f"{what}, wrong results", part["wrong"]),
        judged(f"{what}, threads lost", part["lost"]),
        judged(f"{what}, evictions", part["evictions"], least=1),
        judged(f"{what}, growth of device memory, bytes", part["reserved growth bytes"]),
        judged(f"{what}, growth of host memory, share", growth, most=MOST_HOST_GROWTH),
    ]


JUDGES: dict[str, Callable[[Figures], list[Figures]]] = {
    "rates": judge_rates,
    "background": judge_background,
    "start": judge_start,
    "sizes": judge_sizes,
    "padding": judge_padding,
    "later": judge_later,
    "threads": judge_threads,
}


def targets(parts: Figures) -> list[Figures]:
    """What was to be reached by the parts that are there, and whether it was."""
    return [target for name in NAMES if name in parts for target in JUDGES[name](parts[name])]


# The processes.


def run_all(names: list[str], engines: list[str], options: argparse.Namespace, tiny: bool) -> int:
    """Run the parts and write after each; returns how many gave no result."""
    results: Figures = {"benchmark": "serving", "environment": environment(), "small": tiny}
    parts = results["parts"] = earlier(options.out, results).get("parts", {})
    results["scale"], results["targets"] = asdict(SMALL if tiny else Scale()), []
    missing = 0

    def done(name: str, data: Figures | None) -> None:
        nonlocal missing
        part, _, engine = name.partition(":")
        missing += data is None
        seconds = time.monotonic() - started
        print(f"{name}: {'no result' if data is None else 'done'} at {seconds:.0f} s", flush=True)
        if engine:
            parts.setdefault("rates", {})[engine] = data or {"status": "failed"}
        elif data is not None:
            parts[part] = data
        results["parts"] = {known: parts[known] for known in NAMES if known in parts}
        results["targets"] = [] if tiny else targets(parts)
        write(options.out, results)

    here = [name for name in engines if torch.cuda.is_available() or name not in ON_GPUS_ONLY]
    children = [f"rates:{name}" for name in here] if "rates" in names else []
    children += [name for name in names if name != "rates"]
    started = time.monotonic()
    run_together(
        "benchmarks.serving",
        children,
        [*(["--small"] if tiny else []), "--minutes", str(options.minutes)],
        build_seconds=BUILD_SECONDS + START_SECONDS,
        measure_seconds=PART_SECONDS + options.minutes * 60,
        done=done,
    )
    print(f"{time.monotonic() - started:.0f} s in all; {options.out}")
    for target in results["targets"]:
        print(target_text(target))
    if tiny:
        print("small: no target is judged")
    return missing


def target_text(target: Figures) -> str:
    rule = f"at least {target['least']}" if "least" in target else f"at most {target['most']}"
    return (
        f"{target['what']}: {target['found']:.4g}, {rule}: {'met' if target['met'] else 'MISSED'}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(NAMES), help="parts, with commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of rates, with commas")
    parser.add_argument("--minutes", type=float, default=0.25, help="of the threads")
    parser.add_argument("--small", action="store_true", help="as on a machine without a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, "serving", argv)
    tiny = options.small or not torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.one:
        if tiny:
            torch.set_num_threads(1)
        found = one(options.one, SMALL if tiny else Scale(), options.minutes * 60)
        options.out.write_text(json.dumps(found))
        return 0
    names = chosen(parser, options.only, NAMES)
    engines = chosen(parser, options.engines, list(ENGINES))
    return 1 if run_all(names, engines, options, tiny) else 0


if __name__ == "__main__":
    sys.exit(main())
