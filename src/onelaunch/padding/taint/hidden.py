"""Large numbers that hide padding, and the checks of each call that they suffice.

Minus infinity hides padding from a softmax or a maximum whatever the other values are. A finite
number, such as -1e9, does so only where it is far below them. Where a proof rests on that, the
recording compares the values of each call. A call that fails runs eagerly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, tensors
from onelaunch.padding.taint.rules.call import GAP, TaintedCall, argument_of
from onelaunch.padding.taint.rules.elementwise import choice
from onelaunch.padding.taint.shadow import storage_of
from onelaunch.padding.taint.trace import kind_of, packet_of
from onelaunch.watch.operations import DecomposingMode

SUMS = frozenset({"add", "sub", "baddbmm"})  # operations that add to a tensor
_KEEP = SUMS | {"mul", "div", "_to_copy", "clone", "copy"}
"""Operations that keep low elements low, besides a choice of two tensors."""

Place = tuple[str, int]
"""Kind of an operation, and the number of earlier operations of that kind in a run."""


@dataclass(slots=True)
class Hiding:
    """The places of a run where a finite number hides padding."""

    compared: dict[Place, tuple[tuple[int, ...], float, bool]] = field(default_factory=dict)
    """Place of a softmax or maximum -> its dimensions, the highest constant that hides there, and
    whether a sum with a hiding number does."""
    added: set[Place] = field(default_factory=set)
    """Places of sums whose other summand must be far above the hiding number."""
    attended: set[Place] = field(default_factory=set)
    """Places of attention with a mask that is added."""
    counts: Counter[str] = field(default_factory=Counter)
    """Kind of operation -> operations of that kind in the run."""
    highest: float = -torch.inf  # the highest hiding number that is a summand
    depth: int = 1  # the most sums that a hiding number goes through

    def __bool__(self) -> bool:
        """Return whether a result rests on a finite number. Minus infinity needs no check."""
        return self.number > -math.inf

    def join(self, other: Hiding) -> None:
        for place, compared in other.compared.items():
            self.compare(place, *compared)
        self.added |= other.added
        self.attended |= other.attended
        self.counts = other.counts
        self.highest = max(self.highest, other.highest)
        self.depth = max(self.depth, other.depth)

    def compare(self, place: Place, dims: Sequence[int], highest: float, summed: bool) -> None:
        _, known, sums = self.compared.get(place, (dims, highest, summed))
        self.compared[place] = tuple(dims), max(known, highest), sums or summed

    @property
    def number(self) -> float:
        """The highest of the numbers."""
        return max(self.highest, *(h for _, h, _ in self.compared.values()), -math.inf)

    @property
    def shown(self) -> str:
        """That number, for a message."""
        return f"{self.number:.3g}"

    def least_visible(self, highest: float, summed: bool) -> float:
        """Return the score beside which hidden values vanish. They are at most `highest`, or half
        of the hiding number where it is a summand."""
        bound = max(highest, self.highest / 2) if summed else highest
        return bound if math.isinf(bound) else bound + max(GAP, -bound / 1000)


def low_of(call: TaintedCall) -> Tensor | None:
    """Return the plane where a result is low because an input is; None for other operations. A low
    element is minus infinity, or stands for it. In a sum the other summand must be far above."""
    packet = call.packet.removesuffix("_")
    if not call.results[0].is_floating_point() or packet not in (*_KEEP, "where", "masked_fill"):
        return None
    shape = call.results[0].shape
    if packet in ("where", "masked_fill"):
        mask, yes, no = choice(call)
        low, other = call.low(yes), call.low(no)
        picked = torch.where(call.value(mask).bool(), low, other)
        return torch.where(call.unknown(mask), low & other, picked).broadcast_to(shape)
    given = call.args[1:2] if packet == "copy" else call.args[:2]
    low = call.low(given[0]).broadcast_to(shape)
    other = call.low(given[-1]).broadcast_to(shape) if packet in ("add", "sub") else low
    if packet in ("mul", "div"):
        factor = given[1] if isinstance(given[1], Tensor) else torch.tensor(given[1], device="cpu")
        value = call.value(factor, asks=False)
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


class HidingTrace:
    """The numbers that hide padding in one run under taint, operation by operation."""

    def __init__(self) -> None:
        self.hiding = Hiding()
        self._depths: dict[int, int] = {}
        """storage id -> the sums that a low element in it went through."""

    def begin(self, kind: str, call: TaintedCall) -> None:
        self._place: Place = (kind, self.hiding.counts[kind])
        self.hiding.counts[kind] += 1
        self._call, call.hides = call, self._compare

    def _compare(self, t: Tensor, needed: Tensor, dims: Sequence[int]) -> None:
        """Note that low elements of `t` hide padding along `dims`."""
        hiding, call = self.hiding, self._call
        if self._place[0] == "attention":
            hiding.attended.add(self._place)
            hiding.highest = max(hiding.highest, call.highest_low(t))
            return
        summed = call.unknown(t) & needed
        known = call.value(t)[needed & ~summed]
        highest = float(known.max()) if known.numel() else -torch.inf
        hiding.compare(self._place, dims, highest, bool(summed.any()))

    def follow(self, call: TaintedCall) -> None:
        """Note an operation that gives low elements whose values vary."""
        hiding, sums = self.hiding, call.packet.removesuffix("_") in SUMS
        given = tensors(call.args)
        depth = max(self._depths.get(storage_of(t), 0) for t in given) + sums
        hiding.depth = max(hiding.depth, depth)
        for t in call.results:
            self._depths[storage_of(t)] = depth
        for value in call.args:
            hiding.highest = max(hiding.highest, call.highest_low(value))
        if sums:
            hiding.added.add(self._place)


class HidingChecks(DecomposingMode):
    """A mode that has a run compute whether all numbers that hide padding suffice. `hiding`: the
    places in another run of the same operations."""

    def __init__(self, hiding: Hiding) -> None:
        super().__init__()
        self._hiding = hiding
        self._counts = Counter[str]()
        self._limits: dict[tuple[float, bool, torch.dtype], list[Tensor]] = {}
        """(limit, whether values may be above it alone, their dtype) -> values, 0-dim."""

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(op.label)
        place = kind, self._counts[kind]
        self._counts[kind] += 1
        with torch.no_grad():
            self._check(place, op.func, args, kwargs)
        return op.func(*args, **kwargs)

    def _check(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hiding = self._hiding
        if place in hiding.compared and args[0].numel():
            dims, highest, summed = hiding.compared[place]
            least = hiding.least_visible(highest, summed)
            if least > -torch.inf:
                self._at_least(least, args[0].detach().amax(dims).amin())
        if hiding.highest == -torch.inf:  # it stays so whatever is added
            return
        if place in hiding.added:
            self._added(-hiding.highest / (2 * hiding.depth), packet_of(place[0]), args)
        if place in hiding.attended:
            self._attended(func, args, kwargs)

    def _at_least(self, limit: float, value: Tensor) -> None:
        self._limits.setdefault((limit, True, value.dtype), []).append(value)

    def _at_most(self, limit: float, value: Tensor) -> None:
        self._limits.setdefault((limit, False, value.dtype), []).append(value)

    def _attended(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare an additive mask with a bound of the scores: the norms of queries and keys."""
        mask = argument_of(func, args, kwargs, "attn_mask")
        mask = argument_of(func, args, kwargs, "attn_bias") if mask is None else mask
        query, key = args[:2]
        if query.numel() and key.numel():
            scale = abs(argument_of(func, args, kwargs, "scale") or query.shape[-1] ** -0.5)
            eighth = -self._hiding.highest / 8
            self._at_most(eighth / scale, _bound(query, key.mT))
            self._at_least(-eighth, mask.detach().amax(-1).amin())

    def _added(self, margin: float, packet: str, args: tuple[Any, ...]) -> None:
        """Compare the summands of hiding numbers with the most that one sum may add, `margin`."""
        if packet.startswith("baddbmm"):
            if args[1].numel() and args[2].numel():
                self._at_most(margin, _bound(args[1], args[2]))
        elif packet.startswith("sub"):
            for t in tensors(args[1:2]):
                if t.numel():
                    self._at_least(-margin, t.detach().amin())
        else:
            for t in tensors(args[:2]):
                if t.numel():
                    self._at_most(margin, t.detach().amax())

    @property
    def complete(self) -> bool:
        """Return whether the run had the operations of the other run, as far as they matter."""
        places = {*self._hiding.compared, *self._hiding.added, *self._hiding.attended}
        kinds = {kind for kind, _ in places}
        return all(self._counts[kind] == self._hiding.counts[kind] for kind in kinds)

    def outcome(self, device: torch.device) -> Tensor:
        """Return whether the numbers suffice: a bool, 0-dim, on the device of the run."""
        if not self._limits:
            return torch.ones((), dtype=torch.bool, device=device)
        found = [
            torch.stack(values) >= limit if least else torch.stack(values) <= limit
            for (limit, least, _), values in self._limits.items()
        ]
        return torch.cat(found).all()


def _bound(a: Tensor, b: Tensor) -> Tensor:
    """Return a bound of the elements of `a @ b`, 0-dim: by the norms of rows and columns."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    rows = torch.linalg.vector_norm(a.detach(), dim=-1, dtype=wide)
    return rows.amax() * torch.linalg.vector_norm(b.detach(), dim=-2, dtype=wide).amax()
