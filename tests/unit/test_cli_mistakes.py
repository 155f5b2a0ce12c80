"""Every mistake in a command: exit code 2, and a message in four parts without a traceback."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


def torchs_message() -> str:
    """What this release of torch says of the target `mismatched`."""
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as raised:
        nn.Linear(8, 3)(torch.zeros(2, 7))
    return str(raised.value)


NO_WEIGHTS = "the callable raised LookupError: no weights here"
MISTAKES = [
    ("", "no command is given"),
    ("explian OL101", "explian"),
    ("explain", "Missing argument"),
    ("explain OL999", "there is no code OL999"),
    ("explain OL999", "fix:   onelaunch explain --list\n"),
    ("explain host-raed", "no rule is called host-raed\n"),
    ("explain host-raed", "fix:   onelaunch explain host-read\n"),
    # Factories.
    ("compare FILE:alone", "`alone()` returned a Linear"),
    ("compare FILE:one_tensor", "`one_tensor()` returned (Linear, Tensor)"),
    ("compare FILE:four", "`four()` returned (int, int, int, int)"),
    ("compare FILE:backwards", "its first part is not callable"),
    ("compare FILE:odd_kwargs", "its third part must be a dict"),
    ("compare FILE:broken", "`broken()` raised LookupError: no weights here"),
    ("compare FILE:fewer", "the callable raised TypeError: "),
    ("compare FILE:mismatched", f"the callable raised RuntimeError: {torchs_message()}"),
    ("compare FILE:no_tensor", "the callable returns no tensor, but an int"),
    ("compare FILE:leaves", "`leaves()` raised SystemExit: 0"),
    ("compare FILE:trains", "the engines are compared in inference, without grad, and this runs"),
    ("compare FILE:net", "`net` is a Linear, not a function"),
    ("compare FILE:number", "`number` is not callable"),
    ("compare FILE:sized", "`sized` needs width\n"),
    ("compare FILE:modle", "targets.py:model\n"),
    ("compare FILE:modle", "has no `modle`"),
    ("compare FILE:broken --engines eagre", "fix:   --engines eager\n"),  # before it is made
    # Words of `compare`.
    ("compare", "Missing argument"),
    ("compare nowhere.py:model", "there is no file nowhere.py"),
    ("compare no_such_module:model", "importing no_such_module raised ModuleNotFound"),
    ("compare justaname", "it is not path.py:name or module:name"),
    (f"compare {'x' * 300}.py:model", "there is no file xxx"),
    ("compare :model", "it is not path.py:name or module:name"),
    ("compare FILE:model --engines eagr", "no engine is called eagr\n"),
    ("compare FILE:model --engines eagr,onelaunch", "--engines eager,onelaunch\n"),
    ("compare FILE:model --engines eagr", "the engines are eager, no_grad, "),
    ("compare FILE:model --engines zzz", "--engines eager,onelaunch\n"),
    ("compare FILE:model --engines ,", "no engine is named"),
    ("compare FILE:model --seconds soon", "Invalid value for '--seconds'"),
    ("compare FILE:model --seconds -1", "--seconds is -1"),
    ("compare FILE:model --seconds 0", "--seconds is 0"),
    ("compare FILE:model --seconds nan", "--seconds is nan"),
    (f"compare FILE:model --report {'x' * 300}.html", "cannot be written: File n"),
    ("compare FILE:model --json /no/such/folder/x.json", "there is no folder"),
    ("compare FILE:model --json /no/such/x.json", "fix:   mkdir -p /no/such\n"),
    ("compare FILE:model --sceonds 1", "--sceonds"),
    ("compare FILE:model --limit 0 --isolate", "--limit is 0"),
    ("compare FILE:model --limit nan --isolate", "--limit is nan"),
    ("compare FILE:model --limit 9", "--limit needs --isolate"),
    ("compare FILE:model --python tvm", "it is not ENGINE=PATH"),
    ("compare FILE:model --python tvn=python", "no engine is called tvn"),
    ("compare FILE:model --engines eager --python tvm=python", "tvm is not to run"),
    ("compare none.json", "none.json cannot be read: No such file"),
    ("compare list.json", "is not a comparison that onelaunch wrote"),
    ("compare dict.json", "why:   it has no 'workload'\n"),
    ("compare some.json --engines eager", "--engines cannot be applied to a saved comparison"),
    ("compare some.json --isolate", "fix:   onelaunch compare some.json\n"),
    # The doctor.
    ("doctor", "Missing argument"),
    ("doctor justaname", "there is no file or folder justaname\n"),
    (f"doctor {'x' * 300}", "there is no file or folder xxx"),
    (f"doctor {'x' * 300}.py:model", "there is no file xxx"),
    ("doctor nowhere.py:model", "fix:   onelaunch doctor path.py:model\n"),
    ("doctor FILE:modle", "/targets.py:model\n"),
    ("doctor FILE:broken", "fix:   onelaunch doctor /"),
    ("doctor FILE:mismatched", "the callable raised RuntimeError: "),
    ("doctor FILE:mute", "the callable raised Mute: its message cannot be made\n"),
    ("profile FILE:mute", "the callable raised Mute: its message cannot be made\n"),
    ("doctor FILE:quits", "the callable raised SystemExit: 0\n"),
    ("doctor FILE:model --select host-raed", "no rule is called 'host-raed'\n  where: --select\n"),
    ("doctor FILE:model --select host-raed", "fix:   --select host-read\n"),
    ("doctor FILE:model --ignore OL1,zzz", "where: --ignore\n"),
    ("doctor FILE:model --ignore ,", "no rule is named\n"),
    ("doctor FILE:model --json /no/such/folder/x", "the diagnosis is written there"),
    ("doctor empty", "has no Python files\n"),
    # What is missing is told before anything runs.
    ("doctor FILE:broken missing.py", "there is no file or folder missing.py\n"),
    ("doctor FILE:broken missing.py:model", "there is no file missing.py\n"),
    ("doctor FILE:broken missing.json", "missing.json cannot be read"),
    ("doctor FILE:broken README.md", "README.md is not a file of Python"),
    ("doctor dict.json", "is not a diagnosis that onelaunch wrote"),
    # Profiles and plans.
    ("profile FILE:mismatched", "the callable raised RuntimeError: mat1"),
    ("profile FILE:nothing", "the callable runs no operator of torch"),
    ("profile FILE:missing", "has no `missing`"),
    ("profile profile.json", "`onelaunch profile` shows no saved results"),
    ("profile FILE", "it is not path.py:name or module:name"),
    ("profile FILE:model --json /no/such/folder/p.json", "there is no folder /no/such/folder"),
    ("profile FILE:model --engines eager", "No such option"),
    ("optimize nowhere.py:model --steps grahp", "no step is called grahp"),
    ("optimize nowhere.py:model --steps grahp,fold-batchnorms", "fix:   --steps graph,fold-batch"),
    ("optimize nowhere.py:model", "there is no file nowhere.py"),
    ("optimize nowhere.py:model --steps ,", "no step is named"),
    ("optimize nowhere.py:model --seconds 0", "--seconds is 0"),
    ("optimize nowhere.py:model --max-error -1", "--max-error is -1"),
    ("optimize nowhere.py:model --max-error nan", "--max-error is nan"),
    ("optimize nowhere.py:model --plan nowhere/plan.json", "there is no folder nowhere"),
    ("optimize FILE:raises --seconds 1", NO_WEIGHTS),
    ("optimize FILE:trains --seconds 1", "steps are measured in inference, without grad, and this"),
    ("optimize FILE:absent --seconds 1", "has no `absent`"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_exit_code_2(
    words: str, message: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in (("list.json", "[1]"), ("dict.json", "{}"), ("README.md", "")):
        (tmp_path / name).write_text(text)
    with torch.set_grad_enabled(not words.startswith("optimize")):
        code, out, err = command(*words.split())
    assert code == 2
    assert not (words and out)  # without words, the help
    assert message in err
    four_parts(err)
    assert words.partition(" ")[0] != "doctor" or "\n  where:" in err


def four_parts(err: str) -> None:
    steps, _, message = err.partition("ArgumentError [OL401] ")
    assert message
    assert all(re.match(r" *\d+ s  ", line) for line in steps.splitlines())
    assert all(f"\n  {part}:" in err for part in ("why", "fix"))
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("kind", ["folder", "protected", "in a protected folder"])
def test_a_file_that_cannot_be_written_is_told_before_the_model_is_made(
    option: str, kind: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out"
    if kind == "folder":
        file.mkdir()
    else:
        if kind == "protected":
            file.touch()
        # root may write everywhere
        monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    code, _, err = command("compare", "FILE:broken", option, str(file))
    assert code == 2
    assert ("is a folder" if kind == "folder" else "cannot be written") in err
    four_parts(err)


def test_a_fault_of_onelaunch_is_none_of_the_callable(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onelaunch.tools.bench.rows.Row", None)
    monkeypatch.setattr("onelaunch.tools.bench.entry.Row", None)
    code, out, err = command("compare", "FILE:model", "--engines", "eager", "--traceback")
    assert (code, out) == (2, "")
    assert "Traceback (most recent call last)" in err
    assert "ToolError onelaunch itself failed: TypeError: 'NoneType' object is not callable" in err
    assert re.search(r"\n  where: \S*entry.py:\d+: return Row\(\n", err)
    assert "the callable raised" not in err


def test_a_file_that_fails_after_all(command: Any) -> None:
    words = "compare FILE:model --engines eager,no_grad --seconds 0.02 --json /dev/full"
    code, out, err = command(*words.split())
    assert code == 2
    assert "Fastest correct engine" in out
    assert "/dev/full could not be written: No space left" in err
    four_parts(err)


@pytest.mark.parametrize("words", ["compare x.py:model", "doctor src"])
def test_without_the_package_of_the_charts(
    words: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before any work, with the line that installs it."""
    monkeypatch.setattr("onelaunch.tools.report.page.can_draw", lambda: False)
    code, _, err = command(*words.split(), "--report", "r.html")
    assert code == 2
    assert "vl-convert-python, which is not installed" in err
    assert "fix:   pip install vl-convert-python" in err
    assert "importing" not in err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\ny = x / 0\n", "targets.py:2: y = x / 0"),
        ("x = 1\ndef model(:\n", "targets.py:2: def model(:"),
        ("exit(3)\n", "targets.py:1: exit(3)"),
        (
            "def model():\n    import no_such_package.parts\n",
            "`pip install` the package that has `no_such_package`, or name another",
        ),
    ],
)
def test_a_module_that_cannot_be_run_names_its_line(
    source: str, said: str, command: Any, targets: Path
) -> None:
    targets.write_text(source)
    code, _, err = command("compare", "FILE:model")
    assert code == 2
    assert said in " ".join(err.split())


def test_the_traceback_of_what_the_target_raised(command: Any, targets: Path) -> None:
    short = command("compare", "FILE:broken").err
    assert f"onelaunch compare {targets}:broken --traceback" in short
    lines = enumerate(targets.read_text().splitlines(), 1)
    line = next(i for i, text in lines if "LookupError" in text)
    assert f'targets.py:{line}: raise LookupError("no weights here")' in short  # the user's line
    code, _, long = command("compare", "FILE:broken", "--traceback")
    assert code == 2
    assert "Traceback (most recent call last)" in long
    assert f'File "{targets}", line' in long
    assert "LookupError: no weights here\nArgumentError [OL401] " in long
    code, _, err = command("compare", "nowhere.py:model", "--traceback")
    assert code == 2
    four_parts(err)  # nothing was raised there
