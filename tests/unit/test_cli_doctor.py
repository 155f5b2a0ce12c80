"""`onelaunch doctor`: exit codes, targets, files, and what is shown of the target's own output."""

from __future__ import annotations

import errno
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ONLY = ["--select", "blocks-capture"]


def test_it_finds(command: Any, targets: Path) -> None:
    code, out, err = command("doctor", "FILE:reads", *ONLY)
    assert code == 1
    lines = enumerate(targets.read_text().splitlines(), 1)
    line = next(i for i, text in lines if "x.sum()" in text)
    assert out.startswith("Blocks a capture\n\nOL101 host-read\n  what:  ")
    assert f"  where: {targets}:{line}:20\n         return x * x.sum().item()\n" in out
    assert "\n                    ^\n" in out
    assert "  found: by an eager run and a capture\n" in out
    summary = "1 finding blocks a capture. Graphed, a call is not one launch."
    assert out.endswith(f"\n{targets}:reads: {summary}\n{HINT}")
    steps = [line.partition(" s  ")[2] or line for line in err.splitlines()]
    assert steps[:2] == ["importing PyTorch", f"loading {targets}:reads"]
    assert "watching an eager run" in steps
    assert "capturing" in steps
    # What the factory prints is shown, and not what the callable does.
    assert "making it" not in out
    assert "doubling" not in out + err
    assert err.count("making it\n") == 1
    said = re.search(rf"^not shown: (\d+) lines that {targets}:reads printed while ", err, re.M)
    assert said is not None
    assert int(said[1]) > 1


def test_it_finds_nothing(command: Any, targets: Path) -> None:
    code, out, _ = command("doctor", "FILE:model", *ONLY)
    looked = "an eager run, a capture and bare replays"
    end = "Graphed, a call is one launch.\n"
    assert (code, out) == (0, f"{targets}:model: nothing found in {looked}. {end}")


def test_it_of_several(command: Any, targets: Path) -> None:
    code, out, err = command("doctor", "FILE:model", "FILE:reads", *ONLY)
    assert code == 1
    assert f"{targets}:model, {targets}:reads: 1 finding blocks a capture." in out
    assert err.count("importing PyTorch") == 1


def test_it_of_a_module(command: Any, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(targets.parent)
    code, out, _ = command("doctor", "targets:reads", *ONLY)
    assert code == 1
    assert "  where: targets.py:" in out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--ignore", "host-read"], 0),
        (["--ignore", "ol1"], 0),
        (["--ignore", "OL102,OL101"], 0),
        (["--select", "data-dependent-shape"], 0),
        (["--select", "silently-wrong,host-read"], 1),
    ],
)
def test_it_ignores(words: list[str], code: int, command: Any) -> None:
    ran = command("doctor", "FILE:reads", *ONLY, *words)
    assert ran.code == code
    assert ("  found: " in ran.out) == bool(code)


def test_it_writes_json(command: Any, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(targets.parent)
    assert command("doctor", "targets.py:reads", *ONLY, "--json", "out.json").code == 1
    data = json.loads(Path("out.json").read_text())
    assert data["target"] == "targets.py:reads"
    (finding,) = data["findings"]
    assert (finding["code"], finding["file"]) == ("OL101", "targets.py")
    assert command("doctor", "targets.py:model", *ONLY, "--json", "out.json").code == 0
    assert json.loads(Path("out.json").read_text())["findings"] == []


def test_it_writes_a_page_which_its_json_gives_again(
    command: Any, targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(targets.parent)
    files = ["--json", "o.json", "--report", "a.html"]
    code, shown, _ = command("doctor", "targets.py:reads", *ONLY, *files)
    assert code == 1
    assert "The report: a.html" in shown
    page = Path("a.html").read_text()
    assert "1 finding" in page
    assert "OL101" in page
    code, again, _ = command("doctor", "o.json", *ONLY, "--report", "b.html")
    assert (code, again) == (1, shown.replace("a.html", "b.html"))
    assert Path("b.html").read_text() == page
    assert command("doctor", "o.json", "--ignore", "host-read").code == 0


NET = """\
from torch import Tensor, nn

class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder of its own, which is the current one."""
    (tmp_path / "nets").mkdir()
    monkeypatch.chdir(tmp_path / "nets")
    file = Path("net.py").absolute()
    file.write_text(NET)
    linecache.clearcache()
    return file


HINT = "onelaunch explain OL101 prints the whole rule, with an example.\n"


@pytest.mark.parametrize("target", [".", "net.py"])
def test_it_reads_files_without_running_them(target: str, net: Path, command: Any) -> None:
    code, out, err = command("doctor", target)
    assert code == 1
    assert "  where: net.py:5:20\n         return x * x.sum().item()\n" in out
    assert "  found: by the source\n" in out
    assert out.endswith(f"\n{target}: 1 finding blocks a capture.\n{HINT}")
    assert [line.partition(" s  ")[2] for line in err.splitlines()] == ["reading the source"]


def test_it_finds_nothing_in_a_file(net: Path, command: Any) -> None:
    net.write_text(NET.replace(".item()", ""))
    more = "Nothing was run: a callable, path.py:name, shows more than its file.\n"
    assert command("doctor", "net.py")[:2] == (0, f"net.py: nothing found in the source.\n{more}")


def test_it_takes_files_and_callables(net: Path, targets: Path, command: Any) -> None:
    code, out, _ = command("doctor", "net.py", "FILE:model", *ONLY)
    assert code == 1
    summary = "1 finding blocks a capture. Graphed, a call is one launch.\n"
    assert f"\nnet.py, {targets}:model: {summary}" in out


@pytest.mark.parametrize(
    ("comment", "code"),
    [("host-read -- a debug build", 0), ("host-read", 1), ("host-copy -- a debug build", 1)],
)
def test_a_comment_with_a_reason_allows_a_line(
    comment: str, code: int, net: Path, targets: Path, command: Any
) -> None:
    for file in (net, targets):
        read = ".sum().item()"
        file.write_text(file.read_text().replace(read, f"{read}  # onelaunch: allow {comment}"))
    assert command("doctor", "net.py").code == code
    assert command("doctor", "FILE:reads", *ONLY).code == code


def test_it_prints_to_a_pipe(targets: Path) -> None:
    command = [sys.executable, "-m", "onelaunch", "doctor", f"{targets}:reads", *ONLY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith(HINT)
    assert "\x1b" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


def test_an_interrupt_of_the_doctor(command: Any, targets: Path) -> None:
    source = "import torch\ndef model():\n    def stop(x):\n        raise KeyboardInterrupt\n"
    targets.write_text(source + "    return stop, (torch.ones(2),)\n")
    code, out, err = command("doctor", "FILE:model")
    assert (code, out) == (130, "")
    assert err.endswith("stopped before there was anything to show\n")
    assert "Traceback" not in err


def test_a_folder_with_a_file_that_is_not_python(command: Any, net: Path) -> None:
    net.write_text("import torch  # def forward\ndef f(:\n")
    code, out, err = command("doctor", str(net.parent))
    assert code == 2
    assert "nothing found in the source" in out
    assert "not read: net.py:2: " in err


def test_what_cannot_be_read_is_told_and_the_rest_is_read(
    command: Any, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.write_text(NET)
    Path("gone.py").symlink_to("/nowhere")
    Path("closed").mkdir()
    Path("closed/net.py").write_text(NET)

    def protected(folder: Path, listed: Any = Path.iterdir) -> Any:  # root may read everywhere
        if folder.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", protected)
    code, out, err = command("doctor", ".")
    assert code == 2
    assert "OL101" in out
    assert "not read: gone.py: gone.py cannot be read: No such file" in err
    assert "not read: closed: closed cannot be read: Permission denied" in err
    code, _, err = command("doctor", "closed")
    assert (code, "closed cannot be read: Permission denied" in err) == (2, True)


@pytest.mark.parametrize("encoding", ["utf8", "ascii"])
def test_signs_beyond_ascii_in_any_locale(encoding: str, net: Path) -> None:
    net.write_text(NET.replace("item()", "item()  # é"), encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **locale, "PYTHONIOENCODING": f"{encoding}:strict"}
    for words in (["net.py", "--report", "p.html", "--json", "o.json"], ["o.json"]):
        command = [sys.executable, "-m", "onelaunch", "doctor", *words]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (1, False)
        assert f"item()  # {'é' if encoding == 'utf8' else '?'}".encode() in done.stdout
    assert "# é" in Path("p.html").read_text(encoding="utf-8")


def test_a_folder_that_is_gone(command: Any, net: Path) -> None:
    shutil.rmtree(net.parent)
    code, _, err = command("doctor", "net.py")
    assert code == 2
    assert err.startswith("ArgumentError [OL401] the current folder cannot be used: No such file")
