"""Random services: requests with objects of their own, and what changes between them.

    python -m tests.fuzz.requests --programs 2000 --seed 1 --device cpu

A network reads and writes the cache that each request makes anew, and state of its own. Between the
requests, and sometimes within one, weights move, hooks come and go, containers grow, code is
replaced. It runs in two worlds, one eager and one graphed; results, caches and the state are
compared after each call, bit for bit. Prints each program that is wrong, without the lines and
events that do not make it so.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from . import command
from .state import different

LINES = (
    *("h = self.lin(h)", "h = self.lin(h)", "h = self.norm(h)", "h = h * self.scale"),
    *("for layer in self.adapters: h = h + layer(h)", "h = h + self.table['bias']"),
    *("cache.total += h.sum(1)", "cache.total = cache.total + h.sum(1)"),
    *("h = h + cache.total[:, None]", "cache.k[:, :h.shape[1]] = h", "cache.k = cache.k * 0.5"),
    *("h = h + cache.k.sum(1, keepdim=True)", "cache.n += 1", "h = h * (cache.n + 1)"),
    "cache.rows = h[:, -2:].clone()",
    "h = h if cache.rows is None else h + cache.rows.sum(1, keepdim=True)",
    "self.last = h[:, -3:].clone()",
    "h = h if self.last is None else torch.cat([self.last, h], 1)[:, -h.shape[1]:]",
    "self.ema = self.ema * 0.5 + h.mean((0, 1))",
    "h = h + self.ema",
    "h = h + 1 if self.flag else h",
    "h = self.f(h)",
    "h = h.double().float() if self.training else h",
)
CHANGES = (
    *("m.lin.weight.data = m.lin.weight.data * 1.5", "m.lin.weight = P(m.lin.weight * 0.5)"),
    "m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items()})",
    "m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items()}, assign=True)",
    *("m.lin = L()", "m.norm = torch.nn.Identity()", "m.lin.requires_grad_(False)"),
    *("m.adapters.append(L())", "m.adapters.pop() if m.adapters else None", "m.adapters = [L()]"),
    "hooks.append(m.lin.register_forward_hook(lambda module, args, result: result * 2))",
    "hooks.append(m.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))",
    "hooks.pop().remove() if hooks else None",
    "m.lin.forward = lambda x: x * 3",
    "vars(m.lin).pop('forward', None)",
    *("m.scale = 0.5", "m.scale = m.scale + 1", "m.flag = not m.flag", "m.f = torch.sin"),
    *("m.f = lambda h: h * 2", "m.table = {'bias': 2.0}", "m.table['bias'] = 0.25"),
    *("m.table['other'] = 1", "m.last = None", "m.ema = m.ema * 0", "m.ema = m.ema.clone()"),
    *("m.train(not m.training)", "type(m).forward = Forward.two", "type(m).forward = Forward.one"),
)
CACHES = (
    "class Cache:\n    def __init__(self): FILL",
    "class Cache(torch.nn.Module):\n    def __init__(self):\n        super().__init__(); FILL",
    "@dataclasses.dataclass\nclass Cache:\n    total: object = None\n    k: object = None\n"
    "    n: int = 0\n    rows: object = None\n    def __post_init__(self): FILL",
    "class Cache(types.SimpleNamespace):\n"
    "    def __init__(self):\n        super().__init__(); FILL",
)
FILL = "self.total, self.k, self.n, self.rows = Z(2, 4), Z(2, 8, 4), 0, None"
BATCH, WIDTH = 2, 4


@dataclass(frozen=True)
class Program:
    """A network, a class of caches, and events: a call, as ``(request, rows)``, or a change."""

    seed: int
    lines: tuple[str, ...]
    cache: str
    options: tuple[tuple[str, Any], ...]
    mode: str
    events: tuple[tuple[int, int] | str, ...]

    def __str__(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        events = [e if isinstance(e, str) else f"fast(rows({e[1]}), {e[0]})" for e in self.events]
        head = f"# seed {self.seed}, {self.mode}, {dict(self.options)}\n{self.cache}\n"
        return f"{head}def forward(self, h, cache):\n{body}    return h\n" + "\n".join(events)


def program(seed: int) -> Program:
    """Return the program of a seed."""
    r = random.Random(seed)
    lines = tuple(r.choice(LINES) for _ in range(r.randint(2, 7)))
    events: list[tuple[int, int] | str] = []
    requests = r.randint(3, 6)
    prompts = r.choice(((5,), (5, 2), (1,), (3, 3, 4)))
    for request in range(requests):
        for _ in range(r.choice((0, 0, 1, 1, 2)) if request else 0):
            events.append(r.choice(CHANGES))
        events.append((request, r.choice(prompts)))
        for _ in range(r.choice((5, 5, 6, 7))):
            if r.random() < 0.04:
                events.append(r.choice(CHANGES))
            events.append((request, 1))
    if r.random() < 0.3:  # requests in turns
        events += [(r.randrange(requests), 1) for _ in range(8)]
    options = r.choice(((), (), (), (("outputs", "static"),), (("warmup", 1),)))
    mode = r.choice(("no_grad", "no_grad", "inference_mode", "enable_grad"))
    return Program(seed, lines, r.choice(CACHES), options, mode, tuple(events))


class World:
    """A network and the caches of its requests."""

    def __init__(self, found: Program, device: torch.device) -> None:
        torch.manual_seed(found.seed)
        self.device = device
        self.scope: dict[str, Any] = {
            "torch": torch,
            "types": types,
            "dataclasses": __import__("dataclasses"),
            "Z": lambda *shape: torch.zeros(shape).to(device),
            "L": self._linear,
            "P": lambda t: nn.Parameter(t.detach(), requires_grad=False),
            "hooks": [],
        }
        body = "".join(f"        {line}\n" for line in found.lines)
        one = f"    def one(self, h, cache):\n{body}        return h\n"
        two = f"    def two(self, h, cache):\n{body}        return h + 1\n"
        source = f"{found.cache.replace('FILL', FILL)}\nclass Forward:\n{one}{two}"
        command.ran(source, found.seed, self.scope)
        net = type("Net", (nn.Module,), {"forward": self.scope["Forward"].one})()
        net.lin, net.norm, net.adapters = self._linear(), nn.LayerNorm(WIDTH).to(device), []
        net.requires_grad_(False)
        net.scale, net.flag, net.f, net.table = 1.5, False, torch.tanh, {"bias": 0.5}
        net.last, net.ema = None, torch.zeros(WIDTH).to(device)
        self.net = self.scope["m"] = net
        self.caches: dict[int, Any] = {}
        self.call: Callable[..., Tensor] = net

    def _linear(self) -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False).to(self.device)

    def rows(self, number: int, count: int) -> Tensor:
        return command.random_tensor(1000 + number, BATCH, count, WIDTH, device=self.device)

    def run(self, number: int, event: tuple[int, int] | str, mode: Callable[[], Any]) -> Any:
        """Make a call or a change; return the result, or what it raised."""
        torch.manual_seed(number)  # a new layer has the same weights in both worlds
        try:
            if isinstance(event, str):
                exec(event, self.scope)
                return None
            request, count = event
            cache = self.caches.setdefault(request, None) or self.scope["Cache"]()
            self.caches[request] = cache
            with mode():
                return self.call(self.rows(number, count), cache).clone()
        except ol.CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - compared with the other world
            return error

    def state(self) -> list[Any]:
        """All that is compared beside the results."""
        net, caches = self.net, [self.caches[request] for request in sorted(self.caches)]
        return [
            [net.last, net.ema, net.scale, net.flag, list(net.state_dict().values())],
            [[cache.total, cache.k, cache.n, cache.rows] for cache in caches],
        ]


@command.quiet()
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code), void (eager fails) or wrong."""
    eager, graphed = World(found, device), World(found, device)
    graphed.call = fast = ol.graph(graphed.net, **dict(found.options))
    mode: Callable[[], Any] = getattr(torch, found.mode)
    for number, event in enumerate(found.events):
        expected = eager.run(number, event, mode)
        try:
            got = graphed.run(number, event, mode)
        except ol.CaptureError as error:
            return "refused", error.code
        if isinstance(got, Exception) and type(got) is not type(expected):
            return "wrong", f"event {number}, {event}: {command.at(got)}"
        if isinstance(expected, Exception):
            return ("void", "eager") if number < 8 else ("right", "raised")
        why = different(got, expected)
        why = why or different(graphed.state(), eager.state())
        if why is not None:
            return "wrong", f"event {number}, {event}: {why}"
    return command.right(fast)


def _smaller(found: Program) -> list[Program]:
    half = replace(found, events=found.events[: len(found.events) // 2])
    return [half, *command.without(found, "lines"), *command.without(found, "events")]


fuzz = command.fuzzer(program, verdict, _smaller)


if __name__ == "__main__":
    sys.exit(command.main("Random services.", fuzz, 2000))
