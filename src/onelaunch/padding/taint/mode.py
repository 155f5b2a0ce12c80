"""The taint mode, which follows padding through every operation of a run.

Each storage has taint bits for each of its elements (see `shadow`), so a view of a tensor has the
bits of its own elements, and operations on metadata need no rule. Other operations have a rule in
`rules`; without a rule an operation taints all its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, tensors
from onelaunch.driver.select import computing
from onelaunch.padding.taint.align import (
    DRAWN,
    MOVED,
    ONCE,
    Alignment,
    TaintCause,
    TaintEvent,
    find_cause,
    reason_of,
)
from onelaunch.padding.taint.bounds import check_bounds
from onelaunch.padding.taint.displacement import Holds, displaced
from onelaunch.padding.taint.hidden import HidingTrace, low_of
from onelaunch.padding.taint.rules.call import ALL, LEAST, TaintedCall
from onelaunch.padding.taint.rules.rows import kept, named_by
from onelaunch.padding.taint.rules.table import rule_of
from onelaunch.padding.taint.shadow import (
    LOW,
    PADDED,
    ROW,
    SIZED,
    SKEWED,
    SPARE,
    UNKNOWN,
    Rows,
    ShadowMemory,
    storage_of,
    union,
)
from onelaunch.padding.taint.trace import TracedStep, kind_of, packet_of, step_of
from onelaunch.source import user_frame
from onelaunch.watch.operations import DecomposingMode


class TaintMode(DecomposingMode):
    """A mode that follows taint through a run at a padded size. `reference`: the steps of the
    unpadded run. `spare`: the sizes whose last row is in no call a real row. `front`: whether the
    rows that the unpadded run lacks are the first ones."""

    def __init__(
        self,
        device: torch.device,
        reference: Sequence[TracedStep],
        spare: frozenset[Rows] = frozenset(),
        front: bool = False,
    ) -> None:
        super().__init__()
        self._memory = ShadowMemory(computing(device))
        self._alignment = Alignment(reference)
        self._spare, self._front = spare, front
        self.steps: list[TracedStep] = []
        self._events: list[TaintEvent] = []
        self._roots: set[int] = set()
        self._given: set[int] = set()
        self._made: set[int] = set()
        self._written: dict[int, Tensor] = {}
        self._trace = HidingTrace()
        self.hiding = self._trace.hiding  # the places where a finite number hides padding
        self.constants: set[int] = set()  # storages from before the run whose values count as known
        self.random: TaintCause | None = None  # the first operation that draws random numbers
        self._asked = torch.zeros((), dtype=torch.bool, device=self._memory.device)

    def mark(self, t: Tensor, padded: Tensor, unknown: Tensor, rows: Rows | None = None) -> None:
        """Mark the elements of an argument that are padding, or whose values may vary. `rows`: the
        size whose rows it names, padding a spare row."""
        self._roots.add(storage_of(t))
        self._given.add(storage_of(t))
        bits = self._joined(padded, unknown) | SIZED
        self._memory.put(t, bits)
        if rows in self._spare:
            self._name(t, bits, rows)

    def vary(self, t: Tensor) -> None:
        """Mark the values of an argument without padding as varying from call to call."""
        if t.layout is torch.strided:
            self._given.add(storage_of(t))
            clean = torch.zeros((), dtype=torch.bool, device="cpu")
            self._memory.put(t, self._joined(clean, ~clean))

    def _name(self, t: Tensor, bits: Tensor, rows: Rows) -> None:
        """Note that `t` names rows of a size, and its padding rows that are not real."""
        self._memory.put(t, bits | torch.where((bits & PADDED) != 0, SPARE, ROW).to(torch.uint8))
        self._memory.name(t, rows)

    def _outlives(self, t: Tensor) -> bool:
        """Return whether a tensor outlives the call: its owner may change its values."""
        return storage_of(t) not in self._made and storage_of(t) not in self._given

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = op.func
        if op.label == "record_stream":  # its schema says that it writes, but it does not
            return func(*args, **kwargs)
        if op.reshapes:  # metadata alone: the memory is unchanged
            result = func(*args, **kwargs)
            self._alignment.counterpart(step_of(op, args, kwargs, result))
            return result
        written = op.written(args, kwargs)
        old_values = dict[int, Tensor]()
        if any(
            self._outlives(t) or self._memory.of(t) is not None for t in tensors((args, kwargs))
        ):
            old_values = {id(t): t.clone() for t in written}
        check_bounds(packet_of(op.label), args)
        result = func(*args, **kwargs)
        self._follow(op, args, kwargs, result, written, old_values)
        return result

    def _follow(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: Sequence[Tensor],
        old_values: dict[int, Tensor],
    ) -> None:
        step = step_of(op, args, kwargs, result)
        if step.name == "lift_fresh":  # a constant in the code
            self._made.add(storage_of(args[0]))
        self.steps.append(step)
        random = op.draws(args, {**kwargs, "generator": None})  # from any generator
        if self.random is None and random:
            self.random = TaintCause(step.name, user_frame(), "random numbers are drawn")
        real = self._alignment.counterpart(step)
        if real is not None and random and real[2:4] != step[2:4]:
            self._alignment.differ(TaintCause(step.name, user_frame(), DRAWN))
        call = TaintedCall(
            *(op, args, kwargs, result, real),
            *(self._memory, old_values, self._outlives, self._front),
        )
        inputs, outputs = call.inputs, call.results
        given = {storage_of(t) for t in inputs}
        fresh = [t for t in outputs if storage_of(t) not in given]
        self._made |= {storage_of(t) for t in fresh}
        for t in written:
            if storage_of(t) not in self._made:
                self._written.setdefault(storage_of(t), t)
        targets = [*fresh, *written]
        before = [bits for t in inputs if (bits := self._memory.of(t)) is not None]
        reason = reason_of(step, real, random)
        self._trace.begin(kind_of(step.name), call)
        self.constants.update(map(storage_of, call.constants))
        held = self._held(call, step, real, reason is None)
        if held is not None:
            reason = MOVED if Holds.OTHERS in held else None
        if not targets:
            others = Holds.OTHERS if reason else Holds.SAME
            self._mark_views(outputs, held or [others] * len(outputs))
        if targets and (reason or call.any):
            bits, named = self._bits(call, reason)
            for number, (t, b) in enumerate(zip(outputs, bits, strict=True)):
                if any(t is other for other in targets) or storage_of(t) not in given:
                    sized = call.sized if real is None else real.outputs[number] != t.shape
                    b = b & (ALL | LOW | ROW | SPARE)
                    self._write(t, b | SIZED if sized else b, call)
                    if named is not None:
                        self._memory.name(t, named)
            # Tensors written in place, other than results, get the union of the results' taint.
            start = 0 if bits else ALL if reason else call.most
            whole = torch.full((), start, dtype=torch.uint8, device=self._memory.device)
            for b in bits:
                whole = whole | (union(b) & ALL)
            for t in written:
                if not any(t is other or _same_place(t, other) for other in outputs):
                    self._write(t, whole, call)
        else:
            for t in targets:  # a reused address, or clean values written over tainted ones
                if self._memory.of(t) is not None:
                    self._write(t, torch.zeros((), dtype=torch.uint8, device="cpu"), call)
        if step.name == "arange" and real is not None:  # each names its own place
            rows = real.outputs[0][0], step.outputs[0][0]
            if rows in self._spare:
                padded = call.beyond(step.outputs[0], real.outputs[0]).to(torch.uint8) * PADDED
                self._name(outputs[0], padded | SIZED, rows)
        self._asked = self._asked | call.asked
        after = [bits for t in outputs if (bits := self._memory.of(t)) is not None]
        if before or after or reason:
            event = TaintEvent(
                *(step.name, user_frame(), rule_of(op) is not None),
                frozenset(map(storage_of, inputs)),
                frozenset(map(storage_of, (*outputs, *written))),
                *([*map(_padded_share, before)], [*map(_padded_share, after)], reason),
            )
            self._events.append(event)
        if len(self._events) % 64 == 0:
            self._memory.prune()

    def _write(self, t: Tensor, bits: Tensor, call: TaintedCall) -> None:
        """Set the bits of an operation's result. If it writes other rows than the unpadded run
        does, the elements hold other values than there."""
        old_bits = self._memory.of(t)
        real = call.real(t)
        if old_bits is not None and bool((old_bits & SKEWED).any()):
            self._memory.fill(t, ALL | SKEWED)
            return
        bits = bits.to(self._memory.device)
        if real is not None and real != t.shape:
            bits = bits | call.beyond(t.shape, real).to(torch.uint8) * PADDED
        self._memory.put(t, bits)

    def _held(
        self, call: TaintedCall, step: TracedStep, real: TracedStep | None, same_numbers: bool
    ) -> list[Holds] | None:
        """Return the elements in the results of an operation that picks by place, or None."""
        if real is None or real.picked is None or step.picked is None:
            return None
        if all(call.real(t) in (None, t.shape) for t in tensors(call.args)):
            return None
        return displaced(call, real.picked, same_numbers, len(step.outputs))

    def _mark_views(self, views: Sequence[Tensor], held: Sequence[Holds]) -> None:
        """Mark views of other elements than in the unpadded run."""
        every = torch.tensor(ALL | SIZED | SKEWED, dtype=torch.uint8, device=self._memory.device)
        for view, holds in zip(views, held, strict=True):
            if holds is Holds.OTHERS:
                self._memory.put(view, every)
            elif holds is Holds.PADDING:
                bits = self._memory.of(view)
                self._memory.put(view, every if bits is None else bits | SKEWED)

    def _bits(self, call: TaintedCall, reason: str | None) -> tuple[list[Tensor], Rows | None]:
        """Return the bits of the results, and the size whose rows they name."""
        rule, outputs = None if reason else rule_of(call.op), call.results
        padded, unknown = list[Tensor](), list[Tensor]()
        if rule is not None:
            try:
                padded, unknown = (
                    [p.broadcast_to(t.shape) for p, t in zip(rule(call, of), outputs, strict=False)]
                    for of in (call.padded, call.unknown)
                )
            except (RuntimeError, IndexError, TypeError, ValueError):
                rule = None  # the rule does not know this form of arguments: taint all
        if rule is None:
            bits = ALL if reason else call.most
            every = torch.tensor(bits, dtype=torch.uint8, device=self._memory.device)
            return [every.broadcast_to(t.shape) for t in outputs], None
        bits = [self._joined(p, u) for p, u in zip(padded, unknown, strict=True)]
        bits += [union(bits[0]).broadcast_to(t.shape) for t in outputs[len(bits) :]]
        named = named_by(call)
        if named is not None:
            real_rows, others = kept(call, (bits[0] & PADDED) != 0)
            bits[0] = bits[0] | real_rows.to(torch.uint8) * ROW | others.to(torch.uint8) * SPARE
        low = low_of(call)
        if low is not None:
            low = low.to(self._memory.device) & (call.value(outputs[0], asks=False) <= LEAST / 2)
            low = low & ((bits[0] & UNKNOWN) != 0)
            if bool(low.any()):
                self._trace.follow(call)
            bits[0] = bits[0] | low.to(torch.uint8) * LOW
        elif call.packet == "exp":  # 0 for the lowest
            vanished = call.low(call.args[0]) & (call.value(outputs[0], asks=False) == 0)
            bits[0] = torch.where(vanished, bits[0] & ~UNKNOWN, bits[0])
        return bits, named

    def _joined(self, padded: Tensor, unknown: Tensor) -> Tensor:
        device = self._memory.device
        return padded.to(device, torch.uint8) | unknown.to(device, torch.uint8) * UNKNOWN

    # Questions after the run.

    def finish(self) -> TaintCause | None:
        """Return the first operation in which the runs differ, or None."""
        return self._alignment.finish(self.steps)

    def rests_on_values(self) -> bool:
        """Return whether the taint depends on values that do not vary, as of a mask or an index,
        beside the operations and their shapes."""
        return bool(self._asked)

    def blame(self, t: Tensor) -> TaintCause:
        """Return the operation that made `t` depend on padding."""
        return find_cause(self._events, storage_of(t))

    def depends(self, t: Tensor, part: tuple[slice, ...] = ()) -> bool:
        bits = self._memory.of(t)
        return bits is not None and bool((bits[part] & PADDED).any())

    def made(self, t: Tensor) -> bool:
        """Return whether the memory of `t` was allocated in the run."""
        return storage_of(t) in self._made

    def written(self) -> list[Tensor]:
        """Return older tensors that were written with values that depend on padding."""
        return [t for key, t in self._written.items() if key not in self._roots and self.depends(t)]

    def changed(self) -> TaintCause | None:
        """Return the operation that wrote to an older tensor, except arguments with rows."""
        for key in self._written:
            if key not in self._roots:
                event = next((e for e in self._events if key in e.targets), None)
                name, place = (event.name, event.place) if event else ("a write", None)
                return TaintCause(name, place, ONCE)
        return None

    def mutated(self, t: Tensor) -> bool:
        return storage_of(t) in self._written


def _padded_share(bits: Tensor) -> Tensor:
    return (bits & PADDED).float().mean() if bits.numel() else torch.zeros((), device="cpu")


def _same_place(a: Tensor, b: Tensor) -> bool:
    same = storage_of(a) == storage_of(b) and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
