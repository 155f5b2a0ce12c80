"""Buckets of a graph of Dynamo's: the inputs that follow a size, and the sizes that it serves.

A caller's `Buckets` name dimensions of the arguments of the compiled function. After a graph break
a graph has other inputs. Each symbolic size is an input of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch.dynamo.nodes import Node, example, inputs_of
from onelaunch.sizes.buckets import Buckets


@dataclass(frozen=True)
class Sized:
    """The inputs of a graph that follow bucketed sizes."""

    of: Buckets
    env: Any
    symbols: tuple[Any, ...]  # the bucketed sizes
    kept: tuple[int, ...]  # the index in `of` of each symbol
    dims: Mapping[int, tuple[tuple[int, ...] | None, ...]]
    """Place of an input -> for each symbol its dimensions, or None."""
    fills: Mapping[int, tuple[Any, ...]]  # place of an input -> the values that fill its padding
    numbers: Mapping[int, tuple[int, int]]
    """Place of an input that is a size -> place and dimension of a tensor with this size."""

    def buckets(self, moving: Sequence[int]) -> Buckets | None:
        """Return the buckets of a function of these inputs, or None if the graph serves none. Call
        it once the graph is compiled: the compiler relies on sizes too."""
        sizes = self._served()
        if sizes is None or not all(sizes):
            return None
        return Buckets(
            dim=tuple(self.of.dim[i] for i in self.kept),
            sizes=sizes,
            dims={at: self.dims[place] for at, place in enumerate(moving) if place in self.dims},
            pad={at: self.fills[place] for at, place in enumerate(moving) if place in self.fills},
            overflow=self.of.overflow,
            independent=self.of.independent,
        )

    def _served(self) -> list[list[int]] | None:
        """Return the sizes that satisfy all conditions of the graph's code."""
        sizes = [
            [n for n in self.of.sizes[number] if n in self.env.bound_sympy(symbol)]
            for number, symbol in zip(self.kept, self.symbols, strict=True)
        ]
        for guard in list(self.env.guards):
            relied = self.env.replace(guard.expr)
            free = set(getattr(relied, "free_symbols", ()))
            if not free & set(self.symbols):
                continue
            if len(free) == 1:
                at = self.symbols.index(*free)
                sizes[at] = [n for n in sizes[at] if _holds(relied, {self.symbols[at]: n})]
            elif not free <= set(self.symbols) or not all(
                _holds(relied, dict(zip(self.symbols, each, strict=True)))
                for each in itertools.product(*sizes)
            ):
                return None
        return sizes


def _holds(relied: Any, sizes: Mapping[Any, int]) -> bool:
    return relied.subs(sizes) == True  # noqa: E712  an expression of sympy's


def sized(graph: torch.fx.GraphModule, static: Mapping[int, str], buckets: Buckets) -> Sized | None:
    """Return the inputs of a graph that follow bucketed sizes, or None. None if no single symbolic
    size stands at a bucketed dimension of the arguments, apart from `static` ones. None if another
    size is computed from it, or a static argument has it. None if a following argument is not
    dense: the graph's code is for its strides, and its padded copy is dense."""
    inputs = inputs_of(graph)
    shapes = {i: _shape(node) for i, node in enumerate(inputs)}
    moving = {i: shape for i, shape in shapes.items() if shape is not None and i not in static}
    stated = {i: _stated(buckets.dims, inputs[i]) for i in moving}
    sizes: dict[int, Any] = {}
    for number, default in enumerate(buckets.dim):
        at = {
            shape[dim]
            for i, shape in moving.items()
            for dim in _dims(default if stated[i] is None else stated[i][number])
            if dim < len(shape) and not _is_number(shape[dim])
        }
        if len(at) > 1 or not all(one.is_symbol for one in at):
            return None
        if at:
            sizes[number] = at.pop()
    symbols = tuple(sizes.values())
    if not symbols or len(set(symbols)) < len(symbols):
        return None
    if any(symbol in (shapes[i] or ()) for symbol in symbols for i in static):
        return None
    numbers: dict[int, tuple[int, int]] = {}
    for place, node in enumerate(inputs):
        for n in _symbolic(node):
            if n.node.expr not in symbols and n.node.expr.free_symbols & set(symbols):
                return None
        number = example(node)
        if isinstance(number, torch.SymInt):
            size = number.node.expr
            having = ((i, shape.index(size)) for i, shape in moving.items() if size in shape)
            found_in = next(having, None)
            if found_in is not None:
                numbers[place] = found_in
            elif size in symbols:
                return None
    dims = {i: tuple(_places(shape, symbol) for symbol in symbols) for i, shape in moving.items()}
    followed = [i for i, places in dims.items() if any(places)]
    if not all(_is_dense(inputs[i].meta["example_value"]) for i in followed):
        return None
    fills = {i: _stated(buckets.pad, inputs[i]) for i in moving}
    kept = tuple(sizes)
    return Sized(
        buckets,
        next(n.node.shape_env for node in inputs for n in _symbolic(node)),
        symbols,
        kept,
        dims,
        {i: tuple(fill[n] for n in kept) for i, fill in fills.items() if fill is not None},
        numbers,
    )


def _shape(node: Node) -> list[Any] | None:
    """Return the sizes of a tensor: numbers, and expressions of symbols."""
    value = example(node)
    if not isinstance(value, Tensor):
        return None
    return _exprs(value.shape)


def _exprs(numbers: Sequence[Any]) -> list[Any]:
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]


def _is_dense(t: Tensor) -> bool:
    """Return whether a tensor has the strides of its copy by `padding.pad` at any size."""
    sizes, strides = _exprs(t.shape), _exprs(t.stride())
    orders = [list(range(t.dim())), *([[0, 2, 3, 1]] if t.dim() == 4 else [])]
    return any(_follows(sizes, strides, order) for order in orders)


def _follows(sizes: Sequence[Any], strides: Sequence[Any], order: Sequence[int]) -> bool:
    step: Any = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return False
        step = step * sizes[dim]
    return True


def _symbolic(node: Node) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes of an input, or the input if it is one."""
    value = example(node)
    for n in value.shape if isinstance(value, Tensor) else (value,):
        if isinstance(n, torch.SymInt):
            yield n


def _places(shape: Sequence[Any], symbol: Any) -> tuple[int, ...] | None:
    return tuple(dim for dim, n in enumerate(shape) if n == symbol) or None


def _dims(stated: Any) -> tuple[int, ...]:
    return () if stated is None else (stated,) if isinstance(stated, int) else tuple(stated)


def _is_number(n: Any) -> bool:
    return isinstance(n, int) or n.is_number


def _stated(mapping: Mapping[Any, Any], node: Node) -> Any:
    """Return an input's entry in the buckets, by the name of the variable that it was."""
    return next((v for name, v in mapping.items() if node.target == f"L_{name}_"), None)
