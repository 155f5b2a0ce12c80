"""What the benchmarks' processes share: a time until which they build, what is kept."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processes


def test_a_build_ends_in_time_even_if_an_interrupt_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "AGAIN_SECONDS", 0.05)
    lost: list[KeyboardInterrupt] = []

    def stubborn() -> None:
        while len(lost) < 3:
            try:
                time.sleep(10)
            except KeyboardInterrupt as interrupt:
                lost.append(interrupt)
        raise lost[-1]

    with pytest.raises(KeyboardInterrupt), processes.ends_by(time.time() + 0.05):
        stubborn()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_begins_too_late_has_a_moment() -> None:
    with processes.ends_by(time.time() - 100):
        done = True
    assert done
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(KeyboardInterrupt), processes.ends_by(time.time() - 100):
        time.sleep(10)


def test_children_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONELAUNCH_READY_BY", str(1234.5))
    assert processes.ready_by() == 1234.5


def test_results_of_another_machine_are_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    here = {"benchmark": "some", "environment": {"gpu": "one"}}
    assert processes.earlier(out, here) == {}
    out.write_text(json.dumps(here | {"rows": [1]}))
    assert processes.earlier(out, here)["rows"] == [1]
    assert processes.earlier(out, here | {"environment": {"gpu": "another"}}) == {}


def test_without_a_gpu_no_figures_of_one_are_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out(*argv: str) -> Path:
        return processes.parsed(argparse.ArgumentParser(), "some", argv).out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        out()
    assert "no GPU: name a file with --out" in capsys.readouterr().err
    assert out("--out", str(tmp_path / "mine.json")) == tmp_path / "mine.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert out() == processes.RESULTS / "some.json"


CHILD = """
import json, os, subprocess, sys, time
name, out = sys.argv[2], sys.argv[4]
began = time.time()
if name == "late":
    time.sleep(60)
if name == "dies":
    sys.exit(3)
time.sleep(0.3)
built = time.time()
print("something else", flush=True)
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
if name == "leaves":
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began = left.pid
print("x" * 100_000, flush=True)
with open(out, "w") as file:
    json.dump([began, built, time.time()], file)
os._exit(0)
"""


@pytest.mark.thorough
def test_processes_build_at_once_and_measure_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies, or is late, gives nothing; what one leaves behind is not waited for."""
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.0)
    found: dict[str, Any] = {}
    names = ["late", "dies", "leaves", "a", "b"]
    processes.run_together(
        "some_child",
        names,
        [],
        build_seconds=5.0,
        measure_seconds=20.0,
        done=found.__setitem__,
        at_once=2,
    )
    assert list(found) == names
    assert found["late"] is found["dies"] is None
    os.kill(int(found["leaves"][0]), signal.SIGKILL)
    (a, a_built, a_done), (b, *_, b_done) = found["a"], found["b"]
    assert a < a_built <= b  # the one that is late takes the other of two places
    assert a_done < b_done
