"""The operations of compiled code that torch dispatches, in the lanes of a capture."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.driver.aten import OfKind, Operator
from onelaunch.driver.protocol import Driver, Lanes
from onelaunch.watch.operations import OpCall, WatchingCompiled


class CompiledLanes(WatchingCompiled):
    """A mode that runs the operations of compiled code in lanes, and watches nothing else."""

    def __init__(self, lanes: Lanes, driver: Driver, device: torch.device) -> None:
        super().__init__()
        self._lanes = lanes
        self._storage = driver.storage
        self._here = OfKind(device.type)

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in a lane."""
        call = OpCall(op, args, kwargs, self._storage, self._here)
        result = self._lanes.run(call, op.func, args)
        call.returned(result)
        self._lanes.note(call)
        return result
