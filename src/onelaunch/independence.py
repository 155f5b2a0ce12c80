"""Whether real rows depend on padded ones: followed through every operation of a run.

Each storage gets a shadow, one byte for each element, so that a view of a tensor sees the shadow of
its own elements and no operation on metadata needs a rule. A bit says that an element depends on
padding; another that its value is not the same at every call, as that of a mask's padding is; a
third that it is lower than any score. What each operation does to the bits is in `flows`; one that
is not there makes everything that it touches depend on the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.driver.operators import operator, tensors
from onelaunch.flows import LOW, Call, flow_of
from onelaunch.shadow import Memory, storage_of
from onelaunch.source import Place, user_frame
from onelaunch.trace import AHEAD, LAYOUT, PREFIX, Step, name_of, step_of

_PADDED, _UNKNOWN, _LOW = 1, 2, 4
_ALL = _PADDED | _UNKNOWN

_KEEPS_LOW = ("add", "sub", "mul", "div", "_to_copy", "clone", "copy", "add_", "sub_", "div_")


@dataclass(slots=True)
class _Event:
    """What one operation did to the bits, so that a refusal can name it."""

    name: str
    place: Place | None
    sources: frozenset[int]
    targets: frozenset[int]
    before: list[Tensor]
    after: list[Tensor]
    reason: str | None


class Finding(NamedTuple):
    """Why something depends on padding: the operation, its line, and the reason if it is known."""

    name: str
    place: Place | None
    reason: str | None


class Spread(TorchDispatchMode):
    """Follows padding through a run at a padded size.

    Args:
        device: where the run is; the bits live there too, or on the host for a device without
            kernels of its own.
        reference: the steps of a run without padding at the real size.
    """

    def __init__(self, device: torch.device, reference: Sequence[Step]) -> None:
        super().__init__()
        place = device if device.type == "cuda" else torch.device("cpu")
        self._memory = Memory(place)
        self._reference = reference
        self._next = 0
        self.steps: list[Step] = []
        self._events: list[_Event] = []
        self._roots: set[int] = set()
        self._given: set[int] = set()
        self._made: set[int] = set()
        self._written: dict[int, Tensor] = {}
        self.random: Finding | None = None
        """The first operation that draws random numbers."""
        self.apart: Finding | None = None
        """The first operation that the run at the real size does not have."""

    def mark(self, t: Tensor, padded: Tensor, unknown: Tensor) -> None:
        """Say which elements of an argument are padding, and of which the values may vary."""
        self._roots.add(storage_of(t))
        self._given.add(storage_of(t))
        self._memory.put(t, self._joined(padded, unknown))

    def vary(self, t: Tensor) -> None:
        """Say that the values of an argument that is not padded vary from call to call."""
        if t.layout is torch.strided:
            self._given.add(storage_of(t))
            clean = torch.zeros((), dtype=torch.bool)
            self._memory.put(t, self._joined(clean, ~clean))

    def _kept(self, t: Tensor) -> bool:
        """Whether a tensor lives on from call to call: who owns it may change its values."""
        return storage_of(t) not in self._made and storage_of(t) not in self._given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator(func).composite:
            with self:
                return func.decompose(*args, **kwargs)
        if name_of(func) == "record_stream":  # says that it writes, and does not
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # metadata: the memory is as it was
            result = func(*args, **kwargs)
            self._counterpart(step_of(func, args, kwargs, result))
            return result
        written = operator(func).written(args, kwargs)
        old = {id(t): t.clone() for t in written if self._memory.of(t) is not None}
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
        if self.random is None and _draws(func):
            self.random = Finding(step.name, user_frame(), "random numbers are drawn")
        real = self._counterpart(step)
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
        reason = _reason(func, step, real)
        look = _Look(self._memory, old, inputs, real, self._kept)
        if targets and (reason or look.any):
            bits = self._bits(func, args, kwargs, outputs, reason, look)
            for t, b in zip(outputs, bits, strict=True):
                if any(t is other for other in targets) or storage_of(t) not in given:
                    self._memory.put(t, b)
            # What is written besides the results, or without any, takes after all of them.
            start = 0 if bits else _ALL if reason else look.most
            whole = torch.full((), start, dtype=torch.uint8, device=self._memory.device)
            for b in bits:
                whole = torch.maximum(whole, b.max()) if b.numel() else whole
            for t in written:
                if not any(t is other or _same_place(t, other) for other in outputs):
                    self._memory.put(t, whole)
        else:
            for t in targets:  # an address that is used again, or clean values over others
                if self._memory.of(t) is not None:
                    self._memory.put(t, torch.zeros((), dtype=torch.uint8))
        after = [bits for t in outputs if (bits := self._memory.of(t)) is not None]
        if before or after or reason:
            self._note(step.name, inputs, [*outputs, *written], before, after, reason)
        if len(self._events) % 64 == 0:
            self._memory.prune()

    def _bits(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
        reason: str | None,
        look: _Look,
    ) -> list[Tensor]:
        flow = None if reason else flow_of(func)
        name = name_of(func)
        unsure = look.plane(_UNKNOWN)
        call = Call(
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
        )
        padded, unknown = list[Tensor](), list[Tensor]()
        if flow is not None:
            try:
                padded, unknown = flow(call, look.plane(_PADDED)), flow(call, look.plane(_UNKNOWN))
            except (RuntimeError, IndexError, TypeError, ValueError):
                flow = None  # arguments of a form that the flow does not know: it spreads
        if flow is None:
            bits = _ALL if reason else look.most
            every = torch.tensor(bits, dtype=torch.uint8, device=self._memory.device)
            return [every.broadcast_to(t.shape) for t in outputs]
        bits = [self._joined(p, u) for p, u in zip(padded, unknown, strict=True)]
        bits += [bits[0].max().broadcast_to(t.shape) for t in outputs[len(bits) :]]
        packet = name.partition(".")[0]
        if not (outputs and outputs[0].is_floating_point()):
            return bits  # no score
        if packet in _KEEPS_LOW or packet in ("where", "masked_fill"):
            chosen = packet in ("where", "masked_fill")
            (low,) = flow(call, look.plane(_LOW)) if chosen else [_joined_low(call, look)]
            low = low.to(self._memory.device) & (look.value(outputs[0]) <= LOW / 2)
            bits[0] = bits[0] | low.to(torch.uint8) * _LOW
        elif packet == "exp":  # of the lowest it is 0
            gone = look.low(args[0]) & (look.value(outputs[0]) == 0)
            bits[0] = torch.where(gone, bits[0] & ~_UNKNOWN, bits[0])
        return bits

    def _joined(self, padded: Tensor, unknown: Tensor) -> Tensor:
        device = self._memory.device
        return padded.to(device, torch.uint8) | unknown.to(device, torch.uint8) * _UNKNOWN

    def _counterpart(self, step: Step) -> Step | None:
        """The step of the run at the real size, or None where it has none."""
        for ahead in range(AHEAD):
            place = self._next + ahead
            if place >= len(self._reference):
                break
            if self._reference[place].name == step.name:
                self._next = place + 1
                return self._reference[place]
            if _packet(self._reference[place].name) not in LAYOUT:
                break
        if _packet(step.name) not in LAYOUT and self.apart is None:
            self.apart = Finding(step.name, user_frame(), _DIVERGES)
        return None

    def _note(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        reason: str | None,
    ) -> None:
        event = _Event(
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
        rest = self._reference[self._next :]
        left = next((s for s in rest if _packet(s.name) not in LAYOUT), None)
        if left is not None and self.apart is None:
            self.apart = Finding(left.name, None, _DIVERGES)
        return self.apart

    def depends(self, t: Tensor, part: tuple[slice, ...] = ()) -> bool:
        """Whether an element of this part of `t` depends on padding."""
        bits = self._memory.of(t)
        return bits is not None and bool((bits[part] & _PADDED).any())

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
                return Finding(name, place, _ONCE)
        return None

    def mutated(self, t: Tensor) -> bool:
        """Whether the run wrote into an argument."""
        return storage_of(t) in self._written

    def blame(self, t: Tensor) -> Finding:
        """The operation that made `t` depend on padding."""
        wanted = {storage_of(t)}
        chain: list[_Event] = []
        for event in reversed(self._events):
            if event.targets & wanted:
                wanted |= event.sources
                chain.append(event)
        chain.reverse()
        for event in chain:
            if event.reason:
                return Finding(event.name, event.place, event.reason)
        for event in chain:  # from rows of their own to none
            whole = bool(event.after) and float(event.after[0]) == 1
            if whole and any(0 < float(b) < 1 for b in event.before):
                known = None if _known(event.name) else _STRANGE
                known = _TAKES if _packet(event.name) in LAYOUT else known
                return Finding(event.name, event.place, known)
        rising = [e for e in chain if e.after and e.before]
        last = max(
            rising,
            key=lambda e: float(e.after[0]) - max(float(b) for b in e.before),
            default=chain[-1] if chain else None,
        )
        return Finding(last.name, last.place, None) if last else Finding("result", None, None)


_TAKES = "it takes a padded row"
_ONCE = "it would be written once for each piece"
_STRANGE = "its effect on rows is not known"
_DIVERGES = (
    "the run at another size does not have it: the callable branches on the size, or on a value"
)


def _packet(name: str) -> str:
    return name.partition(".")[0]


def _known(name: str) -> bool:
    packet = _packet(name)
    func = getattr(torch.ops.aten, packet, None)
    if func is None or name == "attention":
        return name == "attention"
    overload = getattr(func, name.partition(".")[2] or "default", None)
    return overload is not None and flow_of(overload) is not None


def _share(bits: Tensor) -> Tensor:
    return (bits & _PADDED).float().mean() if bits.numel() else torch.zeros(())


def _same_place(a: Tensor, b: Tensor) -> bool:
    same = storage_of(a) == storage_of(b) and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()


def _reason(func: Any, step: Step, real: Step | None) -> str | None:
    """Why a result differs from that at the real size whatever the inputs are, or None."""
    packet = _packet(step.name)
    if real is None:
        return None
    if real.fixed != step.fixed:
        return "a number in it changes with the size"
    grown = real.outputs != step.outputs
    random = _draws(func)
    if grown and random:
        return "random numbers are drawn for the padded rows too"
    if grown and not step.inputs and packet not in PREFIX and not random:
        return "its values change with the size"
    return None


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and flow_of(func) is None


def _joined_low(call: Call, look: _Look) -> Tensor:
    low = torch.zeros((), dtype=torch.bool)
    given = tensors(call.args)
    if call.name.startswith(("mul", "div", "sub", "copy")):
        given = given[-1:] if call.name.startswith("copy") else given[:1]
    for t in given:
        low = low.to(look.low(t).device) | look.low(t)
    return low.broadcast_to(call.results[0].shape)


class _Look:
    """What is known of the inputs of one operation."""

    def __init__(
        self,
        memory: Memory,
        old: dict[int, Tensor],
        inputs: Sequence[Tensor],
        real: Step | None,
        kept: Callable[[Tensor], bool],
    ) -> None:
        self._memory = memory
        self._old = old
        self._none = torch.zeros((), dtype=torch.bool, device=memory.device)
        self._bits: dict[int, Tensor] = {}
        shapes = real.inputs if real is not None and len(real.inputs) == len(inputs) else ()
        self._real = {id(t): shape for t, shape in zip(inputs, shapes, strict=False)}
        for t in inputs:
            bits = memory.of(t)
            if bits is None and kept(t) and t.dtype != torch.bool:
                bits = self._varying(t)
            real_shape = self._real.get(id(t), t.shape)
            if real_shape != t.shape and not memory.any(t, _PADDED):
                outside = _outside(t.shape, real_shape, memory.device)
                bits = outside if bits is None else bits | outside
            if bits is not None:
                self._bits[id(t)] = bits
        if old:  # flows read the bits before any is changed
            self._bits = {key: bits.clone() for key, bits in self._bits.items()}
        self.any = bool(self._bits)

    def _varying(self, t: Tensor) -> Tensor:
        """Bits of a tensor whose values may change in place. What hides scores stays so."""
        bits = torch.full(t.shape, _UNKNOWN, dtype=torch.uint8, device=self._memory.device)
        if t.is_floating_point():
            bits |= (self.value(t) <= LOW).to(torch.uint8) * _LOW
        return bits

    def real(self, t: Tensor) -> torch.Size | None:
        """The shape of an input in the run at the real size."""
        return self._real.get(id(t))

    @property
    def most(self) -> int:
        """The bits of a result to which everything spreads."""
        padded = any(bool((bits & _PADDED).any()) for bits in self._bits.values())
        return _ALL if padded else _UNKNOWN

    def plane(self, bit: int) -> Any:
        """The plane of one bit."""

        def see(value: Any) -> Tensor:
            bits = self._bits.get(id(value))
            if bits is None:
                return self._none.broadcast_to(_shape(value))
            return (bits & bit) != 0

        return see

    def value(self, t: Any) -> Tensor:
        """The values of a tensor, as they were before the operation."""
        before = self._old.get(id(t))
        known: Tensor = t if before is None else before
        return known.detach().to(self._memory.device)

    def zero(self, t: Any) -> Tensor:
        """Where a tensor is 0 whatever the padding holds."""
        bits = self._bits.get(id(t))
        if bits is None:  # what is of no interest need not be looked at
            known = torch.ones((), dtype=torch.bool, device=self._memory.device)
        else:
            known = (bits & _UNKNOWN) == 0
        return known & (self.value(t) == 0)

    def low(self, t: Any) -> Tensor:
        """Where a tensor is lower than any score whatever the padding holds."""
        bits = self._bits.get(id(t))
        if not t.is_floating_point():
            return self._none.broadcast_to(_shape(t))
        below = self.value(t) <= LOW
        if bits is None:
            return below
        return ((bits & _LOW) != 0) | (((bits & _UNKNOWN) == 0) & below)


def _shape(value: Any) -> torch.Size:
    return value.shape if isinstance(value, Tensor) else torch.Size(())


def _outside(shape: torch.Size, real: torch.Size, device: torch.device) -> Tensor:
    """Bits of a tensor that grew with the size: what lies beyond its real size is padding."""
    bits = torch.full(shape, _PADDED, dtype=torch.uint8, device=device)
    if len(shape) == len(real):
        bits[tuple(slice(0, n) for n in real)] = 0
    return bits
