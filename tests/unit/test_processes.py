"""What the benchmarks' processes share: a time until which they build, what is kept."""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path

import pytest
import torch

from benchmarks import processes


def test_a_build_ends_in_time_even_if_an_interrupt_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
