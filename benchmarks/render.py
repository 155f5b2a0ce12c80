"""Write the results as Markdown tables between the markers of README.md and docs/*.md, and those of
the engines as a picture, docs/engines.svg.

    python -m benchmarks.render            # writes
    python -m benchmarks.render --check    # exit code 1 if one is not up to date

A marker pair is ``<!-- begin:NAME -->`` and ``<!-- end:NAME -->``, NAME a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    claims_table,
    coverage_table,
    first_replay_table,
    parallel_table,
    serving_table,
    versions,
)
from benchmarks.optimize_table import HEAD, TEXT, rows_of
from benchmarks.picture import draw

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "engines.svg"
INCUMBENTS = (
    "by-hand",
    "make_graphed_callables",
    "compile",
    "reduce-overhead",
    "max-autotune",
    "cudagraphs",
)
NAMES = {
    "mlp": "MLP (32, 1024)",
    "cnn": "CNN (1, 1, 28, 28)",
    "rnn": "RNN (10, 64)",
    "resnet50": "ResNet-50 (1, 3, 224, 224)",
    "resnext101": "ResNeXt-101 32x8d (64, 3, 7, 7)",
    "bert": "BERT-base (1, 16)",
    "sine": "sin(2x) (5,)",
    "linear_small": "Linear 10-64-10 (10,)",
    "linear": "Linear(1000, 500) (32, 1000)",
    "conv2d": "conv2d (4, 3, 32, 32), (16, 3, 3, 3)",
    "conv": "Conv2d(3, 64, 3) (16, 3, 224, 224)",
    "resnet50_small": "ResNet-50 (1, 3, 64, 64)",
    "vit": "ViT-S/16 (1, 3, 224, 224)",
    "efficientnet": "EfficientNet-B0 (1, 3, 224, 224)",
    "decoder": "Llama, 6 layers, a token after 16",
    "embedder": "MiniLM, 8 batches of changing length",
}
MARKED = re.compile(r"(<!-- begin:([\w-]+) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)


SUMMARY = {
    "eager": "eager",
    "no_grad": "eager, no_grad",
    "by-hand": "CUDA graph by hand",
    "reduce-overhead": "reduce-overhead",
    "onelaunch": "onelaunch",
    "onelaunch-compile": "compile=True",
}
"""Column titles of the small table in README, engine -> title."""


def summary(results: dict[str, Any]) -> str:
    """Wall time of these engines on each workload."""
    rows = [
        (NAMES.get(name, name), *(wall(data, engine) for engine in SUMMARY))
        for name, data in results["workloads"].items()
    ]
    text = caption(results, "Wall time per call, microseconds.")
    return table(("model", *SUMMARY.values()), rows) + "\n" + text


def figures(which: str) -> Callable[[dict[str, Any]], str]:
    """A table of every engine on every workload, of one timer."""

    def render(results: dict[str, Any]) -> str:
        workloads = results["workloads"]
        titles = {
            row["engine"]: row["title"] for data in workloads.values() for row in data["rows"]
        }
        # As they are built, compilers come last; a reader looks for ours below the others.
        order = sorted(titles, key=lambda e: (e.startswith("bare"), e.startswith("onelaunch")))
        rows = [
            (titles[engine], *(figure(data, engine, which) for data in workloads.values()))
            for engine in order
        ]
        head = ("engine", *(NAMES.get(name, name) for name in workloads))
        what = {"wall": "Wall", "host": "Host", "gpu": "GPU"}[which]
        judged = {name: {"targets": engine_targets(data)} for name, data in workloads.items()}
        below = missed(judged) if which == "wall" else ""
        text = f"{what} time per call, microseconds."
        return table(head, rows) + "\n" + caption(results, text) + below

    return render


def call_overhead(results: dict[str, Any]) -> str:
    """Host and wall time of a call beside a bare replay."""
    titles = {
        "bare": "bare replay",
        "onelaunch": "onelaunch",
        "onelaunch-static": "static outputs",
        "onelaunch-rebind": "rebind",
        "reduce-overhead": "reduce-overhead",
    }
    rows = [
        (NAMES.get(name, name), *(host_and_wall(data, variant) for variant in titles))
        for name, data in results["workloads"].items()
    ]
    text = "Host / wall time per call, microseconds, under `torch.no_grad()`."
    head = ("workload", *titles.values())
    below = missed(results["workloads"])
    return table(head, rows) + "\n" + caption(results, text, settled=True) + below


def host_and_wall(data: dict[str, Any], variant: str) -> str:
    row = next((row for row in data["rows"] if row["variant"] == variant), None)
    if row is None:
        return "-"
    if row["status"] != "ok":
        return "no time left" if row["reason"] == "not built in time" else row["status"]
    return f"{number(row['host']['median_us'])} / {number(row['wall']['median_us'])}"


def backend(results: dict[str, Any]) -> str:
    """Host and wall time of a call through the backends of `torch.compile`."""
    titles = {
        "backend": 'backend="onelaunch"',
        "backend-eager": 'codegen="eager"',
        "reduce-overhead": "reduce-overhead",
        "cudagraphs": 'backend="cudagraphs"',
        "graph-compile": "ol.graph(compile=True)",
        "dynamo": "Dynamo alone",
    }
    made: list[str] = []
    for dtype in ("fp32", "bf16"):
        data = {BACKEND_NAMES[name]: rows for name, rows in results.get(dtype, {}).items()}
        if data:
            rows = [
                (name, *(host_and_wall(found, variant) for variant in titles))
                for name, found in data.items()
            ]
            text = "Host / wall time per call, microseconds."
            kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
            below = caption(results, text, settled=True, dtype=kind) + missed(data)
            made.append(table(("workload", *titles.values()), rows) + "\n" + below)
    return "\n".join(made)


BACKEND_NAMES = {
    "sine": "sin of cos",
    "resnet50": "ResNet-50",
    "bert": "BERT-base",
    "resnext": "ResNeXt-101 32x8d",
    "breaks": "two graph breaks",
    "large": "two graph breaks, 64 MiB (bf16: 32)",
    "host": "an operator on the CPU",
    "decode": "a decoder's token",
}
BACKEND_NAMES |= {
    f"train-{name}": f"{BACKEND_NAMES[name]}, training"
    for name in ("sine", "resnet50", "bert", "resnext", "large")
}


def shapes(results: dict[str, Any]) -> str:
    """What sizes that vary cost, beside what it was to be."""
    rows = [
        (t["what"], t["rule"], t["found"] if t["met"] else f"{t['found']}, missed")
        for t in results["targets"]
    ]
    head = ("what", "to reach", "found")
    return table(head, rows) + "\n" + caption(results, "", settled=True, dtype=None).lstrip()


def shapes_serving(results: dict[str, Any]) -> str:
    """The engines that serve requests of random batch and length."""
    part = results["parts"]["requests"]
    rows = [
        (
            row["title"],
            f"{row['throughput']['per second']:,.0f}",
            number(row["latency"]["p50 us"]),
            number(row["latency"]["p99 us"]),
        )
        if row["status"] == "ok"
        else (row["title"], row["status"], "-", "-")
        for row in part["engines"].values()
    ]
    load = part["load"]
    text = (
        f"{load['requests']:,} requests of batch 1 to {load['max_batch']} and length 8 to "
        f"{load['max_length']}, BERT of {load['layers']} layers, {load['width']} wide; latency in "
        "microseconds."
    )
    for row in part["engines"].values():
        if row["status"] == "ok" and row["first pass"] < load["requests"]:
            text += (
                f" When the time to build was up {row['title']} had seen {row['first pass']:,} of "
                "them: what it compiled or captured later is in its latency."
            )
    head = ("engine", "requests per second", "p50", "p99")
    return table(head, rows) + "\n" + caption(results, text, settled=True, dtype="bfloat16")


def learning(results: dict[str, Any]) -> str:
    """How fast the engines learn, and what: the return after each fifth of the run."""
    engines = results["engines"]
    count = min(len(row["returns"]) for row in engines.values())
    marks = [max(0, count * fifth // 5 - 1) for fifth in range(1, 6)]
    rows = [
        (name, f"{row['steps per second']:,.0f}", *(f"{row['returns'][i]:.0f}" for i in marks))
        for name, row in engines.items()
    ]
    steps = [f"{(i + 1) * results['steps of an iteration']:,} steps" for i in marks]
    text = "Steps of the environments per second, and the mean return after so many."
    head = ("engine", "steps per second", *steps)
    return table(head, rows) + "\n" + caption(results, text, settled=True)


def training(part: str) -> Callable[[dict[str, Any]], str]:
    """Wall time of every engine on every workload, forward and backward or whole steps."""

    def make(results: dict[str, Any]) -> str:
        workloads = results[part]
        titles = {r["variant"]: r["title"] for data in workloads.values() for r in data["rows"]}
        rows = [
            (title, *(trained(data, variant) for data in workloads.values()))
            for variant, title in titles.items()
        ]
        what = {"step": "a whole step with Adam", "pair": "forward and backward"}[part]
        text = f"Wall time of {what}, microseconds."
        head = ("engine", *(NAMES.get(name, name) for name in workloads))
        return table(head, rows) + "\n" + caption(results, text, settled=True) + missed(workloads)

    return make


def trained(data: dict[str, Any], variant: str) -> str:
    row = next((row for row in data["rows"] if row["variant"] == variant), None)
    if row is None:
        return "-"
    return number(row["wall"]["median_us"]) if row["status"] == "ok" else row["status"]


def batching(results: dict[str, Any]) -> str:
    """The padding and the latency of simulated batches, by rule."""
    rows = [
        (
            row["sizes"],
            row["times"],
            f"{row['max_wait_ms']:.1f}",
            *(f"{rule['padding']:.1%}" for rule in row["rules"].values()),
            *(f"{row['rules'][name]['p50 ms']:.2f}" for name in ("fixed", "batcher")),
        )
        for row in results["rows"]
    ]
    named = [
        f"{launch:g} ms and {row:g} ms a row ({name})"
        for name, (launch, row) in results["times"].items()
    ]
    text = (
        f"Simulated: {results['requests']:,} requests of one row at {results['load']:.0%} of the "
        f"rate of the largest size; a batch takes {', '.join(named)}. `max_wait_ms` is 0, or the "
        "time of the largest batch. p50 of the latency in milliseconds.\n"
    )
    head = ("sizes", "what takes the time", "max_wait_ms", "padding: always 32", "next size")
    return table((*head, "batcher", "p50: always 32", "batcher"), rows) + "\n" + text


def generate(results: dict[str, Any]) -> str:
    """Time per token of every engine: a size and a way of decoding a row."""
    rows = results["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    kinds = list(dict.fromkeys((row["size"], row["way"], row["pick"]) for row in rows))
    found = {(row["size"], row["way"], row["pick"], row["engine"]): row for row in rows}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        if row["median_us"] is None:
            return row["status"].partition(":")[0]
        same = "" if row["agree"] == results["tokens"] else f" ({row['agree']})"
        return f"{number(row['median_us'])} ± {number((row['max_us'] - row['min_us']) / 2)}{same}"

    text = (
        f"Microseconds for each token of a request of {results['tokens']}, its prompt of 16 "
        "included: median, and half the range. In brackets the tokens before the first that is not "
        "eager's, where one is not."
    )
    lines = [
        (f"{size}, {way}, {pick}", *(cell(found.get((size, way, pick, e))) for e in engines))
        for size, way, pick in kinds
    ]
    kind = "bfloat16" if results["environment"]["gpu"] else "float32"
    return (
        table(("decoder", *engines), lines)
        + "\n"
        + caption(results, text, settled=True, dtype=kind)
    )


def torch_versions(results: dict[str, Any]) -> str:
    """The releases of torch that the tests ran on, and how many passed."""
    head = ("torch", *(f"tests/{suite}" for suite in versions.SUITES), "on")
    text = "Tests that passed, of those that this machine can run.\n"
    return table(head, versions.rows_of(results)) + "\n" + text


def coverage(results: dict[str, Any]) -> str:
    """How many models each engine runs right, by mode."""
    text = caption(results, coverage_table.text_of(results), settled=True)
    return table(coverage_table.HEAD, coverage_table.rows_of(results)) + "\n" + text


def coverage_summary(results: dict[str, Any]) -> str:
    """How many models run, as a paragraph."""
    return coverage_table.summary_of(results) + "\n"


def refusals(results: dict[str, Any]) -> str:
    """Why models are refused, and whether what the refusals name works."""
    text = caption(results, coverage_table.REFUSALS_TEXT, settled=True)
    rows = coverage_table.refusals(results)
    return table(coverage_table.REFUSALS_HEAD, rows) + "\n" + text


def doctor(results: dict[str, Any]) -> str:
    """How often the doctor says without a GPU what the GPU then does."""
    here = results["environment"]
    text = f"{coverage_table.DOCTOR_TEXT} {here['cpu']}, torch {here['torch']}.\n"
    return table(coverage_table.DOCTOR_HEAD, coverage_table.diagnosed(results)) + "\n" + text


def optimized(results: dict[str, Any]) -> str:
    """`ol.optimize` beside the best of the other ways."""
    workloads = results["workloads"]
    text = caption(results, TEXT, settled=True)
    return table(HEAD, rows_of(workloads, NAMES, number)) + "\n" + text + missed(workloads)


def claims(results: dict[str, Any]) -> str:
    """Which rows of the other tables still hold."""
    text = caption(results, claims_table.text_of(results), settled=True, dtype=None)
    return table(claims_table.HEAD, claims_table.rows_of(results)) + "\n" + text


def first_replay_fresh(results: dict[str, Any]) -> str:
    """The first replay in fresh processes, and what was missed."""
    text = caption(results, first_replay_table.FRESH_TEXT, settled=True)
    rows = first_replay_table.fresh_rows(results)
    missed = first_replay_table.missed(results)
    return table(first_replay_table.FRESH_HEAD, rows) + "\n" + text + missed


def first_replay_warm(results: dict[str, Any]) -> str:
    """The first replay of large models in a warm process."""
    text = caption(results, first_replay_table.WARM_TEXT, settled=True)
    rows = first_replay_table.warm_rows(results)
    return table(first_replay_table.WARM_HEAD, rows) + "\n" + text


def serving(part: str) -> Callable[[dict[str, Any]], str]:
    """A table of a service under load, if its part was run."""

    def make(results: dict[str, Any]) -> str:
        if part not in ("targets", *results["parts"]):
            return "Not measured yet."
        head, rows, text = serving_table.TABLES[part](results)
        return table(head, rows) + "\n" + caption(results, text, settled=True, dtype="bfloat16")

    return make


def parallel(results: dict[str, Any]) -> str:
    """The gain of branches over the chain."""
    text = caption(results, parallel_table.TEXT, settled=True, dtype="bfloat16, small ones float32")
    rows = table(parallel_table.HEAD, parallel_table.rows_of(results))
    return rows + "\n" + text + parallel_table.missed(results)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "engines-summary": ("engines.json", summary),
    "engines-wall": ("engines.json", figures("wall")),
    "engines-host": ("engines.json", figures("host")),
    "engines-gpu": ("engines.json", figures("gpu")),
    "call-overhead": ("call_overhead.json", call_overhead),
    "call-overhead-slow-host": ("call_overhead_slow_host.json", call_overhead),
    "shapes": ("shapes.json", shapes),
    "shapes-serving": ("shapes.json", shapes_serving),
    "batching": ("batching.json", batching),
    "generate": ("generate.json", generate),
    "learning": ("learning.json", learning),
    "optimize": ("optimize.json", optimized),
    "backend": ("backend.json", backend),
    "claims": ("claims.json", claims),
    "coverage": ("coverage.json", coverage),
    "coverage-summary": ("coverage.json", coverage_summary),
    "coverage-refusals": ("coverage.json", refusals),
    "doctor": ("doctor.json", doctor),
    "first-replay": ("first_replay.json", first_replay_fresh),
    "first-replay-warm": ("first_replay.json", first_replay_warm),
    "parallel": ("parallel.json", parallel),
    "parallel-summary": ("parallel.json", parallel_table.summary),
    "parallel-lanes": ("parallel.json", parallel_table.picture),
    "serving": ("serving.json", serving("targets")),
    "serving-rates": ("serving.json", serving("rates")),
    "serving-start": ("serving.json", serving("start")),
    "torch-versions": ("torch_versions.json", torch_versions),
    "training-pair": ("training.json", training("pair")),
    "training-step": ("training.json", training("step")),
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def caption(
    results: dict[str, Any], text: str, *, settled: bool = False, dtype: str | None = "float32"
) -> str:
    here = results["environment"]
    versions = f"driver {here['driver']}, CUDA {here['cuda']}, torch {here['torch']}"
    tf32 = "TF32 off" if here["cudnn TF32"] == "off" else "TF32 on"
    doubt = "" if settled else " `~`: still moving by more than 2% when time was up."
    modes = "" if dtype is None else f", {dtype}, {tf32}"
    return f"{text}{doubt} {here['gpu'] or here['cpu']}, {versions}{modes}.\n"


def missed(workloads: dict[str, Any]) -> str:
    """What was to be reached and was not; empty where all was."""
    found = [
        f"{NAMES.get(name, name).partition(' (')[0]}, {t['variant']}, {t['figure']} "
        f"{number(t['found_us'])}, to reach {number(t['limit_us'])} ({t['rule']})"
        for name, data in workloads.items()
        for t in data["targets"]
        if not t["met"]
    ]
    return f"\nMissed: {'; '.join(found)}.\n" if found else ""


def engine_targets(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What onelaunch is to reach of the wall times of a workload."""
    rows = {row["engine"]: row["wall"]["median_us"] for row in data["rows"] if row["wall"]}
    best = min((rows[name] for name in INCUMBENTS if name in rows), default=None)
    wanted: list[tuple[str, float, str]] = []
    if "bare" in rows:
        limit = max(1.05 * rows["bare"], rows["bare"] + 3)
        rule = "1.05x a bare replay, or 3 us above it"
        ours = ("onelaunch", "onelaunch-rebind", "onelaunch-static")
        wanted += [(name, limit, rule) for name in ours]
    if best is not None and data["workload"] in ("mlp", "cnn", "rnn"):
        wanted.append(("onelaunch-compile", best, "the best incumbent"))
    elif best is not None:
        limit = max(1.01 * best, best + 3)
        wanted.append(("onelaunch-compile", limit, "1% or 3 us above the best incumbent"))
    return [
        {"variant": name, "figure": "wall", "rule": rule, "limit_us": limit}
        | {"found_us": rows[name], "met": rows[name] <= limit}
        for name, limit, rule in wanted
        if name in rows
    ]


def figure(data: dict[str, Any], engine: str, which: str) -> str:
    """A median, with its doubts: ~ for noisy; the status where there is no figure."""
    row = next((row for row in data["rows"] if row["engine"] == engine), None)
    if row is None:
        return "-"
    if row["status"] != "ok" or row[which] is None:
        return row["status"] if row["status"] != "ok" else "-"
    return ("~" if row["noisy"] else "") + number(row[which]["median_us"])


def wall(data: dict[str, Any], engine: str) -> str:
    return figure(data, engine, "wall")


def number(value: float) -> str:
    """Three figures, and never a fraction of what cannot be seen."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with what stands between markers made anew, where there are results.

    Raises:
        KeyError: a marker names no table.
    """

    def fill(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        if not (results / file).exists():  # not measured yet: the page says so itself
            return match[0]
        return match[1] + make(json.loads((results / file).read_text())) + match[3]

    return MARKED.sub(fill, text)


def picture(results: Path = RESULTS) -> str:
    """Draw the wall time of each engine on each workload."""
    return draw(json.loads((results / "engines.json").read_text()), NAMES, wall)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    made = {page: render(page.read_text()) for page in pages if page.exists()}
    made[PICTURE] = picture()
    stale: list[str] = []
    for file, text in made.items():
        if not file.exists() or file.read_text() != text:
            stale.append(str(file.relative_to(ROOT)))
            if not check:
                file.write_text(text)
    if stale:
        print(f"{'not up to date' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
