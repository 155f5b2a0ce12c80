"""Random interleavings of training: each event does what it does in eager, or is refused.

    python -m tests.fuzz.steps --programs 1000 --seed 1 --device cpu
    python -m tests.fuzz.steps --programs 200 --device tape --compile

A program is a small model and a list of events: forwards, backwards, steps, and what people do in
between. It runs in two worlds, one eager and one with `ol.graph(model)` (or of the whole step), and
results, errors, parameters, gradients, the optimizer and the random state are compared after each
event, bit for bit. Prints each program that is wrong, reduced to the events that make it so.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import onelaunch as ol

from . import command
from .state import different
from .step_models import MIDDLES, OPTIMIZERS, Scaled


@dataclass(frozen=True)
class Program:
    """A model, what is graphed of its training, and what happens to it."""

    seed: int
    middles: tuple[str, ...]
    optimizer: str
    whole: tuple[str, ...] | None
    """The lines of a whole step; None where the model alone is graphed."""
    gradients: str
    warmup: int
    events: tuple[str, ...]
    compiled: str = ""
    """See `command.graph`."""

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.middles}, {self.optimizer}, {self.gradients=}"
        lines = [head, f"warmup={self.warmup}", *(self.whole or ("ol.graph(model)",)), "then"]
        return "\n    ".join([*lines, *self.events])


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    whole = _step(r) if r.random() < 0.4 else None
    gradients = "direct" if whole is None and r.random() < 0.3 else "autograd"
    events = _around(r) if whole else _loop(r)
    middles = tuple(r.choices(tuple(MIDDLES), k=r.choice((1, 1, 2, 3))))
    optimizer = r.choice(tuple(OPTIMIZERS))
    return Program(seed, middles, optimizer, whole, gradients, r.choice((1, 1, 2)), tuple(events))


def _step(r: random.Random) -> tuple[str, ...]:
    lines = [r.choice(("opt.zero_grad()", "opt.zero_grad(set_to_none=False)", ""))]
    lines.append("loss = mse(model(x), y)")
    first = ("loss = Scaled.apply(loss)", "loss.register_hook(lambda grad: grad * 2)")
    lines.append(r.choice(("", "", "", *first)))
    lines.append(
        r.choice(
            (
                "loss.backward()",
                "loss.backward()",
                "loss.backward(retain_graph=True); loss.backward()",
                "(loss / 2).backward(); mse(model(x * 2), y).backward()",
                "grads = torch.autograd.grad(loss, used())\n"
                "for p, g in zip(used(), grads): p.grad = g",
                "with torch.no_grad(): model(y.repeat(1, 2)[:, :4])\nloss.backward()",
            )
        )
    )
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
    lines += [r.choice(("", "", clip)), "opt.step()"]
    lines.append(r.choice(("", "", "opt.zero_grad()")))
    lines.append("return " + r.choice(("loss", "loss.detach()", "loss.detach() * 2")))
    return tuple(line for each in lines for line in each.split("\n") if line)


BETWEEN = (
    *("w.rate({f})", "w.rate({f})", "w.freeze({n})", "w.unfreeze({n})", "w.unfreeze({n})"),
    *("w.hook({n})", "w.hook({n})", "w.unhook()", "w.module_hook()", "w.grad_mode_hook({n})"),
    *("w.node_hook({n})", "w.node_prehook({n})", "w.any_hook()", "w.all_hook()", "w.unhook()"),
    *("w.train(False)", "w.train(True)", "w.seed({n})", "w.load({n})", "w.load_optimizer()"),
    "w.let_go()",
    *("w.edit({n})", "w.data({n})", "w.drop({n})", "w.new({n})", "w.opt.zero_grad()"),
    *("w.opt.zero_grad(set_to_none=False)", "w.scale({n})", "w.look({n})", "w.drop_rate({f})"),
)  # fmt: skip


def _filled(r: random.Random, text: str) -> str:
    return text.replace("{n}", str(r.randint(0, 5))).replace(
        "{f}", r.choice(("0.1", "0.02", "0.0"))
    )


def _around(r: random.Random) -> list[str]:
    events = [f"w.call({i})" for i in range(r.choice((1, 2, 3, 4, 5)))]
    for _ in range(r.randint(2, 7)):
        events += [_filled(r, r.choice(BETWEEN)) for _ in range(r.choice((1, 1, 2)))]
        events += [f"w.call({r.randint(0, 9)})" for _ in range(r.choice((1, 1, 2, 4)))]
    return events


def _loop(r: random.Random) -> list[str]:
    """Ordinary iterations, and ones with several forwards before their backwards."""
    events: list[str] = []
    for number in range(r.randint(6, 12)):
        if number:
            events += [_filled(r, r.choice(BETWEEN)) for _ in range(r.choice((0, 0, 1, 1, 2)))]
        forwards = r.choice((1, 1, 1, 1, 2, 3))
        events += [f"w.forward({r.randint(0, 9)})" for _ in range(forwards)]
        backwards = [
            r.choice(
                (
                    *("w.backward({n})", "w.backward({n})", "w.backward({n})"),
                    *("w.backward({n}, retain_graph=True)", "w.grads({n})", "w.inputs({n})"),
                    *("w.forget({n})", "w.clip()", "w.look({n})"),
                )
            )
            for _ in range(forwards + r.choice((0, 0, 1)))
        ]
        if forwards == 1 and r.random() < 0.6:
            backwards = ["w.backward(0)"]
        if r.random() < 0.1:
            backwards.insert(0, _filled(r, r.choice(BETWEEN)))
        events += [_filled(r, each) for each in backwards]
        if r.random() < 0.3:
            events.append("w.clip()")
        if r.random() < 0.8:
            events.append("w.opt.step()")
        if r.random() < 0.8:
            chosen = r.choice(("", "", "set_to_none=False"))
            events.append(f"w.opt.zero_grad({chosen})")
    return events


class World:
    """One training, and what may happen to it."""

    def __init__(self, found: Program, device: torch.device, graphed: bool) -> None:
        self.device = device
        torch.manual_seed(found.seed)
        middles = [MIDDLES[name]() for name in found.middles]
        self.model = nn.Sequential(nn.Linear(4, 6), *middles, nn.Linear(6, 3)).to(device)
        self.opt = OPTIMIZERS[found.optimizer](self.model.parameters(), device.type != "cpu")
        self.pending: list[Tensor] = []
        self.hooks: list[Any] = []
        self.nodes: list[Any] = []
        self.seen: list[Any] = []
        """What hooks on several gradients were given."""
        self.forward_of: Any = self.model
        self.step_of: Any = None
        if found.whole is not None:
            self.step_of = self._step(found)
        if graphed and found.whole is not None:
            options: dict[str, Any] = {"warmup": found.warmup}
            self.fast = self.step_of = command.graph(self.step_of, found.compiled, **options)
        elif graphed:
            options = {"gradients": found.gradients, "warmup": found.warmup}
            self.fast = self.forward_of = command.graph(self.model, found.compiled, **options)
        self._random = self._drawn()

    def _step(self, found: Program) -> Callable[..., Any]:
        lines = "\n    ".join(found.whole or ())
        namespace = {
            "model": self.model,
            "opt": self.opt,
            "torch": torch,
            "mse": nn.functional.mse_loss,
            "Scaled": Scaled,
            "used": self.used,
        }
        source = f"def step(x, y):\n    {lines}\n"
        return command.ran(source, found.seed, namespace)["step"]

    def close(self) -> None:
        """Undo cycles of hooks and nodes, which Python cannot see."""
        for hook in self.hooks:
            hook.remove()
        self.nodes.clear()
        self.pending.clear()

    def used(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _drawn(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state()] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def run(self, event: str) -> Any:
        """What an event gives, or raises, with this world's random numbers."""
        torch.set_rng_state(self._random[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1])
        try:
            return eval(event, {"w": self})
        except ol.GraphError:
            raise
        except Exception as error:  # noqa: BLE001 - compared with the other world
            return error
        finally:
            self._random = self._drawn()

    def state(self) -> dict[str, Any]:
        """All that is compared."""
        parameters = dict(self.model.named_parameters())
        moments = [self.opt.state.get(p, {}) for p in self.opt.param_groups[0]["params"]]
        return {
            **dict(self.model.state_dict()),
            **{f"{name}.grad": p.grad for name, p in parameters.items()},
            **{f"{name}.frozen": not p.requires_grad for name, p in parameters.items()},
            **{f"{i}.{key}": v for i, held in enumerate(moments) for key, v in held.items()},
            "seen": [] if self.step_of is not None else list(self.seen),
            "random state": self._random[0],
            "device's random state": self._random[-1],
        }

    def _parameter(self, number: int) -> tuple[str, nn.Parameter]:
        named = list(self.model.named_parameters())
        return named[number % len(named)]

    def _data(self, seed: int, size: int) -> Tensor:
        return command.random_tensor(seed, 5, size, device=self.device)

    # Events.

    def call(self, seed: int) -> Any:
        return self.step_of(self._data(seed, 4), self._data(seed + 50, 3))

    def forward(self, seed: int) -> Tensor:
        result = self.forward_of(self._data(seed, 4))
        self.pending.append((result * self._data(seed + 50, 3)).sum())
        return result.detach().clone()

    def look(self, seed: int) -> Tensor:
        with torch.no_grad():
            return self.forward_of(self._data(seed, 4))

    def _next(self, number: int, keep: bool = False) -> Tensor:
        number %= len(self.pending)
        return self.pending[number] if keep else self.pending.pop(number)

    def backward(self, number: int, retain_graph: bool = False) -> None:
        self._next(number, retain_graph).backward(retain_graph=retain_graph)

    def grads(self, number: int) -> Any:
        return torch.autograd.grad(self._next(number), self.used(), allow_unused=True)

    def inputs(self, number: int) -> None:
        self._next(number).backward(inputs=[self.used()[number % len(self.used())]])

    def forget(self, number: int) -> None:
        self._next(number)

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def rate(self, value: float) -> None:
        self.opt.param_groups[0]["lr"] = value

    def freeze(self, number: int) -> None:
        self._parameter(number)[1].requires_grad_(False)

    def unfreeze(self, number: int) -> None:
        self._parameter(number)[1].requires_grad_(True)

    def hook(self, number: int) -> None:
        self.hooks.append(self._parameter(number)[1].register_hook(lambda grad: grad * 2))

    def grad_mode_hook(self, number: int) -> None:
        def scale(p: Tensor) -> None:
            if p.grad is not None:
                p.grad.mul_(0.5)

        parameter = self._parameter(number)[1]
        self.hooks.append(parameter.register_post_accumulate_grad_hook(scale))

    def _accumulator(self, number: int) -> Any:
        """The node that adds to a parameter's gradient."""
        parameter = self._parameter(number)[1]
        made = parameter.expand_as(parameter).grad_fn
        node = None if made is None else made.next_functions[0][0]
        self.nodes.append(node)  # or it is another the next time
        return node

    def node_hook(self, number: int) -> None:
        parameter, node = self._parameter(number)[1], self._accumulator(number)

        def scale(*_: Any) -> None:
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.mul_(0.5)

        if node is not None:
            self.hooks.append(node.register_hook(scale))

    def node_prehook(self, number: int) -> None:
        node = self._accumulator(number)
        if node is not None:
            self.hooks.append(node.register_prehook(lambda grads: (grads[0] * 2,)))

    def let_go(self) -> None:
        """Keep no node. With the nodes go their hooks, unless a graph has them, which it has in
        eager alone under ``gradients="direct"``."""
        if not self.pending:
            self.nodes.clear()

    def any_hook(self) -> None:
        if used := self.used():
            # Which gradient comes first is not said of hooks put there after the forward.
            hook = lambda grad: self.seen.append(type(grad))  # noqa: E731
            self.hooks.append(register_multi_grad_hook(used, hook, mode="any"))

    def all_hook(self) -> None:
        if used := self.used():
            hook = lambda grads: self.seen.append([g is None for g in grads])  # noqa: E731
            self.hooks.append(register_multi_grad_hook(used, hook, mode="all"))

    def module_hook(self) -> None:
        self.hooks.append(self.model[1].register_forward_hook(lambda m, args, result: result * 1.5))

    def unhook(self) -> None:
        if self.hooks:
            self.hooks.pop(0).remove()

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def seed(self, number: int) -> None:
        torch.manual_seed(number)

    def load(self, number: int) -> None:
        state = self.model.state_dict()
        changed = {k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()}
        self.model.load_state_dict(changed, assign=number == 5)
        if number == 5:
            self._adopt()

    def load_optimizer(self) -> None:
        self.opt.load_state_dict(self.opt.state_dict())

    def edit(self, number: int) -> None:
        with torch.no_grad():
            self._parameter(number)[1].mul_(0.9)

    def data(self, number: int) -> None:
        parameter = self._parameter(number)[1]
        parameter.data = parameter.data * 1.1

    def new(self, number: int) -> None:
        name, parameter = self._parameter(number)
        owner, _, last = name.rpartition(".")
        module = self.model.get_submodule(owner)
        setattr(module, last, nn.Parameter(parameter.detach() * 0.8))
        self._adopt()

    def _adopt(self) -> None:
        """Give the optimizer the model's parameters, as they are now."""
        self.opt.param_groups[0]["params"][:] = list(self.model.parameters())

    def drop(self, number: int) -> None:
        self._parameter(number)[1].grad = None

    def scale(self, number: int) -> None:
        grad = self._parameter(number)[1].grad
        if grad is not None:
            grad.mul_(0.5)

    def drop_rate(self, value: float) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = value


@command.quiet()
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code) or wrong."""
    eager, graphed = World(found, device, False), World(found, device, True)
    with contextlib.closing(eager), contextlib.closing(graphed):
        return _compared(found, eager, graphed)


def _compared(found: Program, eager: World, graphed: World) -> tuple[str, str]:
    for number, event in enumerate(found.events):
        expected = eager.run(event)
        try:
            got = graphed.run(event)
        except ol.GraphError as error:
            return "refused", error.code
        if isinstance(got, Exception) and type(got) is not type(expected):
            return "wrong", f"event {number}, {event}: {command.at(got)}"
        why = different(got, expected, bool(found.compiled))
        if why is not None:
            return "wrong", f"event {number}, {event}: {why}"
        if isinstance(expected, Exception):
            if any(name in event for name in ("call", "forward", "backward", "grads", "inputs")):
                break  # what an error leaves behind is not compared
            continue
        mine, theirs = graphed.state(), eager.state()
        for name, value in theirs.items():
            why = different(mine.get(name), value, bool(found.compiled))
            if why is not None:
                return "wrong", f"event {number}, {event}: {name}: {why}"
    return command.right(graphed.fast)


def _smaller(found: Program) -> list[Program]:
    shorter = [replace(found, events=found.events[: len(found.events) // 2])]
    plain = [replace(found, optimizer="SGD")] if found.optimizer != "SGD" else []
    fewer = [*command.without(found, "middles"), *command.without(found, "events")]
    plainer = command.without(found, "whole")[1:] if found.whole else []
    return [*shorter, *plain, *fewer, *plainer]


fuzz = command.fuzzer(program, verdict, _smaller)


if __name__ == "__main__":
    sys.exit(command.main("Random interleavings of training.", fuzz, 1000, compiles=True))
