"""Constants of the host in a graph of Dynamo's, taken to the device.

``x + torch.tensor([1.0, 2.0]).to(x.device)`` makes the same tensor on the host in each call. Here
it is made once, when the graph is compiled, and stays on the device, so that no part of the graph
runs on the host for its sake.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import operator as operator_of
from onelaunch.dynamo.fakes import example, fake_mode, inputs_of, is_on
from onelaunch.unwinding import DispatchMode

Graph = torch.fx.GraphModule
Node = torch.fx.Node

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Constants:
    """A graph that gets its constants as inputs, after its own.

    Attributes:
        inputs: examples of all its inputs.
        values: the constants, on the device.
    """

    graph: Graph
    inputs: Sequence[Any]
    values: Sequence[Tensor]

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled graph as a function of its own inputs."""
        values = self.values
        return lambda *args: run(*args, *values)


def take_constants(graph: Graph, inputs: Sequence[Any], device: torch.device) -> Constants | None:
    """Return a graph whose operations find host constants on the device, or None if nothing
    changed. Numbers that are assigned to elements count too."""
    mode = fake_mode(graph)
    if mode is None:
        return None
    graph = Graph(graph, copy.deepcopy(graph.graph))  # Dynamo still needs its own
    filled = _fill_assigned(graph, device, mode)
    values = {} if device.type == "cpu" else _values(graph, device)
    held: list[Tensor] = []
    for node, value in values.items():
        users = [user for user in node.users if _takes(user, value, device)]
        if users:
            held.append(value.to(device))
            given = _given(graph, node, held[-1], mode)
            for user in users:
                _read_there(graph, user, node, given)
    for node, data in _made(graph, device):
        held.append(torch.tensor(data, dtype=example(node).dtype, device=device))
        given = _given(graph, node, held[-1], mode)
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(_copied(graph, given))
        graph.graph.erase_node(node)
    for node in reversed(list(values)):
        if not node.users:
            graph.graph.erase_node(node)
    if not (held or filled):
        return None
    graph.recompile()
    # Fakes: of a real tensor AOTAutograd would take the sizes for symbols, which have no source.
    added = inputs_of(graph)[len(inputs) :]
    return Constants(graph, [*inputs, *map(example, added)], held)


def _fill_assigned(graph: Graph, device: torch.device, mode: Any) -> bool:
    """Have ``y[0] = 1.0`` copy from the device, and return whether there is such an assignment. On
    CUDA torch would copy the number from a tensor of the host."""
    found = False
    for node in graph.graph.find_nodes(op="call_function", target=operator.setitem):
        args: Any = node.args
        target, _, value = args
        made, number = example(target), example(value) if isinstance(value, Node) else value
        if isinstance(number, bool | int | float | torch.SymInt) and is_on(made, device):
            options: Any = {"dtype": made.dtype, "device": device}
            with graph.graph.inserting_before(node), mode:
                filled = graph.graph.call_function(torch.full, ((), value), options)
                filled.meta["example_value"] = torch.empty((), **options)
            filled.meta["stack_trace"] = node.meta.get("stack_trace")
            node.update_arg(2, filled)
            found = True
    return found


def _values(graph: Graph, device: torch.device) -> Mapping[Node, Tensor]:
    """Compute the host tensors that depend on no input and no random number. Return none if any of
    them is written, or may be by a use on the host beside others."""
    values: dict[Node, Any] = {}
    versions: dict[Node, int] = {}
    for node in graph.graph.nodes:
        depends = any(n not in values for n in node.all_input_nodes)
        if depends or node.op not in ("call_function", "call_method"):
            continue
        made = example(node)
        if isinstance(made, Tensor) and made.device.type == "cpu":
            value = _value(node, values)
            if value is not None:
                values[node], versions[node] = value, value._version
    written = any(value._version != versions[node] for node, value in values.items())
    users = {user for node in values for user in node.users if user not in values}
    on_host = any(user.op != "output" and not _works_on(user, device) for user in users)
    return {} if written or on_host else values


def _value(node: Node, values: Mapping[Node, Tensor]) -> Tensor | None:
    args: Any = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, values.__getitem__)
    target: Any = node.target
    with torch.no_grad(), _Certain():
        try:
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)
        except _DrawnError:
            return None


class _DrawnError(Exception):
    """An operation draws random numbers."""


class _Certain(DispatchMode):
    """A mode in which no operation draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_of(func).random:
            raise _DrawnError
        return func(*args, **(kwargs or {}))


def _takes(user: Node, value: Tensor, device: torch.device) -> bool:
    """Return whether an operation gives the same result with a constant on the device. A kernel
    takes a host number in its own precision, and a device number in that of the tensors. For halves
    the results differ."""
    made: Any = example(user)
    is_number = not value.dim() and user.target is not operator.setitem
    others = len(user.all_input_nodes) > 1
    return _works_on(user, device) and not (is_number and others and made.dtype in _HALVES)


def _works_on(node: Node, device: torch.device) -> bool:
    args: Any = node.args
    return is_on(example(args[0] if node.target is operator.setitem else node), device)


def _made(graph: Graph, device: torch.device) -> Sequence[tuple[Node, Any]]:
    """Return (node, number) of device tensors that torch makes over a tensor of the host."""
    found: list[tuple[Node, Any]] = []
    for node in graph.graph.nodes:
        place = 1 if node.op == "call_method" else 0
        if node.target in (torch.tensor, torch.as_tensor, "new_tensor") and node.args[place:]:
            data = node.args[place]
            computed: list[Node] = []
            torch.fx.map_arg(data, computed.append)
            if not computed and is_on(example(node), device):
                found.append((node, data))
    return found


def _given(graph: Graph, node: Node, value: Tensor, mode: Any) -> Node:
    """Return an input of the graph for a constant."""
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    with graph.graph.inserting_before(first):
        given = graph.graph.placeholder(f"constant_{node.name}")
    given.meta["example_value"] = mode.from_tensor(value, static_shapes=True)
    given.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return given


def _read_there(graph: Graph, user: Node, node: Node, given: Node) -> None:
    """Have an operation read an input for a constant. A mere move to the device gets a copy of its
    own, which may be returned or written."""
    if user.all_input_nodes == [node]:
        with graph.graph.inserting_before(user):
            given = _copied(graph, given)
    user.replace_input_with(node, given)


def _copied(graph: Graph, given: Node) -> Node:
    copied = graph.graph.call_method("clone", (given,))
    copied.meta["example_value"] = example(given)
    return copied
