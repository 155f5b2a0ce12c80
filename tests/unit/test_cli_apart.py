"""`onelaunch compare` with engines in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from onelaunch.tools import bench
from onelaunch.tools.bench import Comparison, Row
from onelaunch.tools.bench.engines import ALONE, DEFAULT
from onelaunch.tools.bench.isolated import LIMIT_SECONDS, Isolated
from onelaunch.tools.cli import run

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0", "--isolate"], "--limit is 0"),
        (["--limit", "nan", "--isolate"], "--limit is nan"),
        (["--limit", "9"], "--limit needs --isolate"),
        (["--python", "tvm"], "it is not ENGINE=PATH"),
        (["--python", "tvn=python"], "no engine is called tvn"),
        (["--engines", "eager", "--python", "tvm=python"], "tvm is not to run"),
    ],
)
def test_mistakes(
    options: list[str],
    message: str,
    target: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", target, *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "OL401" in err
    assert all(part in err for part in ("where:", "why:", "fix:"))
    assert "imported" not in out, "a mistake is told before the work"
