"""The process of one engine: it loads the target, and builds, checks and times when it is told to.

It reads orders from its standard input, a word in a line, and answers each with a line of JSON.
What the callable prints goes to standard error, and it finds nothing to read.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import IO, Any

import torch

from onelaunch.gc_pause import no_collection
from onelaunch.tools.bench.engines import ENGINES
from onelaunch.tools.bench.entry import EngineEntry
from onelaunch.tools.bench.reference import make_reference, said
from onelaunch.tools.bench.target import load
from onelaunch.tools.bench.timers import timers_for
from onelaunch.tools.bench.workload import Workload


def main() -> None:
    """Serve the orders of a comparison: the engine, the target and if parameters are shared."""
    name, target, shared = sys.argv[1:]
    orders, answers = _channel()
    try:
        entry = _prepared(name, target, shared == "shared", orders)
    except Exception as error:  # noqa: BLE001  any code of the user's; the parent tells it
        _answer(answers, {"failed": said(error)})
        return
    _tell(answers, entry)
    for order in orders:
        if order.strip() == "round":
            with no_collection():
                entry.round(timers_for(entry.workload.device))
            _tell(answers, entry)
        else:
            entry.finish()
            _tell(answers, entry)


def _prepared(name: str, target: str, shared: bool, orders: IO[str]) -> EngineEntry:
    """Do what the first order asks for: load, build and check."""
    if not orders.readline():
        raise EOFError("no order came")
    workload = Workload(*load(target), share_parameters=shared)
    reference = make_reference(workload, torch.Generator().manual_seed(0))
    entry = EngineEntry(ENGINES[name], reference.placed(workload))
    entry.prepare(reference)
    gc.collect()
    return entry


def _channel() -> tuple[IO[str], IO[str]]:
    """Take the standard streams for orders and answers, out of the way of the callable."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return orders, answers


def _tell(answers: IO[str], entry: EngineEntry) -> None:
    found = asdict(entry.row())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    state = {"running": entry.running, "settled": entry.settled, "versions": versions}
    _answer(answers, {**state, "found": found})


def _answer(answers: IO[str], what: dict[str, Any]) -> None:
    print(json.dumps(what), file=answers, flush=True)


if __name__ == "__main__":
    main()
