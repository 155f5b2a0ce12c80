"""Random programs that change Python state and are refused: the state is as in eager, or as before.

    python -m tests.fuzz.rollback --programs 2000 --seed 1 --device cpu

A program has a few containers, each in a place of its own, changes some in each call, and then
reads a tensor on the host; or changes them in a function that runs for the first time in the call
that is captured. It is called eagerly in one world, in another graphed with
``on_refusal="eager"``, in a third with ``on_refusal="raise"``. After each call everything in the
places is compared: order, classes, which names are of one object. Prints each program that is
wrong, reduced to the lines that make it so.
"""

from __future__ import annotations

import array
import random
import re
import sys
import types
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol

from . import command

CALLS = 4
IMPORTS = """
import array, collections, types, torch
from collections import Counter, OrderedDict, defaultdict, deque
class Thing:
    def __init__(self, v):
        self.v = v
class Slots:
    __slots__ = ("v", "w")
    def __init__(self, v):
        self.v = v
class Backwards(list):
    def __iter__(self):
        return iter(list(list.__iter__(self))[::-1])
    def __setitem__(self, key, value):
        list.__setitem__(self, key, [value])
class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")
    def __delitem__(self, key):
        raise TypeError("frozen")
    def clear(self):
        raise TypeError("frozen")
class Ordered(OrderedDict):
    def __iter__(self):
        return iter(list(OrderedDict.__iter__(self))[::-1])
class Cell:
    v = 0
"""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "list": (
        ("[1, 2, 3]", "[3, [1], 2]", "[]"),
        (
            *("$.append(n)", "$.insert(0, n)", "$ = $ + [n]", "$ += [n]", "$.reverse()"),
            *("$ = [n]", "$.pop() if $ else 0", "$.pop(0) if $ else 0", "$.clear()"),
            *("$[:] = [n, *$]", "$.extend([n, n])", "$.append($[0] if $ else n)", "$[:1] = []"),
            *("$ = list($)", "$.append($[:])", "$.rotate(1) if hasattr($, 'rotate') else 0"),
            *("del $[1:]", "$[0:1] = [n] if $ else []", "$.sort(key=str)"),
        ),
    ),
    "list of a class": (
        ("Backwards([1, 2, 3])",),
        ("$.append(n)", "list.__setitem__($, 0, n)", "$.reverse()", "$ = Backwards([n, 1])"),
    ),
    "dict": (
        ("{'a': 1, 'b': 2, 'c': 3}", "{1: 'a', 0: 'b'}", "defaultdict(int, a=1, b=2)"),
        (
            *("$[n] = n", "$.pop(next(iter($)), 0)", "$.popitem()", "$.update(a=n)"),
            *("$.clear()", "k = next(iter($)); $[k] = $.pop(k)", "$ = {**$, n: n}"),
            *("$ = {n: 0, **$}", "$.setdefault('z', []).append(n)", "del $[next(iter($))]"),
            *("$['a'] = n", "$ = dict(reversed($.items()))"),
        ),
    ),
    "counts": (("Counter('aab')",), ("$['a'] += 1", "$.update('cb')", "$.subtract('a')")),
    "ordered": (
        ("OrderedDict(a=1, b=2, c=3)", "Ordered(a=1, b=2, c=3)"),
        (
            *("$.move_to_end('a')", "$.move_to_end('b', last=False)", "$['a'] = n", "$[n] = n"),
            *("$.pop(n - 1, 0)", "$.update(b=n)", "$ = OrderedDict(c=n, a=1, b=2)"),
            "OrderedDict.popitem($) if len($) > 3 else 0",
        ),
    ),
    "frozen": (
        ("Frozen(a=1, b=2)",),
        ("dict.__setitem__($, n, n)", "type($).pop($, 'a', 0)", "dict.update($, b=n)"),
    ),
    "set": (
        ("{1, 2, 3}", "{'a', 'b', 'c', 'd'}", "set()", "set(range(40))"),
        (
            *("$.add(n)", "$.discard(1)", "$.discard(n - 1)"),
            *("$.remove(min($, key=repr)) if $ else 0", "$.add(str(n))", "$ = $ | {n}"),
            *("$ |= {n, n + 7}", "$.clear()", "$ ^= {2, n}", "$.update(range(n, 90))"),
        ),
    ),
    "deque": (
        ("deque([1, 2, 3])", "deque([1, 2, 3], maxlen=3)"),
        (
            *("$.append(n)", "$.appendleft(n)", "$.rotate(1)", "$.popleft() if $ else 0"),
            *("$.pop() if $ else 0", "$.extendleft([n, 0])", "$.reverse()", "$ = deque($, 4)"),
            "$.clear()",
        ),
    ),
    "bytes": (
        ("bytearray(b'abc')",),
        ("$.append(n)", "$[0] = n", "$.pop() if len($) > 2 else 0", "$.extend(b'xy')", "$ += b'z'"),
    ),
    "array": (
        ("array.array('i', [1, 2, 3])",),
        ("$.append(n)", "$[0] = n", "$.pop() if len($) > 2 else 0", "$.reverse()"),
    ),
    "object": (
        ("Thing(1)", "Thing([1])", "types.SimpleNamespace(v=1)"),
        (
            *("$.v = n", "$ = Thing(n)", "$.new = n", "$.v = Thing(n)", "del $.v; $.v = n"),
            *("$.__dict__ = {'v': n}", "$.v = [n]", "setattr($, f'x{n}', n)"),
            *("$.__dict__.clear()", "$.__class__ = Cell"),
        ),
    ),
    "slots": (
        ("Slots(1)", "Slots([1])"),
        ("$.v = n", "$.w = n", "$ = Slots(n)", "del $.v; $.v = [n]", "$.w = [n]"),
    ),
    "class": (
        ("type('Made', (), {'v': 1})",),
        ("$.v = n", "$.new = n", "$ = type('Made', (), {'v': n})"),
    ),
    "function": (
        ("(lambda a=1: a)",),
        ("$.v = n", "$.__defaults__ = (n,)", "$ = (lambda a=n: a)", "$.seen = [n]"),
    ),
    "number": (
        ("0", "'a'", "None", "(1, 2)", "1.5"),
        ("$ = n", "$ = str($)", "$ = ($, n)", "$ = []"),
    ),
    "tensor": (
        ("T(1)", "T(2)"),
        ("$ = $ + 1", "$ = T(n)", "$.requires_grad_()", "$ = [$]", "$ = $.t()", "$ = x * 1"),
    ),
    "tuple": (
        ("([1], {'a': 1}, {2})",),
        ("$[0].append(n)", "$[1]['b'] = n", "$[2].add(n)", "$ = ()"),
    ),
}
PLACES = {
    "attribute": ("net.p@", "net.p@ = {}"),
    "of an object": ("net.box.p@", "net.box.p@ = {}"),
    "of two": ("net.box.p@", "net.box.p@ = {}\nnet.q@ = net.box.p@"),
    "global": ("g@", "g@ = {}"),
    "entry": ("net.table['p@']", "net.table['p@'] = {}"),
    "item": ("net.row@[0]", "net.row@ = [{}, 7]"),
    "of a class": ("Cell.p@", "Cell.p@ = {}"),
    "of a module": ("settings.p@", "settings.p@ = {}"),
    "closure": ("c@", "c@ = {}"),
}
BETWEEN = ("# = %", "#, % = %, #", "$ = [#, %]", "del #; # = %", "# = # if % else [#]")
REFUSED = (
    "if x.sum().item() > 1000: x = x + 1",
    "if x.sum() > 1000: x = x + 1",
    "x = x * len(x.tolist())",
    "x = x[torch.nonzero(x)[:, 0]]",
)


@dataclass(frozen=True)
class Program:
    """Places with what each holds, and the lines of a call."""

    seed: int
    places: tuple[tuple[str, str, str], ...]
    """(kind of place, name, what it holds)."""
    lines: tuple[str, ...]
    refused: str
    late: bool
    """True if the lines are in a function that the first call does not run."""

    @property
    def source(self) -> str:
        indent = "\n        "
        built = [
            PLACES[kind][1].replace("@", name).format(value) for kind, name, value in self.places
        ]
        names = [name for kind, name, _ in self.places]
        kinds = [kind for kind, _, _ in self.places]
        of = {kind: [n for k, n in zip(kinds, names, strict=True) if k == kind] for kind in PLACES}
        cells = [f"c{n}" for n in of["closure"]]
        scope = [f"global {', '.join(f'g{n}' for n in of['global'])}"] if of["global"] else []
        inner = [*scope, *([f"nonlocal {', '.join(cells)}"] if cells else [])]
        changes = ["if n > 1: late(x, n)"] if self.late else self.lines
        moved = self.lines if self.late else ["pass"]
        body = [*inner, "net.n += 1", "n = net.n", *changes, self.refused, "return x * 2"]
        shown = [
            *(PLACES[kind][0].replace("@", name) for kind, name, _ in self.places),
            *(f"net.q{n}" for n in of["of two"]),
        ]
        show = ", ".join(["net", *shown])
        return f"""
settings = types.ModuleType("settings")
class Net(torch.nn.Module):
    def forward(self, x):
        return self.call[0](x)
def build():
    {indent[:-4].join([*scope, "net = Net()", "net.n = 0", "net.box, net.table = Thing(0), {}"])}
    {indent[:-4].join(line for text in built for line in text.splitlines())}
    def late(x, n):
        {indent.join([*inner, *moved])}
    def call(x):
        {indent.join(body)}
    def show():
        {indent.join([*scope, f"return [{show}]"])}
    net.call = (call,)
    return net, show
"""

    def __str__(self) -> str:
        return f"# seed {self.seed}\n{self.source.strip()}"


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    kinds = [r.choice(list(KINDS)) for _ in range(r.choice((1, 1, 2, 3)))]
    places = tuple(
        (r.choice(list(PLACES)), str(i), r.choice(KINDS[kind][0])) for i, kind in enumerate(kinds)
    )
    names = [PLACES[kind][0].replace("@", name) for kind, name, _ in places]
    lines: list[str] = []
    for _ in range(r.randint(1, 5)):
        i = r.randrange(len(kinds))
        line = r.choice(KINDS[kinds[i]][1])
        if len(kinds) > 1 and r.random() < 0.15:
            line = r.choice(BETWEEN).replace("#", names[i]).replace("%", r.choice(names))
        line = line.replace("$", names[i])
        lines += [f"if n > 1: {line}" if r.random() < 0.1 else line]
    return Program(seed, places, tuple(lines), r.choice(REFUSED), r.random() < 0.4)


class World:
    """The namespace of a program's source, and what is in its places."""

    def __init__(self, found: Program, device: torch.device) -> None:
        self.device = device
        names: dict[str, Any] = {"__name__": "program", "T": self.tensor}
        self.net, self.show = command.ran(IMPORTS + found.source, found.seed, names)["build"]()

    def tensor(self, seed: int) -> Tensor:
        return command.random_tensor(seed, 2, 2, device=self.device)

    def shown(self) -> list[Any]:
        """Everything in the places, as text and tensors; an object that was met, by its number."""
        met: dict[int, int] = {}
        try:
            return [_shown(value, met) for value in self.show()]
        except (AttributeError, NameError) as error:
            return [type(error).__name__]


def _shown(value: Any, met: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        facts = [value.requires_grad, value.is_leaf, tuple(value.shape)]
        return [met.setdefault(id(value), len(met)), *facts, value.detach().cpu().tolist()]
    if isinstance(value, int | float | str | bytes | type(None)):
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # the text of a function
    if id(value) in met:
        return f"object {met[id(value)]}"
    met[id(value)] = len(met)
    parts: list[Any] = [f"object {met[id(value)]}", type(value).__name__]
    if isinstance(value, bytearray | array.array):
        return [*parts, repr(value)]
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        parts += [[_shown(k, met), _shown(v, met)] for k, v in kind.items(value)]
    if isinstance(value, set):  # in any order
        parts += sorted((_shown(item, met) for item in set.__iter__(value)), key=repr)
    for kind in (list, tuple, deque):
        if isinstance(value, kind):
            parts += [_shown(item, met) for item in kind.__iter__(value)]  # type: ignore[arg-type]
    if isinstance(value, type):
        parts += [[k, _shown(v, met)] for k, v in sorted(vars(value).items()) if k[0] != "_"]
    elif isinstance(value, types.FunctionType):
        parts += [repr(value.__defaults__), _shown(vars(value), met)]
    elif isinstance(value, nn.Module):
        parts += [[k, _shown(v, met)] for k, v in vars(value).items() if k not in _OF_MODULES]
    elif hasattr(value, "__dict__"):
        parts += [[k, _shown(v, met)] for k, v in vars(value).items()]
    for name in getattr(type(value), "__slots__", ()):
        parts.append(_shown(getattr(value, name, "nothing"), met))
    return parts


_OF_MODULES = {*vars(nn.Module()), "call"}


@command.quiet()
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: refused (with the code), void (eager fails) or wrong."""
    try:
        eager, graphed, raising = (World(found, device) for _ in range(3))
    except Exception:  # noqa: BLE001 - of the program
        return "void", "built"
    fast = ol.graph(graphed.net, warmup=1, on_refusal="eager")
    strict = ol.graph(raising.net, warmup=1)
    code = "none"
    with torch.no_grad():
        for number in range(CALLS):
            x = eager.tensor(100 + number)
            before = raising.shown()
            try:
                expected = eager.net(x)
            except Exception:  # noqa: BLE001 - of the program
                return "void", "eager"
            try:
                got = fast(x)
                if code == "none":
                    strict(x)
            except ol.CaptureError as error:
                code = error.code
                if (now := raising.shown()) != before:
                    return "wrong", f"call {number} raised {code}: {now} instead of {before}"
            except Exception as error:  # noqa: BLE001 - eager raised none
                return "wrong", command.at(error)
            if not torch.equal(got, expected):
                return "wrong", f"call {number}: {got} instead of {expected}"
            if (now := graphed.shown()) != (then := eager.shown()):
                return "wrong", f"call {number}: {now} instead of {then}"
    return "refused", code


def _smaller(found: Program) -> list[Program]:
    return [*command.without(found, "lines"), *command.without(found, "places")]


fuzz = command.fuzzer(program, verdict, _smaller)


if __name__ == "__main__":
    sys.exit(command.main("Random programs that are refused half-way.", fuzz, 500))
