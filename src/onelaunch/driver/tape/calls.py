"""One recorded operation, repeated by each replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, copy_bits, leaves, mapped, tensors


class TapeCall:
    """A step that repeats an operation on the same memory, in the grad mode of the capture.

    The mode decides whether some kernels give a workspace for the backward (`mkldnn_rnn_layer`); a
    checkpoint runs its forward in grad mode inside of a backward, which is not.

    Args:
        op, args, kwargs: the call, with tensors that nobody else has.
        targets: the memory of each fresh result, by its number among the results. What the
            operation gives is copied there.
    """

    def __init__(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: dict[int, Tensor],
    ) -> None:
        self._op = op
        self._recorded = args, kwargs
        self._targets = targets
        self._repeat = op.bind(args, kwargs)
        self._grad = torch.is_grad_enabled()

    def __call__(self) -> None:
        with torch.set_grad_enabled(self._grad):
            results = tensors(self._repeat())
            for i, target in self._targets.items():
                copy_bits(target, results[i])

    def numbers(self) -> list[float]:
        """List the numbers among the recorded arguments."""
        return [v for v in leaves(self._recorded) if type(v) is float]

    def patch(self, numbers: dict[float, float]) -> None:
        """Repeat the operation with other numbers from now on: `numbers` has a new one for each
        recorded one."""

        def patched(value: Any) -> Any:
            return numbers.get(value, value) if type(value) is float else value

        args, kwargs = self._recorded
        self._repeat = self._op.bind(mapped(args, patched), mapped(kwargs, patched))
