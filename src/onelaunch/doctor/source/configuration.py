"""The settings of the doctor: ``[tool.onelaunch.doctor]`` in pyproject.toml.

[tool.onelaunch.doctor]
select = ["OL1", "OL5"]           # only these: codes, names, or the beginnings of codes
ignore = ["shape-keyed-cache"]    # none of these; it has the last word
exclude = ["build", "tests/*"]    # files and folders to leave out, in folders
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from onelaunch.errors import ArgumentError, kind_of
from onelaunch.rules import RULES
from onelaunch.rules.finding import Finding
from onelaunch.rules.selection import named, nearest

TABLE = "tool.onelaunch.doctor"
_KEYS = ("select", "ignore", "exclude")
_FIX = f'[{TABLE}]\n         ignore = ["OL6"]'


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings.

    Attributes:
        select: only these rules: codes, beginnings of codes, names or severities; empty: all.
        ignore: none of these; it has the last word.
        exclude: globs of files and folders to leave out, from the folder of pyproject.toml.
        root: that folder; None: there is none.
        where: where the settings are from, for a message.

    Raises:
        ArgumentError: OL401: no rule is called so.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    root: Path | None = None
    where: str = f"[{TABLE}]"

    def __post_init__(self) -> None:
        for name in (*self.select, *self.ignore):
            if not named(name):
                raise self._unknown(name)

    def _unknown(self, name: str) -> ArgumentError:
        near = nearest(name)
        near = near if near and named(near) else "OL1"
        return ArgumentError(
            "OL401",
            f"no rule is called {name!r}",
            where=self.where,
            why="a rule is named by its code or the beginning of it, its name, or its severity",
            fix=f"{self.where} {near}" if self.where.startswith("--") else f'"{near}"',
        )

    def chosen(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings of the rules that are selected and not ignored."""
        codes = _codes(self.select or RULES) - _codes(self.ignore)
        chosen = (finding.under(codes) for finding in findings)
        return [finding for finding in chosen if finding is not None]

    def excludes(self, path: Path, top: Path) -> bool:
        """Return whether a file or folder is left out.

        Args:
            top: the folder that was asked for; without a pyproject.toml, globs start there.
        """
        root = self.root or top
        absolute, within = path.absolute(), root.absolute()
        inner = absolute.relative_to(within if absolute.is_relative_to(within) else top.absolute())
        names = (inner.as_posix(), path.name)
        return any(fnmatch(name, glob.rstrip("/")) for glob in self.exclude for name in names)

    def narrowed(
        self, *, select: Iterable[str] = (), ignore: Iterable[str] = (), where: str
    ) -> Config:
        """Return the settings with those of the command line: `select` in place, `ignore` too.

        Args:
            where: the option, for a message.
        """
        return replace(
            self,
            select=tuple(select) or self.select,
            ignore=(*self.ignore, *ignore),
            where=where,
        )


def configuration(start: str | Path) -> Config:
    """Return the settings for a file or folder: of the next pyproject.toml upward that has any.

    Raises:
        ArgumentError: OL401: a key or rule that there is not, or a file that is no TOML.
    """
    path = Path(start).absolute()
    for folder in (path, *path.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _table(file)
            if table is not None:
                return _checked(table, file)
    return Config()


def _table(file: Path) -> dict[str, Any] | None:
    try:
        found: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(f"{file} is not TOML: {error}", file, "it may hold settings") from error
    for key in TABLE.split("."):
        found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    return cast("dict[str, Any] | None", found)


def _checked(table: dict[str, Any], file: Path) -> Config:
    if not isinstance(table, dict):
        raise _bad(f"`{TABLE}` is {kind_of(table)}", file, "it is a table")
    settings: dict[str, tuple[str, ...]] = {}
    for key, value in table.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            fix = f'{near[0]} = ["..."]' if near else _FIX
            why = f"the keys are {', '.join(_KEYS)}"
            raise _bad(f"`{TABLE}` has no key `{key}`", file, why, fix)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            what = f"`{key}` is {value!r}"
            raise _bad(what, file, "it is a list of strings", f'{key} = ["..."]')
        settings[key] = tuple(cast("list[str]", value))
    return Config(**settings, root=file.parent, where=f"{file}: [{TABLE}]")


def _codes(names: Iterable[str]) -> frozenset[str]:
    return frozenset[str]().union(*map(named, names))


def _bad(what: str, file: Path, why: str, fix: str = _FIX) -> ArgumentError:
    return ArgumentError("OL401", what, where=str(file), why=why, fix=fix)
