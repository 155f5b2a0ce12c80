"""What is published runs as it is installed, by itself: no checkout, no NumPy, no extras."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipapp
from collections.abc import Mapping
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from . import environment

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
README = str(ROOT / "README.md")
SECONDS = 300
"""The time after which a program hangs."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist; ONELAUNCH_DIST names one that is there."""
    if given := os.environ.get("ONELAUNCH_DIST"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("dist")
    env = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts/build", folder], env=env, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("onelaunch-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment with the wheel."""
    return environment.make(tmp_path_factory.mktemp("clean"), wheel)


@pytest.fixture(scope="module")
def bare(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment with what the wheel needs, without it."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(python.parents[1], folder, symlinks=True, dirs_exist_ok=True)
    packages = next(folder.glob("lib/*/site-packages"))
    for path in packages.glob("onelaunch*"):
        shutil.rmtree(path)
    return folder / "bin" / "python"


def run(*command: object, cwd: Path, env: Mapping[str, str | None] | None = None) -> str:
    """Run a command without the variables of this process that name its code; return its output."""
    changed = {"PYTHONPATH": None, "PYTHONHOME": None, "ONELAUNCH_NATIVE": None, **(env or {})}
    kept = {key: value for key, value in os.environ.items() if key not in changed}
    every = {**kept, **{key: value for key, value in changed.items() if value is not None}}
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, env=every, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    assert "it runs" in run(python, PROGRAM, python.parents[1], README, cwd=tmp_path)
    told = run(python.parent / "onelaunch", "info", cwd=tmp_path)
    assert "recordings" in told
    assert "onelaunch" in told


@pytest.mark.thorough
def test_optimized_and_without_a_home(python: Path, tmp_path: Path) -> None:
    """What has no cache in a home compiles nothing, and needs nothing that `assert` does."""
    command = (python, "-O", PROGRAM, python.parents[1], README, "NotADirectoryError")
    run(*command, cwd=tmp_path, env={"HOME": os.devnull, "XDG_CACHE_HOME": None})
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_for_the_home(python: Path, tmp_path: Path) -> None:
    """A user whom the system does not know has no home: nothing is kept in a folder called `~`."""
    code = (
        "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__\n"
        "from onelaunch.native import compiled\n"
        "try: compiled('guard')\n"
        "except LookupError as error: print(error)"
    )
    told = run(python, "-c", code, cwd=tmp_path, env={"XDG_CACHE_HOME": None})
    assert told.startswith("no home directory")
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler(python: Path, tmp_path: Path) -> None:
    command = (python, PROGRAM, python.parents[1], README, "LookupError: no C compiler")
    run(
        *command,
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "CC": None, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )


@pytest.mark.thorough
def test_a_zip(bare: Path, wheel: Path, tmp_path: Path) -> None:
    """The program in the same zip, whose C is built from there."""
    folder, app = tmp_path / "app", tmp_path / "app.pyz"
    with ZipFile(wheel) as files:
        files.extractall(folder)
    shutil.copy(PROGRAM, folder / "__main__.py")
    zipapp.create_archive(folder, app)
    shutil.rmtree(folder)
    run(bare, app, app, README, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})


@pytest.mark.thorough
def test_a_folder_called_site_packages_that_cannot_be_written(
    bare: Path, wheel: Path, tmp_path: Path
) -> None:
    """On PYTHONPATH; the program lies in it too, and is the user's own."""
    folder = tmp_path / "site-packages"
    environment.install(wheel, "--target", str(folder))
    program = shutil.copy(PROGRAM, folder / "program.py")
    before = sorted(folder.rglob("*"))
    for path in (folder, *before):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    env = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    try:
        run(bare, program, folder, README, cwd=tmp_path, env=env)
        assert sorted(folder.rglob("*")) == before  # for root, who may write there
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.thorough
def test_an_editable_install(bare: Path, tmp_path: Path) -> None:
    """A checkout whose folder lies below one called site-packages."""
    checkout = tmp_path / "site-packages" / "checkout"
    shutil.copytree(ROOT / "src" / "onelaunch", checkout / "src" / "onelaunch")
    link = next(bare.parents[1].glob("lib/*/site-packages")) / "__editable__.onelaunch.pth"
    link.write_text(f"{checkout / 'src'}\n")
    try:
        run(bare, PROGRAM, checkout, README, cwd=tmp_path)
    finally:
        link.unlink()


def test_what_is_published(built: Path, wheel: Path) -> None:
    """The package as it is here, and nothing beside it."""
    here = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "onelaunch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as files:
        names = set(files.namelist())
        (information,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(files.read(information))
        assert files.testzip() is None
    folder = information.partition("/")[0]
    own = {name for name in names if not name.startswith(f"{folder}/")}
    assert own == here
    assert {"onelaunch/py.typed", "onelaunch/native/guard.c"} <= own
    assert f"{folder}/licenses/LICENSE" in names
    assert told["Name"] == "onelaunch"
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Description-Content-Type"] == "text/markdown"
    needed = [text for text in told.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {text.partition(">")[0] for text in needed} == {"torch", "rich", "typer"}
    (sdist,) = built.glob("onelaunch-*.tar.gz")
    assert sdist.name == f"onelaunch-{told['Version']}.tar.gz"
    with tarfile.open(sdist) as packed:
        paths = {member.name.partition("/")[2] for member in packed if member.isfile()}
    sources = {path for path in paths if path.startswith("src/onelaunch/")}
    assert sources == {f"src/{name}" for name in here}
    others = {path.partition("/")[0] for path in paths - sources}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src"}
