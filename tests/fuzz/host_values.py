"""Random programs that bring values of the host to the device: right, or refused.

    python -m tests.fuzz.host_values --programs 1000 --seed 1 --device tape

A program is a list of operations on a device tensor, each of which takes a value of the host's:
from constants, state, an argument or random numbers, made in one of many ways, in the forward or in
a backward. Between calls the state changes. Eager and graphed run side by side, and results,
gradients and state are compared after each call, bit for bit. Prints each program that is wrong,
reduced to the operations that make it so.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol

from . import command
from .state import different

ROWS, WIDTH, CALLS = 2, 3, 16


class World(nn.Module):
    """The state that values come from, and the device's parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.numbers = [1.0, 2.0, 0.5]
        self.number = 0.5
        self.array = np.array([0.5, -1.0, 2.0], dtype=np.float32)
        self.table = torch.tensor([0.25, 1.5, -1.0])
        self.scalar = torch.tensor(1.25)
        self.own = nn.Parameter(torch.tensor([1.0, -0.5, 0.75]), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(WIDTH, device=device))


Source = Callable[[World, Tensor], Tensor]
SOURCES: dict[str, Source] = {
    "constant": lambda w, a: torch.tensor([1.0, -2.0, 0.5]),
    "computed": lambda w, a: (torch.arange(3) * 2 - 1).float(),
    "numbers": lambda w, a: torch.tensor(w.numbers),
    "number": lambda w, a: torch.tensor(w.number).expand(3) + torch.zeros(3),
    "array": lambda w, a: torch.from_numpy(w.array),
    "table": lambda w, a: w.table,
    "of the table": lambda w, a: (w.table * 2).cumsum(0),
    "into a constant": lambda w, a: torch.zeros(3).copy_(w.table),
    "scalar": lambda w, a: w.scalar.reshape(1).repeat(3),
    "own parameter": lambda w, a: w.own,
    "argument": lambda w, a: a,
    "of the argument": lambda w, a: torch.ones(3).add_(a),
    "random": lambda w, a: torch.rand(3),
}
Use = Callable[[Tensor, Tensor], Tensor]


def _assigned(x: Tensor, v: Tensor) -> Tensor:
    y = x.clone()
    y[0] = v.to(x.device)
    y[:, [0, 2]] = v[:2]
    return y


def _masked(x: Tensor, v: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = v[0]
    y[torch.tensor([True, False]), 1] = v[1:2]
    return y


def _put(x: Tensor, v: Tensor) -> Tensor:
    return torch.index_put(x, (torch.tensor([0, 1]), torch.tensor([2, 0])), v[:2])


USES: dict[str, Use] = {
    "added": lambda x, v: x + v.to(x.device),
    "new": lambda x, v: x * x.new_tensor(v.tolist()),
    "made": lambda x, v: x - torch.tensor(v.tolist(), device=x.device),
    "first": lambda x, v: x * v[0],
    "read": lambda x, v: x * float(v[1]),
    "on the left": lambda x, v: v.sum() - x,
    "copied": lambda x, v: torch.empty(3, device=x.device).copy_(v) + x,
    "indexed": lambda x, v: x[:, (v > 0).nonzero().flatten().tolist() or [0]].sum(1)[:, None] + x,
    "mask": lambda x, v: x[:, v.abs() > 0.1].sum() + x,
    "assigned": _assigned,
    "masked": _masked,
    "put": _put,
    "where": lambda x, v: torch.where(v.to(x.device) > 0, x, v[0].to(x)),
    "power": lambda x, v: (x * x + 1) ** v[2],
}
PLACES = ("forward", "forward", "backward", "checkpoint", "hook")
CHANGES: dict[str, Callable[[World], object]] = {
    "numbers": lambda w: w.numbers.__setitem__(1, w.numbers[1] + 1),
    "number": lambda w: setattr(w, "number", w.number + 0.25),
    "array": lambda w: w.array.__iadd__(0.5),
    "table": lambda w: w.table.add_(1),
    "table's data": lambda w: w.table.data.mul_(2),
    "another table": lambda w: setattr(w, "table", w.table * 0.5),
    "scalar": lambda w: w.scalar.fill_(0.75),
    "own parameter": lambda w: w.own.data.mul_(-1),
    "weight": lambda w: w.weight.data.mul_(0.5),
}


@dataclass(frozen=True)
class Operation:
    """One use of a value of the host's."""

    place: str
    use: str
    source: str

    def on(self, world: World, x: Tensor, given: Tensor) -> Tensor:
        """Do it in its place; a backward has it done to the gradient."""

        def act(t: Tensor) -> Tensor:
            return USES[self.use](t, SOURCES[self.source](world, given))

        if self.place == "forward" or not torch.is_grad_enabled():
            return act(x)
        if self.place == "checkpoint":
            y = checkpoint(lambda t: act(t).sin(), x, use_reentrant=False)
            assert isinstance(y, Tensor)
            return y
        if self.place == "hook":
            y = x * 1
            y.register_hook(act)
            return y * 1
        return with_gradient(act)(x)


def with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function whose backward does `change` to the gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad)

    return Changed.apply


@dataclass(frozen=True)
class Program:
    """What a call does, and what changes between calls."""

    seed: int
    operations: tuple[Operation, ...]
    mode: str
    """``"no_grad"``, ``"pair"`` (the backward outside) or ``"step"`` (inside)."""
    changes: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Number of a call -> what changes before it."""
    between: tuple[str, ...] = ()
    """What changes between the last forward and its backward."""


def program_of(seed: int) -> Program:
    draw = random.Random(seed)
    mode = draw.choice(("no_grad", "pair", "pair", "step"))
    places = PLACES if mode != "no_grad" else ("forward",)
    rare = draw.random() < 0.25
    sources = [s for s in SOURCES if rare or s not in ("argument", "of the argument", "random")]
    operations = tuple(
        Operation(draw.choice(places), draw.choice([*USES]), draw.choice(sources))
        for _ in range(draw.randint(1, 4))
    )
    changes = {
        i: tuple(draw.sample([*CHANGES], draw.randint(1, 2)))
        for i in range(4, CALLS)
        if draw.random() < 0.2
    }
    between = tuple(draw.sample([*CHANGES], 1)) if draw.random() < 0.2 else ()
    return Program(seed, operations, mode, changes, between)


def smaller(program: Program) -> Sequence[Program]:
    """Programs without one operation, or one change."""
    found = command.without(program, "operations", 1)
    for i in program.changes:
        found.append(replace(program, changes={k: v for k, v in program.changes.items() if k != i}))
    return [*found, replace(program, between=())] if program.between else found


def _callable(program: Program, world: World) -> Callable[..., Tensor]:
    def forward(x: Tensor, given: Tensor) -> Tensor:
        y = x * world.weight
        for operation in program.operations:
            y = operation.on(world, y, given)
        return y

    def step(x: Tensor, given: Tensor) -> Tensor:
        world.weight.grad = None
        loss = forward(x, given).square().mean()
        loss.backward()
        with torch.no_grad():
            assert world.weight.grad is not None
            world.weight.sub_(0.01 * world.weight.grad.clamp(-1, 1))
        return loss.detach()

    return step if program.mode == "step" else forward


def _inputs(program: Program, i: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(program.seed * 100 + i)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
    return x, torch.randn(3, generator=generator)


@command.quiet()
def verdict(program: Program, device: torch.device) -> tuple[str, str]:
    """Run it in both worlds; what became of it, and why."""
    worlds = World(device), World(device)
    eager = _callable(program, worlds[0])
    fast = ol.graph(_callable(program, worlds[1]), warmup=1)
    for i in range(CALLS):
        for name in program.changes.get(i, ()):
            for world in worlds:
                CHANGES[name](world)
        x, given = _inputs(program, i, device)
        found: list[list[Tensor]] = []
        for f, world in zip((eager, fast), worlds, strict=True):
            torch.manual_seed(i)
            own = x.clone().requires_grad_(program.mode == "pair")
            try:
                found.append(_called(f, world, program, own, given, i == CALLS - 1))
            except ol.CaptureError as error:
                return "refused", error.code
            except Exception:  # noqa: BLE001  the eager world says what is right
                if f is eager:
                    return "no program", traceback.format_exc(limit=1).splitlines()[-1][:60]
                return "wrong", traceback.format_exc(limit=-3)
        for a, b in zip(*found, strict=True):
            if different(a, b):
                return "wrong", f"call {i}: {b.tolist()} is not {a.tolist()}"
    replayed = fast.stats().replays
    return ("replayed" if replayed > CALLS // 3 else "eager"), program.mode


def _called(
    f: Callable[..., Tensor], world: World, program: Program, x: Tensor, given: Tensor, last: bool
) -> list[Tensor]:
    with torch.set_grad_enabled(program.mode != "no_grad"):
        y = f(x, given)
    if program.mode != "pair":
        return [y.detach(), world.weight.detach()]
    for name in program.between if last else ():
        CHANGES[name](world)
    world.weight.grad = None
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        if isinstance(error, ol.CaptureError) or "modified by an inplace" not in str(error):
            raise
        return [y.detach()]
    assert x.grad is not None
    assert world.weight.grad is not None
    return [y.detach(), x.grad, world.weight.grad]


fuzz = command.fuzzer(program_of, verdict, smaller)


if __name__ == "__main__":
    sys.exit(command.main(str(__doc__).splitlines()[0], fuzz, 200))
