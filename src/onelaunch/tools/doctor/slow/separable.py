"""The rule on depthwise-separable convolutions: both forms are measured, in the shapes at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onelaunch.finding import Finding
from onelaunch.tools.bench.timers import LONGEST_US, Timer, timers_for
from onelaunch.tools.doctor.slow.machine import LEAST_BYTES
from onelaunch.tools.doctor.slow.products import Product
from onelaunch.tools.doctor.slow.record import Record

Pair = tuple[Product, Product]
_BUDGET_S = 1.0
_ROUNDS = 9
_MOST_LOST = 1
"""The most rounds that may be lost: by chance, one or none of nine is lost in 1 of 50 tries."""
_BEYOND = 1.1
"""The ratio of times that counts as longer: a tenth more may be the weather of the machine."""
_MOST_FLOPS = 16
"""A dense convolution with more times the arithmetic is not tried: that takes long on a CPU."""


class Measured(NamedTuple):
    """The times of a pair and of the dense convolution in its place, of each round."""

    pair_us: list[float]
    dense_us: list[float]

    @property
    def pays(self) -> bool:
        """True if the dense one is faster: in nearly every round, and by more than noise."""
        rounds = zip(self.pair_us, self.dense_us, strict=True)
        lost = sum(pair <= dense for pair, dense in rounds)
        longer = statistics.median(self.pair_us) / statistics.median(self.dense_us)
        return lost <= _MOST_LOST and longer > _BEYOND

    @property
    def gain_us(self) -> float:
        """The time that the dense one would save."""
        return statistics.median(self.pair_us) - statistics.median(self.dense_us)


def depthwise_separable(record: Record) -> list[Finding]:
    """OL612: pairs of a depthwise and a pointwise convolution that take longer than a dense one."""
    by_shape: dict[tuple[object, ...], list[Pair]] = {}
    for pair in record.pairs:
        if _is_tried(*pair):
            by_shape.setdefault(_shape(pair), []).append(pair)
    end = time.perf_counter() + _BUDGET_S
    slow: list[tuple[float, Measured, list[Pair]]] = []
    for pairs in sorted(by_shape.values(), key=lambda pairs: -len(pairs) * pairs[0][0].moved):
        if time.perf_counter() > end:
            break
        measured = measure(pairs[0])
        if measured is not None and measured.pays:
            slow.append((measured.gain_us * len(pairs), measured, pairs))
    if not slow:
        return []
    _, measured, pairs = max(slow, key=lambda found: found[0])
    depthwise, pointwise = pairs[0]
    others = sum(len(pairs) for _, _, pairs in slow) - 1
    more = f"; {others} more such pairs" if others else ""
    what = (
        f"`{depthwise.path}` and `{pointwise.path}` take "
        f"{statistics.median(measured.pair_us):.0f} us, a dense convolution in their place "
        f"{statistics.median(measured.dense_us):.0f} us (measured on {depthwise.device}){more}"
    )
    return [depthwise.spot.finding("OL612", what, None, "run")]


def measure(pair: Pair) -> Measured | None:
    """Measure a pair and the dense convolution, in turns; None if a first try settles it."""
    wall, *others = timers_for(pair[0].device)
    timer = others[-1] if pair[0].device.type == "cuda" else wall
    with torch.no_grad():
        separable, dense = _calls(*pair)
        pair_us, dense_us = _once(wall, separable), _once(wall, dense)
        if dense_us > 2 * pair_us:
            return None
        measured = Measured([], [])
        for _ in range(_ROUNDS):
            measured.pair_us.append(statistics.median(timer.sample(separable, pair_us)))
            measured.dense_us.append(statistics.median(timer.sample(dense, dense_us)))
    return measured


def _once(wall: Timer, call: Callable[[], object]) -> float:
    call()  # the first call chooses an algorithm
    return wall.sample(call, LONGEST_US)[0]


def _calls(
    depthwise: Product, pointwise: Product
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    layout = torch.channels_last if depthwise.channels_last else torch.contiguous_format
    window = depthwise.window
    assert window is not None

    def filled(*sizes: int) -> Tensor:
        made = torch.full(sizes, 0.5, dtype=depthwise.dtype, device=depthwise.device)
        return made.to(memory_format=layout)

    x = filled(*depthwise.shape)
    first, second = filled(*depthwise.weight), filled(*pointwise.weight)
    dense = filled(pointwise.outputs, depthwise.inputs, *depthwise.weight[2:])

    dims = len(window.stride)
    ones, zeros = [1] * dims, [0] * dims
    stride, padding, dilation = window.stride, window.padding, window.dilation

    def spatial(weight: Tensor, groups: int) -> Tensor:
        return torch.convolution(x, weight, None, stride, padding, dilation, False, zeros, groups)

    def separable() -> Tensor:
        between = spatial(first, depthwise.inputs)
        return torch.convolution(between, second, None, ones, zeros, ones, False, zeros, 1)

    return separable, lambda: spatial(dense, 1)


def _is_tried(depthwise: Product, pointwise: Product) -> bool:
    dense_flops = depthwise.flops // depthwise.outputs * depthwise.inputs * pointwise.outputs
    few = dense_flops <= _MOST_FLOPS * (depthwise.flops + pointwise.flops)
    return few and depthwise.moved + pointwise.moved >= LEAST_BYTES


def _shape(pair: Pair) -> tuple[object, ...]:
    depthwise, pointwise = pair
    return (
        *(depthwise.shape, depthwise.weight, depthwise.window),
        *(pointwise.weight, depthwise.dtype, depthwise.channels_last),
    )
