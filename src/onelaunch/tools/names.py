"""Names that a user picks from a list, in an option or an argument: engines, steps."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from onelaunch.errors import bad


def split(text: str) -> list[str]:
    """Take the names out of the text of an option, ``"eager, onelaunch"``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def listed(given: object, kinds: Any, where: str, option: str, example: str) -> list[Any]:
    """Take the values out of an argument that is a list of some types.

    Raises:
        ArgumentError: OL401: it is something else, or empty.
    """
    many = isinstance(given, Iterable) and not isinstance(given, str)
    found = list(cast("Iterable[object]", given)) if many else []
    if not found or not all(isinstance(one, kinds) for one in found):
        fix = f'{option}=["{example}"]'
        raise bad(f"{option}={given!r:.60}", where, "a list of names is expected", fix)
    return found


def known(
    names: Sequence[str],
    all_names: Sequence[str],
    noun: str,
    where: str,
    option: str,
    example: str,
    accepts: Callable[[str], bool] | None = None,
) -> list[str]:
    """Return the names, if there are any and each is known.

    Args:
        noun: the things that have these names, ``"engine"``.
        where: the option of a command, or the function, that was given them.
        option: the way to give names, ``"--engines "`` or ``"engines="``.
        example: names that are known, as they are given.
        accepts: tells whether a name is known; by default those in `all_names` are.

    Raises:
        ArgumentError: OL401: no name is given, or one is unknown.
    """
    accepts = accepts or all_names.__contains__
    unknown = [name for name in names if not accepts(name)]
    if names and not unknown:
        return list(names)
    near = [match for name in names for match in difflib.get_close_matches(name, all_names, 1)]
    what = f"no {noun} is called {' or '.join(unknown)}" if unknown else f"no {noun} is named"
    shown = ",".join(near) if option.startswith("--") else repr(near)
    why = f"the {noun}s are {', '.join(all_names)}"
    raise bad(what, where, why, f"{option}{shown if near else example}")
