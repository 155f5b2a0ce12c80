"""Which numbers of an optimizer a recording can turn, tried on parameters of a few elements."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from onelaunch.dials import Dials, Reached, dials
from onelaunch.driver.driver import Capture, Driver, Graph, Pool
from onelaunch.errors import CaptureError
from onelaunch.hyperparameters import unmistakable
from onelaunch.optimizers import parameters_of, settle
from onelaunch.state import Walk
from onelaunch.steps import Place, Steps, every_key, keys_read, places_of

_SEEDS = 4
"""Sets of stand-ins that are tried: one may look like half an address, or like another number."""

_LARGEST = 4
"""Elements along each dimension of a parameter of a trial."""


@dataclass(slots=True)
class Turnable:
    """Which numbers a recording's optimizers can turn, kept from one attempt to the next."""

    known: dict[int, tuple[frozenset[str], Reached]] = field(default_factory=lambda: cast(Any, {}))
    """id of an optimizer -> see `constants`."""
    seed: int = 0
    """Of the numbers that stand in for the optimizers'."""

    def kept(self, before: Walk) -> Callable[[Optimizer], frozenset[str]]:
        """For each optimizer the keys whose numbers stay constants, as far as it is known."""

        def kept(optimizer: Optimizer) -> frozenset[str]:
            known = self.known.get(id(optimizer))
            return keys_read(before, optimizer) if known is None else known[0]

        return kept

    def turned(
        self, driver: Driver, device: torch.device, pool: Pool, steps: Steps, graph: Graph
    ) -> Dials | None:
        """What turns the numbers of the optimizers that stepped; None if the capture is to be
        repeated, because some of them turned out to be constants."""
        if not steps.places:
            return Dials.none()
        for optimizer in steps.optimizers:
            if id(optimizer) not in self.known:
                kept = steps.kept(optimizer)
                stepped = steps.stepped[id(optimizer)]
                found = constants(driver, device, pool, optimizer, stepped, kept, self.seed)
                self.known[id(optimizer)] = found
                if found[0] != kept:
                    return None
        turned = dials(steps, graph)
        if turned is not None and turned.current():
            known = [(o, self.known[id(o)][1]) for o in steps.optimizers]
            if all(expected <= turned.reached((o,)) for o, expected in known):
                return turned
        self.seed += 1
        if self.seed < _SEEDS:
            return None
        for optimizer in steps.optimizers:
            self.known[id(optimizer)] = every_key(optimizer), frozenset()
        return None


def constants(
    driver: Driver,
    device: torch.device,
    pool: Pool,
    optimizer: Optimizer,
    stepped: Sequence[Tensor],
    kept: Collection[str],
    seed: int = 0,
) -> tuple[frozenset[str], Reached]:
    """The keys, `kept` among them, whose numbers a recording of such an optimizer cannot turn; and
    where the others are in its groups.

    The others were tried: a recorded step of a small optimizer of this kind, its numbers turned, is
    eager's bit for bit, and some kernel holds each of them. That is not so where the step computes
    with a number in ways that cannot be followed (`math.sqrt`, a tensor made of one), or does not
    read it. Costs a small capture, and one more for each key where not all can be turned.
    """
    keys = {place.key for group in optimizer.param_groups for place in places_of(group, kept)}
    trial = _miniature(optimizer, stepped, device)

    def tried(without: Collection[str]) -> Reached | None:
        for copied in (False, True):
            trial = _miniature(optimizer, stepped, device, copied)
            try:
                return _proven(driver, device, pool, trial, {*kept, *without}, seed)
            except CaptureError:
                return None
            except KeyError:  # of a state that its class makes where an optimizer is made
                continue
        return None

    left: set[str] = set()
    reached = tried(())
    if reached is None:
        left = {key for key in keys if tried(keys - {key}) is None}
        reached = tried(left)
    if reached is None:
        return frozenset({*kept, *keys}), frozenset()
    # A result may hide what a number does, as a sign does: one that no kernel holds is a constant.
    left |= {
        place.key
        for i, group in enumerate(trial.param_groups)
        for place in places_of(group, {*kept, *left})
        if group["params"] and (i, place.key, place.item) not in reached
    }
    return frozenset({*kept, *left}), frozenset(at for at in reached if at[1] not in left)


def _proven(
    driver: Driver,
    device: torch.device,
    pool: Pool,
    trial: Optimizer,
    kept: Collection[str],
    seed: int,
) -> Reached | None:
    settle(trial)

    def twice() -> None:
        trial.step()
        trial.step()

    driver.warmup(twice, device)
    tensors = _tensors(trial)
    saved = [t.detach().clone() for t in tensors]
    steps = Steps(lambda _: frozenset(kept), device.type == "cuda", seed)

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


def _miniature(
    optimizer: Optimizer, stepped: Sequence[Tensor], device: torch.device, copied: bool = False
) -> Optimizer:
    """An optimizer of the same class and options over parameters of its own, like those of
    `stepped`: by now the callable may have dropped their gradients.

    Args:
        copied: with a state like that of the optimizer, instead of none.
    """
    counted = {id(p) for p in stepped}
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
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
    for group in optimizer.param_groups:
        kinds = {(p.dtype, p.dim()): p for p in group["params"] if id(p) in counted}
        made = [like(p) for p in kinds.values()]
        groups.append({**group, "params": made})
        for p, parameter in zip(kinds.values(), made, strict=True) if copied else ():
            for key, value in optimizer.state.get(p, {}).items():
                part = _part(value) if isinstance(value, Tensor) else copy.deepcopy(value)
                cast(Any, trial).state[parameter][key] = part
    vars(trial)["param_groups"] = groups
    return trial


def _part(t: Tensor) -> Tensor:
    return t.detach()[tuple(slice(0, _LARGEST) for _ in t.shape)].clone()


def _random(t: Tensor, generator: torch.Generator) -> Tensor:
    shape = [min(n, _LARGEST) for n in t.shape]
    return torch.randn(shape, generator=generator, device="cpu").to(t.dtype)


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
