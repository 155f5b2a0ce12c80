"""Numbers that each call reads: the proof that a recording follows them, and the reading.

The kernels of a recording are eager's, and so are its results, if its scalars are all that depends
on a number. That is tried with each operation that takes one: recorded by itself, with other
numbers written into it, among them those by which kernels are chosen, it must give eager's bits.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from onelaunch.call.numbers import number_paths
from onelaunch.call.tree import Tree
from onelaunch.capture.numbers import Example, NumberStandIns, Operation
from onelaunch.capture.scalar_trace import Term, unmistakable
from onelaunch.driver.aten import mapped, tensors
from onelaunch.driver.protocol import (
    Ambiguities,
    AmbiguousMatch,
    DevicePool,
    Driver,
    Graph,
    ScalarPatch,
)
from onelaunch.driver.select import preserved_random_state
from onelaunch.errors import CaptureError
from onelaunch.optimizers.capturable import is_real
from onelaunch.state.host_values import bytes_of
from onelaunch.state.slots import Slot
from onelaunch.watch.difference import RunDifference
from onelaunch.watch.ledger import Ledger

_C: Any = torch._C

SEEDS = 4
"""Number of sets of scalars that are tried: one may equal half an address, or another number."""

_LARGEST = torch.finfo(torch.float32).max
EXACT = 2**53
"""The largest numbers that are followed: torch refuses larger floats as some scalars, also where it
takes their reciprocals, and beyond 2**53 an int is no float."""

_USUAL: dict[type, tuple[float, ...]] = {
    float: (1e-38, -1e-12, 7.25e5, -3e38, 1 / 3, -0.7182818),
    int: (5, -16, 1001, 2**24 + 1, -(2**40) - 1),
}
"""Numbers that every kernel takes alike."""
_SPECIAL: dict[type, tuple[float, ...]] = {
    float: (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0, -2.0, 3.0, 0.5, -0.5),
    int: (0, 1, -1, 2, -2, 3),
}
"""Numbers for which an operation may take another kernel."""
_MOST_SPECIAL = 7
"""The number of special numbers that are tried where an operation takes several numbers."""
_CHOOSING = frozenset((0.0, 1.0, -1.0))
"""Numbers that get recordings of their own, whatever a trial says, as a kernel may skip a product
by them. An operation that also takes a tensor of one element there is exempt."""
_ELEMENTS = (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan)
"""Elements for which a kernel that skips a product by 0 or 1 gives other bits."""

_REFUSALS = (RuntimeError, ValueError, TypeError, OverflowError)
"""The errors that eager raises for a number that it refuses."""

Excluded = frozenset[float | None]
"""Numbers for which a recorded operation gives other bits than eager; None is NaN."""


@dataclass(slots=True, eq=False)
class Ambiguous:
    """The places that were ambiguous, and those confirmed since, by two stand-ins found there."""

    latest: Ambiguities = frozenset()
    confirmed: Ambiguities = frozenset()

    def add(self, error: AmbiguousMatch) -> None:
        self.confirmed |= self.latest & error.places
        self.latest = error.places


@dataclass(slots=True, eq=False)
class NumberTrials:
    """The results of trials for the captures of one call."""

    seed: int = 0
    """Seed of the scalars."""
    _ambiguities: Ambiguous = field(default_factory=Ambiguous)

    @property
    def exhausted(self) -> bool:
        """True after as many sets of scalars as are tried."""
        return self.seed >= SEEDS

    def follow(
        self,
        driver: Driver,
        device: torch.device,
        pool: DevicePool,
        numbers: NumberStandIns,
        graph: Graph,
    ) -> FollowedNumbers | None:
        """Return the followed numbers of a recording; None if its scalars are not all found, so
        that the capture is to be repeated with others. Numbers on which an operation depends in
        another way escape."""
        excluded: list[Excluded] = []
        for number, operation in enumerate(numbers.operations):
            terms = [use.term for use in numbers.uses if use.operation == number]
            proven = _proven(driver, device, pool, operation)
            if proven is None:
                for term in terms:
                    numbers.give_up(term)
                return None
            excluded += [proven] * len(terms)
        self.seed += 1
        scalars = [use.scalar for use in numbers.uses]
        patch = None
        if scalars:
            try:
                patch = graph.scalar_patch([*dict.fromkeys(scalars)], self._ambiguities.confirmed)
            except AmbiguousMatch as error:
                self._ambiguities.add(error)
                return None
            if patch is None or len(patch.held) < len({*scalars}):
                return None
        return FollowedNumbers(numbers, patch, excluded)


class FollowedNumbers:
    """The numbers that each call of a recording reads."""

    def __init__(
        self, numbers: NumberStandIns, patch: ScalarPatch | None, excluded: Sequence[Excluded]
    ) -> None:
        self.slots = numbers.following.slots  # the places of those in state that the caller varies
        self.counted = tuple(slot for slot, _ in numbers.counted().values())
        """The places of numbers that each replay moves on."""
        self.arguments = numbers.following.arguments  # the positions of those among the arguments
        self.keys = {(id(place.group), place.key) for place in numbers.groups}
        """(id of a group, key) of those in optimizers' groups."""
        places = (*self.slots, *self.counted, *numbers.groups)
        self._readers = [place.reader for place in places]
        terms: dict[int, tuple[type | None, Excluded]] = {}
        for use, more in zip(numbers.uses, excluded, strict=True):
            kind, known = terms.get(use.term, (None, frozenset()))
            known |= more | _CHOOSING if use.chooses else more
            terms[use.term] = kind or use.kind, known
        self._any = len(numbers.kinds) > len(numbers.fixed) or patch is not None
        self._computed = numbers.trace.compiled([*terms], numbers.fixed, numbers.kinds)
        self._conditions = list(terms.values())
        """The type that each term in kernels must keep, and the values that do not serve."""
        scalars = {use.scalar: use.term for use in numbers.uses}
        order = [*terms]
        self._order = [order.index(term) for term in scalars.values()]
        self._patch = patch
        of_call = [v for i, v in enumerate(numbers.trace.leaf_values) if i not in numbers.fixed]
        self.serves_own = self._scalars(of_call) is not None
        """True if it serves the numbers of its own call."""
        self._given: tuple[object, ...] = tuple(numbers.arguments)
        self._latest: Sequence[object] | None = None
        self._written = b""

    def names(self) -> set[object]:
        """Return the numbers that the caller varies: positions of arguments, and ids of slots."""
        return {*self.arguments, *(slot.id for slot in self.slots)}

    @property
    def of_state(self) -> bool:
        """True if calls write numbers of their own or of the state into the recording."""
        return bool(self.names()) or (bool(self.counted) and self._patch is not None)

    def at(self, place: Callable[[Slot], Slot]) -> FollowedNumbers:
        """Return a copy that reads its numbers from the slots that `place` returns."""
        other = copy.copy(self)
        other.slots, other.counted = tuple(map(place, self.slots)), tuple(map(place, self.counted))
        other._readers = [slot.reader for slot in (*other.slots, *other.counted)]
        other._latest, other._written = None, b""
        return other

    def shown(self, tree: Tree) -> tuple[str, ...]:
        """Return the names of these numbers, given the tree of the arguments."""
        paths = number_paths(tree) if self.arguments else []
        return (*(paths[i] for i in self.arguments), *(slot.name for slot in self.slots))

    @staticmethod
    def none() -> FollowedNumbers:
        return FollowedNumbers(NumberStandIns.none(), None, ())

    def __bool__(self) -> bool:
        return self._any

    def write_current(self, *arguments: object) -> bool:
        """Write the numbers of a call into the recording; return whether it serves them. 0.1 us for
        each number, if they are the same objects as in the last call; else 0.5 us for each term and
        1 us for each kernel."""
        values, self._given = self._values(arguments), arguments
        if self._patch is None:
            return values is not None and self._computed(*values) is not None
        latest = self._latest
        if latest is not None and values is not None and all(map(operator.is_, values, latest)):
            return True
        scalars = self._scalars(values)
        if scalars is None:
            return False
        packed = struct.pack(f"{len(scalars)}d", *scalars)
        if packed != self._written:
            self._patch.write(scalars)
        self._written, self._latest = packed, values
        return True

    def serves(self, *arguments: object) -> bool:
        """Return whether the recording serves the numbers of a call, and write nothing. Without
        `arguments` those of the latest call count."""
        return self._scalars(self._values(arguments or self._given)) is not None

    def _values(self, arguments: Sequence[Any]) -> Sequence[Any] | None:
        """Return the numbers of a call, or None if one is gone."""
        try:
            return [*arguments, *[read() for read in self._readers]]
        except (LookupError, TypeError):
            return None

    def _scalars(self, values: Sequence[Any] | None) -> list[float] | None:
        terms = None if values is None else self._computed(*values)
        if terms is None:
            return None
        scalars: list[float] = []
        for term, (kind, excluded) in zip(terms, self._conditions, strict=True):
            fits = is_real(term) if kind is None else type(term) is kind
            if not fits or not _is_in_range(term):
                return None
            scalar = float(term)
            if (scalar if scalar == scalar else None) in excluded:
                return None
            scalars.append(scalar)
        return [scalars[place] for place in self._order]


def _is_in_range(value: float) -> bool:
    if type(value) is int:
        return abs(value) <= EXACT
    return not value or not math.isfinite(value) or 1 / _LARGEST <= abs(value) <= _LARGEST


# One operation by itself.


_proofs: dict[object, Excluded] = {}
"""The results of the trials of this process: one of an operation takes some 50 launches."""


def _proven(
    driver: Driver, device: torch.device, pool: DevicePool, operation: Operation
) -> Excluded | None:
    """Return the result of `_tried`, cached by the kernels and torch's flags."""
    kernels = torch._C._dispatch_dump_table(operation.func.name())
    flags = _C._dynamo.guards.GlobalStateGuard().__getstate__()
    key = device, operation.key(), kernels, flags
    if key not in _proofs:
        excluded = _tried(driver, device, pool, operation)
        if excluded is None:
            return None
        _proofs[key] = excluded
    return _proofs[key]


def _tried(
    driver: Driver, device: torch.device, pool: DevicePool, operation: Operation
) -> Excluded | None:
    """Return the numbers that a recording does not serve; None if it follows none."""
    ambiguities = Ambiguous()
    for seed in range(SEEDS):
        # What other threads draw meanwhile would be drawn again.
        kept = preserved_random_state(device) if _may_draw(operation) else nullcontext()
        try:
            with torch.no_grad(), torch._C._DisableAutocast(), kept:
                return _Trial(driver, device, operation, seed).run(pool, ambiguities)
        except AmbiguousMatch as error:
            ambiguities.add(error)
        except (CaptureError, *_REFUSALS):
            return None
    return None


def _may_draw(operation: Operation) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.func.tags


class _Trial:
    """An operation over a few elements, recorded by itself."""

    def __init__(
        self, driver: Driver, device: torch.device, operation: Operation, seed: int
    ) -> None:
        self._driver, self._device, self._operation = driver, device, operation
        generator = torch.Generator("cpu").manual_seed(seed)
        self._random = random.Random(seed)
        given = (operation.args, operation.kwargs)
        self._given: Any = mapped(given, lambda v: self._example(v, generator))
        self._written = tensors(self._given) if operation.func._schema.is_mutable else []
        self._before = [t.clone() for t in self._written]

    def _example(self, value: Any, generator: torch.Generator) -> Any:
        if not isinstance(value, Example):
            return value
        normal = torch.randn(value.shape, generator=generator, device="cpu")
        if value.dtype.is_floating_point and normal.numel() > 2 * len(_ELEMENTS):
            for i in self._random.sample(range(normal.numel()), len(_ELEMENTS)):
                normal.view(-1)[i] = self._random.choice(_ELEMENTS)
        if value.dtype == torch.bool:
            return (normal > 0).to(self._device)
        scaled = normal if value.dtype.is_floating_point else 5 * normal
        return scaled.to(value.dtype).to(self._device)

    def run(self, pool: DevicePool, ambiguities: Ambiguous) -> Excluded | None:
        """Return the numbers for which a recording gives other bits than eager; None if it does so
        for any, or does not hold the numbers. Raises `AmbiguousMatch`: see `Graph.scalar_patch`."""
        stand_ins = [unmistakable(0.61, self._random) for _ in self._operation.kinds]
        self._driver.run_on_capture_stream(lambda: self._called(stand_ins), self._device)
        self._restore()
        graph, result = self._driver.capture(
            lambda _: self._called(stand_ins), pool, draws=_may_draw(self._operation)
        )
        try:
            patch = graph.scalar_patch(stand_ins, ambiguities.confirmed)
            if patch is None or len(patch.held) < len(stand_ins):
                return None
            excluded: set[float | None] = set()
            for numbers, usual in self._numbers():
                if self._is_followed(patch, graph, result, numbers):
                    continue
                if usual:
                    return None
                excluded |= {float(n) if n == n else None for n in numbers}
            return frozenset(excluded)
        finally:
            graph.reset()

    def _is_followed(
        self, patch: ScalarPatch, graph: Graph, result: Any, numbers: Sequence[float]
    ) -> bool:
        """Return whether a launch with these numbers gives eager's bits."""
        self._restore()
        try:
            called = functools.partial(self._called, numbers)
            expected = self._bits(self._driver.run_on_capture_stream(called, self._device))
        except _REFUSALS:
            return False
        self._restore()
        patch.write(list(map(float, numbers)))
        graph.launch((), ())
        return self._bits(result) == expected

    def _numbers(self) -> Iterator[tuple[list[float], bool]]:
        """Return the numbers of each trial, and whether they are numbers like any others."""
        kinds = self._operation.kinds
        for _ in range(4):
            yield [self._any(kind) for kind in kinds], True
        for place in range(max(map(len, _USUAL.values()))):
            numbers = [_USUAL[kind] for kind in kinds]
            yield [n[(place + i) % len(n)] for i, n in enumerate(numbers)], True
        for index, kind in enumerate(kinds):
            for number in _SPECIAL[kind] if len(kinds) == 1 else _SPECIAL[kind][:_MOST_SPECIAL]:
                others = [self._any(other) for other in kinds]
                yield [*others[:index], number, *others[index + 1 :]], False
        if len(kinds) > 1:
            for numbers in zip(*(_SPECIAL[kind] for kind in kinds), strict=False):
                yield list(numbers), False

    def _any(self, kind: type) -> float:
        if kind is int:
            return self._random.randint(4, 10**6) * self._random.choice((1, -1))
        return self._random.gauss(0, 1) * 10 ** self._random.uniform(-3, 3)

    def _called(self, numbers: Sequence[float]) -> Any:
        place = iter(numbers)
        args, kwargs = mapped(self._given, lambda v: next(place) if isinstance(v, Term) else v)
        return self._operation.func(*args, **kwargs)

    def _restore(self) -> None:
        for t, before in zip(self._written, self._before, strict=True):
            t.copy_(before)

    def _bits(self, result: Any) -> list[bytes]:
        return [bytes_of(t.detach().cpu()) for t in (*tensors(result), *self._written)]


@dataclass(slots=True, eq=False)
class PlainRun:
    """A run without stand-ins for numbers, as the baseline of a run with stand-ins."""

    due: bool = False  # True if the next attempt is this run
    ledger: Ledger | None = None  # its operations
    differs: RunDifference | None = None  # its difference from the run before it

    def note(self, ledger: Ledger) -> None:
        self.due, self.ledger, self.differs = False, ledger, ledger.difference
