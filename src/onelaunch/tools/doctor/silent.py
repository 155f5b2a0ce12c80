"""The silent faults that a bare graph of an eager run would have.

Two calls are watched. The first may make caches and other state that lasts; what the second
changes, each call changes.
"""

from __future__ import annotations

import builtins
import datetime
import inspect
import os
import random
import re
import time
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.call import tree
from onelaunch.call_events import unwatched
from onelaunch.driver.aten import leaves, tensors
from onelaunch.driver.protocol import Driver
from onelaunch.driver.seeding import HostGenerators
from onelaunch.driver.select import recordable, select
from onelaunch.finding import Finding
from onelaunch.frames.origins import is_installed
from onelaunch.frames.peek import attributes_of
from onelaunch.source import is_standard
from onelaunch.state.slots import MISSING, gradient_of
from onelaunch.state.walk import Change, StateWalk, changes, is_replaced, walk
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.ran import Ran, begin_of
from onelaunch.tools.doctor.replay import Kind, is_torchs, named_arguments, repeats, replay, undone
from onelaunch.tools.doctor.run import FunctionCall, Listener, RanOperation, watch
from onelaunch.tools.doctor.spot import NOWHERE, Spot
from onelaunch.tools.rules.findings import merged

_CLOCKS = frozenset(
    getattr(time, name)
    for kind in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for name in (kind, f"{kind}_ns")
)
_NOW = frozenset({"now", "utcnow", "today"})
_DRAWS = frozenset({"random", "getrandbits"})
_DRAWING = r"\b(np|numpy)\.random\b|\brng\.|\bgenerator\.(?!device)|\brandom\.\w+\("
_FLAG: Any = Tensor.requires_grad
_OPTION = re.compile(r"param_groups\[\d+\]\[")


@dataclass
class _Call:
    """One watched call: the state before it, and what it did.

    Attributes:
        arguments, state: storage -> name of an argument, or of a tensor of the state.
        flags: id of a tensor of the state -> whether it requires grad.
        sizes: the sizes of the arguments.
        stepped: id of an optimizer -> the place that changed its parameters.
        read, written: storages that operations had as arguments, and wrote to.
        steps: the operations, with their constants.
    """

    ran: Ran
    before: StateWalk
    arguments: dict[int, str]
    state: dict[int, str]
    flags: dict[int, bool]
    sizes: frozenset[int]
    stepped: dict[int, Spot] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    steps: list[tuple[str, list[object]]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    flipped: list[tuple[str, bool, Spot]] = field(default_factory=list)


class Silent(Listener):
    """The listener of both calls, which must be of one workload.

    Attributes:
        moving: the first operation that got another number in the second call than in the first,
            with its place; None if none did.
    """

    concerns = frozenset({Tensor.data_ptr, Tensor.requires_grad_, _FLAG.__set__})

    def __init__(self) -> None:
        self.moving: tuple[Spot, str] | None = None
        self._found: list[Finding] = []
        self._calls: list[_Call] = []
        self._addresses: dict[int, Spot] = {}
        self._set: dict[int, Spot] = {}
        """id of a tensor -> the place that set whether it requires grad."""
        self._drawn = False

    @contextmanager
    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> Generator[None]:
        self._workload, self._spot = workload, spot
        self._driver, self._device = select(workload.tensors())
        owners = (types.ModuleType, type, random.Random)
        ran = Ran(spot, self._called, owners)
        before = walk(workload.roots())
        state = [(slot, t) for slot, t in before.tensors() if slot.key is not gradient_of]
        arguments = named_arguments(self._driver, (workload.args, workload.kwargs))
        named = {self._driver.storage(t): slot.name for slot, t in state if recordable(t)}
        call = _Call(
            ran,
            before,
            arguments,
            {storage: name for storage, name in named.items() if storage not in arguments},
            {id(t): t.requires_grad for _, t in state},
            _sizes(workload),
        )
        self._calls.append(call)
        self._now = call
        reached = [(slot.name, value) for slot, value in before.all_slots.values()]
        self._generators = lambda: HostGenerators(reached)
        self._host = self._generators()
        self._steps = _stepped_by(before, self._driver)
        with ran.watching():
            yield

    def operation(self, event: RanOperation) -> None:
        with unwatched():
            self._look_at(event)

    def _look_at(self, event: RanOperation) -> None:
        call, number = self._now, len(self._now.steps)
        constants = [v for v in leaves((event.args, event.kwargs)) if tree.is_plain(v)]
        call.steps.append((event.op.text, constants))
        self._look_for_draws(event.spot)
        if len(self._calls) > 1 and self.moving is None:
            self._compare(number, event)
        for t in tensors((event.args, event.kwargs)):
            if recordable(t):
                call.read.add(self._driver.storage(t))
        for t in event.op.written(event.args, event.kwargs) if event.op.writes else ():
            if recordable(t):
                self._wrote(self._driver.storage(t), event)
        if event.op.random:
            self._drew(event)

    def _compare(self, number: int, event: RanOperation) -> None:
        """Note the first operation with other constants than in the first call."""
        known = self._calls[0].steps[number : number + 1]
        text, constants = self._now.steps[number]
        if not known or known[0][0] != text:
            self.moving = NOWHERE, ""  # other operations: there is nothing to compare any more
            return
        for old, new in zip(known[0][1], constants, strict=False):
            if not tree.Constant(old).matches(new):
                what = f"`{event.op.label}` got {old!r} in one call and {new!r} in the next"
                self.moving = event.spot(), what
                return

    def _wrote(self, storage: int, event: RanOperation) -> None:
        if event.op.reshapes:
            return  # refused by a capture, or without effect on the values
        self._now.written.add(storage)
        if storage in self._steps:
            self._now.stepped[self._steps[storage]] = event.spot()
        name = self._now.arguments.get(storage)
        if name is not None:
            self._find("OL505", event.spot(), f"`{event.op.label}` writes to `{name}`")

    def _drew(self, event: RanOperation) -> None:
        given = leaves((event.args, event.kwargs))
        for generator in given:
            if isinstance(generator, torch.Generator):
                what = f"`{event.op.label}` draws from a generator of its own"
                if generator is not torch.default_generator:
                    self._find("OL511", event.spot(), what)
        on_host = any(t.device.type == "cpu" for t in tensors(event.result))
        if on_host and self._device.type != "cpu":
            what = f"`{event.op.label}` draws on the host"
            self._find("OL502", event.spot(), what)

    def _look_for_draws(self, spot: Callable[[], Spot]) -> None:
        """Note a draw of NumPy's generators since the last operation. Python's was seen."""
        name = self._host.moved()
        if name is not None:
            if not self._drawn:
                place = self._now.ran.matching(_DRAWING) or spot()
                self._find("OL502", place, f"the generator {name} draws on the host")
            self._host = self._generators()
        self._drawn = False

    def _called(self, called: Any) -> None:
        owner, name = getattr(called, "__self__", None), called.__name__
        if called is builtins.print:
            self._own("OL513", "`print` runs on the host")
        elif called in _CLOCKS or (
            name in _NOW and isinstance(owner, type) and issubclass(owner, datetime.date)
        ):
            self._own("OL503", f"`{getattr(owner, '__name__', 'time')}.{name}()` reads the clock")
        elif called is os.urandom:
            self._own("OL502", "`os.urandom()` draws on the host")
        elif isinstance(owner, random.Random) and name in _DRAWS:
            self._drawn, spot = True, self._spot()
            if not _is_machinery(spot):
                self._find("OL502", spot, f"`{name}()` draws a number on the host")

    def _own(self, code: str, what: str) -> None:
        """Find a fault in the user's own lines alone: libraries log, and measure themselves."""
        spot = self._spot()
        if spot.library is None and not is_installed(os.path.abspath(spot.file)):
            self._find(code, spot, what)

    def function(self, event: FunctionCall) -> None:
        if event.function == Tensor.data_ptr:
            self._addresses[event.args[0].data_ptr()] = event.spot()  # the last is what is kept
        else:
            self._set[id(event.args[0])] = event.spot()

    def end(self, result: Any) -> None:
        call = self._now
        self._look_for_draws(lambda: call.ran.returned)
        self._shared(result)
        after = walk(self._workload.roots())
        call.changes = changes(call.before, after)
        call.flipped = [
            (slot.name, t.requires_grad, self._set[id(t)])
            for slot, t in after.tensors()
            if id(t) in self._set and call.flags.get(id(t), t.requires_grad) != t.requires_grad
        ]
        self._addressed(call)
        if len(self._calls) > 1:
            self._settled(*self._calls)

    def _shared(self, result: Any) -> None:
        """Find results that share memory with an argument or with state."""
        call, flat = self._now, tree.flatten(result, "result")
        for path, t in zip(flat.paths, flat.tensors, strict=True):
            storage = self._driver.storage(t) if recordable(t) else None
            if storage is None or not t.numel():
                continue
            name = call.arguments.get(storage) or call.state.get(storage)
            if name is not None:
                what = f"`{path}` shares the memory of `{name}`"
                spot = call.ran.returned
                self._find("OL506", spot if spot.line else begin_of(self._workload.fn), what)

    def _addressed(self, call: _Call) -> None:
        """Find addresses among what the call stored."""
        for change in call.changes:
            for value in (change.after, change.slot.key):
                if type(value) is int and value in self._addresses:
                    what = f"`{change.slot.name.lstrip('.')}` keeps the address of a tensor"
                    self._find("OL510", self._addresses[value], what)

    def _settled(self, first: _Call, second: _Call) -> None:
        """Find the changes of each call, and the caches that the first call filled."""
        moved = {change.slot.id for change in second.changes}
        holders = {id(slot.holder) for slot, _ in second.before.all_slots.values()}
        holders |= second.before.containers.keys()
        replaced = {c.slot.id for c in second.changes if not _is_value(c.before, c.after)}
        for change in second.changes:
            known = id(change.slot.holder) in holders
            if known and not is_replaced(change.slot, replaced):
                self._moved(change, second)
        for name, flag, spot in second.flipped:
            what = f"each call changes `{name.lstrip('.')}.requires_grad`, the second to {flag}"
            self._find("OL509", spot, what)
        self._scheduled(second)
        for change in first.changes:
            if change.slot.id not in moved and _is_made_for_a_size(
                change, first, self._driver.storage
            ):
                what = f"`{change.slot.name.lstrip('.')}` is made for one size, and kept"
                self._find("OL507", self._store(change, first), what)

    def _moved(self, change: Change, call: _Call) -> None:
        """Find the fault of a slot that each call changes."""
        slot, before, after = change
        name = slot.name.lstrip(".")
        if slot.key is gradient_of:
            return
        if any(type(value) is int and value in self._addresses for value in (after, slot.key)):
            return
        old, new = tree.flatten(before).tensors, tree.flatten(after).tensors
        if old and new:
            known = {self._driver.storage(t) for t in old if recordable(t)}
            fresh = {self._driver.storage(t) for t in new if recordable(t)}
            if known & call.read and not fresh <= known:
                what = f"`{name}` is read, and then another tensor is put there"
                self._find("OL512", self._store(change, call), what)
            return
        if _OPTION.search(slot.name):
            what = f"`{name}` is {_shown(before)} before a call and {_shown(after)} after it"
            where = call.ran.stored_item(slot.key)
            for spot in call.stepped.values() if where is None else (where,):
                self._find("OL508", spot, what)
            return
        container = call.before.containers.get(id(slot.holder))
        is_global = isinstance(slot.holder, dict) and "__builtins__" in slot.holder
        if container is not None and MISSING in (before, after):
            code, what = "OL309", f"`{container[1].lstrip('.')}` grows or shrinks in each call"
        elif is_torchs(slot.owner) or not _is_value(before, after):
            return
        else:
            code = "OL504" if is_global else "OL501"
            what = f"`{name}` is {_shown(before)} before a call and {_shown(after)} after it"
        self._find(code, self._store(change, call), what)

    def _store(self, change: Change, call: _Call) -> Spot:
        """Return the line that stored to a slot."""
        container = call.before.containers.get(id(change.slot.holder))
        name = container[1] if container is not None and change.slot.owner is None else ""
        return call.ran.store(change.slot, _in_code(name, self._workload.fn), self._workload.fn)

    def _scheduled(self, call: _Call) -> None:
        """Find optimizers that stepped with a float that a scheduler set up."""
        for _, value in call.before.all_slots.values():
            if not isinstance(value, torch.optim.Optimizer) or id(value) not in call.stepped:
                continue
            for group in value.param_groups:
                if "initial_lr" in group and isinstance(group["lr"], float):
                    what = f"a scheduler moves `lr` of {type(value).__name__}, a Python float"
                    self._find("OL508", call.stepped[id(value)], what)

    def _find(self, code: str, spot: Spot, what: str) -> None:
        self._found.append(spot.finding(code, what, None, "run"))

    def findings(self) -> list[Finding]:
        return self._found


_FREEZES = frozenset(f"OL{n}" for n in (309, 501, 502, 503, 504, 505, 507, 508, 509, 510, 511, 512))
_EXPLAINS: dict[Kind, frozenset[str]] = {
    "result": _FREEZES,
    "state": _FREEZES,
    "argument": _FREEZES,
    "alias": frozenset({"OL506"}),
}
"""Kind of a difference -> the rules of the faults that cause it."""


def silently_wrong(workload: Workload, backward: bool) -> list[Finding]:
    """Watch two calls, and compare bare replays with eager.

    Args:
        backward: whether a backward of the results follows each watched call, as in training.
    """
    silent, watched = Silent(), workload.copy()
    with undone(workload, watched):
        for _ in range(2):
            watched.cut_history()
            watch(watched, [silent], backward)
    return confirmed(workload, silent)


def confirmed(workload: Workload, silent: Silent) -> list[Finding]:
    """Return the findings of a run, those that bare replays confirm as found by a replay too; and
    the first difference of a replay that none of them explains."""
    found = merged(silent.findings())
    cached = any(finding.code == "OL507" for finding in found)
    differences = replay(workload, other_size=cached).differences
    confirm = frozenset[str]().union(*(_EXPLAINS[d.kind] for d in differences))
    codes = {finding.code for finding in found}
    unexplained = [d for d in differences if not codes & _EXPLAINS[d.kind]]
    found = [
        replace(f, found_by=(*f.found_by, "replay")) if f.code in confirm else f for f in found
    ]
    if unexplained and repeats(workload):
        spot, why = silent.moving or (NOWHERE, "")
        spot = spot if spot.line else begin_of(workload.fn)
        what = f"{unexplained[0]}: {why}" if why else str(unexplained[0])
        found.append(spot.finding("OL500", what, None, "replay"))
    return found


def _in_code(container: str, fn: Callable[..., Any]) -> str:
    """Return the name that a container has in code: for ``args[0]`` that of the parameter."""
    name = re.sub(r"(\[[^\]]*\])+$", "", container).rpartition(".")[2]
    place = re.fullmatch(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(\[.*)?", container)
    if place is None:
        return name
    with suppress(TypeError, ValueError):  # a callable of C's
        names = list(inspect.signature(getattr(fn, "forward", fn)).parameters)
        return place[2] or names[min(int(place[1]), len(names) - 1)]
    return name


def _is_machinery(spot: Spot) -> bool:
    """Return whether a module is being imported there, or the standard library works for itself."""
    imports = any(step.endswith(" in <module>") for step in spot.calls)
    return imports or is_standard(os.path.abspath(spot.library or spot.file))


def _sizes(workload: Workload) -> frozenset[int]:
    """Return the sizes of the arguments, but for 0 and 1, which any number may be."""
    given = tree.flatten((workload.args, workload.kwargs)).tensors
    return frozenset(size for t in given for size in t.shape if size > 1)


def _stepped_by(found: StateWalk, driver: Driver) -> dict[int, int]:
    """Return storage of a parameter -> id of the optimizer that has it."""
    held = (value for _, value in found.all_slots.values())
    return {
        driver.storage(p): id(optimizer)
        for optimizer in held
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups
        for p in group["params"]
        if recordable(p)
    }


def _is_value(before: object, after: object) -> bool:
    """Return whether a change is of values, and not of objects that have attributes."""
    return all(v is MISSING or tree.is_plain(v) or isinstance(v, Tensor) for v in (before, after))


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)[:40]


def _is_made_for_a_size(change: Change, call: _Call, storage_of: Callable[[Tensor], int]) -> bool:
    """Return whether the call filled a cache: tensors under a key that is a size, or beside a
    number that is one."""
    slot, before, after = change
    owner: Any = slot.owner
    if before is MISSING and owner is None and id(slot.holder) in call.before.containers:
        return _is_size(slot.key, call.sizes) and bool(tree.flatten(after).tensors)
    if owner is None or not _is_size(after, call.sizes):
        return False
    beside = (c.after for c in call.changes if c.slot.owner is owner)
    buffers = owner.buffers(recurse=False) if isinstance(owner, torch.nn.Module) else ()
    held = (*(attributes_of(owner) or {}).values(), *buffers)
    return any(isinstance(value, Tensor) for value in beside) or any(
        isinstance(t, Tensor) and recordable(t) and storage_of(t) in call.written for t in held
    )


def _is_size(value: object, sizes: frozenset[int]) -> bool:
    """Return whether a value is a size of an argument, or has one in it."""
    if isinstance(value, tuple):
        return any(_is_size(part, sizes) for part in cast(tuple[object, ...], value))
    return type(value) is int and value in sizes
