"""The command: exit codes, files, and messages in four parts without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch import bench
from onelaunch.bench import Comparison
from onelaunch.bench.target import load
from onelaunch.cli import run
from onelaunch.errors import CATALOGUE, GraphError

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


@pytest.mark.parametrize("name", ["model", "with_kwargs"])
def test_compare(name: str, factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", f"{factories}:{name}", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "eager, no_grad" in out
    assert "Fastest correct engine" in out
    assert out.startswith("\nThis call takes")  # one empty line, whether or not a bar was shown
    assert err == ""


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
        (["compare", "FILE:model", "--engines", "eagre"], "no engine is called eagre"),
        (["compare", "FILE:model", "--seconds", "soon"], "Invalid value for '--seconds'"),
        (["compare", "FILE:model", "--seconds", "-1"], "seconds=-1.0"),
        (["compare", "FILE:model", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["compare", "FILE:model", "--sceonds", "1"], "--sceonds"),
        ([], "no command is given"),
        (["compare"], "Missing argument"),
        (["explian", "OL101"], "explian"),
        (["explain", "OL999"], "there is no code OL999"),
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
    assert err.startswith("ArgumentError [OL401] ")
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
    assert "engines=['eager']" in capsys.readouterr().err


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
    assert capsys.readouterr() == ("", STOPPED)


@pytest.mark.parametrize("status", ["interrupted", "missing", "failed"])
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
    something = status == "failed"
    assert run(["compare", f"{factories}:model", "--json", str(data)]) == (0 if something else 130)
    out, err = capsys.readouterr()
    assert data.exists() == bool(out) == something
    assert err == ("" if something else STOPPED)


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
    if not Path("/dev/full").exists():
        pytest.skip("a device of Linux")
    assert run(["compare", f"{factories}:model", *QUICK, "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "Fastest correct engine" in out
    assert "/dev/full could not be written: No space left" in err
    four_parts(err)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"onelaunch \d+\.\d+\S*\n", capsys.readouterr().out)
