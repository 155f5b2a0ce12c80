"""Random programs over random state: each call equals eager, or the program is refused.

    python -m tests.fuzz.state --programs 2000 --seed 1 --device cpu
    python -m tests.fuzz.state --programs 200 --device tape --compile

A program reads a few places, each a chain of holders from a root name to a leaf (`state_places`),
and may move some. It is built twice, called eagerly in one world and graphed in the other, while
the same random changes are made to the places of both. Prints each program that is wrong, reduced
to the lines that make it so.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol

from . import command
from .state_places import LINKS, MOVES, ROOTS, USES, Link

IMPORTS = """
import collections, contextvars, dataclasses, enum, functools, operator, sys, types, torch
class Twice:
    def __init__(self, k):
        self.k = k
    def __call__(self, y):
        return y * self.k
    def method(self, y):
        return y + self.k
"""
_modules = itertools.count()


@dataclass(frozen=True)
class Place:
    """What builds a place, the line of the call that reads it, and what changes it."""

    define: str
    lines: tuple[str, ...]
    """Of the call."""
    changes: tuple[str, ...]
    shown: str | None
    """The expression of what the call writes there."""


@dataclass(frozen=True)
class Program:
    """Places, and what happens to them: a change, or None for a call."""

    seed: int
    form: str
    places: tuple[Place, ...]
    events: tuple[str | None, ...]
    compiled: str = ""
    """See `command.graph`."""

    @property
    def source(self) -> str:
        body = "\n    ".join(line for place in self.places for line in place.lines)
        define = "\n".join(place.define for place in self.places)
        before = [line for line in define.split("\n") if not line.startswith("__after__ ")]
        after = [line[10:] for line in define.split("\n") if line.startswith("__after__ ")]
        call = f"def call(x):\n    y = x + 0\n    {body}\n    return y"
        forms = {
            "function": "def target(): return call",
            "module": "class Net(torch.nn.Module):\n    def forward(self, x):\n"
            "        return call(x)\ndef target(): return Net()",
            "partial": "def target(): return functools.partial(call)",
            "method": "class Net:\n    def run(self, x):\n        return call(x)\n"
            "def target(): return Net().run",
        }
        return "\n".join([*before, call, *after, forms[self.form]]).replace("\n\n", "\n")

    def __str__(self) -> str:
        events = ["fast(x)" if event is None else event for event in self.events]
        return f"# seed {self.seed}\n{self.source.strip()}\n# then\n" + "\n".join(events)


def place(r: random.Random, number: int) -> Place:
    """A random place, numbered."""
    kind = r.choice(("number",) * 4 + tuple(USES))
    values, uses = USES[kind]
    chain: list[Link] = [r.choice(ROOTS), *r.choices(LINKS, k=r.choice((1, 1, 1, 2, 2, 3)))]
    names = [f"{number}{'abcd'[depth]}" for depth in range(len(chain))]
    named = [
        Link(
            *(_numbered(text, name) for text in (link.make, link.read, link.write, link.define)),
            tuple(_numbered(change, name) for change in link.changes),
            link.moved,
        )
        for link, name in zip(chain, names, strict=True)
    ]

    def built(depth: int) -> str:
        """A value for what is held at a depth."""
        if depth == len(named):
            return r.choice(values)
        return named[depth].make.replace("$", built(depth + 1))

    def filled(text: str, depth: int) -> str:
        while "$" in text:
            text = text.replace("$", built(depth), 1)
        return text

    holder, holders = "", []
    for link in named:
        holders.append(holder)
        holder = link.read.replace("#", holder)
    changes = [
        filled(text.replace("#", holders[depth]), depth + 1)
        for depth, link in enumerate(named)
        for text in (link.write, link.write, *link.changes)
        if text
    ]
    if kind in ("tensor", "optional", "shaped"):
        changes.append(f"T.edit({holder})")
    define = [text for link in named[1:] if (text := link.define)]
    define.append(filled(named[0].define, 1))
    lines = [r.choice(uses).replace("$", holder)]
    shown = None
    last = named[-1]
    if kind in MOVES and last.moved and last.write and r.random() < 0.3:
        moved = r.choice(MOVES[kind]).replace("%s", holder).replace("%%", "%")
        written = last.write.replace("#", holders[-1]).replace("$", moved)
        lines.insert(r.choice((0, 1)), written)
        shown = holder
    return Place("\n".join(define), tuple(lines), tuple(changes), shown)


def alone() -> list[Program]:
    """A program for each kind of holder and each change of it, of a number and of a tensor."""
    found: list[Program] = []
    for number, link in enumerate(LINKS):
        for first, second in (("2", "3"), ("T(1)", "T(2)")):
            read = link.read.replace("#", "root.g")
            build = f"{link.define}\nroot = types.SimpleNamespace(g={link.make})"
            build = _numbered(build.replace("$", first), "1")
            line = _numbered(f"y = y * {read}", "1")
            for change in filter(None, (link.write, *link.changes)):
                text = _numbered(change.replace("#", "root.g").replace("$", second), "1")
                place = Place(build, (line,), (), None)
                events = (None, None, None, text, None, None, None)
                found.append(Program(number, "function", (place,), events))
    return found


def _numbered(text: str, name: str) -> str:
    """Names that end in `@`, numbered; decorators begin with it."""
    return re.sub(r"(?<=\w)@", name, text)


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    places = tuple(place(r, number) for number in range(r.choice((1, 1, 2, 2, 3, 4))))
    changes = [change for each in places for change in each.changes]
    events: list[str | None] = [None] * r.choice((1, 1, 2, 3, 4, 5))
    for _ in range(r.randint(2, 5)):
        events.extend([r.choice(changes), *[None] * r.choice((1, 1, 2, 3))])
    if r.random() < 0.4:  # the caller replaces something before each call, as servers do
        few = r.sample(found := r.choice(places).changes, min(len(found), r.choice((1, 2, 3))))
        for _ in range(r.randint(6, 12)):
            events.extend([r.choice(few), None])
        events.extend([r.choice(changes), None, None])
    form = r.choice(("function", "function", "module", "partial", "method"))
    return Program(seed, form, places, tuple(events))


class Tensors:
    """Makes the tensors of one world, and edits them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, seed: int) -> Tensor:
        return command.random_tensor(seed, 4, device=self.device)

    @staticmethod
    def edit(t: object) -> None:
        if isinstance(t, Tensor):
            with torch.no_grad():
                t.mul_(0.5)


class World:
    """The namespace that a program's source runs in."""

    def __init__(self, found: Program, device: torch.device) -> None:
        self.found = found
        tensors = Tensors(device)
        number = next(_modules)
        module = types.ModuleType(f"program{number}")
        sys.modules[module.__name__] = module  # Dynamo imports it
        sys.modules.pop(f"program{number - 2}", None)  # two worlds are compared
        self.namespace: dict[str, Any] = module.__dict__
        self.namespace |= {
            "T": tensors,
            "H": lambda seed: tensors(seed).double(),
            "L": lambda seed: tensors(seed).requires_grad_(),
        }
        command.ran(IMPORTS + found.source, found.seed, self.namespace)
        self.target: Callable[..., Any] = self.namespace["target"]()

    def change(self, event: str) -> str | None:
        """Make a change; the name of what it raises."""
        try:
            exec(event, self.namespace)
        except Exception as error:  # noqa: BLE001 - compared with the other world
            return type(error).__name__
        return None

    def shown(self) -> list[Any]:
        found: list[Any] = []
        for each in self.found.places:
            if each.shown is not None:
                try:
                    found.append(eval(each.shown, self.namespace))
                except Exception as error:  # noqa: BLE001 - compared with the other world
                    found.append(type(error).__name__)
        return found


def different(got: Any, expected: Any, near: bool = False) -> str | None:
    """What differs of two values; their tensors may be near, for code that rounds otherwise."""
    if type(got) is not type(expected):
        return f"{got!r} is not {expected!r}"
    if isinstance(expected, Tensor):
        a, b = got.detach().cpu(), expected.detach().cpu()
        alike = a.dtype == b.dtype and a.shape == b.shape
        if near and alike and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True):
            return None
        return None if alike and torch.equal(_bits(a), _bits(b)) else f"{a} is not {b}"
    if isinstance(expected, (list, tuple)):
        pairs = itertools.zip_longest(got, expected)
        return next((why for a, b in pairs if (why := different(a, b, near))), None)
    if isinstance(expected, (int, float, str, type(None))):
        return None if repr(got) == repr(expected) else f"{got!r} is not {expected!r}"
    return None


def _bits(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8)


@command.quiet()
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code), void (eager fails) or wrong."""
    torch.manual_seed(found.seed)  # the same random state each time
    try:
        eager, graphed = World(found, device), World(found, device)
    except (SyntaxError, Exception):  # noqa: BLE001 - of the program
        return "void", "built"
    fast = command.graph(graphed.target, found.compiled, warmup=1)
    tensors = Tensors(device)
    for number, event in enumerate(found.events):
        if event is not None:
            raised = eager.change(event), graphed.change(event)
            if raised[0] != raised[1]:
                return "wrong", f"event {number}, {event}: {raised[1]} instead of {raised[0]}"
            continue
        with torch.no_grad():
            try:
                expected = eager.target(tensors(100 + number))
            except Exception as error:  # noqa: BLE001 - compared with what the graphed one raises
                expected = error
            try:
                got = fast(tensors(100 + number))
            except ol.CaptureError as error:
                return "refused", error.code
            except Exception as error:  # noqa: BLE001 - compared with what eager raised
                got = error
        if isinstance(expected, Exception) and number == 0:
            return "void", "eager"
        if isinstance(got, Exception) and type(got) is not type(expected):
            return "wrong", f"event {number}: " + command.at(got)
        why = different(got, expected)
        if why is None and isinstance(expected, Exception):
            break  # docs/limits.md: what it wrote before it raised may be undone
        if why is None:
            why = different(graphed.shown(), eager.shown())
            why = why and f"state: {why}"
        if why is not None:
            return "wrong", f"event {number}: {why}"
    return command.right(fast)


def _smaller(found: Program) -> list[Program]:
    plain = [replace(found, form="function")] if found.form != "function" else []
    return [*command.without(found, "places", 1), *plain, *command.without(found, "events")]


fuzz = command.fuzzer(program, verdict, _smaller)


if __name__ == "__main__":
    sys.exit(command.main("Random programs over random state.", fuzz, 2000, compiles=True))
