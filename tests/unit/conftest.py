"""The command, run in this process on a file of targets."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Ran(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


COLLECTING = "bench", "checklist", "cli", "claims", "optimize", "report"
"""What the files of tests are named after of which each test collects garbage several times."""


@pytest.fixture(autouse=True, scope="module")
def light_collections(request: pytest.FixtureRequest) -> Iterator[None]:
    """`ol.compare` collects before it times. What is there before the tests of a file is no garbage
    of theirs: left out, a collection takes a tenth of its 0.2 s."""
    light = request.path.stem.removeprefix("test_").startswith(COLLECTING)
    if light:
        gc.freeze()
    yield
    if light:
        gc.unfreeze()


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `targets.py`, importable for the length of a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "targets", raising=False)
    return Path(shutil.copy(Path(__file__).with_name("targets.py"), tmp_path))


@pytest.fixture
def command(targets: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `onelaunch`; in its words FILE stands for the file of the targets."""
    from onelaunch.tools.cli import run

    def ran(*words: str) -> Ran:
        code = run([word.replace("FILE", str(targets)) for word in words])
        return Ran(code, *capsys.readouterr())

    return ran
