"""`onelaunch profile`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import onelaunch as ol


def test_what_it_prints(command: Any) -> None:
    code, out, err = command("profile", "FILE:model")
    assert code == 0
    assert out.rstrip().splitlines()[-1].startswith("Bound by ")  # the answer last, as of all
    for said in ("heaviest operators", "aten::addmm", "roofline", "products in float32", "at most"):
        assert said in out
    assert "On a CPU there are no launches" in out
    assert "fused kernels" in out
    assert "torch.compile(model)" in out
    assert "measuring the peaks of this machine" in err


def test_what_it_writes(command: Any, targets: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "profile.json", tmp_path / "profile.html"
    files = ["--json", str(data), "--report", str(page)]
    assert command("profile", "FILE:model", *files).code == 0
    found = ol.Profile.from_json(data.read_text())
    assert found.workload == f"{targets}:model"
    assert found.roofline.flops == {"float32": 2 * 2 * (32 * 64 + 64 * 16)}
    text = page.read_text()
    for said in ("<h1>Bound by ", "Where the time goes", "aten::addmm", "GB/s", "torch.compile"):
        assert said in text


def test_stopped_by_ctrl_c(targets: Path) -> None:
    command = [sys.executable, "-m", "onelaunch", "profile", f"{targets}:slow"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stderr is not None
        assert "here\n" in iter(process.stderr.readline, "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "stopped before there was anything to show" in err
    assert "Traceback" not in err


@pytest.mark.thorough
def test_the_profiler_itself_says_nothing(targets: Path) -> None:
    command = [sys.executable, "-m", "onelaunch", "profile", f"{targets}:model"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0
    assert "profiler_start" not in done.stderr
