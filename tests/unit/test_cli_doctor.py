"""`onelaunch doctor`: exit codes, targets, files, and what is shown of the target's own output."""

from __future__ import annotations

import json
import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onelaunch.tools.cli import run

FACTORIES = """
import torch
from torch import nn

def model():
    return nn.Linear(8, 3).eval(), (torch.ones(2, 8),)

def mismatched():
    return nn.Linear(8, 3), (torch.ones(2, 7),)

def broken():
    raise LookupError("no weights here")

def reads():
    print("making it")

    def double(x):
        print("doubling")
        return x * x.sum().item()

    return double, (torch.ones(2),)

def quits():
    return lambda x: exit(0), (torch.ones(2),)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of factories, importable for the length of a test."""
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return file


ONLY = ["--select", "blocks-capture"]


def test_it_finds(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", f"{factories}:reads", *ONLY]) == 1
    out, err = capsys.readouterr()
    line = next(i for i, text in enumerate(FACTORIES.splitlines(), 1) if "x.sum()" in text)
    assert out.startswith("Blocks a capture\n\nOL101 host-read\n  what:  ")
    assert f"  where: {factories}:{line}:20\n         return x * x.sum().item()\n" in out
    assert "\n                    ^\n" in out
    assert "  found: by an eager run and a capture\n" in out
    summary = "1 finding blocks a capture. Graphed, a call is not one launch."
    hint = "onelaunch explain OL101 prints the whole rule, with an example."
    assert out.endswith(f"\n{factories}:reads: {summary}\n{hint}\n")
    steps = [line.partition(" s  ")[2] or line for line in err.splitlines()]
    assert steps[:2] == ["importing PyTorch", f"loading {factories}:reads"]
    assert "watching an eager run" in steps
    assert "capturing" in steps


def test_it_shows_what_the_factory_prints_and_not_what_the_callable_does(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["doctor", f"{factories}:reads", *ONLY])
    out, err = capsys.readouterr()
    assert "making it" not in out
    assert "doubling" not in out + err
    assert err.count("making it\n") == 1
    said = re.search(rf"^not shown: (\d+) lines that {factories}:reads printed while ", err, re.M)
    assert said is not None
    assert int(said[1]) > 1


def test_it_finds_nothing(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", f"{factories}:model", *ONLY]) == 0
    out = capsys.readouterr().out
    looked = "an eager run, a capture and bare replays"
    end = "Graphed, a call is one launch.\n"
    assert out == f"{factories}:model: nothing found in {looked}. {end}"


def test_it_of_several(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = [f"{factories}:model", f"{factories}:reads"]
    assert run(["doctor", *targets, *ONLY]) == 1
    out, err = capsys.readouterr()
    assert f"{', '.join(targets)}: 1 finding blocks a capture." in out
    assert err.count("importing PyTorch") == 1


def test_it_of_a_module(
    factories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(factories.parent)
    assert run(["doctor", "factories:reads", *ONLY]) == 1
    assert "  where: factories.py:" in capsys.readouterr().out


def test_it_ignores(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{factories}:reads"
    for options in (["--ignore", "host-read"], ["--ignore", "ol1"], ["--ignore", "OL102,OL101"]):
        assert run(["doctor", target, *ONLY, *options]) == 0
    assert run(["doctor", target, "--select", "data-dependent-shape"]) == 0
    assert run(["doctor", target, "--select", "silently-wrong,host-read"]) == 1
    assert "  found: " in capsys.readouterr().out


def test_it_writes_json(
    factories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(factories.parent)
    options = ["--json", "out.json"]
    assert run(["doctor", "factories.py:reads", *ONLY, *options]) == 1
    data = json.loads(Path("out.json").read_text())
    assert data["target"] == "factories.py:reads"
    (finding,) = data["findings"]
    assert (finding["code"], finding["file"]) == ("OL101", "factories.py")
    assert run(["doctor", "factories.py:model", *ONLY, *options]) == 0
    assert json.loads(Path("out.json").read_text())["findings"] == []


def test_it_writes_a_page_which_its_json_gives_again(
    factories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(factories.parent)
    assert (
        run(["doctor", "factories.py:reads", *ONLY, "--json", "o.json", "--report", "a.html"]) == 1
    )
    shown, _ = capsys.readouterr()
    assert "The report: a.html" in shown
    page = Path("a.html").read_text()
    assert "1 finding" in page
    assert "OL101" in page
    assert run(["doctor", "o.json", *ONLY, "--report", "b.html"]) == 1
    assert Path("b.html").read_text() == page
    assert capsys.readouterr().out == shown.replace("a.html", "b.html")
    assert run(["doctor", "o.json", "--ignore", "host-read"]) == 0
    Path("o.json").write_text("{}")
    for file, what in (
        ("o.json", "is not a diagnosis that onelaunch wrote"),
        ("p.json", "be read"),
    ):
        assert run(["doctor", file]) == 2
        assert what in capsys.readouterr().err


NET = """\
from torch import Tensor, nn

class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder of its own, which is the current one."""
    file = tmp_path / "net.py"
    file.write_text(NET)
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()
    return file


@pytest.mark.parametrize("target", [".", "net.py"])
def test_it_reads_files_without_running_them(
    target: str, net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", target]) == 1
    out, err = capsys.readouterr()
    assert "  where: net.py:5:20\n         return x * x.sum().item()\n" in out
    assert "  found: by the source\n" in out
    assert out.endswith(f"\n{target}: 1 finding blocks a capture.\n{HINT}")
    assert [line.partition(" s  ")[2] for line in err.splitlines()] == ["reading the source"]


def test_columns_count_letters(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net.write_text(NET.replace("return x * x", "äöü = 2; return äöü * x"))
    assert run(["doctor", "net.py"]) == 1
    out = capsys.readouterr().out
    assert "net.py:5:31\n         äöü = 2; return äöü * x.sum().item()\n" in out
    assert "\n                               ^\n" in out


def test_it_finds_nothing_in_a_file(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net.write_text(NET.replace(".item()", ""))
    assert run(["doctor", "net.py"]) == 0
    assert capsys.readouterr().out == "net.py: nothing found in the source.\n"


def test_it_takes_files_and_callables(
    net: Path, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "net.py", f"{factories}:model", *ONLY]) == 1
    summary = "1 finding blocks a capture. Graphed, a call is one launch.\n"
    assert f"\nnet.py, {factories}:model: {summary}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("comment", "code"),
    [("host-read -- a debug build", 0), ("host-read", 1), ("host-copy -- a debug build", 1)],
)
def test_a_comment_with_a_reason_allows_a_line(
    comment: str, code: int, net: Path, factories: Path
) -> None:
    net.write_text(NET.replace(".item()", f".item()  # onelaunch: allow {comment}"))
    assert run(["doctor", "net.py"]) == code
    line = "return x * x.sum().item()"
    factories.write_text(FACTORIES.replace(line, f"{line}  # onelaunch: allow {comment}"))
    assert run(["doctor", f"{factories}:reads", *ONLY]) == code


HINT = "onelaunch explain OL101 prints the whole rule, with an example.\n"


def test_it_prints_to_a_pipe(factories: Path) -> None:
    command = [sys.executable, "-m", "onelaunch", "doctor", f"{factories}:reads", *ONLY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith(HINT)
    assert "\x1b" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["justaname"], "there is no file or folder justaname\n"),
        (["nowhere.py:model"], "fix:   onelaunch doctor path.py:model\n"),
        (["FILE:modle"], "/factories.py:model\n"),
        (["FILE:broken"], "fix:   onelaunch doctor /"),
        (["FILE:mismatched"], "the callable raised RuntimeError: "),
        (["FILE:quits"], "the callable raised SystemExit: 0\n"),
        (
            ["FILE:model", "--select", "host-raed"],
            "no rule is called 'host-raed'\n  where: --select\n",
        ),
        (["FILE:model", "--select", "host-raed"], "fix:   --select host-read\n"),
        (["FILE:model", "--ignore", "OL1,zzz"], "where: --ignore\n"),
        (["FILE:model", "--ignore", ","], "no rule is named\n"),
        (
            ["FILE:model", "--json", "/no/such/folder/x"],
            "the diagnosis is written there",
        ),
        (["EMPTY"], "has no Python files\n"),
        # What is missing is told before anything runs.
        (["FILE:broken", "missing.py"], "there is no file or folder missing.py\n"),
        (["FILE:broken", "missing.py:model"], "there is no file missing.py\n"),
        (["FILE:broken", "missing.json"], "missing.json cannot be read"),
        (["FILE:broken", "README.md"], "README.md is not a file of Python"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = factories.parent / "empty"
    empty.mkdir()
    filled = [a.replace("FILE", str(factories)).replace("EMPTY", str(empty)) for a in arguments]
    assert run(["doctor", *filled]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "\nArgumentError [OL401] " in f"\n{err}"
    assert all(f"\n  {part}:" in err for part in ("where", "why", "fix"))
    assert "Traceback" not in err


def test_an_interrupt_of_the_doctor(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "import torch\ndef model():\n    def stop(x):\n        raise KeyboardInterrupt\n"
    factories.write_text(source + "    return stop, (torch.ones(2),)\n")
    assert run(["doctor", f"{factories}:model"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("stopped before there was anything to show\n")
    assert "Traceback" not in err


def test_a_folder_with_a_file_that_is_not_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import torch  # def forward\ndef f(:\n")
    assert run(["doctor", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "nothing found in the source" in out
    assert f"not read: {tmp_path}/broken.py:2: " in err
