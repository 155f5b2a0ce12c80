"""Kernels of our own, compiled for each device at first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.capabilities import capabilities
from onelaunch.driver.cuda.streams import bindings, device_index


class OwnKernel:
    """A kernel from its source. `name`: of its function; begins with `nodes.OWN`. `trial`: launches
    the kernel on a stream, to no effect, so that it is loaded before a capture."""

    def __init__(self, source: str, name: str, trial: Callable[[Any, int, int], None]) -> None:
        self._source, self._name, self._trial = source, name, trial
        self._kernels: dict[int, Any] = {}

    def ready(self, device: torch.device) -> bool:
        """Compile it for a device, so that a capture can use it. Takes 0.1 s the first time. False
        where the bindings or their compiler are missing, or do not know the device."""
        index = device_index(device)
        if index not in self._kernels:
            self._kernels[index] = None
            if capabilities().rebind and nodes.can_compile():
                with torch.cuda.device(index):
                    self._kernels[index] = self._loaded(index)
        return self._kernels[index] is not None

    def on(self, index: int) -> Any:
        return self._kernels[index]

    def _loaded(self, index: int) -> Any:
        major, minor = torch.cuda.get_device_capability(index)
        try:
            kernel = nodes.compiled(self._source, self._name, f"sm_{major}{minor}")
        except nodes.NodeError:
            return None
        self._trial(kernel, index, bindings._cuda_getCurrentRawStream(index))
        return kernel
