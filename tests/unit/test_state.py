"""What a callable reaches behind its arguments."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.state.snapshot import LastWalk, ReachableState
from onelaunch.state.walk import MISSING, Change, Slot, StateWalk, changes, restore, walk

WEIGHT = torch.ones(2)
PAIR = (torch.ones(1), 2)
SETTINGS = {"scale": 2.0, "shift": torch.zeros(2)}


class Plain:
    limit = 3

    def __init__(self, t: Tensor) -> None:
        self.t = t
        self.only_set = 1

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.t

    def method(self, x: Tensor) -> Tensor:
        return x * self.t


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.parts = [Plain(torch.ones(2))]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](self.layer(x)) * WEIGHT


def tensors(root: object, name: str = "") -> set[str]:
    return {slot.name for slot, _ in walk([(name, root)]).tensors()}


def closure() -> Callable[[Tensor], Tensor]:
    held, table = torch.ones(1), {"k": torch.ones(1)}

    def fn(x: Tensor) -> Tensor:
        return x + held + table["k"] + WEIGHT + SETTINGS["shift"]

    return fn


def with_defaults(x: Tensor, a: Any = PAIR, *, b: Tensor = WEIGHT) -> Tensor:
    return x + a[0] + b


ROOTS: dict[str, tuple[object, set[str]]] = {
    "module": (Net(), {"layer.weight", "layer.bias", "seen", "parts[0].t", "WEIGHT"}),
    "function": (closure(), {"held", "table['k']", "WEIGHT", "SETTINGS['shift']"}),
    "defaults": (with_defaults, {"f.__defaults__[0][0]", "f.__kwdefaults__['b']"}),
    "bound method": (Plain(WEIGHT).method, {"self.t"}),
    "callable object": (Plain(WEIGHT), {"f.t"}),
    "partial": (
        functools.partial(torch.add, WEIGHT, out=torch.ones(2)),
        {"f.args[0]", "f.keywords['out']"},
    ),
    "containers": (
        [deque([torch.ones(1)]), OrderedDict(k=torch.ones(1)), (torch.ones(1),)],
        {"f[0][0]", "f[1]['k']", "f[2][0]"},
    ),
    "wrapped": (
        functools.wraps(with_defaults)(lambda x: x),
        {"f.__defaults__[0][0]", "f.__kwdefaults__['b']"},
    ),
    "nothing": (torch.sin, set()),
}


@pytest.mark.parametrize("kind", ROOTS)
def test_tensors_are_found_by_name(kind: str) -> None:
    root, names = ROOTS[kind]
    assert tensors(root, "" if isinstance(root, nn.Module) else "f") == names


def test_a_long_chain_and_a_ring_end() -> None:
    chain: list[Any] = [torch.ones(1)]
    for _ in range(5000):
        chain = [chain]
    ring: list[Any] = [chain]
    ring.append(ring)
    assert len(tensors(ring)) == 1


def test_slots_read_and_write() -> None:
    value = 1

    def fn() -> int:
        return value

    (cell,) = [slot for slot, _ in walk([("f", fn)]).all_slots.values() if slot.kind == "cell"]
    assert cell.read() == 1
    cell.write(5)
    assert fn() == 5
    box: dict[str, int] = {}
    slot = Slot("item", box, "k", "box['k']", None)
    assert slot.read() is MISSING
    slot.write(3)
    assert (slot.read(), box) == (3, {"k": 3})
    slot.write(MISSING)
    assert box == {}
    assert Slot("item", [1], 4, "a", None).read() is MISSING
    assert repr(MISSING) == "nothing"


def test_changes_and_their_undoing() -> None:
    net = Net()
    before = walk([("", net)])
    assert changes(before, walk([("", net)])) == []
    old = net.layer.weight
    net.layer.weight = nn.Parameter(torch.zeros(2, 2))
    net.late = torch.ones(1)
    del net.seen
    net.parts[0].only_set = 1
    found = changes(before, walk([("", net)]))
    assert {c.slot.name: c.before is MISSING for c in found} == {
        "layer.weight": False,
        "late": True,
        "seen": False,
    }
    restore(found)
    assert net.layer.weight is old
    assert not hasattr(net, "late")
    assert net.seen.shape == (1,)
    assert changes(before, walk([("", net)])) == []


def test_what_changed_again_is_not_undone() -> None:
    box = {"k": 1}
    restore([Change(Slot("item", box, "k", "k", None), 0, 2)])
    assert box == {"k": 1}


def test_an_equal_number_is_no_change() -> None:
    box = [float("2.5"), float("nan")]
    before = walk([("box", box)])
    box[:] = [float("2.5"), float("nan")]
    assert changes(before, walk([("box", box)])) == []
    box[0] = 3
    assert [c.slot.name for c in changes(before, walk([("box", box)]))] == ["box[0]"]


def seen(root: Any) -> StateWalk:
    """What is found of a callable that has run."""
    reads = Reads()
    with FrameWatch(reads).watching():
        (root.forward if isinstance(root, nn.Module) else root)(torch.ones(2, 2))
    return walk([("f", root)], reads)


def test_an_attribute_that_nobody_was_seen_to_touch_is_a_change() -> None:
    net = Net()
    net.late = 1
    before = seen(net)
    assert ("late",) not in {(slot.name,) for slot, _ in before.all_slots.values()}
    assert before.is_current()
    net.__dict__.update(late=2, later=3)  # as code in C may
    assert not before.is_current()
    found = changes(before, walk([("f", net)], before.reads))
    assert {c.slot.key: c.before for c in found} == {"late": 1, "later": MISSING}
    restore(found)
    assert net.late == 1
    assert not hasattr(net, "later")


class Other(Plain):
    pass


class Scaled(Plain):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.parts = [Plain(torch.ones(2))]
        self.table = {"a": 1}
        self.names = {"a"}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) if "a" in self.names else x
        return self.parts[0](y) * self.table["a"] + helper(x)


def helper(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def replaced_code() -> Any:
    return lambda x, scale=2.0: x - scale


EDITS: dict[str, Callable[[Keeper], object]] = {
    "a number": lambda net: net.table.update(a=2),
    "a key": lambda net: net.table.update(b=2),
    "an item": lambda net: net.parts.append(Plain(WEIGHT)),
    "another object": lambda net: net.parts.__setitem__(0, Plain(WEIGHT)),
    "a parameter": lambda net: setattr(net.layer, "bias", None),
    "the parameters": lambda net: vars(net.layer).update(
        _parameters=dict(net.layer._parameters)  # with the same parameters
    ),
    "the attributes": lambda net: setattr(net.layer, "__dict__", dict(vars(net.layer))),
    "an attribute that is not read": lambda net: setattr(net.layer, "in_features", 9),
    "a hook": lambda net: net.layer.register_forward_hook(print),
    "an attribute": lambda net: setattr(net.parts[0], "more", 1),
    "a class": lambda net: setattr(net.parts[0], "__class__", Other),
    "what a set holds": lambda net: (net.names.add("b"), net.names.remove("a")),
    "a default": lambda net: setattr(helper, "__defaults__", (3.0,)),
    "code": lambda net: setattr(helper, "__code__", replaced_code().__code__),
    "a base class": lambda net: setattr(Other, "__bases__", (Scaled,)),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("asked", [False, True])
def test_a_walk_stands_until_something_changes(name: str, asked: bool) -> None:
    net = Keeper()
    if name == "a base class":
        net.parts[0].__class__ = Other
    found = seen(net)
    assert not asked or found.is_current()
    kept = helper.__code__, helper.__defaults__, Other.__bases__
    try:
        EDITS[name](net)
        assert not found.is_current()
    finally:
        helper.__code__, helper.__defaults__, Other.__bases__ = kept


class Stacked(nn.Module):
    """State in modules alone: `Keeper` without its list of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("cache", torch.ones(2))
        self.table = {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.cache * self.table["a"]


def test_a_walk_is_kept_until_the_next_call() -> None:
    found, last = seen(Stacked()), LastWalk()
    state = ReachableState([], found.reads, last)
    last.keep(found)
    kept = state.walk()
    same = {key: (slot, id(value)) for key, (slot, value) in found.all_slots.items()}
    assert {key: (slot, id(value)) for key, (slot, value) in kept.all_slots.items()} == same
    assert list(kept.all_slots) == list(found.all_slots)
    assert len(kept.facts) == len(found.facts)
    assert kept.is_current()
    assert last.take(found.reads) is None  # it is given once


LATER: dict[str, Callable[[Stacked], object]] = {
    "a number": lambda net: net.table.update(a=2),
    "a parameter": lambda net: setattr(net.layer, "bias", None),
    "a buffer": lambda net: setattr(net, "cache", torch.ones(2)),
    "a hook": lambda net: net.layer.register_forward_hook(print),
    "an attribute": lambda net: setattr(net, "more", 1),
}


@pytest.mark.parametrize("name", LATER)
def test_a_walk_is_not_taken_after(name: str) -> None:
    net, last = Stacked(), LastWalk()
    found = seen(net)
    last.keep(found)
    LATER[name](net)
    assert last.take(found.reads) is None


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_walk_that_is_kept_finds_the_gradients_anew(before: bool, after: bool) -> None:
    net, last = Stacked(), LastWalk()
    net.layer.weight.grad = torch.ones(2, 2) if before else None
    found = seen(net)
    last.keep(found)
    net.layer.weight.grad = torch.zeros(2, 2) if after else None
    taken, fresh = last.take(found.reads), seen(net)
    assert taken is not None
    assert list(taken.all_slots) == list(fresh.all_slots)
    assert [id(v) for _, v in taken.all_slots.values()] == [
        id(v) for _, v in fresh.all_slots.values()
    ]
    assert [slot.name for slot, _ in taken.tensors()] == [slot.name for slot, _ in fresh.tensors()]
    assert len(taken.facts) == len(fresh.facts)


def test_a_walk_is_not_taken_with_other_reads_or_grad_mode() -> None:
    net, last = Stacked(), LastWalk()
    found = seen(net)
    last.keep(found)
    assert last.take(found.reads and found.reads.copy()) is None
    found = seen(net)
    last.keep(found)
    with torch.no_grad():
        assert last.take(found.reads) is None


def test_a_walk_that_is_kept_keeps_no_memory() -> None:
    net, last = Stacked(), LastWalk()
    last.keep(seen(net))
    cache = weakref.ref(net.cache)
    net.cache = torch.zeros(2)
    assert cache() is None


def test_no_walk_with_tensors_in_lists_or_objects_of_the_users_is_kept() -> None:
    found, last = seen(Keeper()), LastWalk()
    last.keep(found)
    assert last.take(found.reads) is None
    box = Plain(2)
    read = seen(lambda x: x * box.t)
    assert not read.strays  # a cell leads to it
    found = walk([], read.reads)
    assert found.strays
    last.keep(found)
    assert last.take(found.reads) is None


@pytest.mark.parametrize("change", ["value", "new", "gone", "tensor"])
def test_a_walk_is_kept_with_plain_attributes_of_its_tensors(change: str) -> None:
    """Transformers marks each parameter: `weight._is_hf_initialized = True`."""
    net, last = Stacked(), LastWalk()
    weight: Any = net.layer.weight
    weight.mark, weight.scale = True, 2.0
    found = seen(net)
    last.keep(found)
    taken = last.take(found.reads)
    assert taken is not None
    owners = [slot.owner for slot, _ in taken.all_slots.values() if slot.name.endswith(".scale")]
    assert len(owners) == 1
    assert owners[0] is weight
    assert set(map(id, taken.owners)) == set(map(id, found.owners))
    assert len(taken.facts) == len(found.facts)
    reads = found.reads
    last.keep(taken)
    if change == "value":
        weight.scale = 3.0
    elif change == "new":
        weight.other = 1
    elif change == "gone":
        del weight.mark
    else:
        net.layer.weight = nn.Parameter(torch.ones(2, 2))
    del weight, found, taken, owners
    assert last.take(reads) is None


def test_a_walk_is_not_kept_with_an_object_on_a_tensor() -> None:
    net, last = Stacked(), LastWalk()
    weight: Any = net.layer.weight
    weight.parts = [torch.ones(2)]
    found = seen(net)
    last.keep(found)
    assert last.take(found.reads) is None


def test_which_slots_are_read() -> None:
    found = seen(Plain(WEIGHT))
    by_name = {slot.name: slot for slot, _ in found.all_slots.values()}
    assert found.is_read(by_name["f.t"])
    assert not found.is_read(by_name["f.only_set"])


def test_hooks_of_parts_alone() -> None:
    net = Net()
    found = seen(net)
    sized = [*(container for container, _ in found.sized()), *found.hooks]
    assert any(hooks is net.layer._forward_hooks for hooks in sized)
    assert not any(hooks is net._forward_hooks for hooks in sized)


def test_the_ways_to_attributes() -> None:
    net = Net()
    found = seen(net)
    ways = list(found.paths([net, net.layer]))
    assert all(slot.read() is value for slot, value in ways)
    names = {slot.name for slot, _ in ways}
    assert {"the class of a `Net`", "`__dict__` of a `Net`", "`_modules` of a `Net`"} <= names
    assert "`_parameters` of a `Linear`" in names
    assert "the code of `Net.forward`" in names
    assert "`_parameters` of a `Net`" not in names
    read = {slot.name for slot, _ in found.all_slots.values() if found.is_read(slot)}
    assert {"Linear.forward", "Net.forward"} <= read


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale if isinstance(self.scale, float) else self.scale[0])


@pytest.mark.parametrize("read", [True, False])
def test_modules_of_a_class_that_differ(read: bool) -> None:
    """Attributes are told apart once for a class, and anew for a module that differs."""
    layers = nn.ModuleList([Layer() for _ in range(5)])
    layers[1].scale = [3.0]
    layers[2].late = torch.ones(1)
    layers[3].register_forward_hook(lambda module, args, result: None)
    layers[3]._forward_pre_hooks.note = 1  # type: ignore[attr-defined]
    reads = Reads()
    with FrameWatch(reads).watching(), torch.no_grad():
        for layer in layers[:4]:
            layer(torch.ones(1))
    found = walk([("layers", layers)], reads if read else None)

    def slot(index: int, name: str) -> tuple[int, str]:
        return id(vars(layers[index])), name

    assert all(found.is_leaf_attribute(slot(i, "scale")) for i in (0, 2, 3, 4))
    assert slot(1, "scale") in found.slots
    assert slot(2, "late") in found.slots
    if read:
        assert slot(3, "_forward_hooks") in found.slots
        assert slot(3, "_forward_pre_hooks") in found.slots
        assert found.is_leaf_attribute(slot(2, "_forward_hooks"))
