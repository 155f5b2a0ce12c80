"""One tainted operation, as a propagation rule gets it.

A *plane* is a bool tensor of a tensor's shape: true for the elements with a property. A rule maps
the planes of an operation's inputs to planes of its results; where it is unsure it taints more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, mapped, tensors
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
from onelaunch.padding.taint.trace import TracedStep, packet_of

LEAST = -1e4  # highest number that may stand for minus infinity; each call is checked where it does

GAP = 1000.0
"""A difference of scores whose exponential is 0 in every type: exp(-746) is, in float64."""

ALL = PADDED | UNKNOWN

Planes = Callable[[Any], Tensor]
"""A function from an input to its plane; all false for an untainted input."""


class TaintedCall:
    """An operation that ran, with the taint of its inputs and the values that matter for it.

    Attributes:
        name, packet: the overload, ``add.Tensor``, and its name without that, ``add``.
        inputs, results: its strided tensors.
        real_results: the shapes of the results in the unpadded run; empty if unknown.
        padded: the plane of elements that depend on padding.
        unknown: the plane where a value may differ from call to call. A rule gets these planes
            (`taint is call.unknown`), or the `padded` planes.
        rows: the plane where a value names a real row, at every call.
        spare: the plane where padding names a row that is not real.
        none: a plane, 0-dim, that is false.
        hides: called with a tensor, the plane of its low elements that padding must not outweigh,
            and the dimensions along which they are compared.
        constants: masks from before the call, whose values count as known.
        asked: a plane, 0-dim, that is true once a rule asked for values that do not vary. The
            taint then depends on more than operations and shapes.
    """

    hides: Callable[[Tensor, Tensor, Sequence[int]], None]

    def __init__(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        real: TracedStep | None,
        memory: ShadowMemory,
        old_values: dict[int, Tensor],
        outlives: Callable[[Tensor], bool],
        front: bool,
    ) -> None:
        self.op, self.func, self.args, self.kwargs = op, op.func, args, kwargs
        self.name, self.packet = op.label, packet_of(op.label)
        self.inputs = [t for t in tensors((args, kwargs)) if t.layout is torch.strided]
        self.results = [t for t in tensors(result) if t.layout is torch.strided]
        self.real_results = () if real is None else real.outputs
        self._memory, self._old_values, self._front = memory, old_values, front
        self.none = torch.zeros((), dtype=torch.bool, device=memory.device)
        self._bits: dict[int, Tensor] = {}
        shapes = real.inputs if real is not None and len(real.inputs) == len(self.inputs) else ()
        self._real = {id(t): shape for t, shape in zip(self.inputs, shapes, strict=False)}
        self.constants: list[Tensor] = []
        self.asked = self.none
        for t in self.inputs:
            bits = memory.of(t)
            if bits is None and outlives(t):
                bits = self._varying(t)
            real_shape = self._real.get(id(t), t.shape)
            if real_shape != t.shape:
                first = front and self._uniform(t, real_shape, bits is None)
                outside = beyond(t.shape, real_shape, memory.device, first).to(torch.uint8) * PADDED
                if bits is not None:
                    outside = bits | torch.where((bits & SIZED) != 0, 0, outside)
                bits = outside
            if bits is not None:
                self._bits[id(t)] = bits
        if old_values:  # rules read the bits before any is changed
            self._bits = {key: bits.clone() for key, bits in self._bits.items()}
        self.any = bool(self._bits)
        self.padded, self.unknown = self._plane(PADDED), self._plane(UNKNOWN)
        self.rows, self.spare = self._plane(ROW), self._plane(SPARE)

    def _varying(self, t: Tensor) -> Tensor | None:
        """Return the bits of a tensor whose values may change in place; None for a boolean mask.
        Hidden scores stay hidden: each call checks that the mask is unchanged."""
        if t.dtype == torch.bool:
            self.constants.append(t)
            return None
        bits = torch.full(t.shape, UNKNOWN, dtype=torch.uint8, device=self._memory.device)
        if t.is_floating_point():
            low = self.value(t, asks=False) <= LEAST
            bits |= low.to(torch.uint8) * LOW
            self.constants += [t] if bool(low.any()) else []
        return bits

    def _uniform(self, t: Tensor, real: torch.Size, known: bool) -> bool:
        """Return whether it does not matter which rows the unpadded run lacks: all are the same
        memory, or hold the same known values."""
        if len(t.shape) != len(real):
            return False
        differing = (d for d, (a, b) in enumerate(zip(t.shape, real, strict=True)) if a != b)
        dims = [d for d in differing if t.stride(d) != 0]
        value = self.value(t) if dims and known else t
        firsts = (value[(*[slice(None)] * d, slice(1))] for d in dims)
        return not dims or (known and all(bool((value == first).all()) for first in firsts))

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

    def _plane(self, bit: int) -> Planes:
        """Return a function from an input to its plane of one bit."""

        def taint(value: Any) -> Tensor:
            bits = self._bits.get(id(value))
            if bits is None:
                return self.none.broadcast_to(value.shape if isinstance(value, Tensor) else ())
            return (bits & bit) != 0

        return taint

    def value(self, t: Any, asks: bool = True) -> Tensor:
        """Return the values of a tensor before the operation. `asks`: False where the taint depends
        on them only if `low` or `zero` is true somewhere."""
        if asks:
            self.asked = ~self.none
        before = self._old_values.get(id(t))
        known: Tensor = t if before is None else before
        return known.detach().to(self._memory.device)

    def _known(self, t: Tensor) -> Tensor:
        """Return the plane of values that do not vary, for a rule that depends on them."""
        bits = self._bits.get(id(t))
        known = ~self.none if bits is None else (bits & UNKNOWN) == 0
        self.asked = self.asked | known.any()
        return known.broadcast_to(t.shape)

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
            return self.none | (t == 0)
        return (self.value(t, asks=False) == 0) & self._known(t)

    def low(self, t: Any) -> Tensor:
        """Return the plane where a tensor is minus infinity, or stands for it, whatever the padding
        holds."""
        if not isinstance(t, Tensor):
            return self.none | (isinstance(t, float) and t <= LEAST)
        bits = self._bits.get(id(t))
        if not t.is_floating_point():
            return self.none.broadcast_to(t.shape)
        found = self._known(t) & (self.value(t, asks=False) <= LEAST)
        return found if bits is None else found | ((bits & LOW) != 0)

    def argument(self, name: str, default: Any = None) -> Any:
        return argument_of(self.func, self.args, self.kwargs, name, default)

    def beyond(self, shape: torch.Size, real: torch.Size) -> Tensor:
        """Return the plane of a tensor that is true beyond its real size."""
        return beyond(shape, real, self._memory.device, self._front)


def argument_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return default


Rule = Callable[[TaintedCall, Planes], list[Tensor]]
"""A function that returns the planes of the results, or planes that broadcast to those."""


def more(call: TaintedCall, taint: Planes, t: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of `t` with constants that only the padded run has along `dims`. Constants
    above a diagonal are an example, which no padded row makes."""
    plane, real = taint(t), call.real(t)
    if taint is call.unknown or real is None or all(real[d] == t.shape[d] for d in dims):
        return plane
    along = torch.Size(real[d] if d in dims else n for d, n in enumerate(t.shape))
    outside = call.beyond(t.shape, along)
    return plane | (outside & ~call.unknown(t))


def hidden(call: TaintedCall, t: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of elements that count for nothing beside others along these dimensions."""
    low = call.low(t)
    low = low & ~_outweighed(call, low, call.value(t, asks=False), dims)
    hide(call, t, low, more(call, call.padded, t, dims), dims)
    return low


def _outweighed(call: TaintedCall, low: Tensor, value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the plane of numbers that are not far below the others of this run: each call would
    fail the check. Of a sum only half counts, as in the check."""
    if not value.is_floating_point() or not bool((low & value.isfinite()).any()):
        return torch.zeros_like(low)
    highest = torch.where(low, -torch.inf, value.nan_to_num(torch.inf))
    half = torch.where(call.unknown(call.args[0]), value / 2, value)
    hides = torch.where(low & value.isfinite(), half, -torch.inf)
    for dim in dims:
        highest, hides = highest.amax(dim, keepdim=True), hides.amax(dim, keepdim=True)
    return low & (highest <= hides + GAP) & value.isfinite()


def hide(call: TaintedCall, t: Tensor, low: Tensor, plane: Tensor, dims: Sequence[int]) -> None:
    """Note where the low elements of `t` alone keep a row from depending on padding."""
    low, plane = torch.broadcast_tensors(low, plane)
    saved = any_over(plane, dims) & ~any_over(plane & ~low, dims) & any_over(~low, dims)
    needed = low & plane & saved
    if bool(needed.any()):
        call.hides(t, needed, dims)


def dims_of(call: TaintedCall, t: Tensor) -> list[int]:
    dim = call.argument("dim")
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(t.dim()))
    listed: list[int] = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(t.dim(), 1) for d in listed] if t.dim() else []


def any_over(plane: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        plane = plane.any(dim, keepdim=True)
    return plane


def visible_over(plane: Tensor, low: Tensor, dims: Sequence[int]) -> Tensor:
    """Join a plane over dimensions, without its low elements where others are beside them."""
    visible = any_over(plane & ~low, dims)
    return torch.where(any_over(~low, dims), visible, any_over(plane, dims))


def fitted(plane: Tensor, shape: torch.Size) -> Tensor:
    """Return a reduced plane in the shape of a result, with or without the reduced dimensions."""
    if plane.numel() == math.prod(shape):
        return plane.reshape(shape)
    if plane.dim() == len(shape):  # topk keeps some of the dimension
        return plane.broadcast_to(shape)
    return plane.any().broadcast_to(shape)


def each(plane: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    return [fitted(plane, r.shape) for r in results]


def beyond(
    shape: torch.Size, real: torch.Size, device: torch.device, front: bool = False
) -> Tensor:
    """Return the plane of a tensor that is true beyond its real size: behind the real elements, or
    in front of them."""
    plane = torch.ones(shape, dtype=torch.bool, device=device)
    if len(shape) == len(real):
        starts = [max(m - n, 0) if front else 0 for m, n in zip(shape, real, strict=True)]
        plane[tuple(slice(i, i + n) for i, n in zip(starts, real, strict=True))] = False
    return plane


def same_image(call: TaintedCall, t: Tensor) -> bool:
    """Return whether the dimensions of `t` from the third on are those of the unpadded run."""
    real = call.real(t)
    return real is not None and real[2:] == t.shape[2:]


def rerun(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Run the operation on NaN for tainted elements and 0 for others. NaN spreads to all that
    depends on it, which a weight of 0 does not stop, and moves with its element."""

    def given(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.where(taint(value), torch.nan, 0.0)
        return 0.0 if value != value else value  # NaN, as of a constant that pads

    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("dtype", "device", "layout")}
    found = tensors(call.func(*mapped(call.args, given), **kwargs))
    # Integers are the places of what the first result holds.
    return [(f if f.is_floating_point() else found[0]).isnan() for f in found]


def spread(call: TaintedCall, taint: Planes, *rows: Tensor) -> bool:
    """Return whether an input besides `rows` is tainted: each of its elements matters for all."""
    known = set(map(id, rows))
    return any(bool(taint(t).any()) for t in call.inputs if id(t) not in known)


def everywhere(call: TaintedCall, taint: Planes) -> list[Tensor]:
    """Taint everything: the input's size matters for each element of the result."""
    return [torch.tensor(True, device="cpu") for _ in call.results]
