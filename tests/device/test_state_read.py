"""Table of state: numbers and objects that the callable reads, kept where no tensor is."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Generator
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in, follows, replays

Scale = tuple[Callable[[], float], Callable[[float], object]]
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT")
LOCAL = threading.local()


class Settings:
    scale = 2.0

    def read(self) -> float:
        return self.scale

    @classmethod
    def read_of_class(cls) -> float:
        return cls.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclasses.dataclass(slots=True)
class SlottedData:
    scale: float


class Doubles:
    def factor(self) -> float:
        return 2.0


class Triples:
    def factor(self) -> float:
        return 3.0


class BehindGetattr:
    def __init__(self) -> None:
        self.__dict__["inside"] = {"scale": 2.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["inside"][name]  # KeyError for all else


class OfALibrary(torch.distributions.transforms.Transform):
    """`__call__` of the base class calls `_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def _call(self, x: float) -> float:
        return self.scale * x


def modules() -> types.ModuleType:
    """A module in a package of the user's."""
    package, inside = types.ModuleType("settings"), types.ModuleType("settings.model")
    package.__file__ = inside.__file__ = __file__
    vars(package)["model"], vars(inside)["scale"] = inside, 2.0
    sys.modules.update({"settings": package, "settings.model": inside})
    return inside


def defined(code: str, **namespace: Any) -> Callable[[], float]:
    exec(f"def read():\n {code}", namespace)
    return namespace["read"]


def put(box: Any, value: Any) -> None:
    box.scale = value


def place(
    make: Callable[[], Any],
    read: Callable[[Any], Callable[[], float]] = lambda box: lambda: box.scale,
    write: Callable[[Any, float], object] = put,
) -> Callable[[], Scale]:
    """A box, what reads a number of it, which has it in its closure, and what writes it."""

    def made() -> Scale:
        box = make()
        return read(box), lambda value: write(box, value)

    return made


def of_a_global_class() -> Scale:
    Settings.scale = 2.0
    return lambda: Settings.scale, lambda v: setattr(Settings, "scale", v)


def of_a_read_only_dict() -> Scale:
    inside = {"scale": 2.0}
    box = types.MappingProxyType(inside)
    return lambda: box["scale"], lambda v: inside.update(scale=v)


def of_a_function() -> Scale:
    def read() -> float:
        return read.scale  # pyright: ignore

    read.scale = 2.0  # pyright: ignore
    return read, lambda v: setattr(read, "scale", v)


def of_a_thread() -> Scale:
    LOCAL.scale = 2.0
    return lambda: LOCAL.scale, lambda v: setattr(LOCAL, "scale", v)


def of_a_context() -> Scale:
    CONTEXT.set(2.0)
    return lambda: CONTEXT.get(), CONTEXT.set


def here(base: type = object) -> Any:
    return type("Here", (base,), {"scale": 2.0} if base is object else {})


def named(scale: Any) -> Any:
    return types.SimpleNamespace(scale=scale)


def of_class(box: Any, value: float) -> None:
    type(box).scale = value


PLACES: dict[str, Callable[[], Scale]] = {
    "a global class": of_a_global_class,
    "a local class": place(here),
    "a class method": place(
        lambda: here(Settings)(), lambda box: lambda: box.read_of_class(), of_class
    ),
    "a class that had it of its base": place(
        lambda: here(Settings)(), lambda box: lambda: box.read(), of_class
    ),
    "slots": place(lambda: Slotted(2.0)),
    "a dataclass with slots": place(
        lambda: {"data": SlottedData(2.0)},
        lambda box: lambda: box["data"].scale,
        lambda box, v: put(box["data"], v),
    ),
    "a set": place(
        lambda: {2.0}, lambda box: lambda: next(iter(box)), lambda box, v: (box.clear(), box.add(v))
    ),
    "a set replaced": place(
        lambda: named({2.0}),
        lambda box: lambda: next(iter(box.scale)),
        lambda box, v: put(box, {v}),
    ),
    "an empty list replaced": place(
        lambda: named([]), lambda box: lambda: sum(box.scale), lambda box, v: put(box, [v])
    ),
    "an empty tuple replaced": place(
        lambda: named(()), lambda box: lambda: sum(box.scale), lambda box, v: put(box, (v,))
    ),
    "an object without attributes": place(
        lambda: named(Doubles()),
        lambda box: lambda: box.scale.factor(),
        lambda box, v: put(box, Triples()),
    ),
    "bytes": place(
        lambda: bytearray([2]),
        lambda box: lambda: box[0],
        lambda box, v: box.__setitem__(0, int(v)),
    ),
    "a decimal": place(
        lambda: {"scale": Decimal(2)},
        lambda box: lambda: float(box["scale"]),
        lambda box, v: box.update(scale=Decimal(v)),
    ),
    "a read-only dict": of_a_read_only_dict,
    "a function": of_a_function,
    "a thread": of_a_thread,
    "a context": of_a_context,
    "a big dict": place(
        lambda: dict.fromkeys([f"key{i}" for i in range(200)], 1.0) | {"scale": 2.0},
        lambda box: lambda: box["scale"],
        lambda box, v: box.update(scale=v),
    ),
    "a dict behind getattr": place(
        BehindGetattr, write=lambda box, v: box.__dict__["inside"].update(scale=v)
    ),
    "a module in a package": place(
        modules, lambda _: defined("return settings.model.scale", settings=sys.modules["settings"])
    ),
    "a module imported inside": place(
        modules, lambda _: defined("from settings.model import scale\n return scale")
    ),
    "a module of its own package": place(
        modules,
        lambda _: defined("from .model import scale\n return scale", __package__="settings"),
    ),
    "a module in an attribute": place(
        lambda: types.SimpleNamespace(settings=modules()),
        lambda box: lambda: box.settings.scale,
        lambda box, v: put(box.settings, v),
    ),
    "a template": place(OfALibrary, lambda box: lambda: box(1.0)),
}


class Descriptor:
    def __get__(self, box: Any, kind: Any = None) -> float:
        return box.scale


class Decorated:
    """A number that is read by methods under decorators of libraries."""

    def __init__(self) -> None:
        self.scale = 2.0

    @torch.no_grad()
    def no_grad(self) -> float:
        return self.scale

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def autocast(self) -> float:
        return self.scale

    @torch.compiler.disable
    def not_compiled(self) -> float:
        return self.scale

    @torch.jit.ignore
    def not_scripted(self) -> float:
        return self.scale

    @functools.lru_cache(maxsize=0)  # noqa: B019
    def cached(self) -> float:
        return self.scale

    @contextlib.contextmanager
    def _context(self) -> Generator[float]:
        yield self.scale

    def context(self) -> float:
        with self._context() as scale:
            return scale

    def _times(self, times: float) -> float:
        return self.scale * times

    partial = functools.partialmethod(_times, 1.0)

    @functools.singledispatchmethod
    def _dispatched(self, key: object) -> float:
        raise NotImplementedError

    @_dispatched.register
    def _(self, key: int) -> float:
        return self.scale

    def dispatched(self) -> float:
        return self._dispatched(1)

    @property
    @torch.no_grad()
    def _property(self) -> float:
        return self.scale

    def of_a_property(self) -> float:
        return self._property

    _described = Descriptor()

    def described(self) -> float:
        return self._described


METHODS = [name for name in vars(Decorated) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*PLACES, *METHODS])
def test_a_number_that_changes(rand: Rand, name: str) -> None:
    made = PLACES.get(name) or place(Decorated, lambda box: lambda: getattr(Decorated, name)(box))
    read, write = made()
    fast = follows(lambda x: x * read() + 1, lambda i: (rand(i, 3),), lambda: write(3.0))
    assert fast.stats().replays >= 3


SCALE = 2.0


class TimesScale(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * SCALE

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.inverse = 1 / SCALE

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * SCALE * ctx.inverse


@pytest.mark.parametrize("step", [False, True])
def test_a_number_that_a_function_of_autograd_reads(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch, step: bool
) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return TimesScale.apply(x * weight).sum()

    def whole(x: Tensor) -> Tensor:
        loss = forward(x)
        loss.backward()
        return loss.detach()

    f = whole if step else forward
    fast = ol.graph(f, warmup=1)
    for i in range(9):
        monkeypatch.setattr(f"{__name__}.SCALE", 2.0 + i // 3)
        found: list[Any] = []
        for called in (fast, f):
            weight.grad = None
            loss = called(rand(i, 3))
            if not step:
                loss.backward()
            found.append((loss.detach().clone(), weight.grad))
            weight.grad = None
        assert_same(found[0], found[1], f"call {i}")
    assert replays(fast) >= 3


def test_a_number_that_a_hook_of_a_parameter_reads(device: torch.device, rand: Rand) -> None:
    weight, scale = torch.ones(3, device=device, requires_grad=True), 2.0
    weight.register_hook(lambda g: g * scale)

    def f(x: Tensor) -> None:
        weight.grad = None
        (x * weight).sum().backward()

    fast = ol.graph(f, warmup=1)
    for i in range(9):
        scale = 2.0 + i // 3
        with pytest.warns(ol.GraphWarning, match="OL308") if i == 1 else nullcontext():
            fast(rand(i, 3))
        assert weight.grad is not None
        assert_same(weight.grad, rand(i, 3) * scale, f"call {i}")
    assert replays(fast) >= 3


def test_a_number_that_a_decorated_method_reads_but_is_not_called(rand: Rand) -> None:
    class Logs(nn.Linear):
        step = 0

        @torch.no_grad()
        def log(self) -> int:
            return self.step

    model = Logs(4, 2)
    fast = ol.graph(model, warmup=1)
    for i in range(8):
        fast(rand(i, 3, 4).cpu())
        model.step += 1
    assert len(fast.recordings) == 1


def test_a_number_that_a_hook_of_every_module_reads(rand: Rand) -> None:
    box = {"scale": 2.0}
    handle = nn.modules.module.register_module_forward_hook(lambda m, x, y: y * box["scale"])
    try:
        model = nn.Sequential(nn.Tanh())
        fast = ol.graph(lambda x: model(x), warmup=1)
        with torch.no_grad():
            for i in range(9):
                box["scale"] = 2.0 + i // 3
                with pytest.warns(ol.GraphWarning, match="OL308") if i == 1 else nullcontext():
                    got = fast(rand(i, 3))
                assert_same(got, model(rand(i, 3)))
        assert replays(fast) >= 3
    finally:
        handle.remove()


def test_a_class_attribute_of_a_module_that_is_a_number(rand: Rand) -> None:
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + type(self).scale

    changes = [lambda scale=scale: setattr(Scaled, "scale", scale) for scale in (3.0, 2.0)]
    assert replays(follows(Scaled(), lambda i: (rand(i, 3),), *changes)) > 5


def test_a_number_array_that_changes(rand: Rand) -> None:
    numpy = pytest.importorskip("numpy")
    box = {"array": numpy.full(2000, 2.0), "number": numpy.float32(5.0)}

    def f(x: Tensor) -> Tensor:
        return x * float(box["array"][0]) + float(box["number"])

    def change() -> None:
        box["array"][0] += 1
        box["number"] = numpy.float32(box["number"] - 1)

    assert replays(follows(f, lambda i: (rand(i, 3),), change, change)) > 5


def test_an_attribute_that_is_only_stored_does_not_split_recordings(rand: Rand) -> None:
    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last_shape = x.shape
            return x * 2

    fast = ol.graph(Notes(), warmup=1)
    with torch.no_grad():
        for i in range(12):
            n = 2 + i % 2
            assert_same(fast(rand(i, n)), rand(i, n) * 2)
    assert len(fast.recordings) == 2


def test_attributes_named_much_as_those_of_torch(device: torch.device, rand: Rand) -> None:
    """`nn.Module` has `_forward_hooks`, `_state_dict_hooks` and the like; these are the user's."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.change(0)

        def change(self, step: int) -> None:
            self._state_h = rand(step, 3)
            self._forward_scale = 2.0 + step % 2
            self._load_state_flag = step != 2
            self._backward_w = rand(step + 9, 3)

        def forward(self, x: Tensor) -> Tensor:
            sign = 1 if self._load_state_flag else -1
            return (x * self._forward_scale + self._state_h) * self._backward_w * sign

    model = Named()
    changes = [functools.partial(model.change, step) for step in range(1, 4)]
    assert replays(follows(model, lambda i: (rand(i, 3),), *changes)) > 5


def imports() -> bool:
    try:
        import not_there  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True


def finds() -> bool:
    return importlib.util.find_spec("not_there") is not None


@pytest.mark.parametrize("asks", [imports, finds])
def test_a_finder_of_modules_that_counts_what_it_is_asked(
    rand: Rand, monkeypatch: pytest.MonkeyPatch, asks: Callable[[], bool]
) -> None:
    """What an import reads is no part of the call: pytest's own finder keeps such a cache."""

    class Finder:
        asked: dict[int, str] = {}  # noqa: RUF012

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name not in self.asked.values() or name == "not_there":
                self.asked[len(self.asked)] = name

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])

    drop_in(lambda x: x * 3 if asks() else x * 2, lambda i: (rand(i, 3),))


def test_a_hook_that_came_is_named(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(3, 3)).to(device)
    fast = ol.graph(model)
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 3))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        with pytest.warns(ol.GraphWarning, match="OL308"):  # at the capture
            results = [(fast(rand(i, 3)), model(rand(i, 3))) for i in range(4)]
        for result, expected in results:
            assert_same(result, expected)
    why = [recording.why for recording in fast.recordings]
    assert any("._forward_hooks changed its length" in reason for reason in why), why


WALKS: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda m: [*m.modules()],
    "first": lambda m: [next(m.children())],
    "until": lambda m: [next(c for c in m.modules() if isinstance(c, nn.Linear))],
    "any": lambda m: [m] if any(isinstance(c, nn.Tanh) for c in m.modules()) else [m[0]],
    "named": lambda m: [c for name, c in m.named_modules() if name],
    "closed": lambda m: _closed(m.modules()),
}


def _closed(modules: Any) -> list[nn.Module]:
    found = [next(modules), next(modules)]
    modules.close()
    return found


@pytest.mark.parametrize("change", ["attribute", "other module", "added module"])
@pytest.mark.parametrize("walk", WALKS)
def test_modules_that_torch_lists(device: torch.device, rand: Rand, walk: str, change: str) -> None:
    """Generators of torch's are watched as a whole, and not at each of their values."""

    def world() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        for child in model.modules():
            child.scale = 2.0  # type: ignore[assignment]
        model.to(device)

        def f(x: Tensor) -> Tensor:
            for module in WALKS[walk](model):
                x = x * getattr(module, "scale", 3.0)
                if not [*module.children()]:
                    x = module(x)
            return x

        return model, f

    (mine, f), (theirs, eager) = world(), world()
    fast = ol.graph(f)
    with torch.no_grad():
        for i in range(14):
            if i == 6:
                for model in (mine, theirs):
                    if change == "attribute":
                        model[0].scale = 5.0  # type: ignore[assignment]
                    elif change == "other module":
                        torch.manual_seed(1)
                        model[0] = nn.Linear(3, 3, device=device)
                    else:
                        model.append(nn.Tanh())
            x = rand(i, 2, 3)
            assert_same(fast(x), eager(x))
    assert replays(fast) >= 4
