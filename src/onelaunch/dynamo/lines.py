"""The user's lines behind the nodes of a graph."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

import torch

from onelaunch.source import Place, is_users


def line_of_node(node: torch.fx.Node) -> str | None:
    """Return the innermost line of the user's that made a node, as a message has it."""
    places = list(_places(node))
    chosen = next((place for place in reversed(places) if is_users(place.filename)), None)
    return None if chosen is None else str(chosen)


def function_of(graph: torch.fx.GraphModule) -> str:
    """Return the name of the user's function where a graph begins."""
    for node in graph.graph.nodes:
        found = re.findall(r"line \d+, in (\S+)", node.meta.get("stack_trace") or "")
        if found:
            return found[0]
    return "graph"


def _places(node: torch.fx.Node) -> Iterator[Place]:
    stack = node.meta.get("stack_trace") or ""
    for filename, number in re.findall(r'File "([^"]+)", line (\d+)', stack):
        yield Place(filename, int(number), linecache.getline(filename, int(number)).strip())
