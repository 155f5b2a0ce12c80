"""What code loads, of which object, and what becomes of it."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from onelaunch.frames.codes import sure_stores
from onelaunch.frames.loads import loads_of
from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.frames.watch import FrameWatch
from onelaunch.source import TORCH


def code_of(line: str) -> types.CodeType:
    namespace: dict[str, types.FunctionType] = {}
    exec("def fn(self, d, x, k, f):\n " + line, namespace)
    return namespace["fn"].__code__


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("self.n += 1", Use.GROWS),
        ("self.n -= len(x)", Use.GROWS),
        ("self.n = self.n + k", Use.GROWS),
        ("self.n = (self.n + k) % 3", Use.READ),
        ("self.n += 1; x *= self.n", Use.READ),
        ("self.n = y = self.n + 1", Use.READ),
        ("self.n = f(self.n)", Use.READ),
        ("self.n = d.n", Use.READ),
        ("self.n = d.n + 1", Use.READ),
        ("self.n = self.n", Use.READ),
        ("return x * self.n", Use.READ),
        ("self.n = len(x); return x * self.n", Use.NONE),
        ("if x: self.n = 1\n return self.n", Use.READ),
        ("for i in x: self.n = i\n return self.n", Use.READ),
        ("self.n = len(x)", Use.NONE),
        ("self.n = 0; self.n += 1", Use.NONE),
        ("self.n.append(x)", Use.GROWS),
        ("self.n.append(x); return len(self.n)", Use.READ),
        ("self.n['k'] += 1", Use.ITEMS),
        ("self.n['k'] = self.n['l']", Use.ITEMS),
        ("self.n[k] = 1", Use.READ),
        ("y = self.n; y['k'] += 1", Use.READ),
        ("self.n['k'] = 1; return sum(self.n)", Use.READ),
        ("y = (self.n if x else self.m)['k']; return y", Use.READ),
        ("return self.__dict__['n']", Use.READ),
    ],
)
def test_what_becomes_of_an_attribute(line: str, use: Use) -> None:
    loads = loads_of(code_of(line))
    found = [use for place, use in loads.places.items() if place.key == "n"]
    found += [uses["n"] for uses in loads.arguments.values() if "n" in uses]
    assert max(found) is use


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("d['n'] += 1", Use.GROWS),
        ("self.d['n'] += 1", Use.GROWS),
        ("d[0] += len(x)", Use.GROWS),
        ("d['n'] += 1; return x * d['n']", Use.READ),
        ("self.q[0] = d['n']", Use.READ),
        ("d['n'] = len(x)", Use.NONE),
        ("return x * d['n']", Use.READ),
    ],
)
def test_what_becomes_of_an_item(line: str, use: Use) -> None:
    places = loads_of(code_of(line)).places
    assert max(use for place, use in places.items() if place.kind == "item") is use


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def child(self) -> Any:
        return self.inner  # type: ignore[attr-defined]


def seen(fn: Any, *args: Any) -> Reads:
    reads = Reads()
    with FrameWatch(reads).watching():
        fn(*args)
    return reads


def read_of(reads: Reads, box: Box) -> set[str]:
    owner = reads.of(box)
    return set() if owner is None else {n for n, use in owner.names.items() if use is Use.READ}


def in_a_loop(root: Box) -> float:
    total = 0.0
    for i, box in enumerate(root.boxes):  # type: ignore[attr-defined]
        total += box.scale * i
    return total


def by_a_chain(root: Box) -> float:
    node = root.boxes[0]  # type: ignore[attr-defined]
    while node.next is not None:
        node = node.next
    return node.scale


READERS: dict[str, Any] = {
    "an attribute": lambda root: root.boxes[1].scale,
    "a loop": in_a_loop,
    "a list of a generator": lambda root: sum(box.scale for box in root.boxes),
    "getattr": lambda root: getattr(root.boxes[1], "scale"),  # noqa: B009
    "a name made at run time": lambda root: getattr(root.boxes[1], "sca" + "le"),
    "a call's result": lambda root: root.child().scale,
    "a chain": by_a_chain,
    "a sorted list": lambda root: sorted(root.boxes, key=id)[-1].scale,
    "a conditional": lambda root: (root.boxes[1] if root.boxes else root).scale,
    "an unpacked pair": lambda root: [b.scale for a, b in [(root, root.boxes[1])]],
    "vars": lambda root: dict(vars(root.boxes[1])),
}


@pytest.mark.parametrize("how", READERS)
def test_an_object_that_is_read(how: str) -> None:
    """And no other that has an attribute of that name."""
    last = Box(scale=2.0, next=None)
    first, other = Box(scale=1.0, next=last), Box(scale=3.0)
    reads = seen(READERS[how], Box(boxes=[first, last], inner=last))
    owner = reads.of(last)
    assert owner is not None
    assert owner.opaque or "scale" in read_of(reads, last)
    assert reads.of(other) is None


def test_nothing_that_a_run_made_is_kept() -> None:
    import weakref

    made: list[Any] = []

    def fn() -> float:
        box = Box(scale=1.0)
        made.append(weakref.ref(box))
        return box.scale

    reads = seen(fn)
    assert made[0]() is None
    assert not [owner for owner in reads.copy().owners.values() if owner.ref() is made[0]()]


class Inner(NamedTuple):
    box: Any


class Outer(NamedTuple):
    inner: Inner
    event: int


def test_what_a_run_made_and_read_goes_with_it() -> None:
    """Tuples take no weak reference: those that only what was read refers to are let go, also one
    in another."""
    boxes: list[weakref.ref[Box]] = []

    def made() -> int:
        box = Box(scale=1)
        boxes.append(weakref.ref(box))
        inner = Inner(box)
        outer = Outer(inner, 2)
        return inner.box.scale + outer.event  # type: ignore[attr-defined]

    reads = seen(made)
    assert boxes[0]() is None
    assert not any(isinstance(value, Inner | Outer) for value in reads.alive())


def left_early(root: Box, box: Box) -> Any:
    if root is not box:
        return root.boxes[0].first  # type: ignore[attr-defined]
    return root.boxes[0].scale  # type: ignore[attr-defined]


def left_a_loop(root: Box, box: Box) -> Any:
    node = root
    for i in range(3):
        if i == 2:
            return node.boxes[0].first  # type: ignore[attr-defined]
        node.boxes[0].scale  # type: ignore[attr-defined]  # noqa: B018
    return node.boxes[0].late  # type: ignore[attr-defined]


def caught_late(root: Box, box: Box) -> Any:
    try:
        root.boxes[0].missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError:
        box = root.boxes[0]  # type: ignore[attr-defined]
        return box.scale  # type: ignore[attr-defined]
    return root.boxes[0].late  # type: ignore[attr-defined]


def deleted(root: Box, box: Box) -> Any:
    part = root.boxes[0]  # type: ignore[attr-defined]
    value = part.scale
    del part
    return value


def never_set(root: Box, box: Box) -> Any:
    if root is box:
        part = root.boxes[0]  # type: ignore[attr-defined]
    return None if root is not box else part.scale


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (left_early, {"first"}),
        (left_a_loop, {"first", "scale"}),
        # Since Python 3.12 the last line lies before the handler, as if it had been passed.
        (caught_late, {"missing", "scale"} | ({"late"} if sys.version_info >= (3, 12) else set())),
        (deleted, {"scale"}),
        (never_set, set()),
    ],
)
def test_what_did_not_run_is_not_read(fn: Any, names: set[str]) -> None:
    box = Box(first=1, scale=2.0, late=3)
    assert read_of(seen(fn, Box(boxes=[box]), Box()), box) == names


def straight(self: Any, x: Any) -> Any:
    self.size = len(x)
    self.kept.inner["n"] = 3
    return x


def branching(self: Any, x: Any) -> Any:
    self.first = 1
    if x:
        self.second = 2
    for _ in x:
        self.third = 3
    self.fourth = 4
    while x:
        return x
    self.fifth = 5
    return x


def handling(self: Any, x: Any) -> Any:
    self.first = x
    with x:
        return 1


def replacing(self: Any, x: Any) -> Any:
    self.first = 1
    self = x
    self.append(1)


def replacing_inside(self: Any, x: Any) -> Any:
    def replace() -> None:
        nonlocal self
        self = x

    self.first = 1
    replace()


@pytest.mark.parametrize(
    ("body", "once"),
    [
        ("y = f(x)\n return y", True),
        # Python 3.12 and later have an assignment in each branch.
        ("y = f(x) if k else d\n return y", sys.version_info < (3, 12)),
        ("if k:\n  y = x\n return y", True),
        ("y = x\n y = f(y)", False),
        ("for y in x: f(y)", False),
        ("while k:\n  y = f(x)\n return y", False),
        ("y = [f(z) for z in x]\n del y", False),
        ("y = x\n def g():\n  nonlocal y\n  y = k\n return g", False),
        ("y = x\n def g():\n  def h():\n   nonlocal y\n   y = k\n  return h\n return g", False),
        ("y = x\n def g():\n  nonlocal k\n  k = y\n return g", True),
        ("try:\n  y = f(x)\n except E:\n  y = d", False),
        ("x = f(x)\n y = x\n return y", True),
    ],
)
def test_a_variable_that_is_assigned_once(body: str, once: bool) -> None:
    assert ("y" in loads_of(code_of(body)).once) is once


def test_values_of_a_variable_that_is_assigned_again_in_a_loop() -> None:
    boxes = [types.SimpleNamespace(scale=n) for n in range(3)]

    def total() -> int:
        found = 0
        for box in boxes:
            found += box.scale
        last = boxes[0]
        return found + last.scale

    watch = FrameWatch(Reads())
    with watch.watching():
        total()
    owners = [watch.reads.of(box) for box in boxes]
    assert all(owner is not None and owner.names["scale"] is Use.READ for owner in owners)


def test_what_dynamo_compiles_with_is_no_part_of_the_run() -> None:
    """Nor does the watch slow it down: it is a hundred thousand calls of functions."""
    torch._dynamo.trace_rules.add("onelaunch.frames")  # as a callable's first call does
    box = Box(scale=3)
    inner = torch.compile(lambda x: (x * 2).sin(), backend="eager", dynamic=True)
    reads = seen(lambda x: inner(x) * box.scale, torch.ones(3))  # type: ignore[attr-defined]
    assert read_of(reads, box) == {"scale"}
    files = {code.co_filename for code in reads.codes}
    assert not [file for file in files if "sympy" in file or file.startswith(f"{TORCH}fx/exp")]


def test_stores_that_a_run_comes_by() -> None:
    functions = (straight, branching, handling, replacing, replacing_inside)
    stores = {fn: sure_stores(fn.__code__) for fn in functions}
    assert [(s.variable, s.path, s.key, s.item) for s in stores[straight]] == [
        ("self", (), "size", False),
        ("self", ("kept", "inner"), "n", True),
    ]
    assert [s.key for s in stores[branching]] == ["first", "fourth"]
    assert not any(stores[fn] for fn in (handling, replacing, replacing_inside))
