"""The comparison of runs at two sizes: layout, shapes that follow the size, and gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.autograd.engine import gradients
from onelaunch.autograd.graph_walk import CapturedGraph
from onelaunch.call.tree import Constant, flatten, is_unchanging, unique
from onelaunch.driver.aten import Operator, tensors
from onelaunch.driver.distance import rounding
from onelaunch.driver.rows import first_rows
from onelaunch.errors import CaptureError
from onelaunch.padding.taint.bounds import check_bounds
from onelaunch.padding.taint.shadow import storage_of
from onelaunch.padding.taint.trace import TracedStep, reach
from onelaunch.sizes.buckets import Sizes
from onelaunch.sizes.dims import SizeLink
from onelaunch.state.slots import Slot
from onelaunch.state.walk import Change
from onelaunch.watch.operations import DecomposingMode


def line(dim: int, place: int, sizes: dict[Sizes, int]) -> SizeLink | None:
    """Return the line through these sizes of a dimension, if it depends on a single bucketed
    size."""
    by_size: dict[int, int] = {}
    for bucketed, size in sizes.items():
        if by_size.setdefault(bucketed[place], size) != size:
            return None
    (first, low), *_, (last, high) = sorted(by_size.items()) * (2 if len(by_size) == 1 else 1)
    if first == last or (high - low) % (last - first):
        return None
    scale = (high - low) // (last - first)
    more = low - scale * first
    if scale < 1 or any(scale * n + more != size for n, size in by_size.items()):
        return None
    return SizeLink(dim, place, scale, more)


def same_layout(t: Tensor, stride: Sequence[int]) -> bool:
    pairs = zip(t.shape, t.stride(), stride, strict=True)
    return t.numel() == 0 or all(n == 1 or a == b for n, a, b in pairs)


def is_degenerate(steps: Sequence[TracedStep], sizes: Sizes, bucket: Sizes) -> bool:
    """Return whether an operation gets no row, a single row, or fewer rows than it reaches."""
    least = min(n for n, b in zip(sizes, bucket, strict=True) if n < b)
    return (
        least == 1
        or any(0 in shape for s in steps for shape in (*s.inputs, *s.outputs))
        or (max(map(reach, steps), default=0) >= least)
    )


def refuse_moved_view(number: int, big: Tensor, small: Tensor) -> None:
    """Refuse a result that views memory from before the call at other places for another size.
    Results that follow the size are cut from the padded results."""
    laid_out = big.shape == small.shape and same_layout(small, big.stride())
    if not laid_out or big.storage_offset() != small.storage_offset():
        raise moved_view(number)


def moved_view(number: int) -> CaptureError:
    what = f"result {number} is a view of an argument or parameter, and follows the size"
    return CaptureError("OL140", what, fix="return a `.clone()`")


Form = tuple[object, ...]


class ProvenBucket(NamedTuple):
    """A bucket whose taint was followed at both of its ends. `follows`: the dimensions of its
    results that follow the size. `shapes`: size of a run -> shapes of all its operations.
    `uniform`: whether the taint depends on the operations and their shapes alone."""

    bucket: Sizes
    follows: list[tuple[SizeLink, ...]]
    shapes: dict[Sizes, tuple[int, ...]]
    uniform: bool

    def covers(self, bucket: Sizes) -> bool:
        return all(map(operator.ge, self.bucket, bucket))

    def on_lines(self, shapes: dict[Sizes, tuple[int, ...]]) -> bool:
        """Return whether another bucket's shapes follow the size on the same lines."""
        points = {**self.shapes, **shapes}
        if len({len(found) for found in points.values()}) > 1:
            return False  # an operation for each row
        for sizes in set(zip(*points.values(), strict=True)):
            found = dict(zip(points, sizes, strict=True))
            places = range(len(self.bucket))
            if len(set(sizes)) > 1 and not any(line(0, place, found) for place in places):
                return False
        return True


Known = dict[Form, ProvenBucket]
"""Form of a run -> the proven bucket of a callable with this form. A smaller bucket of the same
form runs at its smallest size only: a second and third point of the same lines. If the taint is
uniform, it is not followed again."""


class Jitter(DecomposingMode):
    """A mode that adds rounding errors larger than any kernel's. An integer that survives them does
    not change with the kernel."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_bounds(op.label.partition(".")[0], args)
        result = op.func(*args, **kwargs)
        given = {storage_of(t) for t in tensors((args, kwargs))}
        for t in tensors(result):
            if t.is_floating_point() and storage_of(t) not in given and t.numel():
                noise = torch.randn(t.shape, generator=self._generator, device="cpu")
                t.mul_((1 + rounding(t) / 4 * noise.to(t.dtype)).to(t.device))
        return result


def stored_otherwise(first: Sequence[Change], second: Sequence[Change]) -> Slot | None:
    """Return a slot in which two runs from the same state left other numbers, or None."""
    runs = [{change.slot.id: change for change in found} for found in (first, second)]
    for key, change in {**runs[0], **runs[1]}.items():
        one, other = (run[key].after if key in run else change.before for run in runs)
        if is_unchanging(one) and is_unchanging(other) and not Constant(one).matches(other):
            return change.slot
    return None


class Backprop:
    """A callable that runs `fn` and the backward from the real rows of its results, and returns the
    gradients. The first call is at the real size. Later calls send the same gradients back from
    real rows, and 0 from all others."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._shapes: list[torch.Size] = []
        self._parameters: list[Tensor] | None = None
        self.inputs: list[Tensor] = []  # the arguments whose gradients the next call returns

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        with torch.enable_grad():
            results = flatten(self._fn(*args, **kwargs), "result", objects=True).tensors
            roots = [t for t in results if t.requires_grad]
            if self._parameters is None:
                self._shapes = [t.shape for t in roots]
                given = {id(t) for t in self.inputs}
                self._parameters = [
                    t for t in unique(CapturedGraph(roots).leaves) if id(t) not in given
                ]
            wanted = [*self.inputs, *self._parameters]
            if not roots or not wanted:
                return []
            sent = [
                _sent(t, s, i) for i, (t, s) in enumerate(zip(roots, self._shapes, strict=True))
            ]
            pairs = zip(gradients(roots, wanted, sent), wanted, strict=True)
            return [torch.zeros_like(t) if g is None else g for g, t in pairs]


def _sent(t: Tensor, real: torch.Size, seed: int) -> Tensor:
    """Return the gradient that a result sends back: random numbers for its real rows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    random = torch.randn(real, generator=generator, device="cpu").to(t.device, t.dtype)
    sent = torch.zeros_like(t)
    first_rows(sent, real).copy_(random)
    return sent
