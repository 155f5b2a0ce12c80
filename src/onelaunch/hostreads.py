"""Reads of a tensor by the host that no dispatcher sees: `tolist`, `numpy`, printing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from onelaunch.refusals import READS


class HostReads(TorchFunctionMode):
    """Hands every such read to `refuse`, while active.

    Args:
        owns: whether a tensor's memory is the device's.
        refuse: called with what happened; raises.
    """

    def __init__(self, owns: Callable[[Tensor], bool], refuse: Callable[[str], object]) -> None:
        super().__init__()
        self._owns = owns
        self._refuse = refuse
        self.assigning = 0
        """How many ``x[i] = number`` are under way; torch makes a host tensor of the number."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = READS.get(func)
        if read is not None and isinstance(args[0], Tensor) and self._owns(args[0]):
            self._refuse(f"the host reads a tensor in a capture: {read}")
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            self.assigning += 1
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.assigning -= 1
        return func(*args, **(kwargs or {}))
