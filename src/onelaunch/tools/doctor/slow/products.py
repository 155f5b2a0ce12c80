"""Matrix products and convolutions of a run as plain data: nearly all arithmetic of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onelaunch.tools.doctor.run import RanOperation
from onelaunch.tools.doctor.slow.flow import FlowStep, Value
from onelaunch.tools.doctor.spot import Spot
from onelaunch.tools.profiler.counting import plain, size_of

Kind = Literal["convolution", "linear", "matmul"]
_WEIGHT = {"aten::convolution": 1, "aten::addmm": 2, "aten::mm": 1, "aten::_int_mm": 1}
_BIAS = {"aten::convolution": 2, "aten::addmm": 0}


@dataclass(frozen=True)
class Window:
    """The numbers of a convolution besides its shapes."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """One matrix product or convolution.

    Attributes:
        kind: "linear" and "convolution" are by a weight; "matmul" is of two results.
        path: of the module whose weight it is, or else of the module that runs.
        flops: by the formulas of `torch.utils.flop_counter`.
        moved, weighs: the bytes of all that it reads and writes, and of the weight alone.
        tf32: whether it may use TF32, if it is in float32.
        tuned: whether cuDNN may look for the fastest algorithm; None: not a convolution.
        shape, weight, result: sizes of the input, the weight (as stored) and the result.
        strides: of the result.
        channels: the dimension of the result that holds the channels.
        channels_last: whether input or weight are laid out so; None where it is no matter.
        source: the value of its input. It reads the part `view`.
        made: the value of its result.
        fixed: the weight is a parameter or buffer, so that it can be changed once for all.
    """

    kind: Kind
    path: str
    spot: Spot
    flops: int
    moved: int
    weighs: int
    dtype: torch.dtype
    device: torch.device
    tf32: bool
    tuned: bool | None
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    strides: tuple[int, ...]
    bias: bool
    window: Window | None
    channels: int
    channels_last: bool | None
    source: Value
    view: tuple[object, ...]
    made: Value
    fixed: bool

    @property
    def inputs(self) -> int:
        """The number of channels that it reads."""
        if self.kind == "linear":
            return self.shape[-1]
        return self.shape[1]

    @property
    def outputs(self) -> int:
        """The number of channels that it makes."""
        return self.result[self.channels]

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / max(self.moved, 1)


def moved_by(event: RanOperation) -> int:
    """Return the bytes that an operation reads and writes, each element once."""
    return sum(map(size_of, (*plain((event.args, event.kwargs)), *plain(event.result))))


def product_of(
    event: RanOperation,
    flops: int | None,
    spot: Spot,
    sources: list[Value],
    step: FlowStep,
    path: str,
) -> Product | None:
    """Describe a product.

    Args:
        flops: see `profiler.counting.flops_of`.
        sources: the values of its arguments that are tensors, in their order.
        path: of the module that runs.

    Returns:
        The description; None if the operation is none, or has other arguments.
    """
    if flops is None:
        return None
    base, args = event.op.base, event.args
    result = event.result if isinstance(event.result, Tensor) else plain(event.result)[0]
    weight = _weight_of(event)
    x = args[1] if base == "aten::addmm" else args[0]
    if not isinstance(x, Tensor) or x.dim() == 0:
        return None
    values = dict(zip(map(id, plain((args, event.kwargs))), sources, strict=True))
    if id(x) not in values:  # a sparse one
        return None
    owner = values[id(weight)].owner if weight is not None and id(weight) in values else None
    convolution = base == "aten::convolution" and weight is not None
    kind: Kind = "convolution" if convolution else "linear" if owner is not None else "matmul"
    bias = args[_BIAS[base]] if base in _BIAS else None
    return Product(
        kind=kind,
        path=path if owner is None else owner,
        spot=spot,
        flops=flops,
        moved=moved_by(event),
        weighs=0 if weight is None else size_of(weight),
        dtype=x.dtype,
        device=x.device,
        tf32=_may_use_tf32(convolution),
        tuned=_tuned() if convolution else None,
        shape=tuple(x.shape),
        weight=() if weight is None else tuple(weight.shape),
        result=tuple(result.shape),
        strides=tuple(result.stride()),
        bias=isinstance(bias, Tensor) and bias.dim() == 1,
        window=_window(args) if convolution else None,
        channels=1 if convolution else result.dim() - 1,
        channels_last=_laid_out_last(x, weight) if convolution else None,
        source=values[id(x)],
        view=(x.storage_offset(), tuple(x.shape), tuple(x.stride())),
        made=step.made[0],
        fixed=owner is not None,
    )


def _weight_of(event: RanOperation) -> Tensor | None:
    """Return the argument of a product that holds its weight, if the operation has one."""
    index = _WEIGHT.get(event.op.base)
    found = event.args[index] if index is not None and index < len(event.args) else None
    return found if isinstance(found, Tensor) else None


def total(products: Sequence[Product]) -> int:
    """Return the flops of products together."""
    return sum(product.flops for product in products)


def _window(args: tuple[Any, ...]) -> Window:
    stride, padding, dilation, transposed, _, groups = args[3:9]
    wide = len(args[1].shape) - 2

    def each(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers) if len(numbers) == wide else tuple(numbers) * wide

    return Window(each(stride), each(padding), each(dilation), transposed, groups)


def _may_use_tf32(convolution: bool) -> bool:
    backends: Any = torch.backends
    kind = backends.cudnn.conv if convolution else backends.cuda.matmul
    return kind.fp32_precision == "tf32"


def _tuned() -> bool:
    """Return whether cuDNN measures algorithms, or may not for the sake of determinism."""
    cudnn = torch.backends.cudnn
    fixed = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return bool(cudnn.benchmark or fixed or not cudnn.enabled)


def _laid_out_last(x: Tensor, weight: Tensor | None) -> bool | None:
    """Return whether a convolution runs in channels_last: by its input or its weight."""
    last = torch.channels_last
    if x.dim() != 4 or weight is None or weight.dim() != 4:
        return None
    if x.is_contiguous(memory_format=last):
        return True
    return weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
