"""An environment with torch, what a wheel declares, and nothing else: made of links."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement


def make(folder: Path, wheel: Path) -> Path:
    """Make an environment with a wheel, and links to what it needs; return its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    install(wheel, "--prefix", str(folder))
    (metadata,) = packages.glob("onelaunch-*.dist-info")
    for found in _needed(Distribution.at(metadata)):
        for name in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = packages / name
            if name != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(found.locate_file(name))).resolve())
    return python


def install(wheel: Path, *how: str) -> None:
    """Install a wheel by pip, by itself."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", *how, str(wheel)], check=True)


def _needed(top: Distribution) -> Iterator[Distribution]:
    """The distributions that one needs, without its extras."""
    todo, known = [(top, {""})], set[str]()
    while todo:
        distribution, extras = todo.pop()
        for wanted in map(Requirement, distribution.requires or ()):
            marker = wanted.marker
            if str(wanted) in known or not (
                marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            ):
                continue
            known.add(str(wanted))
            with suppress(PackageNotFoundError):  # a torch that came otherwise lacks some
                found = Distribution.from_name(wanted.name)
                todo.append((found, {"", *wanted.extras}))
                yield found
