"""The guard in C: built where there is a compiler, done without where not, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from onelaunch.native import _dicts_tell, native

fresh = native.__wrapped__


def test_it_is_in_use_here() -> None:
    assert native().guard is not None, native().reason
    assert native().reason == "in use"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONELAUNCH_NATIVE", "0")
    assert fresh() == type(native())(None, "turned off by ONELAUNCH_NATIVE=0")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert (fresh().guard, fresh().reason) == (None, "LookupError: no C compiler")


def test_with_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    found = fresh()
    assert found.guard is None
    assert found.reason.startswith("CalledProcessError: ")
    assert [p.name for p in tmp_path.rglob("*.so")] == []


def test_with_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert fresh().guard is None
    assert "NotADirectoryError" in fresh().reason


def test_with_a_broken_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    assert fresh().guard is not None
    (built,) = tmp_path.rglob("onelaunch_guard*")
    broken = tmp_path / "broken" / built.relative_to(tmp_path / "whole")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "broken"))
    assert fresh().guard is None
    assert fresh().reason.startswith("ImportError: ")


def test_without_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**sysconfig.get_config_vars(), "Py_GIL_DISABLED": 1}
    monkeypatch.setattr(sysconfig, "get_config_var", config.get)
    assert fresh().guard is None


def test_a_recording_works_without_it() -> None:
    code = """
import torch, onelaunch as ol
from onelaunch.native import native
assert native().guard is None
model = torch.nn.Linear(3, 2)
fast = ol.graph(model, warmup=1)
with torch.no_grad():
    for _ in range(4):
        x = torch.randn(1, 3)
        assert torch.equal(fast(x), model(x))
    assert [r.replays for r in fast.recordings] == [3]
    model.weight.data = torch.ones(2, 3)
    assert torch.equal(fast(x), model(x))
"""
    root = Path(__file__).parents[2]
    env = {**os.environ, "ONELAUNCH_NATIVE": "0", "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BAD: dict[str, tuple[Any, ...]] = {
    "lengths of readers": ((), (1,), (), (), [], 0, (), [], 0, (), False),
    "lengths of slots": ((), (), ({},), (), [], 0, (), [], 0, (), False),
    "lengths of lengths": ((), (), (), (), [], 0, ([],), [], 0, (), False),
    "more watched than there are": ((), (), (), (), [], 1, (), [], 0, (), False),
    "a holder of another kind": ((), (), (5,), (5,), [5], 0, (), [], 0, (), False),
    "a list to watch": ((), (), ([],), (0,), [5], 1, (), [], 0, (), False),
    "too few": ((), ()),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_arguments(arguments: tuple[Any, ...]) -> None:
    guard = native().guard
    assert guard is not None
    with pytest.raises((TypeError, ValueError)):
        guard(*arguments)


def test_deaf_dicts_are_found_out() -> None:
    class Deaf:
        """A guard that no dict tells of a change."""

        def __init__(self, *_: object) -> None:
            pass

        def check(self) -> bool:
            return True

    assert not _dicts_tell(Deaf)
    assert _dicts_tell(native().guard) or sys.version_info >= (3, 13)
