"""`onelaunch compare` with engines in processes of their own, and the scripts that it prints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onelaunch import bench
from onelaunch.bench import Comparison, Row
from onelaunch.bench.engines import ALONE, DEFAULT
from onelaunch.bench.isolated import LIMIT_SECONDS, Isolated
from onelaunch.cli import run

TARGET = """
import torch
print("imported")

def halve(x, *, mask):
    return {"y": x / 2 * mask}

def model():
    print("made")
    return halve, (torch.ones(4, 8),), {"mask": torch.ones(8)}
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = tmp_path / "apart_target.py"
    file.write_text(TARGET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "apart_target", raising=False)
    return f"{file}:model"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the engines that a comparison was asked for."""
    engines: list[Any] = []

    def compare(*_: object, engines: list[Any], **__: object) -> Comparison:
        collected.extend(engines)
        return Comparison("w", (Row("a", "A", "wrong", "no"),))

    collected = engines
    monkeypatch.setattr(bench, "compare", compare)
    return engines


def test_by_default_those_are_apart_that_change_their_process(
    target: str, compared: list[Any]
) -> None:
    run(["compare", target])
    assert [e.name for e in compared] == [e.name for e in DEFAULT]
    assert {e.name for e in compared if isinstance(e, Isolated)} == ALONE


def test_isolate_puts_every_engine_apart(target: str, compared: list[Any]) -> None:
    run(["compare", target, "--isolate", "--engines", "eager,tvm"])
    assert [(e.name, e.limit, e.python, e.target) for e in compared] == [
        ("eager", LIMIT_SECONDS, None, target),
        ("tvm", LIMIT_SECONDS, None, target),
    ]
    compared.clear()
    run(["compare", target, "--isolate", "--engines", "eager", "--limit", "7"])
    assert compared[0].limit == 7


def test_python_puts_its_engine_apart(target: str, compared: list[Any]) -> None:
    run(["compare", target, "--engines", "eager,tvm", "--python", f"tvm={sys.executable}"])
    eager, tvm = compared
    assert not isinstance(eager, Isolated)
    assert (tvm.name, tvm.python) == ("tvm", sys.executable)


def bare_python(folder: Path) -> str:
    """An environment without a package."""
    (folder / "bin").mkdir(parents=True)
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    python = folder / "bin" / "python"
    python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    return str(python)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda _: ["--limit", "0", "--isolate"], "--limit is 0"),
        (lambda _: ["--limit", "nan", "--isolate"], "--limit is nan"),
        (lambda _: ["--limit", "9"], "--limit needs --isolate"),
        (lambda _: ["--python", "tvm"], "it is not ENGINE=PATH"),
        (lambda _: ["--python", "tvn=python"], "no engine is called tvn"),
        (lambda _: ["--python", "tvm=/no/such/file"], "/no/such/file is no Python"),
        (lambda _: ["--python", "tvm=/bin/true"], "/bin/true is no Python"),
        (lambda folder: ["--python", f"tvm={bare_python(folder)}"], "python has no torch"),
        (lambda _: ["--engines", "eager", "--python", "tvm=python"], "tvm is not to run"),
        (lambda _: ["--script", "eagr"], "no engine is called eagr"),
    ],
)
def test_mistakes(
    options: Callable[[Path], list[str]],
    message: str,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", target, *options(tmp_path / "bare")]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "OL401" in err
    assert all(part in err for part in ("where:", "why:", "fix:"))
    assert "imported" not in out, "a mistake is told before the work"


def test_a_script_is_all_of_stdout_and_runs_alone(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", target, "--script", "no_grad", "--seconds", "0.05"]) == 0
    out, err = capsys.readouterr()
    assert "imported\nmade\n" in err
    assert "import onelaunch" not in out
    (tmp_path / "script.py").write_text(out)
    # -E: without the PYTHONPATH by which these tests find onelaunch.
    command = [sys.executable, "-E", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("imported\nmade\nrelative error 0.0e+00 against eager\nmedian ")
