"""The facts of a run on which its speed depends, as plain data that the rules read afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from onelaunch.tools.doctor.slow.flow import Value
from onelaunch.tools.doctor.slow.products import Product
from onelaunch.tools.doctor.spot import NOWHERE, Spot

NormKind = Literal["BatchNorm", "InstanceNorm", "GroupNorm"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm:
    """One call of a norm.

    Attributes:
        own: it computes the statistics of its input, in place of running ones.
        running: it has running statistics.
        each_channel: its statistics are of one channel each.
        product: the layer whose result it reads, channel for channel.
    """

    kind: NormKind
    path: str
    spot: Spot
    own: bool
    running: bool
    each_channel: bool
    product: Product | None


@dataclass(frozen=True, kw_only=True)
class Training:
    """Something that only training needs, as it was called.

    Attributes:
        does: what it does: ``"drops values"``.
        mode: whether its module is in train mode; else its argument says so.
        graded: whether autograd recorded at the time.
    """

    path: str
    spot: Spot
    does: str
    mode: bool
    graded: bool


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of convolutions' results.

    Attributes:
        links: the values that no other operation may read, for them to merge.
    """

    spot: Spot
    branches: tuple[Product, ...]
    links: tuple[Value, ...]


@dataclass
class Launches:
    """The kernels of a run, by their place.

    Attributes:
        busy_us: what their work takes on the reference machine; see `machine`.
    """

    at: dict[tuple[str, int], tuple[Spot, int]] = field(default_factory=dict)
    count: int = 0
    busy_us: float = 0.0

    def add(self, spot: Spot, busy_us: float) -> None:
        """Count a kernel."""
        known = self.at.get((spot.file, spot.line))
        self.at[spot.file, spot.line] = (spot, 1) if known is None else (known[0], known[1] + 1)
        self.count += 1
        self.busy_us += busy_us


@dataclass
class Record:
    """Facts that a run showed.

    Attributes:
        fn: the callable.
        device: where it runs.
        products, norms, sums: in their order.
        pairs: depthwise convolutions, each with the pointwise convolution after it.
        training: what only training needs, by path and kind.
        backward: a backward ran, or a parameter was written.
        wanted: an argument requires grad.
        trainable: a parameter requires grad.
        graded: a result requires grad.
        any_training, any_eval: a module ran in that mode.
    """

    fn: Any
    device: torch.device
    products: list[Product] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    pairs: list[tuple[Product, Product]] = field(default_factory=list)
    training: dict[tuple[str, str], Training] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    backward: bool = False
    wanted: bool = False
    trainable: bool = False
    graded: bool = False
    any_training: bool = False
    any_eval: bool = False

    @property
    def trains(self) -> bool:
        """True if gradients are wanted: then no rule of inference applies."""
        return self.backward or (self.graded and (self.any_training or self.wanted))


def heaviest(products: Iterable[Product]) -> Spot:
    """Return the line with the most flops; its first place."""
    lines: dict[tuple[str, int], tuple[Spot, int]] = {}
    for product in products:
        key = product.spot.file, product.spot.line
        spot, flops = lines.get(key, (product.spot, 0))
        lines[key] = spot, flops + product.flops
    return max(lines.values(), key=lambda line: line[1], default=(NOWHERE, 0))[0]


def named(paths: Sequence[str], many: str) -> str:
    """Name modules: one or two by their paths, more by the first and their number.

    Args:
        many: what they are: ``"convolutions"``.
    """
    shown = [f"`{path}`" for path in dict.fromkeys(paths) if path]
    if not shown:
        return f"{len(paths)} {many}"
    if len(shown) <= 2:
        return " and ".join(shown)
    return f"{len(shown)} {many}, the first {shown[0]}"
