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
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, replays

Rand = Callable[..., Tensor]
Scale = tuple[Callable[[], float], Callable[[float], object]]
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT")
LOCAL = threading.local()


class Settings:
    scale = 2.0


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


def of_a_global_class() -> Scale:
    Settings.scale = 2.0
    return lambda: Settings.scale, lambda v: setattr(Settings, "scale", v)


def of_a_local_class() -> Scale:
    class Here:
        scale = 2.0

    return lambda: Here.scale, lambda v: setattr(Here, "scale", v)


def of_a_class_method() -> Scale:
    class Here:
        scale = 2.0

        @classmethod
        def read(cls) -> float:
            return cls.scale

    here = Here()
    return lambda: here.read(), lambda v: setattr(Here, "scale", v)


def of_slots() -> Scale:
    box = Slotted(2.0)
    return lambda: box.scale, lambda v: setattr(box, "scale", v)


def of_a_dataclass_with_slots() -> Scale:
    box = {"data": SlottedData(2.0)}
    return lambda: box["data"].scale, lambda v: setattr(box["data"], "scale", v)


def of_a_set() -> Scale:
    box = {2.0}
    return lambda: next(iter(box)), lambda v: (box.clear(), box.add(v))


def of_a_set_replaced() -> Scale:
    box = types.SimpleNamespace(scales={2.0})
    return lambda: next(iter(box.scales)), lambda v: setattr(box, "scales", {v})


def of_an_empty_list_replaced() -> Scale:
    box = types.SimpleNamespace(scales=[])
    return lambda: sum(box.scales), lambda v: setattr(box, "scales", [v])


def of_an_empty_tuple_replaced() -> Scale:
    box = types.SimpleNamespace(scales=())
    return lambda: sum(box.scales), lambda v: setattr(box, "scales", (v,))


def of_an_object_without_attributes() -> Scale:
    box: Any = types.SimpleNamespace(strategy=Doubles())
    return lambda: box.strategy.factor(), lambda v: setattr(box, "strategy", Triples())


def of_bytes() -> Scale:
    box = bytearray([2])
    return lambda: box[0], lambda v: box.__setitem__(0, int(v))


def of_a_decimal() -> Scale:
    box = {"scale": Decimal(2)}
    return lambda: float(box["scale"]), lambda v: box.update(scale=Decimal(v))


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


def of_a_big_dict() -> Scale:
    box = dict.fromkeys([f"key{i}" for i in range(200)], 1.0) | {"scale": 2.0}
    return lambda: box["scale"], lambda v: box.update(scale=v)


def of_a_dict_behind_getattr() -> Scale:
    class Reads:
        def __init__(self) -> None:
            self.__dict__["inside"] = {"scale": 2.0}

        def __getattr__(self, name: str) -> float:
            return self.__dict__["inside"][name]  # KeyError for all else

    box = Reads()
    return lambda: box.scale, lambda v: box.__dict__["inside"].update(scale=v)


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


class OfALibrary(torch.distributions.transforms.Transform):
    """`__call__` of the base class calls `_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def _call(self, x: float) -> float:
        return self.scale * x


def _of(box: Any, read: Callable[[], float]) -> Scale:
    return read, lambda v: setattr(box, "scale", v)


def _modules() -> tuple[types.ModuleType, types.ModuleType]:
    """A package of the user's, and a module in it."""
    package, inside = types.ModuleType("settings"), types.ModuleType("settings.model")
    package.__file__ = inside.__file__ = __file__
    vars(package)["model"], vars(inside)["scale"] = inside, 2.0
    sys.modules.update({"settings": package, "settings.model": inside})
    return package, inside


def of_a_module_in_a_package() -> Scale:
    _, inside = _modules()
    namespace: dict[str, Any] = {"settings": sys.modules["settings"]}
    exec("def read(): return settings.model.scale", namespace)
    return namespace["read"], lambda v: vars(inside).update(scale=v)


def of_a_module_imported_inside() -> Scale:
    _, inside = _modules()
    namespace: dict[str, Any] = {}
    exec("def read():\n from settings.model import scale\n return scale", namespace)
    return namespace["read"], lambda v: vars(inside).update(scale=v)


def of_a_module_of_its_own_package() -> Scale:
    _, inside = _modules()
    namespace: dict[str, Any] = {"__package__": "settings"}
    exec("def read():\n from .model import scale\n return scale", namespace)
    return namespace["read"], lambda v: vars(inside).update(scale=v)


def of_a_module_in_an_attribute() -> Scale:
    _, inside = _modules()
    box = types.SimpleNamespace(settings=inside)
    return lambda: box.settings.scale, lambda v: vars(inside).update(scale=v)


def of_a_class_that_had_it_of_its_base() -> Scale:
    class Base:
        scale = 2.0

        def read(self) -> float:
            return self.scale

    class Derived(Base):
        pass

    box = Derived()
    return lambda: box.read(), lambda v: setattr(Derived, "scale", v)


def of_a_template() -> Scale:
    box = OfALibrary()
    return _of(box, lambda: cast(Any, box)(1.0))


METHODS = [name for name in vars(Decorated) if not name.startswith("_")]
PLACES = {name: f for name, f in globals().items() if name.startswith("of_")}


@pytest.mark.parametrize("place", [*PLACES, *METHODS])
def test_a_number_that_changes(rand: Rand, place: str) -> None:
    if place in PLACES:
        read, write = PLACES[place]()
    else:
        box = Decorated()
        read, write = _of(box, lambda: getattr(Decorated, place)(box))

    def f(x: Tensor) -> Tensor:
        return x * read() + 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            assert_same(fast(rand(i, 3)), f(rand(i, 3)))
        assert replays(fast) == 3
        write(3.0)
        for i in range(4):
            assert_same(fast(rand(i, 3)), f(rand(i, 3)))


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

    model = Scaled()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for scale in (2.0, 3.0, 2.0):
            Scaled.scale = scale
            for i in range(4):
                assert_same(fast(rand(i, 3)), model(rand(i, 3)))
    assert replays(fast) > 5


def test_a_number_array_that_changes(rand: Rand) -> None:
    numpy = pytest.importorskip("numpy")
    box = {"array": numpy.full(2000, 2.0), "number": numpy.float32(2.0)}

    def f(x: Tensor) -> Tensor:
        return x * float(box["array"][0]) + float(box["number"])

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for step in range(3):
            box["array"][0] = 2.0 + step
            box["number"] = numpy.float32(5.0 - step)
            for i in range(4):
                assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast) > 5


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
            self._state_h = torch.ones(3, device=device)
            self._forward_scale = 2.0
            self._load_state_flag = True
            self._backward_w = torch.ones(3, device=device)

        def forward(self, x: Tensor) -> Tensor:
            sign = 1 if self._load_state_flag else -1
            return (x * self._forward_scale + self._state_h) * self._backward_w * sign

    model = Named()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for step in range(4):
            model._state_h = rand(step, 3)
            model._forward_scale = 2.0 + step % 2
            model._load_state_flag = step != 2
            model._backward_w = rand(step + 9, 3)
            for i in range(4):
                assert_same(fast(rand(i, 3)), model(rand(i, 3)))
    assert replays(fast) > 5


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

    def f(x: Tensor) -> Tensor:
        return x * 3 if asks() else x * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
    assert replays(fast) == 4


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
