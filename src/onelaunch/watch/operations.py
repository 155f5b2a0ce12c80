"""Modes that get the operations of a run as they are recorded, and a call of one, taken apart."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from onelaunch.beside import make_way
from onelaunch.call.spec import has_strides
from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.driver.aten import OfKind, Operator, imagined, operator, tensors
from onelaunch.driver.protocol import Driver, Lanes
from onelaunch.errors import CaptureError
from onelaunch.identity import id
from onelaunch.source import user_frame
from onelaunch.unwinding import DispatchMode


class HigherOrder(CaptureError):
    """The refusal of an operator that takes functions, such as `flex_attention`."""

    def __init__(self, name: str) -> None:
        what = f"`{name}` takes functions, which it compiles itself"
        super().__init__("OL109", what, where=user_frame())

    def mend_dynamo(self) -> None:
        """Reset Dynamo, which never compiles a function again that it has met under a mode
        (pytorch#190286). These operators compile their functions at each call."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


class DecomposingMode(DispatchMode):
    """A mode that passes each operation to `operation`, composite ones decomposed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.decompose(operator(func), args, kwargs or {})

    def decompose(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or its parts if it is composite."""
        if op.composite:
            with self:
                return op.decomposed(args, kwargs)
        return self.operation(op, args, kwargs)

    @abstractmethod
    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""


class Watching(DecomposingMode):
    """A mode that passes operations to `operation`; of DTensors, those on their local parts."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(is_wrapper_subclass, types)):
            return NotImplemented  # its own dispatch comes back with this process's parts
        if imagined():
            return func(*args, **(kwargs or {}))
        make_way()
        if not isinstance(func, torch._ops.OpOverload):
            return self.higher_order(func, args, kwargs or {})
        return self.decompose(operator(func), args, kwargs or {})

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse an operator that takes functions. The run is rolled back."""
        raise HigherOrder(func.name())


class WatchingCompiled(Watching):
    """A mode over compiled code: Dynamo runs what it has compiled, and not the code as it was."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo may also compile under this mode, which a capture then refuses."""
        return True

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions as it is."""
        return func(*args, **kwargs)


class CompiledLanes(WatchingCompiled):
    """A mode that runs the operations of compiled code in the lanes of a capture, and watches
    nothing else."""

    def __init__(self, lanes: Lanes, driver: Driver, device: torch.device) -> None:
        super().__init__()
        self._lanes = lanes
        self._storage = driver.storage
        self._here = OfKind(device.type)

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = OpCall(op, args, kwargs, self._storage, self._here)
        result = self._lanes.run(call, op.func, args)
        call.returned(result)
        self._lanes.note(call)
        return result


class OpCall:
    """A call of an operation, and the storages of its tensors.

    Args:
        storage: returns the storage of a tensor with memory.
        here: tells which devices are of the run's type.

    Attributes:
        tensors: the tensors among the arguments.
        on_device, on_host: those with memory, on the run's device and elsewhere.
        read: the storages of those on the device.
        storages: id of a tensor with memory among the arguments -> its storage.
        results: the tensors among the results.
        with_memory: the results with memory, with their storages.
        to_copy: host tensors whose constants on the device the operation gets instead.
    """

    __slots__ = (
        *("_storage", "args", "kwargs", "on_device", "on_host", "op"),
        *("read", "results", "storages", "tensors", "to_copy", "with_memory"),
    )

    def __init__(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        storage: Callable[[Tensor], int],
        here: OfKind,
    ) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self._storage = storage
        self.tensors = tensors((*args, kwargs) if kwargs else args)
        self.on_device: list[Tensor] = []
        self.on_host: list[Tensor] = []
        self.read: list[int] = []
        self.storages: dict[int, int] = {}
        for t in self.tensors:
            if has_memory(t):
                self.storages[id(t)] = own = storage(t)
                if here[t.device]:
                    self.on_device.append(t)
                    self.read.append(own)
                else:
                    self.on_host.append(t)
        self.results: Sequence[Tensor] = ()
        self.with_memory: list[tuple[Tensor, int]] = []
        self.to_copy: Sequence[Tensor] = ()

    def returned(self, result: Any) -> None:
        """Take the result apart, once the operation has run."""
        self.results = results = tensors(result)
        self.with_memory = [(t, self._storage(t)) for t in results if has_memory(t)]

    def storage(self, t: Tensor) -> int | None:
        """Return the storage of an argument; None for a tensor without memory of its own."""
        noted = self.storages.get(id(t))
        return self._storage(t) if noted is None and has_memory(t) else noted


def has_memory(t: Tensor) -> bool:
    """Return whether a tensor has memory with sizes and strides."""
    kind = type(t)
    if kind is Tensor or kind is Parameter:
        return t.layout is torch.strided and not t.is_nested
    return not is_lazy(t) and has_strides(t)
