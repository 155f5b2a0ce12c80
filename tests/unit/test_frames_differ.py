"""Frames of the same code that read other things than the frame before: it is looked up again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.frames.watch import FrameWatch


def nothing(*given: Any) -> None:
    """Reads nothing of what it is given."""


class Box:
    pass


class Asker:
    ask: Any = nothing
    late: Any = None

    def __init__(self) -> None:
        self.own = 1

    def run(self, box: Box) -> object:
        late = self.late
        return self.ask(box), self.late(box) if late else self.own


MODULE = types.ModuleType("module")
MODULE.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
asks: Any = nothing


def by_module(box: Box) -> object:
    return MODULE.inner.ask(box)


def by_global(box: Box) -> object:
    return asks(box)


def by_builtin(box: Box) -> object:
    return len(box)  # type: ignore[arg-type]


def by_argument(box: Box, ask: Callable[[Any], object]) -> object:
    return ask(box)


def by_variable(box: Box, asker: Asker) -> object:
    ask = asker.ask if box is not None else None
    return ask(box)


def inner_replaced() -> None:
    MODULE.inner = types.ModuleType("other")  # type: ignore[attr-defined]
    MODULE.inner.ask = vars  # type: ignore[attr-defined]


def module_changed(box: Box, change: Callable[[], None]) -> None:
    MODULE.inner.ask = nothing  # type: ignore[attr-defined]
    by_module(box)
    change()
    by_module(box)


def global_changed(box: Box) -> None:
    global asks
    asks = nothing
    by_global(box)
    asks = vars
    by_global(box)


def builtin_hidden(box: Box) -> None:
    names: dict[str, Any] = {"__builtins__": {"len": nothing}}
    fn = types.FunctionType(by_builtin.__code__, names)
    fn(box)
    names["len"] = vars
    fn(box)


def other_globals(box: Box) -> None:
    for names in ({"asks": nothing}, {"asks": vars}):
        run(by_global.__code__, names, box)


def run(code: types.CodeType, names: dict[str, Any], box: Box) -> None:
    fn = types.FunctionType(code, names)
    fn(box)


def class_changed(box: Box, name: str) -> None:
    class Changing(Asker):
        pass

    Changing().run(box)
    setattr(Changing, name, vars)
    Changing().run(box)


def object_changed(box: Box, name: str) -> None:
    Asker().run(box)
    other = Asker()
    setattr(other, name, vars)
    other.run(box)


def variable_changed(box: Box) -> None:
    by_variable(box, Asker())
    other = Asker()
    other.ask = vars
    by_variable(box, other)


CHANGES: dict[str, Callable[[Box], None]] = {
    "a module's function": lambda box: module_changed(
        box,
        lambda: setattr(MODULE.inner, "ask", vars),
    ),
    "a module": lambda box: module_changed(box, inner_replaced),
    "a global name": global_changed,
    "a name that was a builtin": builtin_hidden,
    "the globals": other_globals,
    "an argument": lambda box: [by_argument(box, ask) for ask in (nothing, vars)].clear(),
    "a variable": variable_changed,
    "a method of the class": lambda box: class_changed(box, "ask"),
    "a method of the object": lambda box: object_changed(box, "ask"),
    "a method that was None in the class": lambda box: class_changed(box, "late"),
    "a method that was None in an object": lambda box: object_changed(box, "late"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_called_changes_between_two_frames(change: str) -> None:
    box, reads = Box(), Reads()
    with FrameWatch(reads).watching():
        CHANGES[change](box)
    owner = reads.of(box)
    assert owner is not None
    assert owner.opaque


def test_an_attribute_moves_from_the_objects_to_their_class() -> None:
    class Scaled:
        scale: Any = 3.0

    def read(scaled: Scaled) -> object:
        return scaled.scale

    own, other = Scaled(), Scaled()
    own.scale = 2.0
    reads = Reads()
    with FrameWatch(reads).watching():
        read(own)
        read(other)
    assert reads.of(other) is not None
    owner = reads.of(Scaled)
    assert owner is not None
    assert owner.names["scale"] is Use.READ


def test_a_name_moves_from_a_module_to_its_class() -> None:
    class Lazy(types.ModuleType):
        scale = 1.0

    module = Lazy("lazy")
    module.scale = 2.0

    def read() -> object:
        return lazy.scale  # type: ignore[name-defined]  # noqa: F821

    fn: Any = types.FunctionType(read.__code__, {"lazy": module})
    reads = Reads()
    with FrameWatch(reads).watching():
        fn()
        assert reads.of(Lazy) is None
        del module.scale
        fn()
    owner = reads.of(Lazy)
    assert owner is not None
    assert owner.names["scale"] is Use.READ


def test_code_of_a_module_gives_what_it_has_no_name_for() -> None:
    boxes = [Box(), Box()]
    module = types.ModuleType("lazy")
    module.__dict__["__getattr__"] = lambda name: boxes[1].__class__
    module.__dict__["kind"] = types.ModuleType("kind")

    def read() -> object:
        return lazy.kind.__name__  # type: ignore[name-defined]  # noqa: F821

    fn = types.FunctionType(read.__code__, {"lazy": module})
    reads = Reads()
    with FrameWatch(reads).watching():
        fn()
        kept = module.__dict__.pop("kind")
        module.__dict__["__getattr__"] = lambda name: module.__dict__.setdefault(name, kept) and Box
        fn()
    owner = reads.of(Box)
    assert owner is not None
    assert owner.names["__name__"] is Use.READ
