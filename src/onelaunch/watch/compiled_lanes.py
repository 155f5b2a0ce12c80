"""The operations of compiled code that torch dispatches, in the lanes of a capture."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.driver.aten import OfKind, operator
from onelaunch.driver.protocol import Driver, Lanes
from onelaunch.watch.operations import OpCall, Watching


class CompiledLanes(Watching):
    """A mode that runs the operations of compiled code in lanes, and watches nothing else."""

    def __init__(self, lanes: Lanes, driver: Driver, device: torch.device) -> None:
        super().__init__()
        self._lanes = lanes
        self._storage = driver.storage
        self._here = OfKind(device.type)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo may compile under this mode, which a capture then refuses."""
        return True

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in a lane."""
        call = OpCall(operator(func), args, kwargs, self._storage, self._here)
        result = self._lanes.run(call, func, args)
        call.returned(result)
        self._lanes.note(call)
        return result

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions as it is: everything else waits for it."""
        return func(*args, **kwargs)
