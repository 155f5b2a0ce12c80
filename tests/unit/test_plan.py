"""The plans of frames: later frames note what they would without one."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.frames.plan import FramePlan
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch

Noted = dict[str, Any]


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


def noted(run: Callable[[], object]) -> Noted:
    reads = Reads()
    watch = FrameWatch(reads)
    with watch.watching():
        run()
    assert watch.failed is None
    owners = [
        (type(owner.ref()).__name__, sorted(owner.names.items()), owner.opaque, owner.asked)
        for owner in reads.owners.values()
    ]
    return {
        "owners": sorted(owners),
        "items": sorted((str(key), use) for (_, key), use in reads.items.items()),
        "globals": sorted(str(sorted(names.items())) for _, names in reads.globals.values()),
        "ended": len(reads.ended),
    }


@pytest.mark.parametrize("name", RUNS)
def test_frames_with_a_plan_note_what_others_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "read", len, raising=False)
    planned = [noted(RUNS[name]) for _ in range(2)]
    monkeypatch.setattr(FramePlan, "holds", lambda self: False)
    assert [noted(RUNS[name]) for _ in range(2)] == planned


def test_a_name_of_a_module_that_leads_elsewhere_is_seen() -> None:
    switch.read = len  # type: ignore[attr-defined]
    reads = Reads()
    with FrameWatch(reads).watching():
        for value in ([], model, model):
            rebound(value)
    owner = reads.of(model)
    assert owner is not None
    assert "scale" in owner.names
