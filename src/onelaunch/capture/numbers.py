"""Numbers that differ from call to call: stand-ins for them in a capture.

A number that enters kernels as a scalar (``x * beta``) differs in nothing but some bytes of their
arguments, which each launch can write. So in the capture an annealed attribute, an argument that is
a number, or a learning rate is a `Number`: it notes what is computed from it and how comparisons
come out. Each operation gets a unique float in place of the stand-in, and the driver finds the
kernel argument by that float. Any other read of the value makes the number a constant.

So is a number that the callable moves on. An integer (``cache.length += 1``) is added to and
compared, a float (``self.epsilon *= 0.99``) is computed with, and each replay moves it on. Whatever
else is done with it, the recording serves its one value.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from onelaunch.call.numbers import is_number, with_numbers
from onelaunch.call.tree import Constant, Tree
from onelaunch.capture.number import Node, Number, node_of
from onelaunch.capture.scalar_trace import ScalarTrace, Step, Term, unmistakable
from onelaunch.driver.aten import is_pointwise, leaves, mapped
from onelaunch.errors import CaptureSignal
from onelaunch.optimizers.steps import NumberPlace
from onelaunch.state.slots import Slot

_OTHERWISE = 0.37
"""The scalar from which that of a use is made where the number itself is 0, infinite or NaN."""

_FILLS = frozenset(
    f"aten::{name}"
    for name in ("fill", "fill_", "full", "full_like", "masked_fill_", "new_full", "scalar_tensor")
)
_LIST_OPERATIONS = ("aten::_foreach_", "aten::_fused_")
"""Pointwise operations over lists of tensors: those of optimizers."""
_FUSED = "aten::_fused_"
"""Operations that take numbers as floats, with no other operation around them."""
_MOST_ELEMENTS = 2**20
"""Elements of an operation that is none of torch's, beyond which it is not tried."""
_BY_VALUE = ("aten::pow", "aten::_foreach_pow", "aten::float_power")
"""Operations whose kernels are chosen by the value of the exponent."""
_BASE_OPERATIONS = ("aten::pow.Scalar", "aten::_foreach_pow.ScalarAndTensor")
"""Powers whose number is the base."""
_SIZES = (64, 3, 2)
"""The most elements of an example in the last dimension, the one before it, and others."""


class NumbersToFollow(NamedTuple):
    """The numbers that a capture is to follow.

    Attributes:
        arguments: their positions among the numbers of the arguments; see `call.numbers`.
        slots: places of others that the caller varies.
        incremented: places of numbers that the callable moves on.
    """

    arguments: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    incremented: tuple[Slot, ...] = ()

    def names(self) -> list[object]:
        """Return the positions, and the ids of the slots."""
        return [*self.arguments, *(slot.id for slot in (*self.slots, *self.incremented))]

    def without(self, escaped: Sequence[object]) -> NumbersToFollow:
        """Return those that are not among `escaped`: positions, and ids of slots."""
        slots = (
            tuple(s for s in part if s.id not in escaped) for part in (self.slots, self.incremented)
        )
        return NumbersToFollow(tuple(i for i in self.arguments if i not in escaped), *slots)

    def __bool__(self) -> bool:
        return bool(self.arguments or self.slots or self.incremented)


class Unfollowed(CaptureSignal):
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
    """The facts about a tensor of an operation on which the choice of its kernel depends.

    Attributes:
        shape: its shape, but for sizes that make no difference.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(t: Tensor, sizes: Literal["any", "most", "all"]) -> Example:
        """Return the facts about a tensor.

        Args:
            sizes: "any" if the sizes make no difference, "all" if each does.
        """
        most = list(itertools.islice(itertools.chain(_SIZES, itertools.repeat(2)), t.dim()))[::-1]
        shapes = {"any": most, "most": map(min, t.shape, most), "all": t.shape}
        return Example(tuple(shapes[sizes]), t.dtype)


class Operation(NamedTuple):
    """An operation that takes numbers as scalars.

    Attributes:
        func: the operation.
        args, kwargs: its arguments: tensors are `Example`s, and the numbers `Term`s.
        kinds: the type of each of these numbers, in order: float or int.
    """

    func: Any
    args: Any
    kwargs: Any
    kinds: tuple[type, ...]

    def key(self) -> str:
        """Return a text that is equal for operations that are proven together."""
        parts = mapped((self.args, self.kwargs), lambda v: "number" if type(v) is Term else v)
        return repr((str(self.func), parts, self.kinds))


class ScalarUse(NamedTuple):
    """One scalar of an operation of the run.

    Attributes:
        term: the number's position in the trace.
        scalar: the float that the operation got in its place.
        operation: the position of the operation.
        kind: the type that the number must keep; None if any number gives the same kernel.
        chooses: True if the operation may take another kernel by its value.
    """

    term: int
    scalar: float
    operation: int
    kind: type | None
    chooses: bool


@dataclass(slots=True, eq=False)
class NumberStandIns:
    """The numbers that one run of a capture follows.

    Attributes:
        following: the places of numbers: arguments first, then slots, those that the callable
            moves on last, in the order of the trace's leaves.
        groups: the places of the others, in optimizers' groups, which the run shows.
        device: the recording's device.
        seed: of the scalars of uses.
        kinds: the type that each of the numbers must keep; None: any number will do.
        arguments: the numbers among the arguments of the call.
        uses, operations: the scalars of the run's operations.
        fixed: positions of numbers that the callable moves on, if the recording serves one value.
        steps: position of a number that the callable moves on -> the amount that it added to an
            integer, or what it computed from a float.
        entered_as_tensor: True if the device got a number as a tensor.
    """

    following: NumbersToFollow
    device: torch.device
    seed: int = 0
    trace: ScalarTrace = field(default_factory=ScalarTrace)
    groups: list[NumberPlace] = field(default_factory=list)
    kinds: list[type | None] = field(default_factory=list)
    uses: list[ScalarUse] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    arguments: list[float] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    steps: dict[int, Step] = field(default_factory=dict)
    entered_as_tensor: bool = False
    _stepping: Callable[[], bool] = bool
    _escaped: set[int] = field(default_factory=set)
    _nodes: list[ref[Node]] = field(default_factory=list)
    _in_groups: dict[object, Number] = field(default_factory=dict)
    _counted: int = 0
    """The position of the first of the numbers that the callable moves on."""
    _handed: dict[float, Node] = field(default_factory=dict)
    """The floats that torch has asked for in a step, which its next operation has to get."""
    _shared: dict[object, float] = field(default_factory=dict)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @staticmethod
    def none() -> NumberStandIns:
        """Return the numbers of a run that follows none."""
        return NumberStandIns(NumbersToFollow(), torch.device("cpu"))

    def __bool__(self) -> bool:
        return bool(self.following or self.groups)

    @property
    def varied(self) -> bool:
        """True if there are numbers that the caller varies."""
        return bool(self.following.arguments or self.following.slots or self.groups)

    def names(self) -> list[object]:
        """Return the positions of arguments, the ids of slots, and the ids of places in groups."""
        return [*self.following.names(), *(place.id for place in self.groups)]

    # Before and after the run.

    def with_stand_ins(self, tree: Tree) -> Tree:
        """Return the tree of the call's arguments, with stand-ins for the numbers among them."""

        def change(position: int, constant: Constant) -> Constant:
            if position not in self.following.arguments:
                return constant
            value: Any = constant.value
            self.arguments.append(value)
            return Constant(self._leaf(value, type(value)))

        return with_numbers(tree, change) if self.following.arguments else tree

    def begin(self, stepping: Callable[[], bool]) -> None:
        """Put stand-ins into the slots.

        Args:
            stepping: returns whether an optimizer steps.
        """
        self._stepping = stepping
        for slot in self.following.slots:
            value = slot.read()
            # A slot that has no number any more keeps its place among the leaves.
            number = value if is_number(value) else 0.0
            leaf = self._leaf(number, type(number))
            if is_number(value):
                slot.write(leaf)
        self._counted = len(self.kinds)
        for slot in self.following.incremented:
            value: Any = slot.read()
            term = self.trace.leaf(value)
            self.kinds.append(type(value))
            if type(value) in (int, float):
                slot.write(self.stand_in(term, value, 0 if type(value) is int else None))
            else:
                self.fixed.add(term)

    def in_group(self, place: NumberPlace) -> Number:
        """Return the stand-in for a number of an optimizer, while that steps."""
        number = self._in_groups.get(place.id)
        if number is None:
            number = self._in_groups[place.id] = self._leaf(place.read(), None)
            self.groups.append(place)
        return number

    def end(self) -> None:
        """Put plain numbers back."""
        for index, slot in enumerate(self.following.slots, len(self.following.arguments)):
            value = slot.read()
            if type(value) is Number:
                if value.node.term != index:
                    self._escaped.add(index)
                slot.write(value.node.value)
            else:
                self._escaped.add(index)
        for index, slot in enumerate(self.following.incremented, self._counted):
            value = slot.read()
            if type(value) is Number:
                term, moved = value.node.term, 0 if value.node.term == index else value.node.moved
                if self.trace.leaves(term) != {index}:
                    self._escaped.add(index)
                self.steps[index] = self.trace.function(term) if moved is None else moved
                slot.write(value.node.value)
        self._in_groups.clear()
        self._take_handed(())

    def surviving(self) -> list[Node]:
        """Return the insides of stand-ins that outlive the run: somebody keeps them."""
        return [node for ref in self._nodes if (node := ref()) is not None]

    def escaped(self) -> list[object]:
        """Return the `names` of numbers that the run used in ways that no recording follows."""
        self._escaped.update(*(self.trace.leaves(node.term) for node in self.surviving()))
        names = self.names()
        return [names[leaf] for leaf in sorted(self._escaped)]

    def _leaf(self, value: Any, kind: type | None) -> Number:
        self.kinds.append(kind)
        return self.stand_in(self.trace.leaf(value), value)

    def stand_in(self, term: int, value: Any, moved: int | None = None) -> Number:
        number = Number(Node(self, term, value, moved))
        self._nodes.append(ref(number.node))
        return number

    # Of numbers that the callable moves on.

    def counted(self) -> dict[tuple[int, object], tuple[Slot, Step | None]]:
        """Return id of a slot -> the slot of a number that each replay moves on, and the step.
        The step is None if the run has stored another number."""
        slots = enumerate(self.following.incremented, self._counted)
        return {s.id: (s, self.steps.get(i)) for i, s in slots if i not in self.fixed}

    def incremented(self, node: Node, amount: int) -> Number:
        """Return a number that is moved on."""
        assert node.moved is not None
        (leaf,) = self.trace.leaves(node.term)
        moved, value = node.moved + amount, node.value + amount
        term = self.trace.term(operator.add, Term(leaf), moved, value) if moved else leaf
        return self.stand_in(term, value, moved)

    def as_float(self, node: Node) -> Number:
        """Return a number as a float, which a kernel can hold."""
        value = float(node.value)
        return self.stand_in(self.trace.term(operator.mul, Term(node.term), 1.0, value), value)

    def fix_kinds(self, term: int) -> None:
        """Note that the run asked for the type of a number, which each call must then keep."""
        for leaf in self.trace.leaves(term):
            self.kinds[leaf] = type(self.trace.leaf_values[leaf])

    def escape(self, term: int) -> None:
        """Note that the numbers that a term is computed from are not followed. If the callable
        moves a number on, the recording then serves one value."""
        counted = range(self._counted, self._counted + len(self.following.incremented))
        leaves = self.trace.leaves(term)
        self.fixed |= leaves & {*counted}
        self._escaped |= leaves - {*counted}

    def give_up(self, term: int) -> None:
        """Note that the run told the numbers of a term from their stand-ins, so that it has to be
        repeated without."""
        self._escaped |= self.trace.leaves(term)

    # In the operations of the run.

    def handed(self, node: Node) -> float:
        """Return the float that torch gets for an argument that takes no stand-in."""
        if not self._stepping():
            return float(node.plain())
        plain = self._unmistakable(node)
        self._handed[plain] = node
        return plain

    def _take_handed(self, nodes: Iterable[Node]) -> None:
        """Have all floats that were handed out escape, but for these."""
        for node in self._handed.values():
            if all(node is not other for other in nodes):
                self.escape(node.term)
        self._handed = {}

    def _unmistakable(self, node: Node) -> float:
        usual = math.isfinite(node.value) and 1e-20 < abs(node.value) < 1e20
        return unmistakable(float(node.value) if usual else _OTHERWISE, self._random)

    def placed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of an operation with a plain number for each stand-in; None if it
        has none. A number that the operation takes as a scalar is found again in its kernel."""
        if not self.kinds:
            return None
        every = list(leaves((args, kwargs)))
        whole = func._schema.name.startswith(_FUSED) or func.namespace != "aten"
        handed = self._handed if whole else {}

        def inside(value: Any) -> Node | None:
            return handed.get(value) if type(value) is float else node_of(value)

        nodes = [node for value in every if (node := inside(value)) is not None]
        self._take_handed(nodes)
        if not nodes:
            return None
        tensors = [value for value in every if isinstance(value, Tensor)]
        floats = bool(tensors) and all(t.dtype.is_floating_point for t in tensors)
        if _is_pointwise(func) and tensors and not any(t.numel() for t in tensors):
            plain = functools.partial(_plain, inside, lambda node: node.value)  # no kernel runs
            return mapped(args, plain), mapped(kwargs, plain)
        if not self._is_scalar(func, every, tensors) or not (
            # An int would make the result an integer, or take part in integers' arithmetic.
            floats or all(type(node.value) is float for node in nodes)
        ):
            plain = functools.partial(_plain, inside, Node.plain)
            return mapped(args, plain), mapped(kwargs, plain)
        operation = _operation(func, args, kwargs, inside)
        wrapped = _taken_as_tensors(func, args, kwargs)
        stepping, number = self._stepping(), len(self.operations)
        # One for all parameters: of many floats, one would be half an address by chance.
        shared = self._shared if stepping else {}
        key, place = operation.key(), 0
        self.operations.append(operation)

        def scalar(value: Any) -> Any:
            nonlocal place
            node = inside(value)
            if node is None:
                return value
            use = key, place, node.term
            place += 1
            exact = shared.get(use) or self._unmistakable(node)
            shared[use] = exact
            chooses = not stepping and all(node is not other for other in wrapped)
            chooses &= func._schema.name not in _FILLS
            kind = None if floats else type(node.value)
            self.uses.append(ScalarUse(node.term, exact, number, kind, chooses))
            return exact

        return mapped(args, scalar), mapped(kwargs, scalar)

    def _is_scalar(self, func: Any, every: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        """Return whether an operation passes its numbers as scalars to one and the same kernel."""
        name: str = func._schema.name
        devices = [t.device for t in tensors]
        devices += [torch.device(v) for v in every if isinstance(v, torch.device)]
        return (
            (_is_pointwise(func) or name in _FILLS or self._is_small_step(func, tensors))
            and torch.Tag.nondeterministic_seeded not in func.tags
            and (not name.startswith(_BY_VALUE) or func.name() in _BASE_OPERATIONS)
            and not any(a.is_out for a in func._schema.arguments)
            and bool(devices)
            and all(device.type == self.device.type for device in devices)
            and not any(t.dtype.is_complex for t in tensors)
        )

    def _is_small_step(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether an operation is that of a step, none of torch's, and can be tried: by
        floats of any values."""
        return (
            self._stepping()
            and func.namespace != "aten"
            and all(t.dtype.is_floating_point for t in tensors)
            and sum(t.numel() for t in tensors) <= _MOST_ELEMENTS
        )


def _is_pointwise(func: Any) -> bool:
    return is_pointwise(func) or func._schema.name.startswith(_LIST_OPERATIONS)


_Inside = Callable[[Any], Node | None]


def _operation(func: Any, args: Any, kwargs: Any, inside: _Inside) -> Operation:
    """Return an operation with an example of each tensor; of lists, with those that differ."""
    of_lists = func._schema.name.startswith(_LIST_OPERATIONS)
    shapes = {value.shape for value in leaves((args, kwargs)) if isinstance(value, Tensor)}
    sizes = "any" if of_lists or len(shapes) == 1 else "most"
    sizes = sizes if func.namespace == "aten" else "all"

    def described(value: Any) -> Any:
        node = inside(value)
        if node is not None:
            return Term(node.term)
        return Example.of(value, sizes) if isinstance(value, Tensor) else value

    def differing(lists: Sequence[Any]) -> list[Any]:
        size = max((len(v) for v in lists if isinstance(v, list)), default=0)
        long = [i for i, v in enumerate(lists) if isinstance(v, list) and len(v) == size]
        columns = {repr(column): column for column in zip(*(lists[i] for i in long), strict=True)}
        rows = dict(zip(long, map(list, zip(*columns.values(), strict=True)), strict=False))
        return [rows.get(i, v) for i, v in enumerate(lists)]

    given = mapped(args, described), mapped(kwargs, described)
    if of_lists:
        few = differing([*given[0], *given[1].values()])
        given = tuple(few[: len(args)]), dict(zip(kwargs, few[len(args) :], strict=True))
    values = {node.term: node.value for v in leaves((args, kwargs)) if (node := inside(v))}
    terms = [v.index for v in leaves(given) if type(v) is Term]
    return Operation(func, *given, tuple(int if type(values[t]) is int else float for t in terms))


def _plain(inside: _Inside, plain: Callable[[Node], Any], value: Any) -> Any:
    node = inside(value)
    return value if node is None else plain(node)


def _taken_as_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Node]:
    """Return the numbers that stand where an operation takes a tensor, or makes one of them."""
    nodes: list[Node] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        node = node_of(value)
        is_tensor = isinstance(argument.type, torch.TensorType) or argument.name == "other"
        if node is not None and is_tensor:
            nodes.append(node)
    return nodes
