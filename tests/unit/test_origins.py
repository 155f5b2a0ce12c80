"""Whose code a file is: told by the folder that Python imports it from, not by its path."""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import onelaunch
from onelaunch.driver import known_causes
from onelaunch.frames import origins
from onelaunch.frames.origins import is_installed, is_machinery
from onelaunch.source import PACKAGE, is_users
from onelaunch.tools.doctor import silent
from onelaunch.tools.doctor.spot import Spot

STANDARD = sysconfig.get_path("stdlib")
PURE = sysconfig.get_path("purelib")
TORCH = os.path.dirname(torch.__file__)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    for known in (is_installed, is_machinery):
        known.cache_clear()
    yield
    for known in (is_installed, is_machinery):
        known.cache_clear()


def test_onelaunch_is_told_by_its_own_folder() -> None:
    own = os.path.join(os.path.dirname(str(onelaunch.__file__)), "")
    assert own == PACKAGE
    assert is_machinery(f"{PACKAGE}frames/watch.py")
    assert is_installed(f"{PACKAGE}frames/watch.py")
    assert not is_users(f"{PACKAGE}frames/watch.py")


@pytest.mark.parametrize(
    "folder",
    ["/home/me/site-packages/app", "/opt/dist-packages-of-mine", "/home/me/tqdm", "/a/torch"],
)
def test_a_folder_of_the_users_may_have_any_name(folder: str) -> None:
    file = f"{folder}/model.py"
    assert is_users(file)
    assert not is_installed(file)
    assert not is_machinery(file)


@pytest.mark.parametrize("name", ["string.py", "string/__init__.py", "collections/__init__.py"])
def test_what_keeps_the_users_objects_is_read(name: str) -> None:
    """A file of the standard library, or a package: `string` is one since Python 3.14."""
    assert not is_machinery(os.path.join(STANDARD, name))
    assert is_machinery(os.path.join(STANDARD, "textwrap.py"))


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_a_folder_of_packages_on_the_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, f"/opt/layer/{name}"])
    assert is_installed(f"/opt/layer/{name}/library/code.py")
    assert not is_machinery(f"/opt/layer/{name}/library/code.py")
    assert not is_installed(f"/opt/other/{name}/library/code.py")
    assert not is_installed(f"/opt/layer/{name}-of-mine/code.py")


def test_the_folder_of_the_program_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = "/home/me/site-packages/program.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "path", ["/home/me/site-packages", *sys.path])
    assert not is_installed("/home/me/site-packages/program.py")
    assert not is_installed("/home/me/site-packages/model.py")
    assert is_installed(os.path.join(PURE, "library.py"))


def test_the_standard_library_and_what_is_installed_in_it() -> None:
    inside = os.path.join(STANDARD, "site-packages", "library", "code.py")
    assert is_machinery(json.__file__)
    assert is_machinery("<frozen importlib._bootstrap>")
    assert not is_machinery(inside)
    assert not origins.is_standard(inside)
    assert origins.is_standard(json.__file__)
    assert not origins.is_standard(f"{STANDARD}-of-mine/code.py")
    assert not is_machinery(os.path.join(STANDARD, "queue.py"))
    assert is_machinery(os.path.join(TORCH, "_dynamo", "eval_frame.py"))
    assert not is_machinery(os.path.join(TORCH, "nn", "modules", "linear.py"))


def test_triton_is_told_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = types.ModuleType("triton")
    triton.__file__ = "/opt/build/triton/__init__.py"
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert is_machinery("/opt/build/triton/runtime/jit.py")
    assert not is_machinery("/home/me/triton/kernels.py")


LIBRARY = """
from onelaunch.frames.origins import library_calls

def called(then):
    return then()

def last():
    return list(library_calls())
"""


def test_functions_of_libraries_are_named_by_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" / "a_library"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY)
    (folder / "part.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder.parent)
    whole, part = importlib.import_module("a_library"), importlib.import_module("a_library.part")
    assert whole.called(lambda: part.last()) == [("a_library/part.py", "last")]
    found = whole.called(part.last)
    assert found == [("a_library/part.py", "last"), ("a_library/__init__.py", "called")]
    net = torch.nn.Module()
    net.forward = part.last  # type: ignore[method-assign]
    assert ("torch/nn/modules/module.py", "_call_impl") in net()
    files = {cause.file for cause in known_causes.CAUSES if cause.file.startswith("torch/")}
    assert all(os.path.exists(os.path.join(os.path.dirname(TORCH), file)) for file in files)


def test_the_doctor_takes_no_library_for_the_standard_one() -> None:
    """Without a virtual environment, packages lie inside the standard library's folder."""
    inside = os.path.join(STANDARD, "site-packages", "library", "code.py")
    assert not silent._is_machinery(Spot(library=f"{inside}:3: random.random()"))
    assert silent._is_machinery(Spot(library=f"{json.__file__}:3: random.random()"))
