"""Whether real rows depend on padded ones: followed through every operation of a run.

Each storage has bits for each of its elements (see `shadow`), so that a view of a tensor sees those
of its own elements and no operation on metadata needs a rule. What each operation does to the bits
is in `flows`; one that is not there makes everything that it touches depend on the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import operator, tensors
from onelaunch.driver.select import computing
from onelaunch.padding.taint.align import Alignment, draws, reason_of
from onelaunch.padding.taint.attribution import DRAWN, MOVED, ONCE, Event, Finding, blamed
from onelaunch.padding.taint.bounds import check_bounds
from onelaunch.padding.taint.displacement import Holds, displaced
from onelaunch.padding.taint.operands import ALL, Operands, low_of, outside_of
from onelaunch.padding.taint.rules.call import LEAST, TaintedCall
from onelaunch.padding.taint.rules.table import rule_of
from onelaunch.padding.taint.shadow import (
    LOW,
    PADDED,
    SIZED,
    SKEWED,
    UNKNOWN,
    Memory,
    storage_of,
    union,
)
from onelaunch.padding.taint.trace import Step, name_of, packet_of, step_of
from onelaunch.source import user_frame
from onelaunch.watch.operations import DecomposingMode


class TaintMode(DecomposingMode):
    """Follows padding through a run at a padded size.

    Args:
        device: where the run is; the bits live there too, or on the host for a device without
            kernels of its own.
        reference: the steps of a run without padding at the real size.
    """

    def __init__(self, device: torch.device, reference: Sequence[Step]) -> None:
        super().__init__()
        self._memory = Memory(computing(device))
        self._alignment = Alignment(reference)
        self.steps: list[Step] = []
        self._events: list[Event] = []
        self._roots: set[int] = set()
        self._given: set[int] = set()
        self._made: set[int] = set()
        self._written: dict[int, Tensor] = {}
        self.random: Finding | None = None
        """The first operation that draws random numbers."""

    def mark(self, t: Tensor, padded: Tensor, unknown: Tensor) -> None:
        """Say which elements of an argument are padding, and of which the values may vary."""
        self._roots.add(storage_of(t))
        self._given.add(storage_of(t))
        self._memory.put(t, self._joined(padded, unknown) | SIZED)

    def vary(self, t: Tensor) -> None:
        """Say that the values of an argument that is not padded vary from call to call."""
        if t.layout is torch.strided:
            self._given.add(storage_of(t))
            clean = torch.zeros((), dtype=torch.bool, device="cpu")
            self._memory.put(t, self._joined(clean, ~clean))

    def _kept(self, t: Tensor) -> bool:
        """Whether a tensor lives on from call to call: who owns it may change its values."""
        return storage_of(t) not in self._made and storage_of(t) not in self._given

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name_of(func) == "record_stream":  # says that it writes, and does not
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # metadata: the memory is as it was
            result = func(*args, **kwargs)
            self._alignment.counterpart(step_of(func, args, kwargs, result))
            return result
        written = operator(func).written(args, kwargs)
        old = dict[int, Tensor]()
        if any(self._kept(t) or self._memory.of(t) is not None for t in tensors((args, kwargs))):
            old = {id(t): t.clone() for t in written}
        check_bounds(packet_of(name_of(func)), args)
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result, written, old)
        return result

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: Sequence[Tensor],
        old: dict[int, Tensor],
    ) -> None:
        step = step_of(func, args, kwargs, result)
        if step.name == "lift_fresh":  # a constant in the code
            self._made.add(storage_of(args[0]))
        self.steps.append(step)
        if self.random is None and draws(func):
            self.random = Finding(step.name, user_frame(), "random numbers are drawn")
        real = self._alignment.counterpart(step)
        if (
            real is not None
            and draws(func)
            and real[2:4] != step[2:4]
            and self._alignment.apart is None
        ):
            self._alignment.apart = Finding(step.name, user_frame(), DRAWN)
        inputs = [t for t in tensors((args, kwargs)) if t.layout is torch.strided]
        outputs = [t for t in tensors(result) if t.layout is torch.strided]
        given = {storage_of(t) for t in inputs}
        fresh = [t for t in outputs if storage_of(t) not in given]
        self._made |= {storage_of(t) for t in fresh}
        for t in written:
            if storage_of(t) not in self._made:
                self._written.setdefault(storage_of(t), t)
        targets = [*fresh, *written]
        before = [bits for t in inputs if (bits := self._memory.of(t)) is not None]
        reason = reason_of(func, step, real)
        look = Operands(self._memory, old, inputs, real, self._kept)
        moved = self._moved(func, step, args, kwargs, real, look, reason is None)
        if moved is not None:
            reason = MOVED if Holds.OTHERS in moved else None
        if not targets:
            others = Holds.OTHERS if reason else Holds.SAME
            self._show(outputs, moved or [others] * len(outputs))
        if targets and (reason or look.any):
            bits = self._bits(func, args, kwargs, outputs, reason, look, real)
            for number, (t, b) in enumerate(zip(outputs, bits, strict=True)):
                if any(t is other for other in targets) or storage_of(t) not in given:
                    sized = look.sized if real is None else real.outputs[number] != t.shape
                    b = b & (ALL | LOW)
                    self._write(t, b | SIZED if sized else b, look)
            # What is written besides the results, or without any, takes after all of them.
            start = 0 if bits else ALL if reason else look.most
            whole = torch.full((), start, dtype=torch.uint8, device=self._memory.device)
            for b in bits:
                whole = whole | (union(b) & ALL)
            for t in written:
                if not any(t is other or _same_place(t, other) for other in outputs):
                    self._write(t, whole, look)
        else:
            for t in targets:  # an address that is used again, or clean values over others
                if self._memory.of(t) is not None:
                    self._write(t, torch.zeros((), dtype=torch.uint8, device="cpu"), look)
        after = [bits for t in outputs if (bits := self._memory.of(t)) is not None]
        if before or after or reason:
            self._note(step.name, inputs, [*outputs, *written], before, after, reason)
        if len(self._events) % 64 == 0:
            self._memory.prune()

    def _write(self, t: Tensor, bits: Tensor, look: Operands) -> None:
        """Give an operation's result its bits.

        Where it writes rows that the run at the real size does not write, or others, what was there
        is another value than there, whatever is written.
        """
        old = self._memory.of(t)
        real = look.real(t)
        if old is not None and bool((old & SKEWED).any()):
            self._memory.fill(t, ALL | SKEWED)
            return
        bits = bits.to(self._memory.device)
        if real is not None and real != t.shape:
            bits = bits | outside_of(t.shape, real, self._memory.device)
        self._memory.put(t, bits)

    def _moved(
        self,
        func: Any,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        real: Step | None,
        look: Operands,
        told: bool,
    ) -> list[Holds] | None:
        """What the results of an operation hold that picks elements by place; None of others."""
        if real is None or real.picked is None or step.picked is None:
            return None
        if all(look.real(t) in (None, t.shape) for t in tensors(args)):
            return None
        unsure, padded = look.plane(UNKNOWN), look.plane(PADDED)
        packet, count = packet_of(step.name), len(step.outputs)
        return displaced(func, packet, args, real.picked, kwargs, padded, unsure, told, count)

    def _show(self, views: Sequence[Tensor], held: Sequence[Holds]) -> None:
        """Mark views of other elements than in the run at the real size."""
        every = torch.tensor(ALL | SIZED | SKEWED, dtype=torch.uint8, device=self._memory.device)
        for view, holds in zip(views, held, strict=True):
            if holds is Holds.OTHERS:
                self._memory.put(view, every)
            elif holds is Holds.PADDING:
                bits = self._memory.of(view)
                self._memory.put(view, every if bits is None else bits | SKEWED)

    def _bits(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
        reason: str | None,
        look: Operands,
        real: Step | None,
    ) -> list[Tensor]:
        flow = None if reason else rule_of(func)
        name = name_of(func)
        unsure = look.plane(UNKNOWN)
        call = TaintedCall(
            func,
            name,
            args,
            kwargs,
            list(outputs),
            look.zero,
            look.low,
            unsure,
            look.value,
            look.real,
            () if real is None else real.outputs,
        )
        padded, unknown = list[Tensor](), list[Tensor]()
        if flow is not None:
            try:
                padded, unknown = flow(call, look.plane(PADDED)), flow(call, unsure)
            except (RuntimeError, IndexError, TypeError, ValueError):
                flow = None  # arguments of a form that the flow does not know: it spreads
        if flow is None:
            bits = ALL if reason else look.most
            every = torch.tensor(bits, dtype=torch.uint8, device=self._memory.device)
            return [every.broadcast_to(t.shape) for t in outputs]
        bits = [self._joined(p, u) for p, u in zip(padded, unknown, strict=True)]
        bits += [union(bits[0]).broadcast_to(t.shape) for t in outputs[len(bits) :]]
        packet = name.partition(".")[0]
        low = low_of(call, packet, look)
        if low is not None:
            low = low.to(self._memory.device) & (look.value(outputs[0]) <= LEAST / 2)
            bits[0] = bits[0] | low.to(torch.uint8) * LOW
        elif packet == "exp":  # of the lowest it is 0
            gone = look.low(args[0]) & (look.value(outputs[0]) == 0)
            bits[0] = torch.where(gone, bits[0] & ~UNKNOWN, bits[0])
        return bits

    def _joined(self, padded: Tensor, unknown: Tensor) -> Tensor:
        device = self._memory.device
        return padded.to(device, torch.uint8) | unknown.to(device, torch.uint8) * UNKNOWN

    def _note(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        reason: str | None,
    ) -> None:
        event = Event(
            name,
            user_frame(),
            frozenset(storage_of(t) for t in inputs),
            frozenset(storage_of(t) for t in outputs),
            [_share(b) for b in before],
            [_share(b) for b in after],
            reason,
        )
        self._events.append(event)

    # What is asked after the run.

    def finish(self) -> Finding | None:
        """The first operation in which the runs differ, or None."""
        return self._alignment.finish(self.steps)

    def blame(self, t: Tensor) -> Finding:
        """The operation that made `t` depend on padding."""
        return blamed(self._events, storage_of(t))

    def depends(self, t: Tensor, part: tuple[slice, ...] = ()) -> bool:
        """Whether an element of this part of `t` depends on padding."""
        bits = self._memory.of(t)
        return bits is not None and bool((bits[part] & PADDED).any())

    def made(self, t: Tensor) -> bool:
        """Whether the memory of `t` was allocated in the run."""
        return storage_of(t) in self._made

    def written(self) -> list[Tensor]:
        """Tensors that existed before the run and were given values that depend on padding."""
        return [t for key, t in self._written.items() if key not in self._roots and self.depends(t)]

    def changed(self) -> Finding | None:
        """The operation that wrote to what existed before the run and has no rows of its own."""
        for key in self._written:
            if key not in self._roots:
                event = next((e for e in self._events if key in e.targets), None)
                name, place = (event.name, event.place) if event else ("a write", None)
                return Finding(name, place, ONCE)
        return None

    def mutated(self, t: Tensor) -> bool:
        """Whether the run wrote into an argument."""
        return storage_of(t) in self._written


def _share(bits: Tensor) -> Tensor:
    return (bits & PADDED).float().mean() if bits.numel() else torch.zeros((), device="cpu")


def _same_place(a: Tensor, b: Tensor) -> bool:
    same = storage_of(a) == storage_of(b) and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
