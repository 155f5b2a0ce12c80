"""Numbers that the caller varies: stand-ins for them in a capture.

A number that enters kernels as a scalar (``x * beta``) differs in nothing but some bytes of their
arguments, which each launch can write. So in the capture an annealed attribute, or an argument that
is a number, is a `Number`: it notes what is computed from it and how comparisons come out, and
torch hands it on to each operation as it is. There a float that occurs nowhere else takes its
place, by which the driver finds the scalar. All else that asks for its value makes it a constant
again.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from onelaunch.call.numbers import is_number, with_numbers
from onelaunch.call.tree import Constant, Tree
from onelaunch.driver.aten import leaves, mapped
from onelaunch.frames.reads import StandIn
from onelaunch.optimizers.traced_float import ScalarTrace, Term, swapped, unmistakable
from onelaunch.state.slots import Slot

_OTHERWISE = 0.37
"""The scalar from which that of a use is made where the number itself is 0, infinite or NaN."""

_FILLS = frozenset(
    f"aten::{name}"
    for name in ("fill", "fill_", "full", "full_like", "masked_fill_", "new_full", "scalar_tensor")
)
_BY_VALUE = ("aten::pow", "aten::float_power")
"""Operations whose kernels are chosen by the value of the scalar."""


@dataclass(frozen=True, slots=True)
class Following:
    """The numbers that a capture is to follow.

    Attributes:
        arguments: their positions among the numbers of the arguments; see `call.numbers`.
        slots: places of the others.
    """

    arguments: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()

    def names(self) -> list[object]:
        """Return the positions, and the ids of the slots."""
        return [*self.arguments, *(slot.id for slot in self.slots)]

    def without(self, escaped: Sequence[object]) -> Following:
        """Return those that are not among `escaped`: positions, and ids of slots."""
        slots = tuple(slot for slot in self.slots if slot.id not in escaped)
        return Following(tuple(i for i in self.arguments if i not in escaped), slots)

    def __bool__(self) -> bool:
        return bool(self.arguments or self.slots)


class Unfollowed(Exception):
    """Numbers among the arguments that cannot be followed: each value needs its recording.

    Attributes:
        positions: their positions.
        only_this_call: True if that is so for the numbers of this call alone.
    """

    def __init__(self, positions: Sequence[int], only_this_call: bool = False) -> None:
        super().__init__(f"numbers {list(positions)} of the arguments are constants")
        self.positions, self.only_this_call = positions, only_this_call


@dataclass(frozen=True, slots=True)
class Example:
    """The facts about a tensor of an operation on which the choice of its kernel depends."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Operation(NamedTuple):
    """An operation that takes numbers as scalars.

    Attributes:
        func: the operation.
        args, kwargs: its arguments: tensors are `Example`s, and the numbers `Term`s.
        kinds: the type of each of these numbers, in order.
    """

    func: Any
    args: Any
    kwargs: Any
    kinds: tuple[type, ...]

    def key(self) -> str:
        """Return a text that is equal for operations that are proven together."""
        parts = mapped((self.args, self.kwargs), lambda v: "number" if type(v) is Term else v)
        return repr((str(self.func), parts, self.kinds))


class Use(NamedTuple):
    """One scalar of an operation of the capture.

    Attributes:
        term: the number's position in the trace.
        scalar: the float that the operation got in its place.
        operation: the position of the operation.
        place: its position among the numbers of the operation.
        wrapped: True if the operation takes it as a tensor of one element.
    """

    term: int
    scalar: float
    operation: int
    place: int
    wrapped: bool


@dataclass(slots=True)
class Numbers:
    """The numbers that one run of a capture follows.

    Attributes:
        following: the places of the numbers: arguments first, then slots, in the order of the
            trace's leaves.
        device: the recording's device.
        seed: of the scalars of uses.
        arguments: the numbers among the arguments of the call.
        uses, operations: the scalars of the run's operations.
    """

    following: Following
    device: torch.device
    seed: int = 0
    trace: ScalarTrace = field(default_factory=ScalarTrace)
    kinds: list[type] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    arguments: list[float] = field(default_factory=list)
    _stepping: Callable[[], bool] = bool
    _escaped: set[int] = field(default_factory=set)
    _nodes: list[ref[_Node]] = field(default_factory=list)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @staticmethod
    def none() -> Numbers:
        """Return the numbers of a run that follows none."""
        return Numbers(Following(), torch.device("cpu"))

    def __bool__(self) -> bool:
        return bool(self.following)

    # Before and after the run.

    def given(self, tree: Tree) -> Tree:
        """Return the tree of the call's arguments, with stand-ins for the numbers among them."""

        def change(position: int, constant: Constant) -> Constant:
            if position not in self.following.arguments:
                return constant
            value: Any = constant.value
            self.arguments.append(value)
            return Constant(self._leaf(value))

        return with_numbers(tree, change) if self.following.arguments else tree

    def begin(self, stepping: Callable[[], bool]) -> None:
        """Put stand-ins into the slots.

        Args:
            stepping: returns whether an optimizer steps, whose kernels hold numbers of its own.
        """
        self._stepping = stepping
        for slot in self.following.slots:
            value = slot.read()
            # A slot that has no number any more keeps its place among the leaves.
            made = self._leaf(value if is_number(value) else 0.0)
            if is_number(value):
                slot.write(made)

    def end(self) -> None:
        """Put plain numbers back."""
        first = len(self.following.arguments)
        for index, slot in enumerate(self.following.slots, first):
            value = slot.read()
            if type(value) is Number:
                if value.node.term != index:
                    self._escaped.add(index)
                slot.write(value.node.value)
            else:
                self._escaped.add(index)

    def escaped(self) -> list[object]:
        """Return, after the run, the numbers that it used in ways that no recording follows:
        positions of arguments, and ids of slots."""
        held = [node.term for made in self._nodes if (node := made()) is not None]
        for term in held:  # it outlives the run: somebody keeps it
            self._escaped |= self.trace.leaves(term)
        names = self.following.names()
        return [names[leaf] for leaf in sorted(self._escaped)]

    def _leaf(self, value: Any) -> Number:
        self.kinds.append(type(value))
        return self.stand_in(self.trace.leaf(value), value)

    def stand_in(self, term: int, value: float) -> Number:
        made = Number(_Node(self, term, value))
        self._nodes.append(ref(made.node))
        return made

    def escape(self, term: int) -> None:
        """Note that the numbers that a term is computed from are not followed."""
        self._escaped |= self.trace.leaves(term)

    # In the operations of the run.

    def placed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of an operation with a plain number for each stand-in; None if it
        has none. A number that the operation takes as a scalar is found again in its kernel."""
        every = list(leaves((args, kwargs)))
        nodes = [node for value in every if (node := node_of(value)) is not None]
        if not nodes:
            return None
        if not self._is_scalar(func, every, nodes):
            return mapped(args, _escaped), mapped(kwargs, _escaped)
        number = len(self.operations)
        wrapped = _taken_as_tensors(func, args, kwargs)
        place = 0

        def scalar(value: Any) -> Any:
            nonlocal place
            node = node_of(value)
            if node is None:
                return value
            usual = math.isfinite(node.value) and 1e-20 < abs(node.value) < 1e20
            made = unmistakable(float(node.value) if usual else _OTHERWISE, self._random)
            as_tensor = any(node is other for other in wrapped)
            self.uses.append(Use(node.term, made, number, place, as_tensor))
            place += 1
            return made

        kinds = tuple(type(node.value) for node in nodes)
        given = mapped(args, _described), mapped(kwargs, _described)
        self.operations.append(Operation(func, *given, kinds))
        return mapped(args, scalar), mapped(kwargs, scalar)

    def _is_scalar(self, func: Any, every: Sequence[Any], nodes: Sequence[_Node]) -> bool:
        """Return whether an operation passes these numbers as scalars to one kernel, and does not
        choose the kernel by them."""
        name: str = func._schema.name
        tensors = [value for value in every if isinstance(value, Tensor)]
        devices = [t.device for t in tensors]
        devices += [torch.device(v) for v in every if isinstance(v, torch.device)]
        floats = all(t.dtype.is_floating_point for t in tensors) and bool(tensors)
        return (
            not self._stepping()
            and (torch.Tag.pointwise in func.tags or name in _FILLS)
            and torch.Tag.nondeterministic_seeded not in func.tags
            and not name.startswith(_BY_VALUE)
            and not any(a.is_out for a in func._schema.arguments)
            and bool(devices)
            and all(device.type == self.device.type for device in devices)
            and not any(t.dtype.is_complex for t in tensors)
            # An int would make the result an integer, or take part in integers' arithmetic.
            and (floats or all(type(node.value) is float for node in nodes))
        )


def _described(value: Any) -> Any:
    node = node_of(value)
    if node is not None:
        return Term(node.term)
    return Example(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _escaped(value: Any) -> Any:
    node = node_of(value)
    return value if node is None else node.plain()


def _taken_as_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Node]:
    """Return the numbers that stand where an operation takes a tensor, or makes one of them."""
    found: list[_Node] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        node = node_of(value)
        is_tensor = isinstance(argument.type, torch.TensorType) or argument.name == "other"
        if node is not None and is_tensor:
            found.append(node)
    return found


class _Node:
    """The inside of a stand-in, which torch hands on by itself; it asks this for the value."""

    __slots__ = ("__weakref__", "numbers", "term", "value")

    def __init__(self, numbers: Numbers, term: int, value: float) -> None:
        self.numbers, self.term, self.value = numbers, term, value

    def plain(self) -> Any:
        """Return the value, which is then not followed."""
        self.numbers.escape(self.term)
        return self.value

    def guard_float(self, file: str, line: int) -> float:
        """Return the value to torch."""
        return float(self.plain())

    def __getattr__(self, name: str) -> Any:
        self.plain()
        raise AttributeError(name)

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False


def node_of(value: Any) -> _Node | None:
    """Return the inside of a stand-in, in which class torch may hand it on; or None."""
    if isinstance(value, torch.SymFloat):
        node: Any = value.node
        return node if type(node) is _Node else None
    return None


class Number(StandIn, torch.SymFloat):
    """A number that notes what is computed from it; to Python code a float, or an int.

    It is no subclass of float, of which C code would read the value unnoticed, but of the class
    for which torch has symbolic numbers.
    """

    node: _Node

    def __init__(self, node: _Node) -> None:
        self.node = node

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.node.value)

    def tell(self) -> None:
        self.node.plain()

    def fixed(self) -> Any:
        return self.node.plain()

    def __bool__(self) -> bool:
        return _decided(self, operator.ne, 0)


def _is_operand(value: Any) -> bool:
    return type(value) is Number or type(value) in (int, float, bool)


def _value(value: Any) -> Any:
    return value.node.value if type(value) is Number else value


def _term(value: Any) -> Any:
    return Term(value.node.term) if type(value) is Number else value


def _computed(number: Number, operation: Callable[[Any, Any], Any], other: Any) -> Any:
    try:
        result = operation(number.node.value, _value(other))
    except Exception:  # other numbers may raise none, and go another way
        _read_all(number, other)
        raise
    if not is_number(result):  # a power may be complex
        _read_all(number, other)
        return result
    numbers = number.node.numbers
    term = numbers.trace.term(operation, Term(number.node.term), _term(other), result)
    return numbers.stand_in(term, result)


def _decided(number: Number, compare: Callable[[Any, Any], Any], other: Any) -> bool:
    outcome = bool(compare(number.node.value, _value(other)))
    trace = number.node.numbers.trace
    trace.decided(compare, Term(number.node.term), _term(other), outcome)
    return outcome


def _plain(value: Any) -> Any:
    return value.node.plain() if type(value) is Number else value


def _read_all(*values: Any) -> None:
    for value in values:
        _plain(value)


def _binary(operation: Callable[[Any, Any], Any], then: Callable[..., Any]) -> Any:
    def method(self: Number, other: Any) -> Any:
        if _is_operand(other):
            return then(self, operation, other)
        if isinstance(other, Tensor):
            return NotImplemented  # which takes it as a number
        return operation(_plain(self), other)

    return method


def _unary(operation: Callable[[Any], Any]) -> Any:
    def computed(a: Any, _: None) -> Any:
        return operation(a)

    def method(self: Number) -> Any:
        return _computed(self, computed, None)

    return method


def _read(operation: Callable[..., Any]) -> Any:
    def method(self: Number, *others: Any) -> Any:
        return operation(_plain(self), *map(_plain, others))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _how: Any = getattr(operator, _name)
    setattr(Number, f"__{_name}__", _binary(_how, _computed))
    setattr(Number, f"__r{_name}__", _binary(swapped(_how), _computed))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name), _decided))
for _name in ("neg", "abs"):
    setattr(Number, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _how in (
    *(("divmod", divmod), ("rdivmod", swapped(divmod)), ("round", round), ("format", format)),
    *(("int", int), ("float", float), ("complex", complex), ("index", operator.index)),
    *(("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)),
    *(("hash", hash), ("repr", repr), ("str", str)),
):
    setattr(Number, f"__{_name}__", _read(_how))
