"""Targets, ``path.py:name`` or ``module:name``, and the files behind them, without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from onelaunch.errors import ArgumentError

FIX = (
    "def model():\n"
    "             return net, (images,)            # or: return net, (ids,), {'mask': mask}"
)
Command = Literal["compare", "doctor", "optimize", "profile"]
"""The command that has a target, which messages name."""
_SAVED: dict[Command, str] = {
    "optimize": 'ol.Plan.from_json(open("plan.json").read()).apply(model, args)    # in Python',
    "profile": 'print(ol.Profile.from_json(open("profile.json").read()).summary)    # in Python',
}
"""command -> the way to show its saved results."""


def named(target: str, command: Command) -> tuple[str, str]:
    """Split a target into its file or module, and the name of its factory.

    Raises:
        ArgumentError: OL401: it has another form.
    """
    place, separator, name = target.rpartition(":")
    if not separator and target.endswith(".json"):
        raise bad_target(
            target,
            f"`onelaunch {command}` shows no saved results",
            "its target is path.py:name or module:name of a factory",
            _SAVED.get(command, f"onelaunch {command} path.py:model"),
        )
    if not separator or not place or not name:
        file = "path.py" if separator or not target else target
        raise bad_target(
            target,
            "it is not path.py:name or module:name",
            "the name is that of a factory in the file",
            f"onelaunch {command} {file}:model",
        )
    return place, name


def located(target: str, command: Command = "compare") -> tuple[Path, str]:
    """Find the folder to put on the path for a target, and its module's dotted name from there.

    Raises:
        ArgumentError: OL401: it is no target, or there is no such file.
    """
    place, _ = named(target, command)
    path = Path(place)
    if path.suffix != ".py" and "/" not in place:
        return Path.cwd(), place
    if not os.path.isfile(path):  # where a name may be too long, unlike in `Path.is_file`
        why = f"the path starts at the current folder, {Path.cwd()}"
        fix = f"onelaunch {command} path.py:model"
        raise bad_target(target, f"there is no file {place}", why, fix)
    return _root(path.resolve())


def _root(path: Path) -> tuple[Path, str]:
    """Find the folder to put on the path, and the dotted name of the file from there."""
    names = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def bad_target(target: str, what: str, why: str, fix: str = FIX) -> ArgumentError:
    return ArgumentError("OL401", what, where=target, why=why, fix=fix)
