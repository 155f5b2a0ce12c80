"""Trials on parameters of a few elements: the numbers of an optimizer that can be patched."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.driver.protocol import (
    Ambiguities,
    AmbiguousMatch,
    Capture,
    DevicePool,
    Driver,
    Graph,
)
from onelaunch.driver.select import preserved_random_state
from onelaunch.errors import CaptureError
from onelaunch.optimizers.capturable import is_of_torch, parameters_of, settle
from onelaunch.optimizers.scalars import PatchedScalars, Reached, patched_scalars
from onelaunch.optimizers.steps import NumberPlace, Steps, every_key, keys_read, places_of
from onelaunch.optimizers.traced_float import unmistakable
from onelaunch.state.walk import StateWalk

_SEEDS = 4
"""Number of sets of stand-ins that are tried: one may equal half an address, or another number."""

_ELEMENTS = 4096
_LARGEST = 4
"""Sizes of a trial's parameter: the real ones up to `_ELEMENTS` elements, else at most `_LARGEST`
in each dimension."""

_FACTOR = 0.61
"""Factor for the numbers of a trial: so far from 1 that the results, even signs, must show it."""


def _has_places(steps: Steps, optimizer: Optimizer) -> bool:
    groups = {id(group) for group in optimizer.param_groups}
    return any(group in groups for group, _, _ in steps.places)


@dataclass(slots=True)
class Ambiguous:
    """The places that were ambiguous, and those confirmed since, by two stand-ins found there."""

    latest: Ambiguities = frozenset()
    confirmed: Ambiguities = frozenset()

    def add(self, error: AmbiguousMatch) -> None:
        self.confirmed |= self.latest & error.places
        self.latest = error.places


@dataclass(slots=True)
class ScalarTrials:
    """The results of trials for a recording's optimizers, kept from one attempt to the next."""

    known: dict[Optimizer, tuple[frozenset[str], Reached]] = field(default_factory=dict)
    """See `constants`."""
    seed: int = 0
    """Seed of the stand-in numbers."""
    _before: Steps | None = None
    """Steps of the previous capture, kept until compared with the next one."""
    _ambiguities: Ambiguous = field(default_factory=lambda: Ambiguous())

    def kept(self, before: StateWalk) -> Callable[[Optimizer], frozenset[str]]:
        """Return a function from an optimizer to its keys whose numbers stay constants, as
        known."""

        def kept(optimizer: Optimizer) -> frozenset[str]:
            known = self.known.get(optimizer)
            return keys_read(before, optimizer) if known is None else known[0]

        return kept

    def patch(
        self, driver: Driver, device: torch.device, pool: DevicePool, steps: Steps, graph: Graph
    ) -> PatchedScalars | None:
        """Return the patched scalars of the optimizers that stepped; None if the capture must be
        repeated, because some numbers turned out to be constants."""
        if not steps.places:
            return PatchedScalars.none()
        agree = True
        for optimizer in steps.optimizers:
            if optimizer not in self.known:
                kept = steps.kept(optimizer)
                stepped = steps.stepped[id(optimizer)]
                found = constants(driver, device, pool, optimizer, stepped, kept, self.seed)
                self._learn(optimizer, *found)
                agree = agree and found[0] == kept
        if not agree:
            return None
        patched = None
        try:
            patched = patched_scalars(steps, graph, self._ambiguities.confirmed)
        except AmbiguousMatch as error:
            self._ambiguities.add(error)
        if (
            patched is not None
            and patched.write_current()
            and all(self.known[o][1] <= patched.reached((o,)) for o in steps.optimizers)
        ):
            return patched if self._agrees_twice(steps) else None
        self.seed += 1
        if self.seed < _SEEDS:
            return None
        for optimizer in steps.optimizers:
            self._learn(optimizer, every_key(optimizer))
        return None

    def keep(self, optimizers: Sequence[Optimizer]) -> bool:
        """Make the numbers of optimizers that are not torch's constants from now on. Return whether
        there are any."""
        own = [o for o in optimizers if not is_of_torch(o)]
        for optimizer in own:
            self._learn(optimizer, every_key(optimizer))
        return bool(own)

    def _learn(
        self, optimizer: Optimizer, constants: frozenset[str], reached: Reached = frozenset()
    ) -> None:
        self.known[optimizer] = constants, reached

    def _agrees_twice(self, steps: Steps) -> bool:
        """Return whether two captures show that all numbers in steps that are not torch's are
        traced. If they are not, they are constants from now on."""
        own = [o for o in steps.optimizers if not is_of_torch(o) and _has_places(steps, o)]
        if not own or (self._before is not None and self._before.agree(steps)):
            return True
        if self._before is not None:
            for optimizer in own:
                self._learn(optimizer, every_key(optimizer))
        self._before = None if self._before else steps
        self.seed += 1
        return False


def constants(
    driver: Driver,
    device: torch.device,
    pool: DevicePool,
    optimizer: Optimizer,
    stepped: Sequence[Tensor],
    kept: Collection[str],
    seed: int = 0,
) -> tuple[frozenset[str], Reached]:
    """Return the keys, with `kept`, whose numbers a recording of such an optimizer cannot follow;
    and the places of the others in its groups.

    The others were tried: a recorded step of a small optimizer of this kind, its numbers patched,
    is eager's bit for bit. It is not if the step computes with a number in ways that cannot be
    traced (`math.sqrt`, a tensor made of one). If the class is not torch's, some kernel must also
    hold each number that the step reads. Costs a small capture, and one more for each key if not
    all can be patched.
    """
    keys = {place.key for group in optimizer.param_groups for place in places_of(group, kept)}
    reads, capturable = _Reads(), driver.demands_capturable

    def try_without(without: Collection[str]) -> Reached | None:
        ambiguities = Ambiguous()
        for copied in (False, True):  # some classes make their state in `__init__`
            for more in range(_SEEDS):
                steps = Steps(lambda _: frozenset({*kept, *without}), capturable, seed + more)
                try:
                    trial = _miniature(optimizer, stepped, device, reads, copied)
                    with preserved_random_state(device):
                        return _proven(
                            driver, device, pool, trial, steps, reads, ambiguities.confirmed
                        )
                except CaptureError:
                    return None
                except AmbiguousMatch as error:
                    ambiguities.add(error)
                except Exception:  # noqa: BLE001  the class may fail with other parameters
                    break
        return None

    untraced: set[str] = set()
    reached = try_without(())
    if reached is None:
        untraced = {key for key in keys if try_without(keys - {key}) is None}
        reached = try_without(untraced)
    if reached is None:
        return frozenset({*kept, *keys}), frozenset()
    if not is_of_torch(optimizer):
        # A result may hide the effect of a number, as a sign does.
        counted = {id(p) for p in stepped}
        untraced |= {
            place.key
            for i, group in enumerate(optimizer.param_groups)
            if any(id(p) in counted for p in group["params"])
            for place in places_of(group, {*kept, *untraced})
            if (i, place.key) in reads.keys and (i, place.key, place.item) not in reached
        }
    return frozenset({*kept, *untraced}), frozenset(at for at in reached if at[1] not in untraced)


@dataclass(slots=True)
class _Reads:
    """The reads of a trial's step in its groups: (number of the group, key)."""

    keys: set[tuple[int, str]] = field(default_factory=set)
    stepping: bool = False

    def step(self, trial: Optimizer) -> None:
        self.stepping = True
        try:
            trial.step()
        finally:
            self.stepping = False


class _Noting(dict[str, Any]):
    """A group of a trial that notes the reads of its step."""

    def __init__(self, group: dict[str, Any], index: int, reads: _Reads) -> None:
        super().__init__(group)
        self._reads, self._index = reads, index

    def _note(self, key: str) -> None:
        if self._reads.stepping:
            self._reads.keys.add((self._index, key))

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self._note(key)
            yield key

    def keys(self) -> Any:
        return [*self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def _proven(
    driver: Driver,
    device: torch.device,
    pool: DevicePool,
    trial: Optimizer,
    steps: Steps,
    reads: _Reads,
    confirmed: Ambiguities,
) -> Reached | None:
    settle(trial)

    def twice() -> None:
        reads.step(trial)
        reads.step(trial)

    driver.warmup(twice, device)
    tensors = _tensors(trial)
    saved = [t.detach().clone() for t in tensors]

    def body(capture: Capture) -> None:
        steps.before(trial)
        try:
            reads.step(trial)
        finally:
            steps.restore()

    graph, _ = driver.capture(body, pool)
    try:
        found = patched_scalars(steps, graph, confirmed)
        if found is None or not _change_numbers(
            found, [place for place, _ in steps.places.values()]
        ):
            return None
        graph.launch((), ())
        patched = [t.detach().clone() for t in tensors]
        _restore(tensors, saved)
        driver.warmup(trial.step, device)
        return found.reached((trial,)) if all(map(_same, patched, tensors)) else None
    finally:
        graph.reset()


def _change_numbers(patched_scalars: PatchedScalars, places: Sequence[NumberPlace]) -> bool:
    """Give a trial other numbers, as far from its own as keeps the step on the same branches."""
    numbers, generator = [float(place.read()) for place in places], random.Random(2)
    for times in (_FACTOR, 1):
        for place, number in zip(places, numbers, strict=True):
            _write(place, unmistakable(times * number, generator))
        if patched_scalars.write_current():
            return True
    return False


def _miniature(
    optimizer: Optimizer,
    stepped: Sequence[Tensor],
    device: torch.device,
    reads: _Reads,
    copied: bool,
) -> Optimizer:
    """Return an optimizer of the same class and options over new parameters with gradients, like
    `stepped`, whose gradients the callable may have dropped.

    Args:
        copied: True for a state like the optimizer's, instead of none.
    """
    counted = {id(p) for p in stepped}
    trial = object.__new__(type(optimizer))
    kept = {"param_groups", "state"}
    vars(trial).update({k: v if k in kept else _own(v) for k, v in vars(optimizer).items()})
    vars(trial).pop("step", None)  # a scheduler's wrapper, bound to the original
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(trial)[name] = type(value)()
    vars(trial)["state"] = defaultdict(dict)
    generator = torch.Generator("cpu").manual_seed(0)

    def like(t: Tensor) -> torch.nn.Parameter:
        made = torch.nn.Parameter(_random(t, generator).to(device))
        made.grad = _random(t, generator).to(device)
        return made

    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        kinds = {(p.dtype, p.dim()): p for p in group["params"] if id(p) in counted}
        made = [like(p) for p in kinds.values()]
        others = {key: _own(value) for key, value in group.items() if key != "params"}
        groups.append(_Noting({**others, "params": made}, index, reads))
        for p, parameter in zip(kinds.values(), made, strict=True) if copied else ():
            for key, value in optimizer.state.get(p, {}).items():
                part = _part(value) if isinstance(value, Tensor) else copy.deepcopy(value)
                cast(Any, trial).state[parameter][key] = part
    vars(trial)["param_groups"] = groups
    return trial


def _own(value: Any) -> Any:
    """Return a copy whose tensors the trial can write, instead of the optimizer's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_own, value))
    if type(value) is dict:
        return {key: _own(part) for key, part in cast(dict[Any, Any], value).items()}
    return value


def _shape(t: Tensor) -> list[int]:
    return list(t.shape) if t.numel() <= _ELEMENTS else [min(n, _LARGEST) for n in t.shape]


def _part(t: Tensor) -> Tensor:
    return t.detach()[tuple(slice(0, n) for n in _shape(t))].clone()


def _random(t: Tensor, generator: torch.Generator) -> Tensor:
    shape = _shape(t)
    return torch.randn(shape, generator=generator, device="cpu").to(t.dtype)


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    params = parameters_of(optimizer)
    states = [s for p in params for s in optimizer.state[p].values() if isinstance(s, Tensor)]
    return [*params, *states, *(p.grad for p in params if p.grad is not None)]


def _restore(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, before in zip(tensors, saved, strict=True):
            t.copy_(before)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.detach().cpu(), b.detach().cpu()))


def _write(place: NumberPlace, value: float) -> None:
    if place.item is None:
        place.group[place.key] = value
    else:
        parts = list(place.group[place.key])
        parts[place.item] = value
        place.group[place.key] = tuple(parts)
