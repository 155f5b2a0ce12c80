"""Seeds that an operator hands to its backward.

Memory-efficient attention keeps the seed of its dropout, and the place in the stream of random
numbers, for its backward. In eager they are on the host, where the backward reads them. In a
capture they are on the device; a read by the host would end the process (pytorch#172233). Flash and
cuDNN attention keep theirs on the device always; dropout itself keeps the mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onelaunch.driver.aten import Operator, operator
from onelaunch.unwinding import DispatchMode

_FAMILY = "efficient_attention"


class Seeds(NamedTuple):
    """Positions of an operator's arguments and results that are on the host in eager."""

    arguments: tuple[int, ...]
    results: tuple[int, ...]


@functools.cache
def seeds_of(op: Operator) -> Seeds:
    """Find the seeds among the arguments and results of an operator."""
    schema = op.func._schema
    if _FAMILY not in schema.name:
        return Seeds((), ())
    named = [[value.name for value in values] for values in (schema.arguments, schema.returns)]
    return Seeds(
        *(tuple(i for i, name in enumerate(names) if name.startswith("philox_")) for names in named)
    )


class SeedsOfCapture(DispatchMode):
    """A mode for an eager run over the autograd graph of a capture, whose seeds are on the device.
    An operator gets its seeds on the host, where it reads them outside of a capture. A part of the
    forward that runs again (a checkpoint) gives its seeds on the device, as in the capture:
    checkpoints compare. `capturing`: tells whether somebody is recording this run too."""

    def __init__(self, device: torch.device, capturing: Callable[[], bool]) -> None:
        super().__init__()
        self._device = device
        self._capturing = capturing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments, results = seeds_of(operator(func))
        if not (arguments or results) or self._capturing():
            return func(*args, **kwargs)
        args = tuple(t.cpu() if i in arguments else t for i, t in enumerate(args))
        outcome: Sequence[Any] = func(*args, **kwargs)
        return tuple(t.to(self._device) if i in results else t for i, t in enumerate(outcome))
