"""The command: what it shows, exit codes, files, interrupts, and where the output goes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.errors import GraphError
from onelaunch.tools import bench
from onelaunch.tools.bench import Comparison
from onelaunch.tools.bench.target import load
from onelaunch.tools.cli.compare import ENGINES
from onelaunch.tools.cli.progress import Lines
from onelaunch.tools.rules import RULES
from tests.unit.test_cli_mistakes import four_parts

QUICK = ["--engines", "eager,no_grad", "--seconds", "0.02"]
every_command = pytest.mark.parametrize(
    ("name", "options", "done"),
    [
        ("compare", QUICK, "compared"),
        ("optimize", ["--steps", "inference-mode", "--seconds", "1"], "optimized"),
        ("profile", [], "profiled"),
        ("doctor", [], "diagnosed"),
    ],
)


@every_command
def test_what_a_callable_prints_is_counted_and_not_shown(
    name: str, options: list[str], done: str, command: Any
) -> None:
    code, out, err = command(name, "FILE:talks", *options)
    assert code in (0, 1)
    assert "chatter" not in out + err
    assert re.search(rf"not shown: \d+ lines that .*:talks printed while it was {done}\n", err)


@pytest.mark.parametrize("name", ["model", "with_kwargs"])
def test_compare(name: str, command: Any, targets: Path) -> None:
    code, out, err = command("compare", f"FILE:{name}", *QUICK)
    assert code == 0
    assert "eager, no_grad" in out
    assert "Fastest correct engine" in out
    assert out.startswith("\nThis call takes")  # one empty line, whether or not a bar was shown
    steps = [line.partition(" s  ")[2] for line in err.splitlines()]
    assert steps[:2] == ["importing PyTorch", f"loading {targets}:{name}"]
    assert steps[2:5] == ["importing torch.compile", "float64 reference", "timing eager calls"]
    assert steps[5:7] == ["building eager", "checking eager"]
    assert steps[7:10] == ["building eager, no_grad", "checking eager, no_grad", "timing, round 1"]
    assert steps[-1] == "tracing a call"


def test_a_step_of_many_rounds_is_a_line_each_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([1.0, 2.0, 9.0, 13.0, 14.0, 15.0])
    monkeypatch.setattr("onelaunch.tools.cli.progress.BEGAN", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    tell = Lines()
    for text in ("a", "b, 1", "b, 2", "b, 3", "c", "c"):
        tell(text, 0.0)
    printed = capsys.readouterr().err
    assert printed.splitlines() == ["   1 s  a", "   2 s  b, 1", "  13 s  b, 3", "  14 s  c"]


def test_a_long_step_says_each_ten_seconds_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while an engine is built, which has stderr to itself."""
    times = iter([1.0, 3.0, 11.0, 13.0, 22.0])
    monkeypatch.setattr("onelaunch.tools.cli.progress.BEGAN", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    tell = Lines()
    tell("building", 0.0)
    with contextlib.redirect_stderr(io.StringIO()):
        for _ in range(4):
            tell.go_on()
    told = ["   1 s  building", "  11 s  building, for 10 s", "  22 s  building, for 21 s"]
    assert capsys.readouterr().err.splitlines() == told


def test_a_watch_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onelaunch.tools.cli.progress.LATE_SECONDS", 0.01)
    monkeypatch.setattr("onelaunch.tools.cli.progress.REPEAT_SECONDS", 0.05)
    with Lines() as tell:
        tell("building", 0.0)
        time.sleep(1.0)
    assert "s  building, for " in capsys.readouterr().err


@pytest.mark.thorough
def test_on_a_terminal_there_is_a_bar(targets: Path, tmp_path: Path) -> None:
    """A terminal of its own, on which nothing of the bar stays, and no line of a step."""
    pty = pytest.importorskip("pty", reason="a terminal of Unix")
    outer, inner = pty.openpty()
    options = [f"{targets}:model", *QUICK, "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "onelaunch", "compare", *options]
    environment = os.environ | {"TERM": "xterm"}
    # Not a pipe: a pty holds a few KiB, and the command waits until they are read.
    with subprocess.Popen(command, stdout=inner, stderr=subprocess.PIPE, env=environment) as child:
        os.close(inner)
        shown = bytearray()
        while part := read(outer):
            shown += part
        assert child.stderr is not None
        assert child.stderr.read() == b""
    assert child.returncode == 0
    assert b"importing PyTorch" in shown
    assert "━".encode() in shown


def read(terminal: int) -> bytes:
    """The next bytes of a terminal, none when the other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:  # which is how Linux says it
        return b""


def test_compare_writes_json_and_a_page(command: Any, tmp_path: Path) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    options = ["--json", str(data), "--report", str(page)]
    assert command("compare", "FILE:model", *QUICK, *options).code == 0
    rows = Comparison.from_json(data.read_text()).rows
    assert [row.engine for row in rows] == ["eager", "no_grad"]
    assert page.read_text().startswith("<!doctype html>")


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has every comparison give these rows."""

    def gives(*rows: bench.Row, **facts: Any) -> None:
        monkeypatch.setattr(bench, "compare", lambda *_, **__: Comparison("w", rows, **facts))

    return gives


def test_an_engine_that_is_wrong_is_exit_code_1(command: Any, comparing: Any) -> None:
    comparing(bench.Row("a", "A", "wrong", "NaN in the result"))
    assert command("compare", "FILE:model").code == 1


def test_no_engine_that_was_measured_is_exit_code_2(command: Any) -> None:
    code, out, _ = command("compare", "FILE:model", "--engines", "tensorrt,cudagraphs")
    assert code == 2
    assert "needs an NVIDIA GPU" in out
    assert command("compare", "FILE:model", "--engines", "tensorrt,eager", *QUICK[2:]).code == 0


@every_command
def test_each_command_shows_the_traceback_of_a_callable(
    name: str, options: list[str], done: str, command: Any
) -> None:
    code, _, err = command(name, "FILE:mismatched", *options, "--traceback")
    assert code == 2
    assert "torch/nn/modules/linear.py" in err
    assert f"it must run by itself before it can be {done}\n" in err


def test_a_file_in_a_package_is_imported_as_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "somenets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layers.py").write_text("SIZE = 3\n")
    (package / "net.py").write_text(
        "import torch\nfrom .layers import SIZE\n"
        "def model():\n    return torch.relu, [torch.ones(SIZE)]\n"
    )
    fn, args, kwargs = load(f"{package}/net.py:model")
    assert fn(*args, **kwargs).shape == (3,)


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="there is no file"):
        load(f"{tmp_path}:model")


# What is explained.


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_is_explained(code: str, command: Any) -> None:
    shown = command("explain", code.lower())
    assert shown.code == 0
    assert f"{code}: {CATALOGUE[code].title}" in shown.out
    assert command("explain", f"[{code}]") == shown


@pytest.mark.parametrize("word", ["host-read", "Host_Read", "ol101"])
def test_a_rule_is_explained_by_its_name(word: str, command: Any) -> None:
    code, out, _ = command("explain", word)
    assert code == 0
    said, rule = " ".join(out.split()), RULES["OL101"]
    head = f"OL101: {rule.title} rule: host-read, blocks a capture why: {rule.why}"
    assert said.startswith(head)
    for text in (rule.fix, rule.what[1:], rule.problems[1:]):
        assert " ".join(text.split()) in said
    assert f"\nExample\n{rule.example.strip()}\n" in out
    assert f"\nUse instead\n{rule.instead.strip()}\n" in out


def test_an_error_that_is_no_rule_is_explained_in_short(command: Any) -> None:
    code, out, _ = command("explain", "OL401")
    assert code == 0
    assert [line[:5] for line in out.splitlines()] == ["OL401", "why: ", "fix: "]


def test_all_codes_are_listed(command: Any) -> None:
    code, out, _ = command("explain", "--list")
    assert code == 0
    listed = {line[0]: line[1:] for line in (text.split(maxsplit=3) for text in out.splitlines())}
    assert list(listed) == sorted({*CATALOGUE, *RULES})
    assert listed["OL101"] == ["host-read", "blocks-capture", RULES["OL101"].title]
    assert listed["OL401"] == ["-", "-", CATALOGUE["OL401"].title]


def test_info(command: Any) -> None:
    code, out, _ = command("info")
    assert code == 0
    assert all(word in out for word in ("torch", "python", "gpu", "recordings"))


# Interrupts.

STOPPED = "stopped before there was anything to show\n"


@pytest.mark.parametrize(
    "source", ["def model():\n    raise KeyboardInterrupt\n", "raise KeyboardInterrupt\n"]
)
def test_an_interrupt_while_the_factory_runs_or_is_imported(
    source: str, command: Any, targets: Path
) -> None:
    targets.write_text(source)
    code, out, err = command("compare", "FILE:model")
    assert (code, out) == (130, "")
    assert err.endswith(f" s  loading {targets}:model\n{STOPPED}")
    assert "Traceback" not in err


def test_an_interrupt_while_torch_is_imported(tmp_path: Path) -> None:
    """One line, whenever it comes, and no file that was to be written."""
    report, target = tmp_path / "out.html", tmp_path / "x.py"
    target.touch()
    words = ["compare", f"{target}:model", "--report", str(report)]
    command = [sys.executable, "-m", "onelaunch", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline().endswith(" s  importing PyTorch\n")
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == STOPPED
    # Python ends itself by the signal if it came in the middle of an `exec`: 130 in a shell, too.
    assert child.returncode in (130, -signal.SIGINT)
    assert not report.exists()


@pytest.mark.parametrize("status", ["interrupted", "missing", "failed", "wrong"])
def test_an_interrupt_before_anything_was_measured(
    status: Any, command: Any, comparing: Any, tmp_path: Path
) -> None:
    rows = bench.Row("a", "A", status, "why"), bench.Row("b", "B", "interrupted")
    comparing(*rows, reference="none", interrupted=True)
    data = tmp_path / "out.json"
    something = status == "wrong"
    code, out, err = command("compare", "FILE:model", "--json", str(data))
    assert code == (1 if something else 130)
    assert data.exists() == bool(out) == something
    assert err.endswith(STOPPED) != something


def test_an_interrupt_after_something_was_measured_shows_it(command: Any, comparing: Any) -> None:
    timed = bench.Row("a", "A", "ok", wall=bench.Timing(3.0, 0.1, 5))
    comparing(timed, bench.Row("b", "B", "interrupted"), interrupted=True)
    code, out, _ = command("compare", "FILE:model")
    assert code == 0
    assert "Interrupted: this is what was known by then." in out


# Where the output goes.


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["explain", "--list"], ["explain", "OL101"], ["--help"], ["--version"]]
)
def test_a_stdout_that_is_full_is_exit_code_2(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "onelaunch", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("ArgumentError [OL401] the output could not be written: No space")
    four_parts(done.stderr)


@pytest.mark.parametrize("words", [["explain", "--list"], ["--help"]])
def test_a_pipe_that_nobody_reads_is_exit_code_2_without_a_word(words: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "onelaunch", *words],
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (2, b"")


@pytest.mark.parametrize("columns", ["abc", "0", "-3"])
def test_a_width_that_is_none(columns: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = command("explain", "OL101").out
    monkeypatch.setenv("COLUMNS", columns)
    assert command("explain", "OL101") == (0, expected, "")


def test_the_version(command: Any) -> None:
    code, out, _ = command("--version")
    assert code == 0
    assert re.fullmatch(r"onelaunch \d+\.\d+\S*\n", out)


def test_the_names_of_the_engines() -> None:
    assert tuple(bench.ENGINES) == ENGINES
