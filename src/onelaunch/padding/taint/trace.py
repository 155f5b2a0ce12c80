"""Traces: the operations of a run, as far as runs at other sizes must have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, leaves, tensors
from onelaunch.padding.taint.bounds import check_bounds, check_known
from onelaunch.padding.taint.displacement import MOVES, Picked, picked
from onelaunch.watch.operations import DecomposingMode

# Operations on layout alone, which may be missing in the trace at another size.
LAYOUT = frozenset(
    {
        *("clone", "copy", "copy_", "_to_copy", "contiguous", "constant_pad_nd", "lift_fresh"),
        *("view", "_unsafe_view", "expand", "t", "transpose", "permute", "slice", "as_strided"),
        *("unsqueeze", "squeeze", "select", "alias", "detach", "reshape", "_reshape_alias"),
        *("split", "split_with_sizes", "unbind", "empty", "empty_strided", "empty_like"),
    }
)
AHEAD = 8  # the most layout operations that a trace may have in between

# Factories whose first elements are the same whatever the size.
PREFIX = frozenset(
    {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "arange", "eye"}
)
_STARTS = {
    "arange.start": (0,),
    "arange.start_step": (0, 2),
    "slice.Tensor": (1, 2, 4),
    "select.int": (1, 2),
    "full": (1,),
    "select_scatter": (2, 3),
    "slice_scatter": (2, 3, 5),
}
"""Operation -> positions of the arguments that must not change with the size."""

_SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("arange", "empty", "empty_permuted", "full", "ones", "zeros"), (0,)),
    **dict.fromkeys(("normal", "rand", "randint", "randn", "randperm", "uniform"), (0,)),
    **dict.fromkeys(("empty_strided", "eye"), (0, 1)),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), (1,)),
    **dict.fromkeys(("view", "view_copy", "_unsafe_view", "reshape", "_reshape_copy"), (1,)),
    **dict.fromkeys(("expand", "expand_copy", "repeat", "col2im", "_fused_rms_norm"), (1,)),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), (1,)),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), (1,)),
    **dict.fromkeys(("upsample_bicubic2d", "affine_grid_generator"), (1,)),
    **dict.fromkeys(("as_strided", "_reshape_alias", "new_empty_strided"), (1, 2)),
    "native_group_norm": (3, 5),
    "repeat_interleave": (3,),
}
"""Operation -> positions of arguments that are sizes and may follow the size."""


class TracedStep(NamedTuple):
    """An operation of a run, as far as a run at another size must agree with it. `inputs`,
    `outputs`: the shapes of its tensors."""

    name: str
    fixed: tuple[Any, ...]  # its numbers that must be the same at every size
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]
    constant: Tensor | None = None  # a tensor that the code makes from numbers
    picked: Picked | None = None  # its call, if it picks elements by index


def step_of(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> TracedStep:
    name = op.label
    shapes = tuple(t.shape for t in tensors((args, kwargs)))
    outputs = tuple(t.shape for t in tensors(result))
    constant = args[0].detach().to("cpu", copy=True) if name == "lift_fresh" else None
    fixed = _fixed(op.func, name, args, kwargs)
    return TracedStep(
        kind_of(name), fixed, shapes, outputs, constant, picked(packet_of(name), args, kwargs)
    )


def packet_of(name: str) -> str:
    """Return the name without the overload: ``add``."""
    return name.partition(".")[0]


def kind_of(name: str) -> str:
    """Return the name of an overload; one for all kernels of attention."""
    is_attention = name.startswith("_scaled_dot_product") and "backward" not in name
    return "attention" if is_attention else name


def _fixed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the numbers of a call that must be the same at every size, as text: NaN equals NaN."""
    packet = packet_of(name)
    if name in _STARTS:
        found: list[Any] = [args[i] if i < len(args) else None for i in _STARTS[name]]
        return tuple(0 if v is None else v for v in found)
    if packet == "constant_pad_nd":  # the padding at the front; at the end it may follow the size
        return tuple(args[1][::2])
    if packet in ("split", "split_with_sizes"):  # the sizes show in the results
        return (args[2] if len(args) > 2 else kwargs.get("dim", 0),)
    if kind_of(name) == "attention":  # kernels differ in their other arguments
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        return named.get("dropout_p", 0.0), named.get("is_causal", False), named.get("scale")
    free = _SIZES.get(packet, ())
    given = [v for i, v in enumerate(args) if i not in free]
    values = [
        v for v in leaves([*given, *kwargs.values()]) if isinstance(v, (bool, complex, float, int))
    ]
    return tuple((type(v).__name__, repr(v)) for v in values)


def reach(step: TracedStep) -> int:
    """Return the largest distance by which an operation moves elements or reads neighbours."""
    packet = packet_of(step.name)
    if packet not in MOVES | _WINDOWS and "pool" not in packet:
        return 0
    # A number is an int, or its type and text.
    numbers = [v for v in step.fixed if type(v) is int]
    numbers += [int(v[1]) for v in step.fixed if isinstance(v, tuple) and v[0] == "int"]
    windows = [n for shape in step.inputs[1:2] for n in shape[2:]] if packet in _WINDOWS else []
    return max(map(abs, numbers), default=1) * max(windows, default=1)


_WINDOWS = frozenset({"convolution", "im2col", "col2im", "roll", "tril", "triu"})


def form(steps: Sequence[TracedStep]) -> tuple[object, ...]:
    """Return the facts of a run that do not change with the size; hashable."""
    return tuple(
        (
            *(s.name, repr(s.fixed), tuple(map(len, s.inputs)), tuple(map(len, s.outputs))),
            None if s.constant is None else repr(s.constant.tolist()),
        )
        for s in steps
    )


class Trace(DecomposingMode):
    """A mode that notes the operations of a run. `made_up`: whether the run is on numbers that no
    call gave."""

    def __init__(self, made_up: bool = False) -> None:
        super().__init__()
        self.steps: list[TracedStep] = []
        self._made_up = made_up

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_bounds(packet_of(op.label), args)
        if self._made_up:
            check_known(op.func, args)
        result = op.func(*args, **kwargs)
        if op.label == "record_stream":
            return result
        self.steps.append(step_of(op, args, kwargs, result))
        return result


def shapes_of(steps: Sequence[TracedStep]) -> tuple[int, ...]:
    return tuple(n for s in steps for shape in (*s.inputs, *s.outputs) for n in shape)
