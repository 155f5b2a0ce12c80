"""A bare replay against eager: what a graph captured by hand does on inputs that change.

By hand, one copies the inputs into tensors of the graph's own, replays, and clones the results.
Nothing is guarded or followed, and no state is written back. That is done here with one copy of
the callable, and with another eager calls; then all that a caller could see is compared.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onelaunch.call import tree
from onelaunch.driver.distance import is_inexact
from onelaunch.driver.protocol import Driver
from onelaunch.driver.seeding import HostGenerators
from onelaunch.driver.select import driver_of, preserved_random_state, recordable, select
from onelaunch.state.rollback import Rollback
from onelaunch.state.slots import gradient_of
from onelaunch.state.walk import StateWalk, walk
from onelaunch.tools.bench.draws import draws
from onelaunch.tools.bench.reference import said
from onelaunch.tools.bench.workload import Inputs, Workload, each_tensor, graded_as

Kind = Literal["result", "alias", "argument", "state"]
_SAME = 2
"""Calls on the same inputs. Python of the capture counts for the first, so what Python moves on
shows in the second."""
_DRAWS = 2
"""Other inputs, whose values stay between the given values: nothing is out of range."""
_ROUNDING = 256
"""Units in the last place by which two runs of the same kernels on a device may differ."""


_LARGE = 2**16
"""Elements of a tensor of the state beyond which no copy of it is kept."""


class Difference(NamedTuple):
    """A thing that a caller sees, and sees otherwise in eager.

    Attributes:
        kind: a result's values; a result that shares memory in eager; what was written to an
            argument; an attribute, global or buffer.
        name: its name: ``"result[0]"``, ``"args[0]"``, ``"steps"``.
        when: the call: ``"the second replay on the same inputs"``.
    """

    kind: Kind
    name: str
    when: str

    def __str__(self) -> str:
        if self.kind == "alias":
            return f"`{self.name}` shares its memory in eager, and not after {self.when}"
        return f"`{self.name}` is another than eager's after {self.when}"


@dataclass(frozen=True)
class Replay:
    """The outcome of bare replays.

    Attributes:
        differences: what differs from eager, each thing once.
        refused: why there is no recording to replay; None: there was one.
    """

    differences: tuple[Difference, ...] = ()
    refused: str | None = None


class _Case(NamedTuple):
    """One call: its inputs, or None for the caller's own once more."""

    when: str
    inputs: Inputs | None = None
    other_size: bool = False


_Values = dict[str, object]
"""Copies of tensors, and `Constant`s, by name."""


@dataclass
class _Seen:
    """All that a caller sees of the calls of one copy.

    Attributes:
        calls: for each call, what it returned and, right after it, its arguments and the state
            behind it; None where the callable refused other inputs. The state of other inputs is
            left out.
        shared: results that shared memory with an argument or state, after calls on the same
            inputs.
    """

    calls: list[tuple[_Values, _Values, _Values] | None] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BareRecording:
    """A recorded call.

    Attributes:
        inputs: the static arguments.
        result: what the callable returned; each launch writes its tensors anew.
        launch: replays it.
        close: frees it.
    """

    inputs: Inputs
    result: Any
    launch: Callable[[], object]
    close: Callable[[], object]


Record = Callable[[Workload], BareRecording]


def by_driver(workload: Workload) -> BareRecording:
    """Record a workload once, after a call to warm up, without a check or guard of ours."""
    driver, device = select(workload.tensors())
    args, kwargs = workload.copy_inputs()
    with driver.exclusive():
        driver.run_on_capture_stream(lambda: workload.fn(*args, **kwargs), device)
        pool = driver.new_pool(device)
        graph, result = driver.capture(lambda _: workload.fn(*args, **kwargs), pool)

    def close() -> None:
        driver.synchronize(device)
        graph.reset()

    return BareRecording((args, kwargs), result, lambda: graph.launch((), ()), close)


def replay(
    workload: Workload, seed: int = 0, other_size: bool = False, record: Record = by_driver
) -> Replay:
    """Record a workload bare, and compare its replays with eager calls.

    The callable runs once to warm up and once in the capture, and in eager as often as it is
    replayed: twice on the same inputs, so that state moves on, and on two draws.

    Args:
        workload: copied, twice.
        seed: of the draws.
        other_size: run it in eager on fewer rows in between, and then on the inputs given, as a
            prefill does between decodes.
        record: warms it up by one call, and captures it.

    An exception of the callable comes through as it is.
    """
    cases = [*_same(), *_drawn(workload, seed)]
    if other_size:
        fewer = _fewer_rows(workload)
        if fewer is not None:
            cases.append(_Case("a call of another size", fewer, other_size=True))
            cases.append(_Case("a replay that comes after a call of another size"))
    driver, _ = select(workload.tensors())
    bare, eager = workload.copy(), workload.copy()
    with undone(bare, eager):
        try:
            replayed = _replayed(driver, bare, cases, record)
        except Exception as error:  # noqa: BLE001  a capture may fail in any way
            return Replay(refused=said(error))
    with undone(bare, eager):
        called = _called(driver, eager, cases)
    found = _differences(called, replayed, cases, exact=driver.computes_on_host)
    return Replay(tuple(found))


def repeats(workload: Workload) -> bool:
    """Return whether two copies give the same, call by call: else no replay can be compared."""
    driver, _ = select(workload.tensors())
    some, other = workload.copy(), workload.copy()
    seen: list[_Seen] = []
    for copy in (some, other):
        with undone(some, other):
            seen.append(_called(driver, copy, list(_same())))
    found = _differences(seen[0], seen[1], list(_same()), exact=driver.computes_on_host)
    return next(iter(found), None) is None


def _same() -> Iterator[_Case]:
    for number in ("first", "second"):
        yield _Case(f"the {number} replay on the same inputs")


def _drawn(workload: Workload, seed: int) -> list[_Case]:
    if not all(map(recordable, tree.flatten((workload.args, workload.kwargs)).tensors)):
        return []  # sparse ones, say
    generator = torch.Generator("cpu").manual_seed(seed)
    found = (pair for pair in draws(workload, generator) if pair[0].within)
    return [
        _Case(f"a replay on other inputs ({draw.name})", inputs)
        for draw, inputs in itertools.islice(found, _DRAWS)
    ]


def _fewer_rows(workload: Workload) -> Inputs | None:
    """Return the arguments with one row less in each tensor that has as many as the first."""
    given = workload.args, workload.kwargs
    rows = next((len(t) for t in tree.flatten(given).tensors if t.dim()), 0)
    if rows < 2:
        return None

    def fewer(t: Tensor) -> Tensor:
        cut = t[:-1] if t.dim() and len(t) == rows else t
        return graded_as(t, cut.detach().clone())

    return each_tensor(given, fewer)


def _called(driver: Driver, workload: Workload, cases: Sequence[_Case]) -> _Seen:
    """Call a workload in eager, once to warm up and then for each case."""
    args, kwargs = workload.copy_inputs()
    workload.fn(*args, **kwargs)
    return _observed(driver, workload, cases, workload.fn)


def _replayed(driver: Driver, workload: Workload, cases: Sequence[_Case], record: Record) -> _Seen:
    """Record a workload, and replay it for each case as one does by hand."""
    recording = record(workload)
    statics, static = tree.flatten(recording.inputs).tensors, tree.flatten(recording.result)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            given = tree.flatten((args, kwargs)).tensors
            for mine, theirs in zip(statics, given, strict=True):
                mine.copy_(theirs)
            recording.launch()
            return tree.unflatten(static.tree, [_clone(t) for t in static.tensors])

    try:
        return _observed(driver, workload, cases, call)
    finally:
        recording.close()


def _observed(
    driver: Driver, workload: Workload, cases: Sequence[_Case], call: Callable[..., Any]
) -> _Seen:
    """Make a call for each case, and keep all that its caller sees."""
    seen, roots = _Seen(), workload.roots()
    for number, case in enumerate(cases):
        own = (workload.args, workload.kwargs)
        args, kwargs = own if case.inputs is None else workload.copy_inputs(case.inputs)
        last_same = number == _SAME - 1
        before = _memory(driver, walk(roots), (args, kwargs)) if last_same else {}
        try:
            result = (workload.fn if case.other_size else call)(*args, **kwargs)
        except Exception:  # the callable's own, of any kind: it takes no such inputs
            if case.inputs is None:
                raise
            seen.calls.append(None)
            continue
        state = _state(roots) if 0 < number < _SAME else {}
        seen.calls.append((_values(result, "result"), _values((args, kwargs), ""), state))
        if last_same:
            flat = tree.flatten(result, "result")
            pairs = zip(flat.paths, flat.tensors, strict=True)
            where = (
                (p, before.get(driver.storage(t)) if recordable(t) else None) for p, t in pairs
            )
            seen.shared = {path: owner for path, owner in where if owner is not None}
    return seen


def _memory(driver: Driver, found: StateWalk, inputs: Inputs) -> dict[int, str]:
    """Return the names of arguments and state by their storages."""
    named = [(slot.name, t) for slot, t in found.tensors() if slot.key is not gradient_of]
    held = {driver.storage(t): name for name, t in named if recordable(t)}
    return held | named_arguments(driver, inputs)


def named_arguments(driver: Driver, inputs: Inputs) -> dict[int, str]:
    """Return the names of arguments by their storages."""
    named: dict[int, str] = {}
    for value, root in zip(inputs, ("args", "kwargs"), strict=True):
        flat = tree.flatten(value, root)
        for path, t in zip(flat.paths, flat.tensors, strict=True):
            if recordable(t):
                named.setdefault(driver.storage(t), path)
    return named


def _values(value: object, root: str) -> _Values:
    """Return the tensors and plain values of arguments or of a result, by name."""
    flat = tree.flatten(value, root)
    values: _Values = {path: _clone(t) for path, t in zip(flat.paths, flat.tensors, strict=True)}
    plain = ((path, c) for path, c in tree.constants(flat.tree, root) if not c.by_identity)
    return {_call_path(path): kept for path, kept in (*values.items(), *plain)}


def _call_path(path: str) -> str:
    """Return ``args[0]`` for the path ``[0][0]`` in ``(args, kwargs)``."""
    for start, name in (("[0]", "args"), ("[1]", "kwargs")):
        if path.startswith(start):
            return name + path[len(start) :]
    return path


def _state(roots: Iterable[tuple[str, object]]) -> _Values:
    """Return the values that a callable and its arguments reach, by name.

    Numbers that objects of torch's own keep for themselves are left out.
    """
    found, kept, counts = walk(roots), _Values(), Counter[str]()
    for slot, value in found.all_slots.values():
        name = slot.name.lstrip(".")
        counts[name] += 1
        name = name if counts[name] == 1 else f"{name} ({counts[name]})"
        if isinstance(value, Tensor):
            kept[name] = _clone(value) if _is_small(value) else _digest(value)
            if slot.key is not gradient_of:
                kept[f"{name}.requires_grad"] = tree.Constant(value.requires_grad)
        elif tree.is_plain(value) and not is_torchs(slot.owner):
            kept[name] = tree.Constant(value)
    for _, name, length in found.containers.values():
        kept.setdefault(f"len({name})", tree.Constant(length))
    return kept


def is_torchs(owner: object) -> bool:
    """Return whether an object's class is torch's own."""
    return type(owner).__module__.partition(".")[0] == "torch"


def _clone(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _is_small(t: Tensor) -> bool:
    return t.numel() <= _LARGE or not recordable(t)


def _digest(t: Tensor) -> Tensor:
    """Return sums that tell a tensor from another, in place of a copy of a large one."""
    flat = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach()).reshape(-1)
    parts = (flat, flat[::3], flat[::7])
    found = torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return found if driver_of(t.device.type).computes_on_host else found.float()


def _differences(
    eager: _Seen, other: _Seen, cases: Sequence[_Case], exact: bool
) -> Iterator[Difference]:
    """Return each thing that differs, with the first call after which it does."""
    seen: list[tuple[Kind, str, _Values, _Values]] = []
    for case, mine, theirs in zip(cases, eager.calls, other.calls, strict=True):
        if mine is not None and theirs is not None and not case.other_size:
            seen.append(("result", case.when, mine[0], theirs[0]))
            seen.append(("argument", case.when, mine[1], theirs[1]))
            seen.append(("state", case.when, mine[2], theirs[2]))
    known = set[tuple[Kind, str]]()
    for kind, when, mine, theirs in seen:
        for name in {**mine, **theirs}:
            same = _same_value(mine.get(name), theirs.get(name), exact)
            if not same and (kind, name) not in known:
                known.add((kind, name))
                yield Difference(kind, name, when)
    for name in eager.shared.keys() - other.shared.keys():
        yield Difference("alias", name, cases[_SAME - 1].when)


def _same_value(a: object, b: object, exact: bool) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if not (recordable(a) and recordable(b)):
        return True  # nested, sparse and quantized results are refused by captures
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return True
    if exact or not is_inexact(a):
        return False
    limit = _ROUNDING * torch.finfo(a.dtype).eps * a.abs().nan_to_num().max()
    return bool((same | ((a - b).abs() <= limit)).all())


@contextmanager
def undone(workload: Workload, *copies: Workload) -> Generator[None]:
    """Undo the changes that runs of copies make to the random state, to globals, and to objects
    that cannot be copied. Warnings of the callable are not shown: it runs many times."""
    roots = [root for one in (workload, *copies) for root in one.roots()]
    before = walk(roots)
    rollback = Rollback(before)
    generators = HostGenerators((slot.name, value) for slot, value in before.all_slots.values())
    of_torch = [v for _, v in before.all_slots.values() if isinstance(v, torch.Generator)]
    shared = _shared(workload, copies[0] if copies else workload.copy())
    _, device = select(workload.tensors())
    with preserved_random_state(device, of_torch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            generators.restore()
            rollback.restore()
            with torch.no_grad():
                for t, value in shared:
                    t.detach().copy_(value)


def _shared(workload: Workload, copy: Workload) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that a copy has in common with a workload, with their values."""
    own, others = ({id(t): t for _, t in walk(w.roots()).tensors()} for w in (workload, copy))
    parameters = {id(p) for p in workload.parameters()} if workload.share_parameters else ()
    common = [t for i, t in own.items() if i in others and i not in parameters]
    return [(t, t.detach().clone()) for t in common]
