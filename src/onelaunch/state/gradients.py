"""`.grad` of the leaves that a callable reaches: whose memory it is, and who rebinds it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.spec import lies_on
from onelaunch.driver.protocol import Driver
from onelaunch.state.slots import Slot, gradient_of, read_gradient


def lasting_gradients(
    driver: Driver,
    rebound: Sequence[tuple[Slot, object]],
    results: Sequence[Tensor],
    hidden: Sequence[Slot],
    device: torch.device,
) -> set[int]:
    """The ids of gradients that may stay the recording's own memory, if they are that.

    They are not copied at each replay: a ResNet-50 has 161. Not among them is what the callable
    also returns or stores elsewhere, since that must outlast the next call; nor what is stored in
    one of the `hidden` slots, since the next call finds it there as an input, and may write it.
    """
    read = {slot.id for slot in hidden}
    gradients: list[Tensor] = []
    others: list[Tensor] = []
    for slot, t in rebound:
        if isinstance(t, Tensor):
            lasts = slot.key is gradient_of and slot.id not in read
            (gradients if lasts else others).append(t)
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
