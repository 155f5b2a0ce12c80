"""Every way to change what a recording relies on is noticed, in C and in Python alike."""

from __future__ import annotations

import contextvars
import gc
import math
import resource
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onelaunch.call.ambient import readers
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.state import guard as guards
from onelaunch.state.guard import StateGuard
from onelaunch.state.native_guard import NativeGuard, native_guard
from onelaunch.state.walk import MISSING, Slot, walk

SCALE = [2.0]


class Config:
    def __init__(self) -> None:
        self.depth = 3

    def deep(self) -> bool:
        return self.depth > 2


class Other(Config):
    pass


def activation(x: Tensor, slope: float = 0.5) -> Tensor:
    return x * slope


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.flag = 2.5
        self.items = [1, 2]
        self.table = {"a": 1000}
        self.config = Config()
        self.unread = 1

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "late"):
            return x
        y = self.norm(self.layer(x)) * self.flag * self.items[0] * self.table["a"] * SCALE[0]
        return activation(y) if self.config.deep() else y


@pytest.fixture(params=["native", "python"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(guards, "native_guard", lambda: NativeGuard(None, "not wanted"))
    else:
        assert native_guard().guard is not None, native_guard().reason
    return request.param


@pytest.fixture(autouse=True)
def settled() -> Generator[None]:
    """What the changes below do to classes, functions, globals and modes is undone."""
    before = Config.deep, activation.__code__, activation.__defaults__, list(SCALE)
    forward = nn.Linear.forward
    yield
    Config.deep, activation.__code__, activation.__defaults__, SCALE[:] = before
    nn.Linear.forward = forward
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = True


def seen(root: Any) -> Reads:
    """What a callable reads as it runs; hooks of the module itself run outside."""
    reads = Reads()
    with FrameWatch(reads).watching():
        (root.forward if isinstance(root, nn.Module) else root)(torch.ones(2, 3))
    return reads


def guard_of(
    root: object, tensors: Iterable[Tensor] = (), reads: Reads | None = None
) -> StateGuard:
    """The guard of a callable, of all that it may read unless `reads` is given."""
    found = walk([("", root)], reads)
    slots = list(found.all_slots.values())
    owners = {id(s.owner): s.owner for s, _ in slots if hasattr(s.owner, "__dict__")}
    kept = [(s, v) for s, v in slots if found.is_read(s) and not isinstance(v, Tensor)]
    kept += [(s, v) for s, v in slots if isinstance(v, Tensor)]
    sized = {id(c): (c, names) for c, names in found.sized()}
    kept += found.paths(owners.values())
    return StateGuard(kept, tensors, list(sized.values()), readers())


def model_guard() -> tuple[Model, StateGuard]:
    model = Model()
    reads = seen(model)
    return model, guard_of(model, [*model.parameters(), *model.buffers()], reads)


def twice(x: Any) -> Any:
    return x


def hook(*_: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Model], object]] = {
    "setattr": lambda m: setattr(m, "flag", 3.0),
    "setattr of another type": lambda m: setattr(m, "flag", 2),
    "__dict__[...]": lambda m: m.__dict__.__setitem__("flag", 3.0),
    "__dict__.update": lambda m: vars(m).update(flag=3.0),
    "__dict__.pop": lambda m: vars(m).pop("flag"),
    "__dict__ =": lambda m: setattr(m.config, "__dict__", {"depth": 3}),
    "__dict__ = an equal one": lambda m: setattr(m.config, "__dict__", dict(vars(m.config))),
    "del __dict__": lambda m: delattr(m.config, "__dict__"),
    "__dict__ = of a module": lambda m: setattr(
        m.layer, "__dict__", dict(nn.Linear(3, 3).__dict__)
    ),
    "object.__setattr__": lambda m: object.__setattr__(m, "flag", 3.0),
    "delattr": lambda m: delattr(m, "flag"),
    "an attribute asked for": lambda m: setattr(m, "late", True),
    "__class__ =": lambda m: setattr(m.config, "__class__", Other),
    "eval": lambda m: m.eval(),
    "eval of a part": lambda m: m.norm.eval(),
    "parameter": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(3, 3))),
    "_parameters[...]": lambda m: m.layer._parameters.update(bias=nn.Parameter(torch.ones(3))),
    "_parameters =": lambda m: setattr(m.layer, "_parameters", dict(m.layer._parameters)),
    "parameter gone": lambda m: setattr(m.layer, "bias", None),
    "buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(3)),
    "submodule": lambda m: setattr(m, "norm", nn.Identity()),
    "_modules[...]": lambda m: m._modules.update(norm=nn.Identity()),
    "_modules =": lambda m: setattr(m, "_modules", dict(m._modules)),
    "submodule gone": lambda m: delattr(m, "norm"),
    "hook added": lambda m: m.layer.register_forward_hook(hook),
    "pre-hook added": lambda m: m.layer.register_forward_pre_hook(hook),
    "forward of an instance": lambda m: setattr(m.layer, "forward", twice),
    "forward of a class": lambda m: setattr(nn.Linear, "forward", twice),
    "method of a class": lambda m: setattr(Config, "deep", lambda self: False),
    "code of a function": lambda m: setattr(activation, "__code__", twice.__code__),
    "default of a function": lambda m: setattr(activation, "__defaults__", (0.25,)),
    "list item": lambda m: m.items.__setitem__(0, 7),
    "list grown": lambda m: m.items.append(3),
    "list shrunk": lambda m: m.items.pop(),
    "list replaced": lambda m: setattr(m, "items", [1, 2]),
    "dict item": lambda m: m.table.update(a=5),
    "dict shrunk": lambda m: m.table.clear(),
    "attribute of an object": lambda m: setattr(m.config, "depth", 1),
    "item of a global": lambda m: SCALE.__setitem__(0, 3.0),
    ".data": lambda m: setattr(m.layer.weight, "data", torch.ones(3, 3)),
    ".data of other strides": lambda m: setattr(m.layer.weight, "data", m.layer.weight.data.t()),
    ".data of another dtype": lambda m: setattr(
        m.layer.bias, "data", m.layer.bias.data.view(torch.int32).view(torch.float16)[:3]
    ),
    "set_": lambda m: m.norm.running_mean.set_(torch.ones(3)),
    "resize_": lambda m: m.norm.running_mean.resize_(2),
    "storage freed": lambda m: m.norm.running_mean.untyped_storage().resize_(0),
    "swap_tensors": lambda m: torch.utils.swap_tensors(
        m.layer.weight, nn.Parameter(torch.ones(3, 3))
    ),
    "to another dtype": lambda m: m.double(),
    "requires_grad": lambda m: m.layer.weight.requires_grad_(False),
    "grad mode": lambda m: torch.set_grad_enabled(False),
    "default dtype": lambda m: torch.set_default_dtype(torch.float64),
    "deterministic": lambda m: torch.use_deterministic_algorithms(True),
    "TF32": lambda m: setattr(torch.backends.cudnn, "allow_tf32", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change: Callable[[Model], object]) -> None:
    model, guard = model_guard()
    for _ in range(3):
        assert guard.check()
    change(model)
    assert not guard.check()
    assert not guard.check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_guard_of_other_state_does_not_agree(change: Callable[[Model], object]) -> None:
    model = Model()
    tensors, reads = [*model.parameters(), *model.buffers()], seen(model)
    guard, again = (guard_of(model, tensors, reads) for _ in range(2))
    assert guard.agrees(again)
    assert again.agrees(guard)
    change(model)
    other = guard_of(model, tensors, reads)
    assert not guard.agrees(other)
    assert not other.agrees(guard)


KEPT: dict[str, Callable[[Model], object]] = {
    "a key that no code reads": lambda m: m.table.update(b=5),
    "an equal float": lambda m: setattr(m, "flag", float("2.5")),
    "an equal int": lambda m: m.table.update(a=int("1000")),
    "what no code reads": lambda m: setattr(m, "unread", 2),
    "a new attribute that no code reads": lambda m: setattr(m, "elsewhere", 2),
    "another value, in place": lambda m: m.layer.weight.data.fill_(2.0),
    "the parameter under another name": lambda m: setattr(m, "elsewhere", [m.layer.weight]),
    "a hook of the module itself": lambda m: m.register_forward_hook(hook),
    "there and back": lambda m: (m.eval(), m.train()),
    "a gradient": lambda m: m(torch.ones(2, 3)).sum().backward(),
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_what_makes_no_difference(change: Callable[[Model], object]) -> None:
    model, guard = model_guard()
    change(model)
    assert guard.check()
    assert guard.difference() is None
    assert guard.check()
    model.flag = 9.0
    assert not guard.check()


def test_hooks_that_go() -> None:
    model = Model()
    handle = model.layer.register_forward_hook(hook)
    reads = seen(model)
    guard = guard_of(model, (), reads)
    handle.remove()
    assert not guard.check()
    model.layer.register_forward_hook(hook)
    guard = guard_of(model, (), reads)
    model.layer._forward_hooks = OrderedDict()
    assert not guard.check()


def test_cells_and_globals() -> None:
    factor = 2.0

    def fn(x: Tensor) -> Tensor:
        return x * factor * SCALE[0]

    guard = guard_of(fn)
    assert guard.check()
    factor = 2.0 + 1.0
    assert not guard.check()
    factor = 1.0 + 1.0
    assert guard.check()
    SCALE[:] = [4.0]
    assert not guard.check()


def test_keyword_defaults() -> None:
    def fn(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return x * factor

    guard = guard_of(fn)
    assert guard.check()
    fn.__kwdefaults__ = {"factor": 3.0}
    assert not guard.check()


def test_a_flag_may_come_back() -> None:
    model, guard = model_guard()
    model.eval()
    assert not guard.check()
    assert guard.moved() is None
    assert guard.difference() == "norm.training: captured True, got False"
    model.train()
    assert guard.check()
    model.requires_grad_(False)
    assert guard.moved() is None
    assert guard.difference() == "layer.weight.requires_grad: captured True, got False"
    model.requires_grad_(True)
    assert guard.check()


def test_without_grad_mode_requires_grad_is_free() -> None:
    with torch.no_grad():
        model, guard = model_guard()
        model.requires_grad_(False)
        assert guard.check()


def test_a_parameter_that_moved_is_gone_for_good() -> None:
    model, guard = model_guard()
    model.layer.weight.data = torch.ones(3, 3)
    assert guard.moved() == "layer.weight"
    assert guard.difference() == "layer.weight moved"


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(2, 2), [1, 2]
        self.state: dict[str, Any] = {"momentum": torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.numbers.append(3), "numbers changed its length"),
        (lambda m: setattr(m, "numbers", [3]), "numbers: captured [1, 2], got [3]"),
        (lambda m: setattr(m, "numbers", [*range(99)]), "numbers: captured [1, 2], got a list"),
        (
            lambda m: setattr(m, "state", {"momentum": torch.zeros(2)}),
            "state: captured a dict, got another",
        ),
        (lambda m: setattr(m, "layer", nn.Linear(2, 2)), "layer: captured a Linear, got another"),
    ],
)
def test_a_difference_is_named_by_its_attribute(
    change: Callable[[Holder], object], expected: str
) -> None:
    holder = Holder()
    guard = guard_of(holder)
    assert guard.difference() is None
    change(holder)
    assert guard.difference() == expected


def test_a_conjugated_parameter() -> None:
    p = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    guard = StateGuard([], [p])
    assert guard.check()
    p.data = p.data.conj()
    assert not guard.check()


def test_nan_and_the_sign_of_zero() -> None:
    box = {"a": math.nan, "b": 0.0}
    guard = StateGuard([(Slot("item", box, key, key, None), box[key]) for key in box], [])
    box["a"] = float("nan")
    assert guard.check()
    box["b"] = -0.0
    assert not guard.check()


class Shouting(dict[str, str]):
    """Shows what it does not hold."""

    def __getitem__(self, key: str) -> str:
        return super().__getitem__(key).upper()


def test_a_container_that_shows_something_else() -> None:
    box = Shouting(a="x")
    guard = StateGuard([(Slot("item", box, "a", "a", None), "x")], [])
    assert guard.check()
    box["a"] = "y"
    assert not guard.check()


VALUES = [
    None,
    True,
    1,
    1.0,
    -0.0,
    0.0,
    "a",
    10**20,
    (1, 2),
    object(),
    nn.Identity(),
    torch.ones(1),
]
STEPS = st.tuples(
    st.sampled_from(["attribute", "item", "entry", "delete", "append", "class", "dict"]),
    st.sampled_from(range(len(VALUES))),
    st.booleans(),
)


class Thing:
    pass


class Another(Thing):
    pass


@settings(max_examples=60, deadline=None)
@given(first=st.sampled_from(range(len(VALUES))), steps=st.lists(STEPS, max_size=12))
def test_both_guards_agree(first: int, steps: list[tuple[str, int, bool]]) -> None:
    root = Thing()
    root.a, root.items, root.table = VALUES[first], [VALUES[first]], {"k": VALUES[first]}
    guard = guard_of(root)
    names = frozenset({"a", "items", "table", "late"})
    slots = [(s, s.read()) for s in guard._slots if s.read() is not MISSING]
    sized = [(vars(root), names), (root.items, None), (root.table, None)]
    guard = StateGuard(slots, [], sized, readers())
    for what, index, anew in steps:
        value = VALUES[index]
        if anew and isinstance(value, float | int) and not isinstance(value, bool):
            value = type(value)(repr(value))  # equal, and another object
        change(root, what, value)
        assert guard.check() == guard._python_check()


def change(root: Any, what: str, value: object) -> None:
    if what == "attribute":
        root.a = value
    elif what == "item" and root.items:
        root.items[0] = value
    elif what == "entry":
        root.table["k"] = value
    elif what == "delete":
        root.table.pop("k", None)
    elif what == "append":
        root.items.append(value)
    elif what == "class":
        root.__class__ = Thing if value is None else Another
    elif what == "dict":
        root.__dict__ = dict(root.__dict__)


@pytest.mark.thorough
def test_nothing_is_left_of_guards_that_are_dropped() -> None:
    model = Model()
    weight, box = model.layer.weight, {"k": object()}
    slots = [(Slot("item", box, "k", "k", None), box["k"])]

    def make(count: int) -> tuple[int, ...]:
        for _ in range(count):
            assert StateGuard(slots, [weight], [(box, None)], readers()).check()
        for _ in range(10):  # garbage of earlier tests, whose end makes more of it
            if not gc.collect():
                break
        return tuple(sys.getrefcount(o) for o in (weight, box, box["k"], torch.Tensor, vars))

    before = make(1000)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert make(10_000) == before
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 4096 * (1024 if sys.platform == "darwin" else 1)  # 4 MiB


def test_a_guard_keeps_its_tensors_alive() -> None:
    guard = StateGuard([], [torch.ones(1000)])
    gc.collect()
    assert guard.check()


def test_a_reader_that_raises() -> None:
    def read() -> object:
        if broken:
            raise ValueError("broken")
        return None

    broken: list[int] = []
    guard = StateGuard([], [], [], [(read, None)])
    broken.append(1)
    with pytest.raises(ValueError, match="broken"):
        guard.check()


def test_a_list_that_shrinks_under_its_slots() -> None:
    items: list[object] = [1, 2, 3]
    guard = StateGuard([(Slot("item", items, i, str(i), None), items[i]) for i in range(3)], [])
    del items[1:]
    assert not guard.check()
    items[:] = [1, 2, 3]
    assert guard.check()


def test_an_empty_cell() -> None:
    cell = types.CellType(2.0)
    guard = StateGuard([(Slot("cell", cell, None, "c", None), 2.0)], [])
    assert guard.check()
    del cell.cell_contents
    assert not guard.check()


@pytest.mark.parametrize("dims", [1, 5, 6, 7])
def test_a_layout_that_moves_in_place(dims: int) -> None:
    """Sizes of up to five dimensions lie in the tensor itself, and others elsewhere."""
    t = torch.zeros([2] * dims)
    guard = StateGuard([], [t])
    assert guard.check()
    other = torch.zeros([2] * dims)
    for change in (
        lambda: t.unsqueeze_(0),
        lambda: t.squeeze_(0),
        lambda: t.resize_([1] * dims),
        lambda: t.resize_([2] * dims),
        lambda: torch.utils.swap_tensors(t, other),
        lambda: torch.utils.swap_tensors(t, other),
    ):
        change()
        assert guard.check() is guard._python_check()  # pyright: ignore[reportPrivateUsage]
    assert guard.check()


def test_data_of_another_dtype_in_the_same_memory() -> None:
    t = torch.zeros(4)
    guard = StateGuard([], [t])
    t.data = t.data.view(torch.int32)
    assert not guard.check()


def test_a_context_variable() -> None:
    variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable")
    slot = Slot("contents", variable, contextvars.ContextVar.get, "variable", None)
    guard = StateGuard([(slot, MISSING)], [])
    assert guard.check()
    token = variable.set(None)
    assert not guard.check()
    variable.reset(token)
    assert guard.check()
    assert not contextvars.copy_context().run(lambda: variable.set(1) and guard.check())
    assert guard.check()
