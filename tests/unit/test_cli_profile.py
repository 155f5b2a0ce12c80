"""`onelaunch profile`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onelaunch as ol
from onelaunch.tools.cli import run

FACTORIES = """
import sys
import time

import torch
from torch import nn


def model():
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    return net, (torch.randn(8, 16),)


def broken():
    def f(x):
        raise RuntimeError("shapes that do not fit")

    return f, (torch.ones(2, 3),)


def nothing():
    return lambda: None, ()


def slow():
    def f(x):
        print("here", file=sys.stderr, flush=True)  # of stdout nothing is shown
        time.sleep(60)
        return x + 1

    return f, (torch.ones(2),)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "profiled_factories.py"
    file.write_text(FACTORIES)
    return str(file)


def test_what_it_prints(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", f"{target}:model"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().splitlines()[-1].startswith("Bound by ")  # the answer last, as of all
    for said in ("heaviest operators", "aten::addmm", "roofline", "products in float32", "at most"):
        assert said in out
    assert "On a CPU there are no launches" in out
    assert "fused kernels" in out
    assert "torch.compile(model)" in out
    assert "measuring the peaks of this machine" in err


def test_json(target: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    assert run(["profile", f"{target}:model", "--json", str(file)]) == 0
    found = ol.Profile.from_json(file.read_text())
    assert found.workload == f"{target}:model"
    assert found.roofline.flops == {"float32": 2 * 8 * (16 * 16 + 16 * 4)}


def test_a_page(target: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.html"
    assert run(["profile", f"{target}:model", "--report", str(file)]) == 0
    text = file.read_text()
    for said in ("<h1>Bound by ", "Where the time goes", "aten::addmm", "GB/s", "torch.compile"):
        assert said in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:broken"], "the callable raised RuntimeError: shapes"),
        (["{}:nothing"], "the callable runs no operator of torch"),
        (["{}:missing"], "has no `missing`"),
        (["profile.json"], "`onelaunch profile` shows no saved results"),
        (["{}"], "it is not path.py:name or module:name"),
        (["{}:model", "--json", "/no/such/folder/p.json"], "there is no folder /no/such/folder"),
        (["{}:model", "--engines", "eager"], "No such option"),
    ],
)
def test_mistakes_are_exit_code_2(
    arguments: list[str], message: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", *(argument.replace("{}", target) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "ArgumentError [OL401]" in err
    assert "Traceback" not in err


def test_stopped_by_ctrl_c(target: str) -> None:
    command = [sys.executable, "-m", "onelaunch", "profile", f"{target}:slow"]
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
def test_the_profiler_itself_says_nothing(target: str) -> None:
    command = [sys.executable, "-m", "onelaunch", "profile", f"{target}:model"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.returncode == 0
    assert "profiler_start" not in done.stderr
