"""`onelaunch compare`: engines in processes of their own, and a comparison shown again."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onelaunch.tools import bench
from onelaunch.tools.bench import Comparison, Row
from onelaunch.tools.bench.engines import ALONE, DEFAULT
from onelaunch.tools.bench.isolated import LIMIT_SECONDS, Isolated
from tests.unit import reported


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the engines that a comparison was asked for."""
    collected: list[Any] = []

    def compare(*_: object, engines: list[Any], **__: object) -> Comparison:
        collected[:] = engines
        return Comparison("w", (Row("a", "A", "wrong", "no"),))

    monkeypatch.setattr(bench, "compare", compare)
    return collected


def test_by_default_those_are_apart_that_change_their_process(
    command: Any, compared: list[Any]
) -> None:
    command("compare", "FILE:with_kwargs")
    assert [e.name for e in compared] == [e.name for e in DEFAULT]
    assert {e.name for e in compared if isinstance(e, Isolated)} == ALONE


def test_isolate_puts_every_engine_apart(command: Any, compared: list[Any], targets: Path) -> None:
    command("compare", "FILE:model", "--isolate", "--engines", "eager,tvm")
    assert [(e.name, e.limit, e.python, e.target) for e in compared] == [
        ("eager", LIMIT_SECONDS, None, f"{targets}:model"),
        ("tvm", LIMIT_SECONDS, None, f"{targets}:model"),
    ]
    command("compare", "FILE:model", "--isolate", "--engines", "eager", "--limit", "7")
    assert compared[0].limit == 7


def test_python_puts_its_engine_apart(command: Any, compared: list[Any]) -> None:
    words = ["--engines", "eager,tvm", "--python", f"tvm={sys.executable}"]
    command("compare", "FILE:model", *words)
    eager, tvm = compared
    assert not isinstance(eager, Isolated)
    assert (tvm.name, tvm.python) == ("tvm", sys.executable)


def test_what_was_saved_is_shown_again(command: Any, tmp_path: Path) -> None:
    report, file = tmp_path / "page.html", tmp_path / "saved.json"
    found = reported.comparison()
    file.write_text(replace(found, rows=found.rows[:4]).to_json())
    code, out, _ = command("compare", str(file), "--report", str(report))
    assert code == 0
    assert "Fastest correct engine: the quick" in out
    title = "<h1>Fastest correct engine: the quick, 30.0 µs per call, 3.00x eager"
    assert title in report.read_text()
    file.write_text(found.to_json())
    assert command("compare", str(file)).code == 1  # with an engine that was wrong
