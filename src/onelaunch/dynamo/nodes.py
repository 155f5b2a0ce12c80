"""What Dynamo keeps with the nodes of a graph: examples, and the user's lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onelaunch.source import Place, is_users

Graph = torch.fx.GraphModule
Node = torch.fx.Node


def inputs_of(graph: Graph) -> Sequence[Node]:
    return graph.graph.find_nodes(op="placeholder")


def example(node: Node) -> Any:
    """Return the value of a node in Dynamo's own run: a fake tensor, a symbol, a constant."""
    return node.meta.get("example_value")


def is_on(value: object, device: torch.device) -> bool:
    """Return whether an example is a tensor of a device of this kind."""
    return isinstance(value, Tensor) and value.device.type == device.type


def fake_mode(graph: Graph) -> Any:
    """Return the mode in which a graph's examples compute, or None if it has none."""
    values = map(example, graph.graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def detached(node: Node) -> Any:
    """Return the example of an input, whose sizes an operation may change."""
    value = example(node)
    return value.detach() if isinstance(value, Tensor) else value


def line_in(stack: str) -> str | None:
    """Return the user's innermost line in the text of a stack, in the form of a message."""
    for filename, number in reversed(re.findall(r'File "([^"]+)", line (\d+)', stack)):
        if is_users(filename):
            return str(Place.of(filename, int(number)))
    return None


def function_in(stacks: Iterable[str | None]) -> str:
    """Return the name of the outermost function in the first of these texts of stacks."""
    for stack in stacks:
        functions = re.findall(r"line \d+, in (\S+)", stack or "")
        if functions:
            return functions[0]
    return "graph"
