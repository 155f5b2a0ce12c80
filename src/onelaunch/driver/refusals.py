"""The operations that a capture refuses: the same table for every driver.

Its rows come from the CUDA column of ``tests/device/refusals_cuda.json``. The operations read
device memory on the host, or have a result whose size depends on data. Operators without a row are
refused by the tags that they were defined with. `error_here` finds the user's line, by `source.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator
from onelaunch.driver.known_causes import OWN_DROPOUT, PADDED, UNNESTED, fix_within
from onelaunch.errors import CaptureError
from onelaunch.frames.origins import library_calls
from onelaunch.source import Place, user_frame

_KEEP = "keep the value on the device, or read it after the call"
_INDEX = (
    f"{_KEEP}; to index with it: `x[i.view(1)].squeeze(0)`, or for n rows from there `x[i + "
    "torch.arange(n, device=x.device)]`; to write there: `x[i.view(1)] = y`, and `x[:, i.view(1)] "
    "= y.unsqueeze(1)` for `x[:, i] = y`"
)
_FIXED = "compute at a fixed size, with a mask or topk; or move the operation out of the callable"
_CHOICE = (
    "torch.where(condition, a, b), which computes both; where only one may run, decide before the "
    "call and pass a bool, of which each value gets a recording"
)
_SELECTED = (
    "torch.where(mask, x, 0), with `mask[..., None]` where x has a dimension more, if zeros in "
    "place of what is left out change nothing, as in a sum (a mean divides by mask.sum(), a "
    "maximum fills with -inf); torch.where(mask, f(x), x) for `x[mask] = f(x[mask])`; else select "
    "after the call"
)
_ASSIGNED = (
    "x.masked_scatter_(mask, values), with a mask of as many dimensions as x; or "
    "torch.where(mask, values, x), where values is as large as x: for `x[mask] *= 2` write `x = "
    "torch.where(mask, x * 2, x)`"
)
_FOUND = (
    "torch.nonzero_static(x, size=n), whose missing rows are -1: as an index that is the last row, "
    "so mask what it selects; or torch.where(mask[:, None], f(x), y) for `y[index] = f(x[index])`"
)

DRAWN = (
    "draw on the device, `torch.rand((), device=x.device)`, which each replay does anew; or draw "
    "before the call, and pass the number as an argument"
)
"""The fix for a number drawn by Python or NumPy."""
READ_BY_HOST = (
    "pass them as a list or tuple of numbers, of which each value gets a recording; or read them "
    "before the call"
)
"""The fix for a host tensor whose many values the host reads."""


class DrawsAfterAll(CaptureError):
    """The refusal of a random number in a capture that was to draw none; another may draw it."""


def drawn_after_all(place: Place | None) -> DrawsAfterAll:
    """Make the refusal for a line of user code, or for none."""
    return DrawsAfterAll("OL106", "a random number is drawn", where=place)


class OperatorRefusal(NamedTuple):
    code: str
    fix: str | None  # the code to write instead; None: that of the code
    when: Callable[[Sequence[Any], dict[str, Any]], bool] | None = None
    """A condition on the arguments, which may be symbols: see `_known`. None: refused always."""
    what: str | None = None  # the fault, where it is not a need for the value of a tensor


def _known(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition is true of all sizes and numbers that a compiled graph may get. A
    symbol's truth value would tie the graph to the present size, or end the compilation."""
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return condition


def _masked(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ()
    )


def _masked_values(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # One mask and one value is a masked_fill on the device.
    return _masked(args, kwargs) and not (
        _known(args[2].numel() == 1) and sum(i is not None for i in args[1]) == 1
    )


def _unsized(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("output_size") is None


def _unbounded(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)
    return not _known(low != high)


def _drops(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    dropout, training = args[11:13]
    return not _known(training == 0) and not _known(dropout == 0)


def _in_float32(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return args[0].is_cuda and args[0].dtype is torch.float32


REFUSALS: dict[str, OperatorRefusal] = {
    # Host reads.
    "aten::_local_scalar_dense": OperatorRefusal("OL101", _INDEX),
    "aten::item": OperatorRefusal("OL101", _INDEX),
    "aten::is_nonzero": OperatorRefusal("OL101", _CHOICE),
    "aten::equal": OperatorRefusal(
        "OL101",
        "(a == b).all() stays on the device; torch.istft asks so of its window: "
        "`frames = torch.fft.irfft(s, n, dim=-2) * window[:, None]`, laid over each other by "
        "F.fold, and divided by F.fold of the squares of the window, does not",
    ),
    "aten::allclose": OperatorRefusal("OL101", "torch.isclose(a, b).all() stays on the device"),
    "aten::_linalg_check_errors": OperatorRefusal(
        "OL101",
        "the `_ex` form, which returns the error code as a tensor: torch.linalg.inv_ex(a), "
        "torch.linalg.solve_ex(a, b), torch.linalg.cholesky_ex(a)",
    ),
    "aten::normal.float_Tensor": OperatorRefusal("OL101", "mean + std * torch.randn_like(std)"),
    "aten::normal.Tensor_Tensor": OperatorRefusal("OL101", "mean + std * torch.randn_like(std)"),
    "aten::histc": OperatorRefusal("OL101", "torch.histc(x, bins, min=low, max=high)", _unbounded),
    "aten::_nested_tensor_from_mask_left_aligned": OperatorRefusal("OL101", UNNESTED),
    # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/GroupedMMUtils.h
    "aten::_grouped_mm": OperatorRefusal(
        "OL109",
        "half precision, `model.bfloat16()`, which has a kernel of its own; or for experts of "
        '`transformers`, `experts_implementation="batched_mm"` in the configuration',
        _in_float32,
        "`grouped_mm` in float32 reads its offsets on the host, on CUDA",
    ),
    # Sizes that depend on data.
    "aten::_nested_tensor_from_mask": OperatorRefusal("OL102", UNNESTED),
    "aten::nonzero": OperatorRefusal("OL102", _FOUND),
    "aten::nonzero_numpy": OperatorRefusal("OL102", _FOUND),
    "aten::argwhere": OperatorRefusal("OL102", _FOUND),
    "aten::masked_select": OperatorRefusal("OL102", _SELECTED),
    "aten::_unique": OperatorRefusal("OL102", _FIXED),
    "aten::_unique2": OperatorRefusal("OL102", _FIXED),
    "aten::unique_dim": OperatorRefusal("OL102", _FIXED),
    "aten::unique_consecutive": OperatorRefusal("OL102", _FIXED),
    "aten::unique_dim_consecutive": OperatorRefusal("OL102", _FIXED),
    "aten::bincount": OperatorRefusal(
        "OL102", "torch.zeros(n, device=x.device).scatter_add_(0, x, weights)"
    ),
    "aten::repeat_interleave.Tensor": OperatorRefusal(
        "OL102", "torch.repeat_interleave(x, repeats, output_size=n)", _unsized
    ),
    "aten::index.Tensor": OperatorRefusal("OL102", _SELECTED, _masked),
    "aten::index_put_": OperatorRefusal("OL102", _ASSIGNED, _masked_values),
    "aten::index_put": OperatorRefusal("OL102", _ASSIGNED, _masked_values),
    "aten::_index_put_impl_": OperatorRefusal("OL102", _ASSIGNED, _masked_values),
    "aten::_to_sparse": OperatorRefusal("OL102", _FIXED),
    "aten::_pack_padded_sequence": OperatorRefusal("OL102", PADDED),
    # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cudnn/RNN.cpp
    "aten::_cudnn_rnn": OperatorRefusal(
        "OL106",
        OWN_DROPOUT,
        _drops,
        "the dropout of cuDNN's recurrent layers draws from a state of its own, which the host "
        "seeds anew after torch.manual_seed",
    ),
}
"""Operation (``aten::name`` for every overload, or ``aten::name.overload``) -> its refusal."""


_BY_TAG: dict[torch.Tag, tuple[str, str, str | None]] = {
    torch.Tag.cudagraph_unsafe: ("OL109", "it is unsafe in CUDA graphs", None),
    torch.Tag.data_dependent_output: ("OL101", "it gives Python a value of a tensor", _KEEP),
    torch.Tag.dynamic_output_shape: ("OL102", "its result is as large as the data says", _FIXED),
}
"""Tag of operators, those of other libraries too -> the code, the meaning and the fix."""


READS: dict[Callable[..., Any], str] = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "an array made of it",
    Tensor.__dlpack__: "DLPack",
    Tensor.__dlpack_device__: "DLPack",
    Tensor.__bool__: "its truth",
    Tensor.__int__: "int(tensor)",
    Tensor.__float__: "float(tensor)",
    Tensor.__complex__: "complex(tensor)",
    Tensor.__index__: "its use as an index",
    Tensor.__repr__: "print or repr",
    Tensor.__format__: "format",
}
"""Methods of a tensor that read its memory on the host, with their names in a message."""

SHOWS = frozenset({"print or repr", "format"})  # names of methods that show a tensor to a person


CHECKED: dict[Any, tuple[str, str]] = {
    torch.nn.functional.one_hot: (
        "`one_hot` reads its argument: on a CPU to check it, on CUDA only where it is not told "
        "how many classes there are",
        "(i[..., None] == torch.arange(n, device=i.device)).long()",
    ),
    Tensor.__getitem__: (
        "`x[i]` reads a tensor without dimensions on the host, to take a view there",
        "x[i.view(1)].squeeze(0), for `x[i]`; x[:, i.view(1)].squeeze(1), for `x[:, i]`",
    ),
    Tensor.__setitem__: (
        "`x[i] = y` reads a tensor without dimensions on the host, to take a view there",
        "x[i.view(1)] = y; x[:, i.view(1)] = y.unsqueeze(1), for `x[:, i] = y`",
    ),
}
"""Function that reads an argument inside, where no operation shows it -> a message and a fix."""

BY_LIST = (
    "an index that is no list, which torch copies to the device each time: write `v[:, -1:]` for "
    "`v[:, [-1]]`, or make the index once on the device, before the calls"
)
"""The fix for `v[:, [0, 2]]`."""


def refusal(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> OperatorRefusal | None:
    """Find the reason why a capture cannot contain this call on device tensors, or None. Costs less
    than a microsecond; reads no tensor's data."""
    row = _row(op)
    return row if row is None or row.when is None or row.when(args, kwargs) else None


@functools.cache
def _row(op: Operator) -> OperatorRefusal | None:
    """Return the row of an operator, whatever its arguments; a tag of PyTorch's makes one too."""
    name = op.name
    row = REFUSALS.get(name) or REFUSALS.get(name.partition(".")[0])
    if row is None and not op.composite:  # one that is made of others is judged by these
        for tag, (code, meaning, fix) in _BY_TAG.items():
            if tag in op.func.tags:
                what = f"`{name.removeprefix('aten::')}` is tagged `{tag.name}`: {meaning}"
                return OperatorRefusal(code, fix, what=what)
    return row


def error_here(code: str, what: str, *, fix: str | None = None) -> CaptureError:
    """Make a `CaptureError` for the line of user code that is running now."""
    place = user_frame()
    fix = fix_within(code, library_calls()) or fix_of_line(code, place) or fix
    return CaptureError(code, what, where=place, fix=fix)


def fix_of_line(code: str, place: Place | None) -> str | None:
    """Return the replacement of a line that only shows or checks a value; None for other lines.
    Such a line chooses nothing that `torch.where` could choose on the device."""
    if place is None or code not in _VALUE_CODES:
        return None
    statement = _STATEMENT.match(place.source)
    return statement and (CHECKED_LATER if statement[1] == "assert" else SHOWN_LATER)


_VALUE_CODES = frozenset({"OL101", "OL103", "OL104"})
_STATEMENT = re.compile(r"(assert|print)\b")
SHOWN_LATER = "print after the call, `y = fast(x); print(y)`: what is to be shown is a result"
"""The fix for a tensor that is printed, formatted or logged."""
CHECKED_LATER = "return the condition, and check it after the call: `y, ok = fast(x); assert ok`"
"""The fix for an assertion."""
