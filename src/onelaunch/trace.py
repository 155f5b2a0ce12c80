"""The operations of a run, as far as runs at other sizes must have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.driver.operators import operator, tensors
from onelaunch.flows import is_pointwise

# Whether an operation of one trace is missing in that of another size says nothing: layout only.
LAYOUT = frozenset(
    {
        *("clone", "copy", "copy_", "_to_copy", "contiguous", "constant_pad_nd", "lift_fresh"),
        *("view", "_unsafe_view", "expand", "t", "transpose", "permute", "slice", "as_strided"),
        *("unsqueeze", "squeeze", "select", "alias", "detach", "reshape", "_reshape_alias"),
        *("split", "split_with_sizes", "unbind", "empty", "empty_strided", "empty_like"),
    }
)
AHEAD = 8
"""How many layout operations a trace may have in between."""

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
"""The arguments, by position, that must not change with the size."""


class Step(NamedTuple):
    """One operation of a run, as far as a run at another size must agree with it."""

    name: str
    fixed: tuple[Any, ...]
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]


def step_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Step:
    """A call of an overload, with its result."""
    name = name_of(func)
    shapes = tuple(t.shape for t in tensors((args, kwargs)))
    outputs = tuple(t.shape for t in tensors(result))
    return Step(_kind(name), _fixed(func, name, args, kwargs), shapes, outputs)


def name_of(func: Any) -> str:
    """The name of an overload: ``add.Tensor``."""
    return operator(func).label


def _kind(name: str) -> str:
    return "attention" if name.startswith("_scaled_dot_product") else name


def _fixed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of a call that must be the same at every size."""
    if name in _STARTS:
        found: list[Any] = [args[i] if i < len(args) else None for i in _STARTS[name]]
        return tuple(0 if v is None else v for v in found)
    if name == "lift_fresh" and args[0].device.type == "cpu" and args[0].numel() <= AHEAD:
        return (str(args[0].tolist()),)
    values = [*args, *kwargs.values()]
    kinds = (bool, float, int) if is_pointwise(func) else (bool, float)
    return tuple((type(v), v) for v in values if isinstance(v, kinds))


def form(steps: Sequence[Step]) -> tuple[object, ...]:
    """What of a run does not change with the size; hashable."""
    return tuple(
        (s.name, repr(s.fixed), tuple(map(len, s.inputs)), tuple(map(len, s.outputs)))
        for s in steps
    )


class Trace(TorchDispatchMode):
    """Notes the operations of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if operator(func).composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if name_of(func) == "record_stream":
            return result
        self.steps.append(step_of(func, args, kwargs or {}, result))
        return result
