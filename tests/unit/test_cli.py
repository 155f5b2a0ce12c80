"""The command: exit codes, files, and messages in four parts without a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.error_catalogue import CATALOGUE
from onelaunch.errors import GraphError
from onelaunch.tools import bench
from onelaunch.tools.bench import Comparison
from onelaunch.tools.bench.target import load
from onelaunch.tools.cli import run
from onelaunch.tools.cli.compare import ENGINES
from onelaunch.tools.cli.progress import Lines
from onelaunch.tools.rules import RULES

FACTORIES = """
import torch
from torch import nn

def model():
    return nn.Linear(8, 3).eval(), (torch.ones(2, 8),)

def with_kwargs():
    return torch.clamp, (torch.ones(2),), {"min": 0.5}

def alone():
    return nn.Linear(8, 3)

def one_tensor():
    return nn.Linear(8, 3), torch.ones(2, 8)

def four():
    return 1, 2, 3, 4

def backwards():
    return (torch.ones(2, 8),), nn.Linear(8, 3)

def odd_kwargs():
    return nn.Linear(8, 3), (torch.ones(2, 8),), [1]

def broken():
    raise LookupError("no weights here")

def mismatched():
    return nn.Linear(8, 3), (torch.ones(2, 7),)

def no_tensor():
    return len, ([1, 2],)

def trains():
    def step(x):
        net(x).sum().backward()
        return x * 2
    return step, (torch.ones(2, 8),)

def talks():
    def call(x):
        print("chat" + "ter")
        return x * 2
    return call, (torch.ones(2, 8),)

def leaves():
    raise SystemExit(0)

number = 3
net = nn.Linear(8, 3)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of factories, importable for the length of a test."""
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return file


QUICK = ["--engines", "eager,no_grad", "--seconds", "0.02"]
every_command = pytest.mark.parametrize(
    ("command", "options", "done"),
    [
        ("compare", QUICK, "compared"),
        ("optimize", ["--steps", "inference-mode", "--seconds", "1"], "optimized"),
        ("profile", [], "profiled"),
        ("doctor", [], "diagnosed"),
    ],
)


@every_command
def test_what_a_callable_prints_is_counted_and_not_shown(
    command: str,
    options: list[str],
    done: str,
    factories: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([command, f"{factories}:talks", *options]) in (0, 1)
    out, err = capsys.readouterr()
    assert "chatter" not in out + err
    assert re.search(rf"not shown: \d+ lines that .*:talks printed while it was {done}\n", err)


@pytest.mark.parametrize("name", ["model", "with_kwargs"])
def test_compare(name: str, factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", f"{factories}:{name}", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "eager, no_grad" in out
    assert "Fastest correct engine" in out
    assert out.startswith("\nThis call takes")  # one empty line, whether or not a bar was shown
    steps = [line.partition(" s  ")[2] for line in err.splitlines()]
    assert steps[:2] == ["importing PyTorch", f"loading {factories}:{name}"]
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
def test_on_a_terminal_there_is_a_bar(factories: Path, tmp_path: Path) -> None:
    """A terminal of its own, on which nothing of the bar stays, and no line of a step."""
    pty = pytest.importorskip("pty", reason="a terminal of Unix")
    outer, inner = pty.openpty()
    options = [f"{factories}:model", *QUICK, "--json", str(tmp_path / "out.json")]
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


def test_compare_writes_json_and_a_page(factories: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    options = ["--json", str(data), "--report", str(page)]
    assert run(["compare", f"{factories}:model", *QUICK, *options]) == 0
    assert [row.engine for row in Comparison.from_json(data.read_text()).rows] == [
        "eager",
        "no_grad",
    ]
    assert page.read_text().startswith("<!doctype html>")


def test_an_engine_that_is_wrong_is_exit_code_1(
    factories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench.Row("a", "A", "wrong", "NaN in the result")
    monkeypatch.setattr(bench, "compare", lambda *_, **__: Comparison("w", (row,)))
    assert run(["compare", f"{factories}:model"]) == 1


def test_no_engine_that_was_measured_is_exit_code_2(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = ["--engines", "tensorrt,cudagraphs"]
    assert run(["compare", f"{factories}:model", *engines]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out
    engines = ["--engines", "tensorrt,eager"]
    assert run(["compare", f"{factories}:model", *engines, *QUICK[2:]]) == 0


def torchs_message() -> str:
    """What this release of torch says of the factory `mismatched`."""
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as raised:
        nn.Linear(8, 3)(torch.zeros(2, 7))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alone", "`alone()` returned a Linear"),
        ("one_tensor", "`one_tensor()` returned (Linear, Tensor)"),
        ("four", "`four()` returned (int, int, int, int)"),
        ("backwards", "its first part is not callable"),
        ("odd_kwargs", "its third part must be a dict"),
        ("broken", "`broken()` raised LookupError: no weights here"),
        ("mismatched", f"the callable raised RuntimeError: {torchs_message()}"),
        ("no_tensor", "the callable returns no tensor, but an int"),
        ("leaves", "`leaves()` raised SystemExit: 0"),
        ("trains", "the engines are compared in inference, without grad, and this runs a backward"),
        ("net", "`net` is a Linear, not a function"),
        ("number", "`number` is not callable"),
        ("modle", "factories.py:model\n"),
        ("modle", "has no `modle`"),
    ],
)
def test_a_bad_factory_is_exit_code_2(
    name: str, message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", f"{factories}:{name}", *QUICK]) == 2
    err = capsys.readouterr().err
    assert message in err
    four_parts(err)


def test_where_is_the_users_line(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["compare", f"{factories}:broken"])
    line = next(i for i, text in enumerate(FACTORIES.splitlines(), 1) if "LookupError" in text)
    place = f'factories.py:{line}: raise LookupError("no weights here")'
    assert place in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere.py:model"], "there is no file nowhere.py"),
        (["compare", "no_such_module:model"], "importing no_such_module raised ModuleNotFound"),
        (["compare", "justaname"], "it is not path.py:name or module:name"),
        (["compare", ":model"], "it is not path.py:name or module:name"),
        (["compare", "FILE:model", "--engines", "eagr"], "no engine is called eagr\n"),
        (["compare", "FILE:model", "--engines", "eagr,onelaunch"], "--engines eager,onelaunch\n"),
        (["compare", "FILE:model", "--engines", "eagr"], "the engines are eager, no_grad, "),
        (["compare", "FILE:model", "--engines", "zzz"], "--engines eager,onelaunch\n"),
        (["compare", "FILE:model", "--engines", ","], "no engine is named"),
        (["compare", "FILE:model", "--seconds", "soon"], "Invalid value for '--seconds'"),
        (["compare", "FILE:model", "--seconds", "-1"], "--seconds is -1"),
        (["compare", "FILE:model", "--seconds", "0"], "--seconds is 0"),
        (["compare", "FILE:model", "--seconds", "nan"], "--seconds is nan"),
        (["compare", "FILE:model", "--report", f"{'x' * 300}.html"], "cannot be written: File n"),
        (["compare", "FILE:model", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["compare", "FILE:model", "--json", "/no/such/x.json"], "fix:   mkdir -p /no/such\n"),
        (["compare", "FILE:model", "--sceonds", "1"], "--sceonds"),
        ([], "no command is given"),
        (["compare"], "Missing argument"),
        (["explian", "OL101"], "explian"),
        (["explain", "OL999"], "there is no code OL999"),
        (["explain", "OL999"], "fix:   onelaunch explain --list\n"),
        (["explain", "host-raed"], "no rule is called host-raed\n"),
        (["explain", "host-raed"], "fix:   onelaunch explain host-read\n"),
        (["explain"], "Missing argument"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.replace("FILE", str(factories)) for argument in arguments]
    assert run(filled) == 2
    err = capsys.readouterr().err
    assert message in err
    four_parts(err)


def four_parts(err: str) -> None:
    steps, _, message = err.partition("ArgumentError [OL401] ")
    assert message
    assert all(re.match(r" *\d+ s  ", line) for line in steps.splitlines())
    assert all(f"\n  {part}:" in err for part in ("why", "fix"))
    assert "Traceback" not in err


def test_a_broken_module_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken_module.py"
    file.write_text("x = 1\ny = x / 0\n")
    assert run(["compare", f"{file}:model"]) == 2
    assert "broken_module.py:2: y = x / 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "where"),
    [("x = 1\ndef model(:\n", "fails.py:2: def model(:"), ("exit(3)\n", "fails.py:1: exit(3)")],
)
def test_a_module_that_cannot_be_run_names_its_line(
    source: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fails.py").write_text(source)
    assert run(["compare", f"{tmp_path}/fails.py:model"]) == 2
    assert where in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "needs.py").write_text("def model():\n    import no_such_package.parts\n")
    assert run(["compare", f"{tmp_path}/needs.py:model"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "`pip install` the package that has `no_such_package`, or name another" in text


def test_an_unknown_engine_is_told_before_the_model_is_made(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", f"{factories}:broken", "--engines", "eagre"]) == 2
    assert "fix:   --engines eager\n" in capsys.readouterr().err


def test_the_traceback_of_what_the_target_raised(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["compare", f"{factories}:broken"])
    short = capsys.readouterr().err
    assert "Traceback" not in short
    assert f"onelaunch compare {factories}:broken --traceback" in short
    assert run(["compare", f"{factories}:broken", "--traceback"]) == 2
    long = capsys.readouterr().err
    assert "Traceback (most recent call last)" in long
    assert f'File "{factories}", line' in long
    assert "LookupError: no weights here\nArgumentError [OL401] " in long
    assert run(["compare", "nowhere.py:model", "--traceback"]) == 2
    four_parts(capsys.readouterr().err)  # nothing was raised there


@every_command
def test_each_command_shows_the_traceback_of_a_callable(
    command: str,
    options: list[str],
    done: str,
    factories: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([command, f"{factories}:mismatched", *options, "--traceback"]) == 2
    err = capsys.readouterr().err
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


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_is_explained(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", code.lower()]) == 0
    out = capsys.readouterr().out
    assert f"{code}: {CATALOGUE[code].title}" in out
    assert run(["explain", f"[{code}]"]) == 0
    assert capsys.readouterr().out == out


def test_a_rule_is_explained_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("host-read", "Host_Read", "ol101"):
        assert run(["explain", word]) == 0
        out = capsys.readouterr().out
        said = " ".join(out.split())
        rule = RULES["OL101"]
        assert said.startswith(
            f"OL101: {rule.title} rule: host-read, blocks a capture why: {rule.why}"
        )
        for text in (rule.fix, rule.what[1:], rule.problems[1:]):
            assert " ".join(text.split()) in said
        assert f"\nExample\n{rule.example.strip()}\n" in out
        assert f"\nUse instead\n{rule.instead.strip()}\n" in out


def test_an_error_that_is_no_rule_is_explained_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "OL401"]) == 0
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == [
        "OL401",
        "why: ",
        "fix: ",
    ]


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--list"]) == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == sorted({*CATALOGUE, *RULES})
    listed = {code: (name, severity, title) for code, name, severity, title in lines}
    rule = RULES["OL101"]
    assert listed["OL101"] == ("host-read", "blocks-capture", rule.title)
    assert listed["OL401"] == ("-", "-", CATALOGUE["OL401"].title)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("torch", "python", "gpu", "recordings"))


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "onelaunch", "explain", "OL101"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "host read of a device value" in done.stdout


STOPPED = "stopped before there was anything to show\n"


@pytest.mark.parametrize(
    "source", ["def model():\n    raise KeyboardInterrupt\n", "raise KeyboardInterrupt\n"]
)
def test_an_interrupt_while_the_factory_runs_or_is_imported(
    source: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factories.write_text(source)
    assert run(["compare", f"{factories}:model"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(f" s  loading {factories}:model\n{STOPPED}")
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
    status: Any,
    factories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = bench.Row("a", "A", status, "why"), bench.Row("b", "B", "interrupted")
    result = Comparison("w", rows, reference="none", interrupted=True)
    monkeypatch.setattr(bench, "compare", lambda *_, **__: result)
    data = tmp_path / "out.json"
    something = status == "wrong"
    assert run(["compare", f"{factories}:model", "--json", str(data)]) == (1 if something else 130)
    out, err = capsys.readouterr()
    assert data.exists() == bool(out) == something
    assert err.endswith(STOPPED) != something


def test_an_interrupt_after_something_was_measured_shows_it(
    factories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = bench.Row("a", "A", "ok", wall=bench.Timing(3.0, 0.1, 5))
    result = Comparison("w", (timed, bench.Row("b", "B", "interrupted")), interrupted=True)
    monkeypatch.setattr(bench, "compare", lambda *_, **__: result)
    assert run(["compare", f"{factories}:model"]) == 0
    assert "Interrupted: this is what was known by then." in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("kind", ["folder", "protected", "in a protected folder"])
def test_a_file_that_cannot_be_written_is_told_before_the_model_is_made(
    option: str,
    kind: str,
    factories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "out"
    if kind == "folder":
        file.mkdir()
    else:
        if kind == "protected":
            file.touch()
        # root may write everywhere
        monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    assert run(["compare", f"{factories}:broken", option, str(file)]) == 2
    err = capsys.readouterr().err
    assert ("is a folder" if kind == "folder" else "cannot be written") in err
    four_parts(err)


def test_a_file_that_fails_after_all(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", f"{factories}:model", *QUICK, "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "Fastest correct engine" in out
    assert "/dev/full could not be written: No space left" in err
    four_parts(err)


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


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"onelaunch \d+\.\d+\S*\n", capsys.readouterr().out)


def test_the_names_of_the_engines() -> None:
    assert tuple(bench.ENGINES) == ENGINES
