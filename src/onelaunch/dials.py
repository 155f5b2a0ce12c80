"""What an optimizer's step in a capture reads from `param_groups`, turned at later calls."""

from __future__ import annotations

import math
import operator
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onelaunch.driver.driver import Capture, Dial, Driver, Graph, Pool
from onelaunch.errors import CaptureError
from onelaunch.hyperparameters import Book, unmistakable
from onelaunch.names import names_read
from onelaunch.observe import Observer
from onelaunch.optimizers import parameters_of, refusal, settle, watching_steps
from onelaunch.slots import Slot
from onelaunch.source import is_users
from onelaunch.state import Change, Walk

_LARGEST = 4
"""Elements along each dimension of a parameter of a trial."""


class Place(NamedTuple):
    """Where a number of an optimizer is: ``group[key]``, or an item of the tuple there."""

    group: dict[str, Any]
    key: str
    item: int | None

    def read(self) -> Any:
        value = self.group[self.key]
        return value if self.item is None else value[self.item]


Reached = frozenset[tuple[int, str, int | None]]
"""(number of a group, key, item) of numbers that recorded kernels hold."""


def _places(group: dict[str, Any], without: Collection[str]) -> list[Place]:
    """The numbers of a group that could be turned. Zero is a branch of its own for all but the
    learning rate, with which schedules begin and end."""
    places: list[Place] = []
    for key, value in group.items():
        if key in without or key == "params":
            continue
        if _turns(value) or (key == "lr" and type(value) in (int, float) and math.isfinite(value)):
            places.append(Place(group, key, None))
        elif type(value) is tuple and all(map(_is_float, value)):
            places += [Place(group, key, i) for i, part in enumerate(value) if _turns(part)]
    return places


def _is_float(value: Any) -> bool:
    return type(value) is float


def _turns(value: Any) -> bool:
    return type(value) is float and value != 0 and math.isfinite(value)


@dataclass(slots=True)
class Steps:
    """The optimizer steps of one capture.

    Args:
        kept: the keys of an optimizer's groups whose numbers stay constants of the recording.
        on_cuda: torch refuses there a step that is not marked capturable, even a fused one.
    """

    kept: Callable[[Optimizer], frozenset[str]] = lambda _: frozenset()
    on_cuda: bool = False
    optimizers: list[Optimizer] = field(default_factory=lambda: cast(list[Optimizer], []))
    book: Book = field(default_factory=Book)
    places: dict[tuple[int, str, int | None], tuple[Place, Any]] = field(
        default_factory=lambda: cast(Any, {})
    )
    _before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = field(
        default_factory=lambda: cast(Any, [])
    )
    """Groups, with what was in them, and what they got for the step."""
    stepped: dict[int, list[Tensor]] = field(default_factory=lambda: cast(Any, {}))
    """id of an optimizer -> those of its parameters that had a gradient as it stepped."""
    _counts: dict[int, list[object]] = field(default_factory=lambda: cast(Any, {}))
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: put numbers that can be told in the place of its own."""
        error = refusal(optimizer)
        if error is not None:
            raise error
        settle(optimizer)
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        self._counts[id(optimizer)] = _counters(optimizer)
        self.stepped[id(optimizer)] = [p for p in parameters_of(optimizer) if p.grad is not None]
        for group in optimizer.param_groups:
            before = dict(group)
            if self.on_cuda and group.get("fused") and not group.get("capturable"):
                group["capturable"] = True
            self._swap(group, self.kept(optimizer))
            self._before.append((group, before, dict(group)))

    @contextmanager
    def watched(self, observer: Observer) -> Generator[None]:
        """Around the callable: see its optimizers step."""

        def before(optimizer: Optimizer) -> None:
            try:
                self.before(optimizer)
            except CaptureError as error:
                observer.refused = observer.refused or error  # the callable may catch it
                raise

        try:
            with watching_steps(before, self.after):
                yield
        finally:
            self.restore()

    def relied_on(
        self,
        slots: Sequence[tuple[Slot, object]],
        before: Walk,
        writes: Callable[[Tensor], bool],
    ) -> list[tuple[Slot, object]]:
        """`slots` without the numbers that each call reads, and without what only schedulers read,
        and optimizers that do not step here: not what the callable's own code names.

        Args:
            writes: whether the call wrote a tensor's memory.
        """
        turned = {(group, key) for group, key, _ in self.places}
        # What is in an optimizer's state is as seldom written as an attribute of it.
        states = {id(o.state): o for o in self.optimizers}
        states.update((id(inner), o) for o in self.optimizers for inner in o.state.values())
        idle: dict[int, frozenset[str]] = {}
        for _, value in before.held.values():
            if not isinstance(value, Optimizer) or any(value is o for o in self.optimizers):
                continue
            if not any(map(writes, parameters_of(value))):
                named = keys_read(before, value) | {"params"}
                idle.update((id(group), named) for group in value.param_groups)
        named = keys_read(before)

        def counts(slot: Slot) -> bool:
            way: Slot | None = slot
            while way is not None:
                if isinstance(way.owner, LRScheduler) and way.key not in named:
                    return False
                if way.id in turned or way.key not in idle.get(id(way.holder), (way.key,)):
                    return False
                way = way.via
            return True

        return [
            (slot._replace(owner=states.get(id(slot.holder), slot.owner)), value)
            for slot, value in slots
            if counts(slot)
        ]

    def refuse_schedule(self, found: Sequence[Change]) -> None:
        """Refuse a callable that itself changes the numbers of an optimizer that steps in it."""
        groups = {id(g): type(o).__name__ for o in self.optimizers for g in o.param_groups}
        for slot, old, new in found:
            if isinstance(slot.owner, LRScheduler):
                name = type(slot.owner).__name__
                raise CaptureError("OL122", f"the callable steps a schedule, {name}")
            if id(slot.holder) in groups and type(new) in (float, int, tuple):
                kind = groups[id(slot.holder)]
                what = f"the callable sets `{slot.key}` of {kind} from {old} to {new}"
                raise CaptureError("OL122", what)

    def _swap(self, group: dict[str, Any], kept: Collection[str]) -> None:
        for place in _places(group, kept):
            at = (id(group), place.key, place.item)
            if at not in self.places:
                number = self.book.number(unmistakable(float(place.read()), self._random))
                self.places[at] = (place, number)
            number = self.places[at][1]
            if place.item is None:
                group[place.key] = number
            else:
                parts = list(group[place.key])
                parts[place.item] = number
                group[place.key] = tuple(parts)

    def after(self, optimizer: Optimizer) -> None:
        """It has stepped: put its own numbers back."""
        counts = any(_differ(group, given) for group, _, given in self._before)
        self.restore()
        if counts or _counters(optimizer) != self._counts.pop(id(optimizer), None):
            kind = type(optimizer).__name__
            raise CaptureError("OL120", f"{kind} counts its steps in Python")

    def restore(self) -> None:
        """Put every optimizer's own numbers back; also after a step that raised."""
        for group, before, _ in reversed(self._before):
            group.clear()
            group.update(before)
        self._before.clear()


def _differ(group: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a step has put other numbers into its group."""
    numbers = {key: value for key, value in group.items() if isinstance(value, int | float)}
    return any(
        value is not given.get(key) and repr(value) != repr(given.get(key))
        for key, value in numbers.items()
    )


def _counters(optimizer: Optimizer) -> list[object]:
    """The numbers that an optimizer keeps in Python."""
    return [
        value
        for state in optimizer.state.values()
        for value in (cast(dict[str, object], state).values() if isinstance(state, dict) else ())
        if isinstance(value, int | float)
    ]


def keys_read(before: Walk, optimizer: Optimizer | None = None) -> frozenset[str]:
    """What the user's code names, that of the optimizer's own class apart."""
    kinds = () if optimizer is None else type(optimizer).__mro__
    own = {id(member) for kind in kinds for member in vars(kind).values()}
    names: set[str] = set()
    for fn in before.functions:
        inner = getattr(fn, "__wrapped__", fn)
        if is_users(fn.__code__.co_filename) and id(fn) not in own and id(inner) not in own:
            names |= names_read(fn.__code__)
    return frozenset(names)


class Dials:
    """The numbers of a recording's optimizers, and the places in it that hold what they lead to.

    Attributes:
        keys: (id of a group, key) of each number that is turned and not guarded.
    """

    def __init__(self, steps: Steps, dial: Dial | None, terms: Sequence[int]) -> None:
        self._places = [place for place, _ in steps.places.values()]
        self._book, self._dial, self._terms = steps.book, dial, terms
        self.keys = {(id(place.group), place.key) for place in self._places}
        self._values: list[float] | None = None
        groups = {id(place.group): place.group for place in self._places}
        self._fast: list[list[Any]] = []
        for group in groups.values():
            keys = list(dict.fromkeys(p.key for p in self._places if p.group is group))
            # Of one key the getter would give the value itself.
            self._fast.append([itemgetter(*keys, keys[0]), group, None])

    @staticmethod
    def none() -> Dials:
        """Those of a recording without optimizers."""
        return Dials(Steps(), None, ())

    def reached(self, optimizers: Sequence[Optimizer]) -> Reached:
        """Which numbers some recorded kernel holds, or what was computed from them."""
        assert self._dial is not None
        leaves = {leaf for i in self._dial.found for leaf in self._book.leaves(self._terms[i])}
        groups = {id(g): i for o in optimizers for i, g in enumerate(o.param_groups)}
        places = [self._places[leaf] for leaf in leaves]
        return frozenset(
            (groups[id(p.group)], p.key, p.item) for p in places if id(p.group) in groups
        )

    def current(self) -> bool:
        """Have the recording use the numbers of now; whether it can.

        0.2 us for each group whose numbers are the objects of the last call; where one has
        changed, 0.2 us for each term and 1 us for each kernel.
        """
        try:
            for read, group, seen in self._fast:
                if seen is None or not all(map(operator.is_, read(group), seen)):
                    return self._turn()
        except LookupError:
            return False
        return True

    def _turn(self) -> bool:
        seen = [read(group) for read, group, _ in self._fast]
        values = [place.read() for place in self._places]
        if not all(type(value) in (float, int) for value in values):
            return False
        values = [float(value) for value in values]
        if values != self._values:
            terms = self._book.evaluate(values)
            if terms is None:
                return False
            assert self._dial is not None
            self._dial.write([terms[i] for i in self._terms])
            self._values = values
        for entry, now in zip(self._fast, seen, strict=True):
            entry[2] = now
        return True


def every_key(optimizer: Optimizer) -> frozenset[str]:
    """All keys of an optimizer's groups."""
    return frozenset(key for group in optimizer.param_groups for key in group)


def dials(steps: Steps, graph: Graph) -> Dials | None:
    """What turns the numbers of a recording; None where they cannot be found in it."""
    terms = _varying(steps)
    dial = graph.dial([steps.book.values[i] for i in terms])
    return None if dial is None else Dials(steps, dial, terms)


def _varying(steps: Steps) -> list[int]:
    """The terms that other numbers change: ``lr * 0`` is not one."""
    book, generator = steps.book, random.Random(1)
    numbers = [float(place.read()) for place, _ in steps.places.values()]
    others = book.evaluate([unmistakable(number, generator) for number in numbers])
    if others is None:
        return list(range(len(book.values)))
    return [i for i, (a, b) in enumerate(zip(book.values, others, strict=True)) if a != b]


# Whether that is right, tried on parameters of a few elements.


def constants(
    driver: Driver,
    device: torch.device,
    pool: Pool,
    optimizer: Optimizer,
    stepped: Sequence[Tensor],
    kept: Collection[str],
) -> tuple[frozenset[str], Reached]:
    """The keys, `kept` among them, whose numbers a recording of such an optimizer cannot turn; and
    which of the others some kernel holds.

    The others were tried: a recorded step of a small optimizer of this kind, its numbers turned, is
    eager's bit for bit. It is not where the step computes with a number in ways that cannot be
    followed (`math.sqrt`, a tensor made of one). Costs a small capture, and one more for each key
    where not all can be turned.
    """
    keys = {place.key for group in optimizer.param_groups for place in _places(group, kept)}

    def tried(without: Collection[str]) -> Reached | None:
        try:
            trial = _miniature(optimizer, stepped, device)
            return _proven(driver, device, pool, trial, {*kept, *without})
        except CaptureError:
            return None

    reached = tried(())
    if reached is not None:
        return frozenset(kept), reached
    left = {key for key in keys if tried(keys - {key}) is None}
    reached = tried(left)
    if reached is None:
        return frozenset({*kept, *keys}), frozenset()
    return frozenset({*kept, *left}), reached


def _proven(
    driver: Driver,
    device: torch.device,
    pool: Pool,
    trial: Optimizer,
    kept: Collection[str],
) -> Reached | None:
    settle(trial)

    def twice() -> None:
        trial.step()
        trial.step()

    driver.warmup(twice, device)
    tensors = _tensors(trial)
    saved = [t.detach().clone() for t in tensors]
    steps = Steps(lambda _: frozenset(kept), device.type == "cuda")

    def body(capture: Capture) -> None:
        steps.before(trial)
        try:
            trial.step()
        finally:
            steps.restore()

    graph, _ = driver.capture(body, pool)
    try:
        found = dials(steps, graph)
        generator = random.Random(2)
        for place, _ in steps.places.values():
            _write(place, unmistakable(float(place.read()), generator))
        if found is None or not found.current():
            return None
        graph.launch((), ())
        turned = [t.detach().clone() for t in tensors]
        _put_back(tensors, saved)
        driver.warmup(trial.step, device)
        return found.reached((trial,)) if all(map(_same, turned, tensors)) else None
    finally:
        graph.reset()


def _miniature(optimizer: Optimizer, stepped: Sequence[Tensor], device: torch.device) -> Optimizer:
    """An optimizer of the same class and options over parameters of its own, like those of
    `stepped`: by now the callable may have dropped their gradients."""
    counted = {id(p) for p in stepped}
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    vars(trial).pop("step", None)  # a scheduler's wrapper, bound to the original
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(trial)[name] = type(value)()
    vars(trial)["state"] = defaultdict(dict)
    generator = torch.Generator().manual_seed(0)

    def like(t: Tensor) -> torch.nn.Parameter:
        made = torch.nn.Parameter(_random(t, generator).to(device))
        made.grad = _random(t, generator).to(device)
        return made

    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kinds = {(p.dtype, p.dim()): p for p in group["params"] if id(p) in counted}
        groups.append({**group, "params": [like(p) for p in kinds.values()]})
    vars(trial)["param_groups"] = groups
    return trial


def _random(t: Tensor, generator: torch.Generator) -> Tensor:
    shape = [min(n, _LARGEST) for n in t.shape]
    return torch.randn(shape, generator=generator).to(t.dtype)


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    params = parameters_of(optimizer)
    states = [s for p in params for s in optimizer.state[p].values() if isinstance(s, Tensor)]
    return [*params, *states, *(p.grad for p in params if p.grad is not None)]


def _put_back(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, before in zip(tensors, saved, strict=True):
            t.copy_(before)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.detach().cpu(), b.detach().cpu()))


def _write(place: Place, value: float) -> None:
    if place.item is None:
        place.group[place.key] = value
    else:
        parts = list(place.group[place.key])
        parts[place.item] = value
        place.group[place.key] = tuple(parts)
