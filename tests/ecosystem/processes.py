"""Files of programs in processes of their own: a program that dies, hangs or loses its device costs
itself alone.

    python -m tests.ecosystem --device cpu programs_steps gcn_without_self_loops

runs files and programs in one process and says what became of them; `run_files` shares files out
among such processes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from onelaunch import testing

from .harness import Program, play
from .programs import FILES, programs

FOLDER = Path(__file__).parent
START_SECONDS = 180.0
"""For a process to import what it needs."""
PROGRAM_SECONDS = 120.0

_WARM = multiprocessing.get_context("forkserver")
"""Each process is forked from one that has imported the libraries which most programs need."""
_WARM.set_forkserver_preload(["tests.ecosystem.warm"])

Report = dict[str, Any]
"""What became of a program: `Outcome`'s fields, and `kind`, `file`, `seconds`, `unexpected`."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Every n-th program of a file, from a certain one on."""

    file: str
    first: int = 0
    every: int = 1


def run_files(chunks: Sequence[Chunk], device: str, workers: int) -> dict[str, Report]:
    """Run the programs of each chunk in a process, so many at the same time."""
    reports: dict[str, Report] = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda chunk: _run_chunk(chunk, device), chunks):
            reports.update(found)
    return reports


def _run_chunk(chunk: Chunk, device: str) -> dict[str, Report]:
    """Run a chunk in a process; where it ends early, what is left in another."""
    reports: dict[str, Report] = {}
    while True:
        known = len(reports)
        complete, begun, found, end = _run_child(chunk, device, list(reports))
        reports.update(found)
        if complete:
            return reports
        if begun is not None and begun not in reports:
            reports[begun] = _lost(chunk, end)
        elif len(reports) == known:  # not one was begun, and none would be
            reports[f"{chunk.file} {chunk.first}"] = _lost(chunk, end)
            return reports


def _lost(chunk: Chunk, end: str) -> Report:
    return {"verdict": "died", "file": chunk.file, "unexpected": f"died: {end}"}


def _run_child(
    chunk: Chunk, device: str, done: list[str]
) -> tuple[bool, str | None, dict[str, Report], str]:
    """Whether all ran, the program that was begun last, the reports, and how the process ended."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "reports", Path(folder) / "errors"
        command = [chunk.file, "--device", device, "--out", str(out)]
        command += ["--part", str(chunk.first), str(chunk.every), "--skip", *done]
        out.touch()
        child = _WARM.Process(target=_child, args=(command, str(err)))
        child.start()
        late = _wait(child, out)
        notes = [json.loads(line) for line in out.read_text().splitlines()]
        reports = {note["name"]: note["report"] for note in notes if "report" in note}
        begun = [note["begun"] for note in notes if "begun" in note]
        said = err.read_text(errors="replace")[-3000:] if err.exists() else ""
        end = f"{late or f'exit code {child.exitcode}'}\n{said}"
        return {"complete": True} in notes, begun[-1] if begun else None, reports, end


def _child(command: list[str], errors: str) -> None:
    """Run programs in a process that was forked; what it prints goes to a file."""
    file = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(command))


def _wait(child: BaseProcess, out: Path) -> str | None:
    """Wait for its end; a word on why it was ended, if it was."""
    since, size = time.monotonic(), 0
    try:
        while child.is_alive():
            child.join(0.1)
            if out.stat().st_size != size:
                since, size = time.monotonic(), out.stat().st_size
            limit = PROGRAM_SECONDS if size else START_SECONDS
            if time.monotonic() - since > limit:
                return f"nothing for {limit:.0f} s"
    finally:
        child.kill()
        child.join()
    return None


def _report(program: Program, device: torch.device) -> Report:
    start = time.monotonic()
    outcome = play(program, device)
    return {
        "kind": program.kind,
        "file": program.file,
        **dataclasses.asdict(outcome),
        "seconds": round(time.monotonic() - start, 2),
        "unexpected": outcome.unexpected(program, device),
    }


def _say(report: Report, name: str) -> None:
    code = f" {report['code']}" if report["code"] else ""
    figures = f"{report['replays']} replays of {report['captures']}, {report['seconds']} s"
    print(f"{name}: {report['verdict']}{code}, {figures}", flush=True)
    if report["unexpected"] is not None:
        print(f"  UNEXPECTED {report['unexpected']}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run programs here; the exit code is 1 if one was not as it is said to be."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="files of programs, or programs; all by default")
    parser.add_argument("--device", default="cpu", help="cpu, tape or cuda")
    parser.add_argument("--out", type=Path, help="a file for what `run_files` reads")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "EVERY"))
    parser.add_argument("--skip", nargs="*", default=[])
    options = parser.parse_args(argv)

    torch.set_num_threads(1)
    if options.device == "tape":
        testing.install()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
    names = set(options.names or FILES)
    files = [name for name in names if (FOLDER / f"{name}.py").exists()]
    if len(files) < len(names):  # programs, which may be of any file
        files += FILES
    on = "cpu" if device.type == "tape" else device.type  # on the tape what it has operators for
    wanted = [p for p in programs(files) if {p.name, p.file} & names and on in p.on]
    if unknown := names - {p.name for p in wanted} - set(files):
        parser.error(f"there is no {', '.join(sorted(unknown))} on {device.type}")
    bad = False
    for program in wanted[options.part[0] :: options.part[1]]:
        if program.name in options.skip:
            continue
        if options.out is None:
            report = _report(program, device)
            _say(report, program.name)
        else:
            _note(options.out, {"begun": program.name})
            report = _report(program, device)
            _note(options.out, {"name": program.name, "report": report})
            if report["verdict"] == "error":  # the device may be lost for this process
                return 1
        bad |= report["unexpected"] is not None
    if options.out is not None:
        _note(options.out, {"complete": True})
    return int(bad)


def _note(out: Path, note: dict[str, Any]) -> None:
    with out.open("a") as lines:
        lines.write(json.dumps(note) + "\n")
