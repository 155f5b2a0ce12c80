"""Engines in processes of their own, of which some fail, and what is left of these processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import nn

from onelaunch.tools.bench import ENGINES, Comparison, compare, isolated
from onelaunch.tools.bench.isolated import Isolated
from tests.unit import failing_worker
from tests.unit.test_bench_compare import Made, as_it_is

WORKER = str(failing_worker.__file__)
X = torch.randn(2, 8)
TARGET = """
import os, sys, time
import torch

def model():
    print("a target prints")
    torch.manual_seed(0)
    return torch.nn.Linear(8, 3).eval(), (torch.randn(2, 8),)

def hangs_in_a_worker():
    if "worker" in sys.argv[0]:
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    return model()
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "isolated_target.py"
    file.write_text(TARGET)
    return file


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORDERS", str(tmp_path / "orders"))
    return tmp_path / "orders"


def plain(name: str, limit: float = 30.0) -> Isolated:
    """A worker that only speaks as one."""
    return Isolated(Made(name, as_it_is), "nowhere:x", limit, worker=(WORKER, "plain"))


def run(*engines: Isolated) -> Comparison:
    return compare(nn.Linear(8, 3).eval(), (X,), engines=engines, seconds=0.02)


def test_a_process_without_a_limit() -> None:
    assert run(plain("raises", math.inf)).rows[0].reason == "ImportError: no such target"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("killed", "its process died of SIGKILL, which a system that is out of memory sends"),
        ("dies later", "its process died of SIGBUS"),
        ("exits", "its process ended with code 3: a library that ends the process"),
        ("raises", "ImportError: no such target"),
        ("hangs", "took longer than 0.5 s"),
        ("hangs later", "took longer than 0.5 s"),
    ],
)
@pytest.mark.usefixtures("orders")
def test_a_process_that_fails_is_a_row(name: str, reason: str) -> None:
    row = run(plain(name, limit=0.5 if "hangs" in name else 30.0)).rows[0]
    assert (row.status, row.reason) == ("failed", reason)
    assert row.code == "with torch.no_grad():\n    y = model(x)"


def test_rounds_are_interleaved_over_processes(orders: Path) -> None:
    run(plain("a"), plain("dies later"), plain("b"))
    told = orders.read_text().split("\n")[:-1]
    assert told[:3] == ["a prepare", "dies later prepare", "b prepare"]
    assert told[3:7] == ["a round", "b round", "b round", "a round"]
    assert told[-2:] == ["b finish", "a finish"]


def test_a_python_that_does_not_start_is_a_row() -> None:
    engine = Isolated(Made("a", as_it_is), "nowhere:x", python="/no/such/python")
    assert run(engine).rows[0].reason == (
        "/no/such/python does not start: No such file or directory"
    )


def test_an_engine_that_cannot_run_here_starts_no_process() -> None:
    engine = Isolated(Made("a", as_it_is, "needs another machine"), "nowhere:x", worker=("/none",))
    row = run(engine).rows[0]
    assert (row.status, row.reason) == ("missing", "needs another machine")


@pytest.mark.thorough
def test_real_engines_in_processes_fail_alone(target: Path) -> None:
    def engine(name: str) -> Isolated:
        return Isolated(Made(name, as_it_is), f"{target}:model", worker=(WORKER,))

    eager = Isolated(ENGINES["eager"], f"{target}:model")
    names = ("crashes", "takes all memory", "gives NaN", "runs")
    crashes, memory, nan, runs, plain = run(*map(engine, names), eager)
    assert (crashes.status, crashes.reason) == ("failed", "its process died of SIGSEGV")
    assert memory.status == "failed"
    assert memory.reason is not None
    assert memory.reason.startswith("out of memory: ")
    assert (nan.status, nan.reason) == ("wrong", "NaN in the result")
    for row in (runs, plain):
        assert (row.status, row.reason) == ("ok", None)
        assert row.wall is not None
        assert row.wall.samples >= 2
        assert row.error is not None
        assert row.error < 1e-6


@pytest.mark.thorough
def test_an_engine_of_a_zip_runs(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "app.pyz"
    with ZipFile(archive, "w") as files:
        for path in isolated.PACKAGE.rglob("*"):
            files.write(path, Path("onelaunch") / path.relative_to(isolated.PACKAGE))
    monkeypatch.setattr(isolated, "PACKAGE", archive / "onelaunch")
    (row,) = run(Isolated(ENGINES["eager"], f"{target}:model")).rows
    assert (row.status, row.reason) == ("ok", None)


@pytest.mark.thorough
def test_an_interrupt_leaves_no_process(target: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-m", "onelaunch", "compare", f"{target}:hangs_in_a_worker"]
    with subprocess.Popen(
        [*command, "--isolate", "--engines", "eager"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PID_FILE": str(pid_file), "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def other_python(folder: Path, *, without: str) -> str:
    """An environment over the packages of this one, less those whose names begin so."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.symlink_to(Path(sys._base_executable).resolve())  # pyright: ignore
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).resolve().parent}\n")  # pyright: ignore
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(without) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return str(python)


@pytest.mark.thorough
def test_another_python_runs_an_engine(target: Path, tmp_path: Path) -> None:
    python = other_python(tmp_path / "other", without="onnxruntime")
    eager, onnx = run(
        *(Isolated(ENGINES[n], f"{target}:model", python=python) for n in ("eager", "onnxruntime"))
    )
    assert (eager.status, eager.reason) == ("ok", None)
    assert eager.notes[-1].endswith(f"torch {torch.__version__} in {python}")
    assert onnx.status == "missing"
    assert onnx.reason == "onnxruntime is not installed: pip install onnxruntime onnxscript"
