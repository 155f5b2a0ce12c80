"""The user's lines behind the nodes of a graph."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator

from onelaunch.source import Place, is_users


def line_in(stack: str) -> str | None:
    """Return the user's innermost line in the text of a stack, in the form of a message."""
    places = list(_places(stack))
    chosen = next((place for place in reversed(places) if is_users(place.filename)), None)
    return None if chosen is None else str(chosen)


def function_in(stacks: Iterable[str | None]) -> str:
    """Return the name of the outermost function in the first of these texts of stacks."""
    for stack in stacks:
        found = re.findall(r"line \d+, in (\S+)", stack or "")
        if found:
            return found[0]
    return "graph"


def _places(stack: str) -> Iterator[Place]:
    for filename, number in re.findall(r'File "([^"]+)", line (\d+)', stack):
        yield Place(filename, int(number), linecache.getline(filename, int(number)).strip())
