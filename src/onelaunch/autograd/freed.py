"""Results whose autograd graph the callable itself has used up, as the loss of a training step.

Such a tensor requires grad, and a backward over it raises: the engine freed what its graph had
saved. A replay gives a tensor of which the same is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onelaunch.autograd.proxies import is_packed

_AGAIN = "Trying to backward through the graph a second time"
_MESSAGE = (
    f"{_AGAIN} (or directly access saved tensors after they have already been freed). The "
    "callable that returned this tensor ran the backward itself, in the same launch. To run it "
    "again, return the tensor without calling backward inside."
)


def is_freed(t: Tensor) -> bool:
    """Whether a backward over `t` would raise, because one has freed what its graph saved.

    The nodes nearest to `t` that have saved a tensor tell. A graph that saved none (sums and means
    of parameters) is never spent: eager may run it again.
    """
    if t.grad_fn is None:
        return False
    level, seen = [t.grad_fn], {t.grad_fn}
    while level:
        verdicts = [spent for node in level for spent in _saved(node)]
        if verdicts:
            return any(verdicts)
        below: list[Any] = []
        for node in level:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    below.append(following)
        level = below
    return False


def _saved(node: Any) -> Iterator[bool]:
    """For each tensor that a node of the graph has saved, whether it was freed."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        names = ["saved_tensors"]  # a function of the user's
    else:
        names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in names:
        try:
            if is_packed(node, name):
                yield False  # a freed one has no hook any more
                return
            value = getattr(node, name)
        except RuntimeError as error:
            if _AGAIN not in str(error):
                raise
            yield True
            return
        if isinstance(value, Tensor) or (isinstance(value, tuple) and _has_tensor(value)):
            yield False
            return


def _has_tensor(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


_bindings: Any = torch._C


def mark_freed(t: Tensor) -> Tensor:
    """A tensor over the memory of `t` that requires grad, and over which a backward raises. 1 us.

    Args:
        t: a fresh leaf; not to be used afterwards.
    """
    return _bindings._functions.DelayedError(_MESSAGE, 1)(t.requires_grad_())
