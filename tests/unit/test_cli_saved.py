"""A comparison that was saved, shown again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onelaunch.tools.cli import run
from tests.unit import reported


def test_it_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, file = tmp_path / "page.html", tmp_path / "saved.json"
    found = reported.comparison()
    file.write_text(replace(found, rows=found.rows[:4]).to_json())
    assert run(["compare", str(file), "--report", str(report)]) == 0
    assert "Fastest correct engine: the quick" in capsys.readouterr().out
    assert (
        "<h1>Fastest correct engine: the quick, 30.0 µs per call, 3.00x eager" in report.read_text()
    )
    file.write_text(found.to_json())
    assert run(["compare", str(file)]) == 1  # with an engine that was wrong


def test_mistakes_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(tmp_path / "saved.json")
    other = tmp_path / "other.json"
    other.write_text("[1]")
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    for targets, what in (
        (["none.json"], "none.json cannot be read: No such file"),
        ([str(other)], "is not a comparison that onelaunch wrote"),
        ([str(plan)], "why:   it has no 'workload'\n"),
        ([first, "--engines", "eager"], "--engines cannot be applied to a saved comparison"),
        ([first, "--isolate"], f"fix:   onelaunch compare {first}\n"),
    ):
        assert run(["compare", *targets]) == 2
        assert what in capsys.readouterr().err


@pytest.mark.parametrize("command", [["compare", "x.py:model"], ["doctor", "src"]])
def test_without_the_package_of_the_charts(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said before any work, with the line that installs it."""
    monkeypatch.setattr("onelaunch.tools.report.page.can_draw", lambda: False)
    assert run([*command, "--report", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert "vl-convert-python, which is not installed" in err
    assert "fix:   pip install vl-convert-python" in err
    assert "importing" not in err
