"""What frames of one function note, over several objects."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.frames.reads import Reads
from onelaunch.frames.stack import Use
from onelaunch.frames.watch import FrameWatch

Noted = dict[str, set[str]]


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale, self.pick = inner, 3.0, operator.attrgetter("scale")
        self.table = {"a": 1.0}

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * self.scale * self.factor * self.table.get("a", 1.0)


class Masked:
    """An object whose attributes are found by its own code."""

    def __init__(self) -> None:
        self.hidden = types.SimpleNamespace(scale=1.0)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    @property
    def shown(self) -> Any:
        return self.hidden


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


switch = types.ModuleType("switch")
model = Scaled(nn.Linear(2, 2))


def twice(fn: Callable[[Any], object], values: list[Any]) -> object:
    return [fn(value) for value in values]


def rebound(value: Any) -> object:
    """The name of a module leads to another function for the second frame."""
    found = switch.read(value)  # type: ignore[attr-defined]
    switch.read = operator.attrgetter("scale")  # type: ignore[attr-defined]
    return found


def shadowed(value: Any) -> object:
    """An attribute of the class, and of the object in the second frame."""
    found = value.factor
    value.factor = 5.0
    return found


RUNS: dict[str, Callable[[], object]] = {
    "a module": lambda: twice(lambda m: m(torch.ones(1, 2)), [model, model, Scaled(model)]),
    "a callee that reads": lambda: twice(lambda m: m.pick(m), [model, model]),
    "another callee": lambda: (
        setattr(switch, "read", len),
        twice(lambda v: rebound(v) if v is model else rebound([v]), [1, model, model]),
    ),
    "of the class, then its own": lambda: [
        twice(shadowed, [held, held]) for held in [Scaled(model)]
    ],
    "an object's own way": lambda: twice(lambda m: m.shown.scale + m.hidden.scale, [Masked()] * 3),
    "slots": lambda: twice(lambda m: m.scale, [Slotted(), Slotted()]),
    "tensors": lambda: twice(lambda t: t.sum().item() + t.shape[0], [torch.ones(2)] * 3),
    "a method as a value": lambda: twice(
        lambda m: (lambda call: call(torch.ones(1, 2)))(m.forward), [model] * 3
    ),
    "a partial": lambda: twice(lambda m: functools.partial(getattr, m)("scale"), [model] * 3),
    "builtins": lambda: twice(lambda m: (len(m.table), isinstance(m, nn.Module)), [model] * 3),
}


OWN = {"inner", "factor", "scale", "pick", "table", "hidden", "shown", "read", "n"}


NOTED: dict[str, Noted] = {
    "a module": {
        "NoneType": {"inner", "factor", "scale", "table", "pick, stored"},
        "type": {"inner", "factor"},
        "Scaled": {"inner", "factor", "scale", "table"},
    },
    "a callee that reads": {"Scaled": {"pick", "scale"}},
    "another callee": {"module": {"read", "scale"}, "Scaled": {"scale"}},
    "of the class, then its own": {
        "NoneType": {"factor", *(f"{n}, stored" for n in ("inner", "scale", "pick", "table"))},
        "type": {"inner, stored"},
    },
    "an object's own way": {"NoneType": {"hidden", "shown"}, "type": {"shown"}},
    "slots": {"type": {"scale"}},
    "tensors": {},
    "a method as a value": {
        "Scaled": {"inner", "factor", "scale", "table"},
        "type": {"inner", "factor"},
    },
    "a partial": {"Scaled": {"all", "scale"}},
    "builtins": {"Scaled": {"table"}},
}
"""Class of an object, `NoneType` for one that is gone -> its attributes that each run notes."""


def noted(run: Callable[[], object]) -> Noted:
    """Class of an object that was read -> its own attributes among what was noted."""
    reads = Reads()
    watch = FrameWatch(reads)
    with watch.watching():
        run()
    assert watch.failed is None
    found: Noted = {}
    for owner in reads.owners.values():
        own = {name: use for name, use in owner.names.items() if name in OWN}
        names = {f"{name}, stored" if use is Use.NONE else name for name, use in own.items()}
        kind = type(owner.ref()).__name__
        names |= {"all"} if owner.opaque and kind != "NoneType" else set()
        if names:
            found[kind] = found.get(kind, set()) | names
    return found


@pytest.mark.parametrize("name", RUNS)
def test_all_frames_are_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "read", len, raising=False)
    assert [noted(RUNS[name]) for _ in range(2)] == [NOTED[name]] * 2


def test_a_name_of_a_module_that_leads_elsewhere_is_seen() -> None:
    switch.read = len  # type: ignore[attr-defined]
    reads = Reads()
    with FrameWatch(reads).watching():
        for value in ([], model, model):
            rebound(value)
    owner = reads.of(model)
    assert owner is not None
    assert "scale" in owner.names
