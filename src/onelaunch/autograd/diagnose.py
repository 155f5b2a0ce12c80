"""Who keeps an autograd graph from before a capture, whose nodes work on another stream."""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterable
from typing import Any, cast

from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.errors import CaptureError

_ANOTHER_STREAM = re.compile(r"legacy stream|uncaptured work|another stream|unjoined|isolat")


def explained(error: CaptureError, leaves: Iterable[Tensor]) -> CaptureError:
    """`error`; where it speaks of another stream and a graph is kept that leads to one of these
    leaves, one that names the tensor with the graph.

    An AccumulateGrad node works on the stream where it was made, as long as anything keeps it.
    """
    if error.code != "OL109" or not _ANOTHER_STREAM.search(error.what):
        return error
    every = _kept({id(t) for t in leaves if t.is_leaf and t.requires_grad})
    if not every:
        return error
    named = ((t, _name(t)) for t in every)
    kept, name = next((one for one in named if one[1]), (min(every, key=Tensor.numel), None))
    spoken = f"`{name}`, " if name else "a tensor, "
    return CaptureError(
        "OL109",
        f"{spoken}{TensorSpec.of(kept)}, keeps its autograd graph, which accumulates gradients on "
        "another stream",
        where=error.where,
        fix="keep `loss.detach()` or `loss.item()` of earlier steps, not `loss`",
    )


def _kept(leaves: Collection[int]) -> list[Tensor]:
    """The tensors whose autograd graph leads to one of these leaves; of a loss, what led to it as
    well."""
    gc.collect()
    # The class is asked for: some objects do things when they are asked themselves.
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.grad_fn is not None]
    return [t for t in alive if _leads(t.grad_fn, leaves)]


def _leads(node: Any, leaves: Collection[int]) -> bool:
    stack, seen = [node], set[Any]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        stack += [following for following, _ in node.next_functions]
    return False


def _name(value: object, depth: int = 2) -> str | None:
    """What the code calls it: a global, an attribute, an item of either. A local variable cannot be
    asked for without keeping it."""
    for holder in gc.get_referrers(value):
        if isinstance(holder, dict):
            entries = cast(dict[object, object], holder)
            names = [k for k, v in entries.items() if v is value and isinstance(k, str)]
            if names:
                return names[0]
        elif isinstance(holder, list) and depth:
            items = cast(list[object], holder)
            name = _name(items, depth - 1)
            if name is not None:
                return f"{name}[{next(i for i, v in enumerate(items) if v is value)}]"
    return None
