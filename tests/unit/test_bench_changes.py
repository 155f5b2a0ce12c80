"""Two comparisons side by side: what is a change, and what is noise."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from onelaunch.bench import Comparison, Row, Timing, compare
from onelaunch.bench.changes import Changes, changes
from onelaunch.bench.rows import RecordingMemory
from onelaunch.cli import run
from onelaunch.report.changed import show_changes, summary
from tests.unit import reported


def row(
    status: str = "ok", wall: float | None = None, spread: float = 0.0, noisy: bool = False
) -> Row:
    timing = None if wall is None else Timing(wall, spread, 20)
    assert status in ("ok", "wrong", "failed", "missing", "unchecked")
    return Row("e", "the e", status, wall=timing, noisy=noisy, error=3e-7)


def one(before: Row | None, after: Row | None) -> Changes:
    found = [
        Comparison("w", (r,) if r else (), environment={"torch": "2"}) for r in (before, after)
    ]
    return changes(found[0], found[1])


@pytest.mark.parametrize(
    ("before", "after", "change", "worse"),
    [
        (row(wall=100), row(wall=101.9), "within noise", False),  # settled is within 2%
        (row(wall=100), row(wall=102.1), "slower", True),
        (row(wall=102.1), row(wall=100), "faster", False),
        (row(wall=100, spread=8), row(wall=107, spread=8), "within noise", False),  # 4% and 3.7%
        (row(wall=100, spread=8), row(wall=109, spread=8), "slower", True),
        (row(wall=100, noisy=True), row(wall=109), "within noise", False),
        (row(wall=100), row(wall=111, noisy=True), "slower", True),
        (row(wall=100), row("wrong"), "wrong", True),
        (row(wall=100), row("failed"), "failed", True),
        (row(wall=100), row("missing"), "gone", False),
        (row(wall=100), None, "gone", False),
        (None, row(wall=100), "new", False),
        (row("missing"), row(wall=100), "new", False),
        (row("wrong"), row(wall=100), "mended", False),
        (row("failed"), row(wall=100), "mended", False),
        (row("failed"), row("failed"), "not timed", False),
        (row("wrong"), row("failed"), "not timed", False),
        (row("missing"), row("wrong"), "not timed", False),
    ],
)
def test_what_a_change_is(before: Row | None, after: Row | None, change: str, worse: bool) -> None:
    found = one(before, after)
    assert found.engines[0].change == change
    assert bool(found.worse) is worse


def test_they_are_the_same_after_json() -> None:
    first, second = reported.comparison("net"), reported.comparison("other")
    second = replace(second, environment={**second.environment, "torch": "2.13", "triton": "3"})
    found = changes(first, second, ("a.json", "b.json"))
    assert Changes.from_json(found.to_json()) == found
    assert found.environment == (
        ("torch", "2.11", "2.13"),
        ("triton", None, "3"),
        ("cpu", "net", "other"),
    )
    with pytest.raises(ValueError, match="not changes in JSON"):
        Changes.from_json("{}")


def test_a_comparison_keeps_its_recordings_in_json_and_needs_none() -> None:
    """Files that were written before there were any are read, too."""
    found = reported.comparison()
    assert found["quick"].recordings == (
        RecordingMemory("float32[8, 4] on cuda:0", 14, 2 << 20, 2 << 20),
    )
    written = found.to_json()
    assert Comparison.from_json(written) == found
    old = written.replace(',\n   "recordings": []', "")
    assert old != written
    assert Comparison.from_json(old) == found


def test_onelaunch_tells_what_its_recordings_hold() -> None:
    net = torch.nn.Linear(8, 4).eval()
    found = compare(net, (torch.ones(2, 8),), engines=["eager", "onelaunch"], seconds=0.02)
    (recording,) = found["onelaunch"].recordings
    assert recording.signature == "float32[2, 8] on cpu"
    assert recording.nodes > 0
    assert recording.pool_bytes == found["onelaunch"].memory_bytes
    assert found["eager"].recordings == ()


def printed(found: Changes) -> str:
    console = Console(width=100, file=io.StringIO())
    show_changes(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_says_what_changed() -> None:
    before = reported.comparison()
    rows = {r.engine: r for r in before.rows}
    rows["quick"] = replace(rows["quick"], wall=Timing(60.0, 0.4, 20), error=1e-5)
    rows["static"] = Row("static", "the static", "wrong", "relative error 1")
    after = replace(before, rows=tuple(rows.values()), workload="another")
    text = printed(changes(before, after))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "the quick 30.0 us 60.0 us 2.00 ±0.02 3.0e-07 → 1.0e-05 slower" in lines
    assert "the eager 90.0 us 90.0 us 1.00 ±0.02 3.0e-07 within noise" in lines
    assert "the static: wrong: relative error 1" in lines
    assert "1 wrong now, 1 slower, 2 within noise" in lines
    assert "They are not of the same workload: net, and another." in lines
    assert "the absent" not in text


def test_the_same_twice_is_no_change() -> None:
    found = reported.comparison()
    assert summary(changes(found, found))[0] == "No change beyond noise in 4 engines"
    empty = Comparison("w", ())
    assert summary(changes(empty, empty)) == ["No engine was timed in both"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    before = reported.comparison()
    fast = [r for r in before.rows if r.status == "ok"]
    slower = [replace(r, wall=Timing(2 * r.wall.median_us, 0.4, 20)) for r in fast if r.wall]
    files = tmp_path / "before.json", tmp_path / "after.json"
    for file, rows in zip(files, (fast, slower), strict=True):
        file.write_text(replace(before, rows=tuple(rows)).to_json())
    return files


def test_two_files_on_the_command_line(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = map(str, saved)
    report, json = tmp_path / "c.html", tmp_path / "c.json"
    assert run(["compare", before, after, "--report", str(report), "--json", str(json)]) == 1
    assert "4 slower" in capsys.readouterr().out
    assert "4 slower" in report.read_text()
    assert len(Changes.from_json(json.read_text()).worse) == 4
    assert run(["compare", after, before]) == 0
    assert "4 faster" in capsys.readouterr().out


def test_one_file_is_shown_again(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "page.html"
    assert run(["compare", str(saved[0]), "--report", str(report)]) == 0
    assert "Fastest correct engine: the quick" in capsys.readouterr().out
    assert "the quick runs 3.00x as fast as eager" in report.read_text()
    saved[0].write_text(reported.comparison().to_json())
    assert run(["compare", str(saved[0])]) == 1  # with an engine that was wrong


def test_mistakes_with_files(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(saved[0])
    other = tmp_path / "other.json"
    other.write_text("[1]")
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    for targets, what in (
        (["none.json"], "none.json cannot be read: No such file"),
        ([str(other)], "is not a comparison that --json wrote"),
        ([str(plan)], "why:   it has no 'profile'\n"),
        ([first, "--engines", "eager"], "--engines cannot be applied to a saved comparison"),
        ([first, "--isolate"], f"fix:   onelaunch compare {first}\n"),
        ([first, "a.py:model"], "2 targets were given"),
        ([first, first, first], "3 targets were given"),
        (["a.py:model", "b.py:model"], "2 targets were given"),
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
    monkeypatch.setattr("onelaunch.report.page.frame.can_draw", lambda: False)
    assert run([*command, "--report", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert "vl-convert-python, which is not installed" in err
    assert "fix:   pip install 'onelaunch[report]'" in err
    assert "importing" not in err
