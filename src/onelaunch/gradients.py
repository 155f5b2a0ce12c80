"""`.grad` of the leaves that a callable reaches: whose memory it is, and who rebinds it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.driver import Driver
from onelaunch.slots import Slot, gradient_of, read_gradient
from onelaunch.spec import lies_on


def lasting_gradients(
    driver: Driver,
    rebound: Sequence[tuple[Slot, object]],
    results: Sequence[Tensor],
    device: torch.device,
) -> set[int]:
    """The ids of gradients that may stay the recording's own memory, if they are that.

    They are not copied at each replay: a ResNet-50 has 161. Not among them is what the callable
    also returns or stores elsewhere, since that must outlast the next call.
    """
    gradients = [t for slot, t in rebound if slot.key is gradient_of and isinstance(t, Tensor)]
    others = [t for slot, t in rebound if slot.key is not gradient_of and isinstance(t, Tensor)]
    taken = {driver.storage(t) for t in (*results, *others) if lies_on(t, device)}
    return {id(t) for t in gradients if lies_on(t, device) and driver.storage(t) not in taken}


def keeper(gradients: Sequence[tuple[Any, Tensor | None]]) -> Callable[[], None]:
    """What sees to it that each leaf has its gradient: 0.05 us for each where it has already."""
    leaves = [leaf for leaf, _ in gradients]
    expected = [gradient for _, gradient in gradients]

    def keep() -> None:
        if all(map(operator.is_, map(read_gradient, leaves), expected)):
            return
        for leaf, gradient in zip(leaves, expected, strict=True):
            if leaf.grad is not gradient:
                leaf.grad = gradient

    return keep
