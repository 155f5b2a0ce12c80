"""The inputs of one operation, with the taint bits of their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.padding.taint.rules.call import LEAST, TaintedCall, beyond
from onelaunch.padding.taint.shadow import (
    LOW,
    PADDED,
    ROW,
    SIZED,
    SPARE,
    UNKNOWN,
    Rows,
    ShadowMemory,
    storage_of,
)
from onelaunch.padding.taint.trace import TracedStep

ALL = PADDED | UNKNOWN


class Operands:
    """The inputs of one operation, with their taint and the values that matter for it."""

    def __init__(
        self,
        memory: ShadowMemory,
        old_values: dict[int, Tensor],
        inputs: Sequence[Tensor],
        real: TracedStep | None,
        outlives: Callable[[Tensor], bool],
        front: bool,
    ) -> None:
        self._memory = memory
        self._old_values = old_values
        self._none = torch.zeros((), dtype=torch.bool, device=memory.device)
        self._bits: dict[int, Tensor] = {}
        shapes = real.inputs if real is not None and len(real.inputs) == len(inputs) else ()
        self._real = {id(t): shape for t, shape in zip(inputs, shapes, strict=False)}
        self.constants: list[Tensor] = []
        """Masks from before the call, whose values count as known."""
        for t in inputs:
            bits = memory.of(t)
            if bits is None and outlives(t):
                bits = self._varying(t)
            real_shape = self._real.get(id(t), t.shape)
            if real_shape != t.shape:
                first = front and self._uniform(t, real_shape, bits is None)
                outside = outside_of(t.shape, real_shape, memory.device, first)
                if bits is not None:
                    outside = bits | torch.where((bits & SIZED) != 0, 0, outside)
                bits = outside
            if bits is not None:
                self._bits[id(t)] = bits
        if old_values:  # rules read the bits before any is changed
            self._bits = {key: bits.clone() for key, bits in self._bits.items()}
        self.any = bool(self._bits)

    def _varying(self, t: Tensor) -> Tensor | None:
        """Return the bits of a tensor whose values may change in place; None for a boolean mask.
        Hidden scores stay hidden: each call checks that the mask is unchanged."""
        if t.dtype == torch.bool:
            self.constants.append(t)
            return None
        bits = torch.full(t.shape, UNKNOWN, dtype=torch.uint8, device=self._memory.device)
        if t.is_floating_point():
            low = self.value(t) <= LEAST
            bits |= low.to(torch.uint8) * LOW
            self.constants += [t] if bool(low.any()) else []
        return bits

    def _uniform(self, t: Tensor, real: torch.Size, known: bool) -> bool:
        """Return whether it does not matter which rows the unpadded run lacks: all are the same
        memory, or hold the same known values."""
        if len(t.shape) != len(real):
            return False
        dims = [dim for dim in _differing(t.shape, real) if t.stride(dim) != 0]
        value = self.value(t) if dims and known else t
        return not dims or (known and all(bool((value == value[_first(d)]).all()) for d in dims))

    def real(self, t: Tensor) -> torch.Size | None:
        """Return the shape of an input in the unpadded run."""
        return self._real.get(id(t))

    @property
    def most(self) -> int:
        """The union of the inputs' bits, for a result that may depend on any element."""
        padded = any(bool((bits & PADDED).any()) for bits in self._bits.values())
        return ALL if padded else UNKNOWN

    @property
    def sized(self) -> bool:
        """True if an input was made at a size that padding changes."""
        return any(bool((bits & SIZED).any()) for bits in self._bits.values())

    def plane(self, bit: int) -> Any:
        """Return a function from an input to its plane of one bit."""

        def taint(value: Any) -> Tensor:
            bits = self._bits.get(id(value))
            if bits is None:
                return self._none.broadcast_to(_shape(value))
            return (bits & bit) != 0

        return taint

    def value(self, t: Any) -> Tensor:
        """Return the values of a tensor before the operation."""
        before = self._old_values.get(id(t))
        known: Tensor = t if before is None else before
        return known.detach().to(self._memory.device)

    def highest_low(self, t: Any) -> float:
        """Return the highest number in `t` that stands for minus infinity and is no summand. Minus
        infinity if there is none."""
        low = self.low(t)
        bits = self._bits.get(id(t))
        if not isinstance(t, Tensor):
            return float(t) if bool(low) else -torch.inf
        if bits is not None and self._memory.of(t) is not None:
            low = low & ((bits & UNKNOWN) == 0)
        found = self.value(t)[low]
        return float(found.max()) if found.numel() else -torch.inf

    def named(self, t: Any) -> Rows | None:
        """Return the size whose rows `t` names; None if it names none."""
        bits = self._bits.get(id(t))
        if bits is None or t.is_floating_point() or not bool((bits & (ROW | SPARE)).any()):
            return None
        return self._memory.shadows[storage_of(t)].rows

    def zero(self, t: Any) -> Tensor:
        """Return the plane where a tensor is 0 whatever the padding holds."""
        if not isinstance(t, Tensor):
            return self._none | (t == 0)
        bits = self._bits.get(id(t))
        if bits is None:  # not tainted
            known = torch.ones((), dtype=torch.bool, device=self._memory.device)
        else:
            known = (bits & UNKNOWN) == 0
        return known & (self.value(t) == 0)

    def low(self, t: Any) -> Tensor:
        """Return the plane where a tensor is minus infinity, or stands for it, whatever the padding
        holds."""
        if not isinstance(t, Tensor):
            return self._none | (isinstance(t, float) and t <= LEAST)
        bits = self._bits.get(id(t))
        if not t.is_floating_point():
            return self._none.broadcast_to(_shape(t))
        below = self.value(t) <= LEAST
        if bits is None:
            return below
        return ((bits & LOW) != 0) | (((bits & UNKNOWN) == 0) & below)


def _differing(shape: torch.Size, real: torch.Size) -> list[int]:
    return [dim for dim, (a, b) in enumerate(zip(shape, real, strict=True)) if a != b]


def _first(dim: int) -> tuple[slice, ...]:
    """Return the index of the first row of a dimension, as a tensor of one row."""
    return (*[slice(None)] * dim, slice(0, 1))


def _shape(value: Any) -> torch.Size:
    return value.shape if isinstance(value, Tensor) else torch.Size(())


def outside_of(shape: torch.Size, real: torch.Size, device: torch.device, front: bool) -> Tensor:
    """Return the bits of a tensor that grew with the size: padding beyond its real size."""
    return beyond(shape, real, device, front).to(torch.uint8) * PADDED


SUMS = frozenset({"add", "sub", "baddbmm"})
"""Operations that add to a tensor."""
_KEEP = SUMS | {"mul", "div", "_to_copy", "clone", "copy"}
"""Operations that keep low elements low, besides a choice of two tensors."""


def low_of(call: TaintedCall, packet: str, operands: Operands) -> Tensor | None:
    """Return the plane where a result is low because an input is; None for other operations. A low
    element is minus infinity, or stands for it. In a sum the other summand must be far above."""
    packet = packet.removesuffix("_")
    if not call.results[0].is_floating_point() or packet not in (*_KEEP, "where", "masked_fill"):
        return None
    shape = call.results[0].shape
    if packet in ("where", "masked_fill"):
        mask, yes, no = call.args if packet == "where" else (call.args[i] for i in (1, 2, 0))
        low, other = operands.low(yes), operands.low(no)
        picked = torch.where(operands.value(mask).bool(), low, other)
        return torch.where(call.unknown(mask), low & other, picked).broadcast_to(shape)
    given = call.args[1:2] if packet == "copy" else call.args[:2]
    low = operands.low(given[0]).broadcast_to(shape)
    other = operands.low(given[-1]).broadcast_to(shape) if packet in ("add", "sub") else low
    if packet in ("mul", "div"):
        factor = given[1] if isinstance(given[1], Tensor) else torch.tensor(given[1], device="cpu")
        value = operands.value(factor)
        grows = (value >= 1) if packet == "mul" else (value > 0) & (value <= 1)
        return low & (grows & ~call.unknown(given[1])).broadcast_to(shape)
    if packet in SUMS:
        plain = call.argument("alpha", 1) == call.argument("beta", 1) == 1
        if not plain or not isinstance(given[1], Tensor):
            return torch.zeros_like(low)
        if packet == "sub":
            return low & ~other
        return low | other if packet == "add" else low
    return low
