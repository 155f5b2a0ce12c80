"""State that is read by code whose instructions differ between the versions of Python."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .drop_in import follows, on_cpu

SHARED = """
import contextlib, dataclasses, enum, functools, operator
class Box:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)
class A(Box): pass
class B(Box): pass
class C(Box): pass
class Given:
    def __init__(self, value):
        self.value = value
    def __enter__(self):
        return self.value
    def __exit__(self, *raised):
        return False
N, p, ran = "scale", 1, [1, 2]
a, b, c = A(scale=2.0), B(scale=3.0), C(scale=4.0)
m = Box(a=a, b=b, c=c, none=None, rows=[a, b, c], d={"a": a, "b": b})
table = {**{str(i): 1.0 for i in range(200)}, "s": 2.0}
dicts = [{"s": 2.0, "t": 1.0}, {"s": 3.0, "t": 1.0}, {"s": 4.0, "t": 1.0}]
"""
SETS = ("a.scale = 9.0", "b.scale = 9.0", "c.scale = 9.0")
A_, B_, C_ = ((change,) for change in SETS)
MANY = "\n".join(f"    y += g{i}" for i in range(300))
GLOBALS = "\n".join(f"g{i} = 1.0" for i in range(300))

PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    # Branches that meet.
    "three ways": ("x * (m.a if p == 0 else m.b if p == 1 else m.c).scale", (*B_, "p = 2")),
    "three ways, by name": ("x * getattr(m.a if p == 0 else m.b if p == 1 else m.c, N)", B_),
    "or": ("x * (m.b or m.c).scale", (*B_, "m.b = None")),
    "or or": ("x * (m.none or m.b or m.c).scale", (*B_, "m.b = None")),
    "or, by name": ("x * getattr(m.none or m.b or m.c, N)", (*B_, "m.none = m.c")),
    "and or": ("x * (m.none and m.a or m.b).scale", (*B_, "m.none = m.a; a.scale = 7.0")),
    "or in an argument": ("x * getattr(m.b, N or 'k', m.none or 1)", B_),
    "compared in a chain": (
        "x * (2 if 1 < m.a.scale < getattr(m.b, N) < 8 else 3)",
        ("a.scale = 5.0", *B_),
    ),
    "a condition": (
        "x * 2 if not m.rows or (m.a.scale > 1 and getattr(m.b, N) > 4) else x * 3",
        (*A_, *B_, "m.rows.clear()"),
    ),
    # Slices.
    "a loop over a slice": (
        "\n    for r in m.rows[1:]: x = x * getattr(r, N)\n    return x",
        (*B_, *C_, "m.rows.append(m.a)"),
    ),
    "an item of a slice": ("x * m.rows[-2:][1].scale * getattr(m.rows[1:][0], N)", (*B_, *C_)),
    "a step": ("x * sum([getattr(r, N) for r in m.rows[::2]])", (*A_, *C_)),
    "a map over a slice": ("x * sum(map(operator.attrgetter(N), m.rows[1:]))", (*B_, *C_)),
    "a slice as arguments": ("x * getattr(*[0, m.b, N, 0.0][1:])", B_),
    "dicts of a slice": (
        "x * (dicts[1]['t'] + sum([r['s'] for r in dicts[1:]]) + dicts[2:][0].get('s'))",
        ("dicts[1]['s'] = 9.0", "dicts[2]['s'] = 9.0", "dicts[1]['t'] = 9.0"),
    ),
    "a slice of an object": (
        "x * getattr(sliced[0:2], N) * getattr(sliced[1], N)",
        (*A_, "m.a = m.b"),
    ),
    "a slice that is stored": (
        "\n    m.rows[:1] = m.rows[1:2]\n    return x * getattr(m.rows[0], N)",
        B_,
    ),
    "a slice that grows": (
        "\n    h = list(m.rows)\n    h[1:] += [m.a]\n    return x * h[1].scale",
        B_,
    ),
    # Comprehensions, which 3.12 runs in the function itself.
    "a dict in an argument": ("x * getattr(m.c, N, {k: v for k, v in [('a', 1)]})", C_),
    "dicts in an argument": ("x * getattr(m.c, N, {i: {j: [j] for j in ran} for i in ran})", C_),
    "a dict in a method": ("x * table.get('s', {i: i for i in ran})", ("table['s'] = 9.0",)),
    "a list in an argument": ("x * getattr(m.c, ''.join([k for k in N]), {*ran})", C_),
    "a comprehension in another": (
        "x * sum([sum([getattr(r, N) for r in rs]) for rs in [m.rows, m.d.values()]])",
        (*A_, *C_),
    ),
    "a name of two": (
        "\n    r = m.c\n    y = [getattr(r, N) for r in m.rows[:2]]\n"
        "    return x * y[0] * getattr(r, N)",
        (*A_, *C_),
    ),
    "a name of two functions": (
        "\n    y = [(lambda: getattr(r, N)) for r in m.rows]\n    r = m.a\n"
        "    return x * y[0]() * (lambda: getattr(r, N))()",
        (*A_, *C_),
    ),
    "a dict of objects": ("x * getattr({k: v for k, v in m.d.items()}['b'], N)", B_),
    "a walrus": ("x * sum([s for r in m.rows if (s := getattr(r, N)) > 2.5]) * s", (*A_, *C_)),
    "a name in a comprehension": (
        "\n    y = [last := r for r in m.rows]\n    return x * getattr(last, N)",
        C_,
    ),
    # Calls.
    "spread arguments": ("x * getattr(*(m.a, *[N]), *[0.0])", (*A_, "N = 'other'; a.other = 5.0")),
    "keywords": ("x * sorted(m.rows, key=operator.attrgetter(N), reverse=True)[0].scale", A_),
    "super": (
        "x * child.go()",
        ("Parent.scale = 9.0", "Parent.read = lambda self: 7.0", "child.kept = 9.0"),
    ),
    # Names in the body of a class, which are not its function's.
    "a class": (
        "\n    class K:\n        s, t = getattr(m.a, N), m.b\n        u = getattr(t, N)\n"
        "        v = [getattr(r, N) for r in [t]]\n    return x * K.s * K.u * K.v[0]",
        (*A_, *B_),
    ),
    "a variable in a class": (
        "\n    o = m.a\n    class K:\n        s, t = getattr(o, N), o.scale\n"
        "    return x * K.s * K.t",
        A_,
    ),
    "a variable in a class in a class": (
        "\n    o = m.a\n    class K:\n        class L:\n            s = getattr(o, N)\n"
        "    return x * K.L.s",
        A_,
    ),
    "a variable of a function around": ("class_in(x)", ("set_kept(m.b)", *A_)),
    # Statements that leave values on the stack.
    "with": (
        "\n    with Given(m.a) as o, Given(m.b) as q:\n"
        "        x = x * getattr(o, N) * getattr(q, N)\n"
        "    with Given(m.c) as o:\n        return x * getattr(o, N)",
        (*A_, *B_, *C_),
    ),
    "a handler": (
        "\n    try:\n        raise KeyError('b')\n    except KeyError as e:\n"
        "        return x * getattr(m.d[e.args[0]], N) * sum([getattr(r, N) for r in m.rows])",
        (*B_, *C_),
    ),
    "a handler in a loop": (
        "\n    for r in [m.none, *m.rows]:\n        try:\n            x = x * getattr(r, N)\n"
        "        except AttributeError:\n            continue\n        finally:\n"
        "            x = x + m.b.scale\n    return x",
        (*A_, *B_, *C_),
    ),
    "match": (
        "\n    match {'d': m.d, 'l': m.rows}:\n"
        "        case {'d': {'a': o}, 'l': [*_, q]}: return x * getattr(o, N) * getattr(q, N)\n",
        (*A_, *C_),
    ),
    "match of one key": (
        "\n    match table:\n        case {'s': s}: return x * s\n    return x",
        ("table['s'] = 9.0", "del table['s']"),
    ),
    "yield from": ("x * sum(numbers())", (*A_, *B_, *C_)),
    "async for": ("x * awaited(every())", (*A_, *C_)),
    "a text": ("x * getattr(m.a, f'{N}') * float(f'{m.b.scale:.{p}f}')", (*A_, *B_)),
    # Instructions with a prefix: in long functions, and far jumps.
    "a long function": (
        f"\n    y = 0.0\n{MANY}\n    return x * getattr(m.a, LATE) + y",
        (*A_, "g299 = 5.0"),
    ),
    "a long loop": (
        f"\n    y = 0.0\n    for r in m.rows:\n{MANY.replace('    ', ' ' * 8)}\n"
        "        y = y * getattr(r, N)\n    return x * y",
        (*A_, *C_),
    ),
    # Objects that are in no variable at the end.
    "a list that is emptied": (
        "\n    q = []\n    for r in m.rows: q.append(r)\n"
        "    while q: x = x * getattr(q.pop(), N)\n    return x",
        (*A_, *C_),
    ),
    "a getter of a list that is emptied": (
        "\n    q = []\n    for r in m.rows: q.append(r)\n"
        "    while q: x = x * operator.attrgetter('scale')(q.pop())\n    return x",
        (*A_, *C_),
    ),
    "all of an object": (
        "\n    q = []\n    for r in m.rows: q.append(r)\n"
        "    while q: x = x * sum(v for v in vars(q.pop()).values() if type(v) is float)\n"
        "    return x",
        (*A_, *C_),
    ),
    "a name from a list that is emptied": (
        "\n    q, n = [], []\n    q.extend(m.rows)\n    while q:\n        o = q.pop()\n"
        "        for k in ('scale', 'kept'): n.append(k + '')\n"
        "        while n: x = x * getattr(o, n.pop(), 1.0)\n    return x",
        (*A_, *C_, "b.kept = 9.0"),
    ),
    "a partial and a map": (
        "\n    q = []\n    for r in m.rows: q.append(r)\n"
        "    while q: x = x * functools.partial(getattr, q.pop())(N)\n"
        "    for r in m.rows: q.append(r)\n"
        "    while q: x = x * next(map(getattr, [q.pop()], [N]))\n    return x",
        (*A_, *C_),
    ),
    "a way through a graph": (
        "\n    q = [linked]\n    while q:\n        o = q.pop()\n"
        "        x = x * getattr(o, N)\n        if o.next: q.append(o.next)\n"
        "    q.append(linked)\n    q.append(q.pop().next)\n"
        "    return x * sum(v for v in vars(q.pop()).values() if type(v) is float)",
        (*A_, *B_, *C_, "b.next = None"),
    ),
    "a class of an object": (
        "\n    q = []\n    for r in m.rows: q.append(r)\n"
        "    while q: x = x * getattr(type(q.pop()), 'k', 2.0)\n    return x",
        ("A.k = 9.0", "C.k = 9.0"),
    ),
}
NEWER: dict[str, tuple[str, tuple[str, ...]]] = {
    "a type's variable": (
        "\n    def g[T](y: T, k=m.a) -> T: return y * getattr(k, N)\n    return g(x)",
        A_,
    ),
    "a type's class": (
        "\n    class K[T: int](Box):\n        s, t = getattr(m.a, N), m.b\n"
        "        u = [getattr(r, N) for r in (t,)]\n    return x * K.s * K.u[0]",
        (*A_, *B_),
    ),
    "a bound": (
        "\n    def g[T: getattr(m.a, N)](): 0\n    return x * g.__type_params__[0].__bound__",
        A_,
    ),
    "an alias": ("\n    type K = getattr(m.a, N)\n    return x * K.__value__", A_),
    "an alias in a class": (
        "\n    o = m.a\n    class K:\n        type L = getattr(o, N)\n"
        "        type M = getattr(b, N)\n"
        "    return x * K.L.__value__ * K.M.__value__",
        (*A_, "b = c"),
    ),
}
if sys.version_info >= (3, 12):
    PROGRAMS |= NEWER
MORE = """
LATE = "scale"
linked, a.next, b.next, c.next = a, b, c, None
class Sliced:
    def __getitem__(self, key):
        return m.a
sliced = Sliced()
class Parent:
    scale = 2.0
    def read(self):
        return self.kept
class Child(Parent):
    kept = 3.0
    def go(self, *, n=0):
        return super().scale * super().read(*()) * getattr(super(), "read")() + n
child = Child()
def around():
    kept = m.a
    def class_in(x):
        class K:
            s = getattr(kept, N)
        return x * K.s
    def set_kept(value):
        nonlocal kept
        kept = value
    return class_in, set_kept
class_in, set_kept = around()
def chosen():
    yield m.c.scale
    return m.a
def numbers():
    found = yield from chosen()
    yield getattr(found, N)
    yield from (getattr(r, N) for r in m.rows[1:2])
async def each():
    for r in m.rows:
        yield r
async def every():
    return sum([getattr(r, N) async for r in each()])
def awaited(work):
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
"""


def program(body: str) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    module = types.ModuleType("written")
    body = body if body.startswith("\n") else f"\n    return {body}"
    exec(f"{SHARED}{GLOBALS}\n{MORE}\ndef f(x):{body}", module.__dict__)
    return module.__dict__, module.__dict__["f"]


@pytest.mark.cpu
@on_cpu
@pytest.mark.parametrize("how", PROGRAMS)
def test_calls_see_what_changed(device: torch.device, rand: Any, how: str) -> None:
    body, changes = PROGRAMS[how]
    for change in changes:
        names, f = program(body)
        with torch.no_grad():
            fast = follows(f, lambda i: (rand(i, 3),), lambda: exec(change, names))  # noqa: B023
        assert fast.stats().replays
