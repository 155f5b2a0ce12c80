"""Numbers that change from call to call, taken out of a graph of Dynamo's.

Dynamo passes an integer as a symbol from its second value on, and a float as a host tensor whose
item the graph takes. Compiled code has both as constants, and each value would be a recording. So
arithmetic on numbers alone runs on the host, beside the recording. An operation of the graph gets
its result as a tensor, in place of a scalar.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._sympy.symbol import SymT, symbol_is_type

from onelaunch.call.wrappers import is_wrapped
from onelaunch.dynamo.nodes import Graph, Node, detached, example, fake_mode, inputs_of, is_on

_Scalar = tuple[Node, bool]  # a number, and whether its inverse is meant
_Number = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

_OUT_OF_PLACE = ("add", "sub", "mul", "div", "true_divide", "truediv")
_IN_PLACE: Mapping[str, str] = {
    **{f"{name}_": name for name in _OUT_OF_PLACE},
    **{f"i{name}": name for name in ("add", "sub", "mul", "truediv")},
}
"""Operations that write their first operand, and what they compute."""
_ROUNDED = frozenset({"pow", "lt", "le", "gt", "ge", "eq", "ne"})
"""Operations whose kernels round a scalar to the dtype of the tensors."""
_ARITHMETIC = frozenset(_OUT_OF_PLACE) | frozenset(_IN_PLACE) | _ROUNDED
_PLACED = frozenset({"where", "masked_fill", "masked_fill_", "fill_"})
"""Functions that only place a number, and compute nothing with it."""
_CHECKS = (torch._check, torch._assert)
_QUOTIENTS = frozenset({"truediv", "div", "true_divide"})
"""Operations that compute in floats, of integers too."""
_FILLED: Mapping[Any, int] = {
    torch.full: 1,
    torch.full_like: 1,
    torch.tensor: 0,
    torch.scalar_tensor: 0,
    operator.setitem: 2,
}
"""Functions that fill a tensor with a number, and the place of the number."""
_NUMBER_FIRST: Mapping[Any, Any] = {
    getattr(operator, f"{in_place}{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for in_place in ("", "i")
}
"""Operators, and what they are where the first operand is a number, which cannot be written."""
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which arithmetic is done with a scalar."""


class Fill(NamedTuple):
    """A scalar that fills a tensor. From `least` to `most` no value is an error."""

    scalar: int
    shape: tuple[int, ...]
    """The shape of a tensor that torch fills likewise. Numbers too large for float16 are infinite
    as a single element, and an error else."""
    dtype: torch.dtype
    least: float
    most: float

    @staticmethod
    def of(scalar: int, node: Node, dtype: torch.dtype) -> Fill:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        one = node.target in (torch.tensor, torch.scalar_tensor, operator.setitem)
        # CUDA's kernels convert a scalar of `where` as that of any fill.
        one |= _name(node) == "where" and not example(node).is_cuda
        shape = () if one else (2,)
        return Fill(scalar, shape, dtype, limits.min, limits.max)


@dataclass(frozen=True)
class HostSplit:
    """A graph in two parts: `host` computes its changing numbers, and `graph` all else."""

    graph: Graph
    inputs: Sequence[Any]
    """Examples of its inputs: those that were `kept`, and a host tensor for each scalar."""
    host: Graph  # computes the scalars, then results, from the inputs `numbers`
    numbers: Sequence[int]
    kept: Sequence[int]
    dtypes: Sequence[torch.dtype]  # of the scalars
    fills: Sequence[Fill]  # the scalars that fill tensors, whose dtypes may not hold each value
    results: Sequence[int | None]
    """Index of each original result among the results of `host`. None: `graph` returns it."""

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like the original graph. `run`: the compiled `graph`."""

        def call(*args: Any) -> list[Any]:
            values = self.host(*[args[place] for place in self.numbers])
            for fill in self.fills:
                if not fill.least <= values[fill.scalar] <= fill.most:
                    torch.full(fill.shape, values[fill.scalar], dtype=fill.dtype)  # raises as eager
            scalars = [torch.tensor(n, dtype=d) for n, d in zip(values, self.dtypes, strict=False)]
            rest = iter(run(*[args[place] for place in self.kept], *scalars))
            return [next(rest) if place is None else values[place] for place in self.results]

        return call


def split_numbers(graph: Graph, inputs: Sequence[Any], device: torch.device) -> HostSplit | None:
    """Split a graph from its changing numbers; None if it has none, or needs their values: for a
    size, a place, or an operation that takes no tensor for a scalar."""
    mode = fake_mode(graph)
    if mode is None or not isinstance(graph.graph.output_node().args[0], tuple | list):
        return None
    sources = _sources(inputs_of(graph))
    if sources:
        with mode:
            _number_first(graph)
    while sources:
        numbers = _computed(graph, sources)
        with mode, torch.no_grad():
            wanting = _wanting(graph, numbers, device)
        if not wanting:
            return _split(graph, inputs, numbers, mode, device)
        needed = _behind(wanting)
        sources = [s for s in sources if s not in needed]
    return None


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes, and all that they are computed of."""
    behind: set[Node] = set()
    rest = [*nodes]
    while rest:
        node = rest.pop()
        if node not in behind:
            behind.add(node)
            rest += node.all_input_nodes
    return behind


def _number_first(graph: Graph) -> None:
    """Rewrite ``n += x`` and ``n / x``, where `n` is a number, as eager computes them: a tensor in
    the number's place would be written, or divided."""
    for node in graph.graph.nodes:
        _as_operator(node)
        if node.target not in _NUMBER_FIRST or isinstance(_value(node.args[0]), Tensor):
            continue
        node.target = _NUMBER_FIRST[node.target]
        n, x = node.args
        if node.target is operator.truediv and isinstance(_value(x), Tensor):
            with graph.graph.inserting_before(node):
                inverse = graph.graph.call_method("reciprocal", (x,))
            inverse.meta = {**node.meta, "example_value": example(x).reciprocal()}
            node.target, node.args = operator.mul, (inverse, n)
    graph.recompile()


def _as_operator(node: Node) -> None:
    """Rewrite ``x.__eq__(n)`` as ``x == n`` and ``x.__rsub__(n)`` as ``n - x``. Dynamo calls such
    methods where the program does, and in torch 2.11 for ``x == n``, too."""
    name, args = str(node.target), node.args
    if node.op != "call_method" or not name.startswith("__") or len(args) != 2 or node.kwargs:
        return
    if not hasattr(operator, name):
        name, args = name.replace("__r", "__", 1), args[::-1]
    if hasattr(operator, name) and isinstance(_value(node.args[1]), _Number):
        node.op, node.target, node.args = "call_function", getattr(operator, name), args


def _value(given: Any) -> Any:
    return example(given) if isinstance(given, Node) else given


def _sources(given: Sequence[Node]) -> list[Node]:
    """Return the inputs that are such numbers: integers that are no size of a tensor, and floats
    that are nothing but floats."""
    sizes: set[Any] = set()
    for node in given:
        value = example(node)
        if isinstance(value, Tensor):
            for n in (*value.shape, *value.stride(), value.storage_offset()):
                sizes |= n.node.expr.free_symbols if isinstance(n, torch.SymInt) else set()
    integers = [node for node in given if isinstance(example(node), torch.SymInt)]
    free = [node for node in integers if not example(node).node.expr.free_symbols & sizes]
    return [node for node in given if node in free or is_float(node)]


def is_float(node: Node) -> bool:
    """Return whether an input is a float that changes: a host tensor whose item a graph takes."""
    value = example(node)
    of_host = isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim()
    return of_host and bool(node.users) and all(map(_is_item, node.users))


def _is_item(node: Node) -> bool:
    value, reads = example(node), node.meta.get("unbacked_bindings")  # those of the program's own
    symbolic = isinstance(value, torch.SymFloat) and bool(value.node.expr.free_symbols)
    return node.target == "item" and symbolic and not reads


@contextmanager
def floats_elsewhere(graph: Graph) -> Generator[None]:
    """Hide the floats that a graph does not read from what compiles it: AOTAutograd would take
    those for constants, and have Dynamo compile once more for each value."""
    mode = fake_mode(graph)
    env = None if mode is None else mode.shape_env
    named = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    values: dict[Any, Any] = getattr(env, named, {})
    read: set[Any] = set()
    # An `autograd.Function` or a checkpoint has a graph of its own inside.
    graphs = [module for module in graph.modules() if isinstance(module, Graph)]
    for value in (example(node) for each in graphs for node in each.graph.nodes):
        read |= value.node._expr.free_symbols if isinstance(value, torch.SymFloat) else set()
    elsewhere = [k for k in values if symbol_is_type(k, SymT.FLOAT) and k not in read]
    hidden = {symbol: values.pop(symbol) for symbol in elsewhere}
    try:
        yield
    finally:
        values.update(hidden)


def _computed(graph: Graph, sources: Sequence[Node]) -> Mapping[Node, None]:
    """Return the nodes that are computed from `sources` and constants alone."""
    computed = dict.fromkeys(sources)
    for node in graph.graph.nodes:
        given = node.all_input_nodes
        if given and node.op != "output" and all(n in computed for n in given):
            value = example(node)
            held = node.target is torch.scalar_tensor and value.device.type == "cpu"
            checked = node.target in _CHECKS and value is None
            if isinstance(value, _Number) or held or checked:
                computed[node] = None
    return computed


def _wanting(graph: Graph, numbers: Mapping[Node, None], device: torch.device) -> set[Node]:
    """Return the numbers whose values the graph needs."""
    wanting: set[Node] = set()
    for node in graph.graph.nodes:
        used = [n for n in node.all_input_nodes if n in numbers]
        if not used or node in numbers or node.op == "output":
            continue
        kinds = (Tensor, bool, torch.SymBool)
        if any(isinstance(example(n), kinds) for n in used) or not _takes(node, numbers, device):
            wanting.update(used)
    return wanting


def _takes(node: Node, numbers: Mapping[Node, None], device: torch.device) -> bool:
    """Return whether an operation takes a tensor for each of the numbers, to the same end."""
    result = example(node)
    used = [n for n in node.all_input_nodes if n in numbers]
    place = _FILLED.get(node.target)
    args: Any = node.args
    if node.target is operator.setitem:
        result = example(args[0])
    if not is_on(result, device):
        return False
    if place is not None:
        alone = len(args) > place and used == [args[place]]
        return alone and node.kwargs.keys() <= {"dtype", "device"}
    name = _name(node)
    if name is None or node.kwargs or not _all_tensors(node, numbers):
        return False
    if name == "pow" and args[0] not in numbers:
        return False  # kernels of their own for exponents such as 2 and 0.5, and checks of integers
    examples = map(example, node.all_input_nodes)
    if any(isinstance(value, Tensor) and is_wrapped(value) for value in examples):
        return False  # by `vmap`: an operation on it runs inside of that alone
    args = torch.fx.map_arg(
        node.args, lambda n: _scalar(node, n, device) if n in numbers else detached(n)
    )
    target: Any = node.target
    outcome: Any = target(*args) if callable(target) else getattr(args[0], target)(*args[1:])
    return (outcome.dtype, outcome.device, _text(outcome.shape)) == (
        result.dtype,
        result.device,
        _text(result.shape),
    )


def _all_tensors(node: Node, numbers: Mapping[Node, None]) -> bool:
    """Return whether the arguments are numbers and tensors, with a tensor among them."""
    nodes = [n for n in node.args if isinstance(n, Node)]
    tensors = [n for n in nodes if n not in numbers]
    first = node.args[0] if node.op == "call_method" else tensors and tensors[0]
    return (
        len(nodes) == len(node.all_input_nodes)
        and first in tensors
        and all(isinstance(example(n), Tensor) for n in tensors)
    )


def _name(node: Node) -> str | None:
    """Return the name of a function that takes a tensor for a scalar, or None."""
    if node.op == "call_method":
        name = node.target
    else:
        name = getattr(node.target, "__name__", "")
        if node.target not in (getattr(operator, name, None), getattr(torch, name, None)):
            return None
    return name if name in _ARITHMETIC or name in _PLACED else None  # pyright: ignore[reportReturnType]


def _scalar(node: Node, number: Any, device: torch.device) -> Tensor:
    """Return an example of the tensor that stands for a number in an operation."""
    return torch.empty((), dtype=_dtype(node, number), device=device)


def _wide(node: Node) -> torch.dtype | None:
    """Return the dtype that an operation's kernel computes in, if it is wider than its tensors'."""
    if node.target in _FILLED or _name(node) in _PLACED | _ROUNDED:
        return None
    tensors = [value for n in node.all_input_nodes if isinstance(value := example(n), Tensor)]
    return _WIDER.get(functools.reduce(torch.promote_types, (t.dtype for t in tensors)))


def _dtype(node: Node, number: Node) -> torch.dtype:
    """Return the dtype that an operation's kernel gives a scalar."""
    args: Any = node.args
    if node.target is operator.setitem:
        return example(args[0]).dtype
    if node.target in _FILLED or _name(node) in _PLACED:
        return example(node).dtype
    tensor = next(value for n in node.all_input_nodes if isinstance(value := example(n), Tensor))
    is_float = isinstance(example(number), torch.SymFloat) or _is_quotient(node)
    dtype = torch.result_type(tensor, 1.0 if is_float else 1)
    return dtype if _name(node) in _ROUNDED else _WIDER.get(dtype, dtype)


def _is_quotient(node: Node) -> bool:
    name = str(_name(node))
    return _IN_PLACE.get(name, name) in _QUOTIENTS


def _inverts(node: Node) -> bool:
    """Return whether an operation takes the inverse of a number: so CUDA's kernels divide.
    https://github.com/pytorch/pytorch/issues/191495"""
    return _is_quotient(node) and example(node).is_cuda


def _inverse(number: float) -> float:
    return 1 / number if number else math.copysign(math.inf, number)


def _text(shape: Iterable[Any]) -> list[str]:
    return list(map(str, shape))  # a comparison of symbols would be a new guard


def _split(
    graph: Graph,
    inputs: Sequence[Any],
    numbers: Mapping[Node, None],
    mode: Any,
    device: torch.device,
) -> HostSplit:
    given = inputs_of(graph)
    host, rest = torch.fx.Graph(), torch.fx.Graph()
    on_host: dict[Node, Node] = {}
    for node in numbers:
        on_host[node] = host.node_copy(node, on_host.__getitem__)
    of_rest: dict[Node, Node] = {}
    for node in given:
        if node not in numbers:
            of_rest[node] = rest.node_copy(node, of_rest.__getitem__)
    taken: dict[_Scalar, None] = {
        (n, _inverts(node)): None
        for node in graph.graph.nodes
        if node not in numbers
        if node.op != "output"
        for n in node.all_input_nodes
        if n in numbers
    }
    scalars = list(taken)
    placeholders: dict[_Scalar, Node] = {}
    results: Any = graph.graph.output_node().args[0]
    made: list[Any] = []
    for number, inverse in scalars:
        is_float = inverse or isinstance(example(number), torch.SymFloat)
        with mode:
            made.append(torch.empty((), dtype=torch.float64 if is_float else torch.int64))
        placeholders[number, inverse] = placeholder = rest.placeholder(f"number_{len(made)}")
        placeholder.meta["example_value"] = made[-1]
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or node in numbers:
            continue
        if any(n in numbers for n in node.all_input_nodes):
            of_rest[node] = _with_tensors(rest, node, numbers, of_rest, placeholders, mode, device)
        else:
            of_rest[node] = rest.node_copy(node, of_rest.__getitem__)
    fills = [
        Fill.of(scalars.index((n, False)), node, dtype)
        for node in of_rest
        if node.target in _FILLED or _name(node) in _PLACED
        for n in node.all_input_nodes
        if n in numbers and _may_overflow(node, dtype := _dtype(node, n))
    ]
    returned = [r for r in results if r in numbers]
    found = [
        host.call_function(_inverse, (on_host[n],)) if inverse else on_host[n]
        for n, inverse in scalars
    ]
    host.output((*found, *(on_host[n] for n in returned)))
    rest.output(tuple(of_rest.get(r, r) for r in results if r not in numbers))
    places = iter(range(len(scalars), len(scalars) + len(returned)))
    kept = [i for i, node in enumerate(given) if node not in numbers]
    return HostSplit(
        Graph(graph, rest),
        [*(inputs[i] for i in kept), *made],
        Graph(graph, host),
        [i for i, node in enumerate(given) if node in numbers],
        kept,
        [t.dtype for t in made],
        fills,
        [next(places) if r in numbers else None for r in results],
    )


def _may_overflow(node: Node, dtype: torch.dtype) -> bool:
    """Return whether filling a tensor of a dtype with a number may be an error."""
    if node.target is torch.tensor and dtype.is_floating_point:
        return False
    return not (dtype.is_complex or dtype is torch.bool)


def _with_tensors(
    rest: torch.fx.Graph,
    node: Node,
    numbers: Mapping[Node, None],
    of_rest: Mapping[Node, Node],
    placeholders: Mapping[_Scalar, Node],
    mode: Any,
    device: torch.device,
) -> Node:
    """Copy an operation, with tensors for its numbers."""

    def call(method: str, *args: Any, **kwargs: Any) -> Node:
        made = rest.call_method(method, args, kwargs)
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        return made

    def scalar(number: Node) -> Node:
        made = call("to", placeholders[number, inverse], device, _dtype(node, number))
        with mode:
            made.meta["example_value"] = _scalar(node, number, device)
        return made

    wide, result, inverse = _wide(node), example(node), _inverts(node)

    def given(n: Node) -> Node:
        if n in numbers:
            return scalar(n)
        return call("to", of_rest[n], wide) if wide else of_rest[n]

    target: Any = node.target
    args: Any = torch.fx.map_arg(node.args, of_rest.get)
    if target is operator.setitem or target not in _FILLED:
        made = rest.node_copy(node, given)
        if inverse:
            made.op, made.target = "call_method", "mul_" if _name(node) in _IN_PLACE else "mul"
        if wide and _name(node) in _IN_PLACE:
            return call("copy_", args[0], made)
        return call("to", made, result.dtype) if wide else made
    if target in (torch.tensor, torch.scalar_tensor):
        target, args = torch.full, ((), None)
    empty = rest.call_function(target, (args[0], 0), {**node.kwargs, "dtype": result.dtype})
    return call("fill_", empty, scalar(next(n for n in node.all_input_nodes if n in numbers)))
