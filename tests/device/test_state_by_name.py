"""Attributes that code reads otherwise than by a dot: by `vars`, C functions, imports."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import operator
import os
import pathlib
import shutil
import statistics
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, replays
from .states import Place, World, as_eager, reads_anew

NAME = "scale"
SCALE: Any = operator.attrgetter("scale")


class Layer:
    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 2.0, 0


def python_module() -> types.ModuleType:
    made = types.ModuleType("settings")
    made.scale, made.calls = 2.0, 0  # type: ignore[attr-defined]
    return made


def function() -> Any:
    def made() -> None: ...

    made.scale, made.calls = 2.0, 0  # type: ignore[attr-defined]
    return made


OWNERS: dict[str, Callable[[], Any]] = {
    "object": Layer,
    "module": Module,
    "python module": python_module,
    "class": lambda: type("Settings", (), {"scale": 2.0, "calls": 0}),
    "function": function,
    "namespace": lambda: types.SimpleNamespace(scale=2.0, calls=0),
}


def kept(owner: Any) -> float:
    attributes = vars(owner)
    return attributes["scale"]


def under_another_name(owner: Any) -> float:
    get = getattr
    return get(owner, "scale")


def by_getattribute(owner: Any) -> float:
    get = type.__getattribute__ if isinstance(owner, type) else object.__getattribute__
    return get(owner, "scale")


FORMS: dict[str, Callable[[Any], float]] = {
    "vars": lambda owner: vars(owner)["scale"],
    "vars, kept": kept,
    "vars by get": lambda owner: vars(owner).get("scale"),
    "a dict": lambda owner: owner.__dict__["scale"],
    "a dict by a variable": lambda owner: owner.__dict__[NAME],
    "a dict by get": lambda owner: owner.__dict__.get("scale", 1.0),
    "a dict by getattr": lambda owner: getattr(owner, "__dict__")["scale"],  # noqa: B009
    "all items": lambda owner: dict(vars(owner).items())["scale"],
    "getattr under another name": under_another_name,
    "a partial getattr": lambda owner: functools.partial(getattr, owner)("scale"),
    "getattribute": by_getattribute,
    "a getter": lambda owner: operator.attrgetter("scale")(owner),
    "a getter of the module": lambda owner: SCALE(owner),
    "a mapped getter": lambda owner: next(map(SCALE, [owner])),
    "a name that is computed": lambda owner: getattr(owner, "_".join(["scale"])),
    "inspection": lambda owner: inspect.getattr_static(owner, "scale"),
    "code that is evaluated": lambda owner: eval("owner.scale", {"owner": owner}),
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("form", FORMS)
def test_an_attribute_that_changes(device: torch.device, form: str, owner: str) -> None:
    def made() -> Place:
        layer, read = OWNERS[owner](), FORMS[form]
        return lambda: read(layer), lambda value: setattr(layer, "scale", value)

    reads_anew(device, made)


@pytest.mark.parametrize("form", ["vars", "vars by get", "a dict", "a dict by get", "a getter"])
@pytest.mark.parametrize("owner", ["object", "module", "python module"])
def test_the_other_attributes_are_not_read(device: torch.device, form: str, owner: str) -> None:
    """A name that is known reads no other, such as a count that the loop around the call keeps."""

    read = FORMS[form]

    def world() -> World:
        layer = OWNERS[owner]()
        return layer, lambda x: x * read(layer)

    def between(layer: Any, i: int) -> None:
        layer.calls += 1

    fast = as_eager(device, world, between, calls=6, shown=lambda layer: layer.calls)
    assert (fast.stats().captures, fast.stats().replays) == (1, 5)


def test_a_name_that_comes_and_goes(device: torch.device) -> None:
    def made() -> Place:
        layer = nn.Identity()

        def change(value: float) -> None:
            layer.__dict__.pop("twice", None) if value == 2.0 else setattr(layer, "twice", True)

        return lambda: 2.0 if "twice" in vars(layer) else 1.0, change

    reads_anew(device, made, recordings=2)


# Modules, as `sys.modules` has them.


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ol_settings", "ol_settings.inner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    replaced(2.0)


def replaced(value: float) -> None:
    """Put other modules in the place of the two, unless they have this number already."""
    if vars(sys.modules["ol_settings"]).get("scale") == value:
        return
    outer, inner = types.ModuleType("ol_settings"), types.ModuleType("ol_settings.inner")
    vars(outer).update(scale=value, inner=inner)
    vars(inner).update(scale=value)
    sys.modules.update({"ol_settings": outer, "ol_settings.inner": inner})


def changed(value: float) -> None:
    for name in ("ol_settings", "ol_settings.inner"):
        vars(sys.modules[name])["scale"] = value


def by_import() -> float:
    import ol_settings  # type: ignore[import-not-found]

    return ol_settings.scale


def by_import_from() -> float:
    from ol_settings import scale  # type: ignore[import-not-found]

    return scale


def by_import_of_a_submodule() -> float:
    import ol_settings.inner as inner  # type: ignore[import-not-found]

    return inner.scale


def by_import_module() -> float:
    return importlib.import_module("ol_settings").scale


def by_its_entry() -> float:
    return sys.modules["ol_settings"].scale  # type: ignore[attr-defined]


def by_get() -> float:
    return sys.modules.get("ol_settings").scale  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["__getattr__", "__getattribute__"])
@pytest.mark.parametrize("base", [object, nn.Module])
def test_a_class_that_finds_attributes_later(device: torch.device, name: str, base: Any) -> None:
    class Scaled(base):
        pass

    box, x = Scaled(), torch.ones(3, device=device)
    fast = ol.graph(lambda x: x * getattr(box, "scale", 2.0))
    for _ in range(5):
        assert_same(fast(x), x * 2)
    assert replays(fast) > 0
    former = getattr(base, name, None)

    def found(self: object, asked: str) -> object:
        return 5.0 if asked == "scale" or former is None else former(self, asked)

    setattr(Scaled, name, found)
    for _ in range(5):
        assert_same(fast(x), x * 5)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("change", [replaced, changed])
@pytest.mark.parametrize(
    "read",
    [by_import, by_import_from, by_import_of_a_submodule, by_import_module, by_its_entry, by_get],
)
def test_a_module_that_changes(
    device: torch.device, read: Callable[[], float], change: Callable[[float], None]
) -> None:
    reads_anew(device, lambda: (read, change))


def test_a_module_that_comes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> float:
        try:
            import ol_optional  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return 1.0
        return 2.0

    def change(value: float) -> None:
        there = types.ModuleType("ol_optional") if value == 3.0 else None
        monkeypatch.setitem(sys.modules, "ol_optional", there)

    reads_anew(device, lambda: (read, change))


# What the standard library's own code reads.

SETTING = "OL_SCALE"


def environ(read: Callable[[], str | None]) -> Callable[[], Any]:
    def made() -> Place:
        return lambda: float(read() or 0), lambda value: os.environ.update({SETTING: str(value)})

    return made


ENVIRONMENT: dict[str, Callable[[], str | None]] = {
    "item": lambda: os.environ[SETTING],
    "get": lambda: os.environ.get(SETTING),
    "getenv": lambda: os.getenv(SETTING, "1"),
    "items": lambda: dict(os.environ.items())[SETTING],
    "bytes": lambda: os.environb[SETTING.encode()].decode(),
    "expandvars": lambda: os.path.expandvars(f"${SETTING}"),
}


@pytest.mark.parametrize("read", ENVIRONMENT)
def test_the_environment(device: torch.device, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "2.0")
    reads_anew(device, environ(ENVIRONMENT[read]), recordings=2)


PROGRAMS, PYTHON = os.path.split(sys.executable)
BEHIND: dict[str, tuple[str, tuple[str, str], Callable[[], float]]] = {
    "home": ("HOME", ("/a", "/bb"), lambda: len(os.path.expanduser("~"))),
    "path": ("HOME", ("/a", "/bb"), lambda: len(str(pathlib.Path.home()))),
    "terminal": ("COLUMNS", ("40", "50"), lambda: shutil.get_terminal_size().columns),
    "program": ("PATH", ("", PROGRAMS), lambda: 2.0 if shutil.which(PYTHON) else 3.0),
}


@pytest.mark.parametrize("name", BEHIND)
def test_the_environment_behind_the_standard_library(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, values, read = BEHIND[name]

    def change(value: float) -> None:
        monkeypatch.setenv(variable, values[value == 3.0])

    monkeypatch.setenv("LINES", "20")
    change(2.0)
    reads_anew(device, lambda: (read, change), recordings=2)


MEMBERS: dict[str, Callable[[Any], float]] = {
    "dot": lambda mode: mode.FAST.value,
    "item": lambda mode: mode["FAST"].value,
    "getattr": lambda mode: getattr(mode.FAST, "value"),  # noqa: B009
    "getter": lambda mode: operator.attrgetter("FAST.value")(mode),
    "mapped": lambda mode: next(map(operator.attrgetter("value"), [mode.FAST])),
    "format": lambda mode: float("{.value}".format(mode.FAST)),  # noqa: UP032
    "repr": lambda mode: float(repr(mode.FAST).split(": ")[1][:-1]),
    "text": lambda mode: float(f"{mode.FAST!r}".split(": ")[1][:-1]),
}


@pytest.mark.parametrize("kind", [enum.Enum, enum.IntEnum, enum.Flag])
@pytest.mark.parametrize("read", MEMBERS)
def test_the_value_of_a_member(device: torch.device, kind: Any, read: str) -> None:
    def made() -> Place:
        mode: Any = kind("Mode", {"FAST": 2, "SLOW": 4})
        return lambda: MEMBERS[read](mode), lambda v: setattr(mode.FAST, "_value_", int(v))

    reads_anew(device, made)


OF_A_DISTRIBUTION: dict[str, Callable[[Any], float]] = {
    "property": lambda normal: normal.mean,
    "getattr": lambda normal: getattr(normal, "mean"),  # noqa: B009
    "method of C": lambda normal: operator.methodcaller("cdf", 1.0)(normal),
    "operator": lambda normal: (normal + 1.0).mean,
    "repr": lambda normal: float(repr(normal).split("mu=")[1].split(",")[0]),
    "sorted": lambda normal: sorted([normal], key=lambda n: n.variance)[0].mean,
}


@pytest.mark.parametrize("read", OF_A_DISTRIBUTION)
def test_an_object_of_the_standard_library(device: torch.device, read: str) -> None:
    def made() -> Place:
        normal: Any = statistics.NormalDist(2.0)
        return lambda: OF_A_DISTRIBUTION[read](normal), lambda v: setattr(normal, "_mu", v)

    reads_anew(device, made)


def test_methods_of_the_standard_library(device: torch.device) -> None:
    def made() -> Place:
        event, normal = threading.Event(), statistics.NormalDist(2.0)

        def change(value: float) -> None:
            (event.clear if value == 2.0 else event.set)()
            normal._mu = value  # type: ignore[attr-defined]

        return lambda: event.is_set() + normal.cdf(1.0), change

    reads_anew(device, made)


class Answers:
    """Has a value for any attribute that it lacks."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getattr__(self, name: str) -> float:
        return self.value


OF_HELD: dict[str, Callable[[Layer], Any]] = {
    "attribute": lambda h: object.__getattribute__(h, "held").scale,
    "call": lambda h: object.__getattribute__(h, "read")("value"),
    "by getattr": lambda h: getattr(h, "held").scale,  # noqa: B009
    "of a result": lambda h: max([h.held], key=id).scale,
}


@pytest.mark.parametrize("read", OF_HELD)
def test_an_attribute_of_what_object_s_getattribute_returns(
    device: torch.device, read: str
) -> None:
    """It comes, changes and goes behind a `__getattr__`."""

    def world() -> World:
        layer: Any = Layer()
        layer.held = Answers(2.0)
        layer.read = layer.held.__getattribute__
        return layer, lambda x: x * OF_HELD[read](layer)

    def between(layer: Any, i: int) -> None:
        if i == 3:
            layer.held.scale = 5.0
        if i in (5, 7):
            layer.held.value = float(i)
        if i == 6:
            del layer.held.scale

    as_eager(device, world, between, calls=10, shown=lambda layer: None)


def test_a_name_that_a_class_gets_after_its_objects_were_replaced(device: torch.device) -> None:
    def world() -> World:
        class Held:
            def __init__(self, value: float) -> None:
                self.value = value

        def held(default: Any = Held(2.0)) -> Any:  # noqa: B008
            return default

        return (Held, held), lambda x: x * getattr(held(), "other", held().value)

    def between(made: Any, i: int) -> None:
        kind, held = made
        if i == 1:
            held.__defaults__ = (kind(3.0),)
        if i == 5:
            kind.other = 0.5

    as_eager(device, world, between, calls=9, shown=lambda made: None)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_dict_of_attributes_that_is_replaced_after_its_object(
    device: torch.device, by_function: bool
) -> None:
    def world() -> World:
        outer = types.SimpleNamespace(inner=Layer())

        def f(x: Tensor) -> Tensor:
            inner = max([outer.inner], key=id) if by_function else outer.inner
            return x * inner.__dict__["scale"]

        return outer, f

    def between(outer: Any, i: int) -> None:
        if i == 1:
            outer.inner = Layer()
            outer.inner.scale = 3.0
        if i in (4, 6):
            outer.inner.__dict__ = {"scale": float(i)}

    as_eager(device, world, between, calls=9, shown=lambda outer: vars(outer.inner))


class Shown:
    """An object with properties whose getters are in C."""

    own = property(operator.attrgetter("scale"))
    inner = property(operator.attrgetter("layer.scale"))

    def __init__(self) -> None:
        self.scale, self.layer = 2.0, Layer()


class ShownModule(nn.Module):
    own = property(operator.attrgetter("scale"))
    inner = property(operator.attrgetter("layer.scale"))

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = 2.0, Layer()


@pytest.mark.parametrize("made", [Shown, ShownModule])
def test_properties_with_a_getter_in_c(
    device: torch.device, rand: Callable[..., Tensor], made: Callable[[], Any]
) -> None:
    shown = made()
    fast = ol.graph(lambda x: x * shown.own + shown.inner, warmup=1)
    for i in range(12):
        if i in (4, 8):
            shown.scale += 1.0
        if i == 6:
            shown.layer.scale = 5.0
        x = rand(i, 4)
        assert_same(fast(x), x * shown.scale + shown.layer.scale)
    assert replays(fast) > 4
