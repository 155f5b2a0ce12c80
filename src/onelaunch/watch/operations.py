"""Modes that get the operations of a run as they are recorded."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any

import torch

from onelaunch.call.wrappers import is_wrapper_subclass
from onelaunch.driver.aten import imagined, operator
from onelaunch.driver.select import make_way
from onelaunch.errors import CaptureError
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
        return self.decompose(func, args, kwargs or {})

    def decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or its parts if it is composite."""
        if operator(func).composite:
            with self:
                return operator(func).decomposed(args, kwargs)
        return self.operation(func, args, kwargs)

    @abstractmethod
    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""


class Watching(DecomposingMode):
    """A mode that passes a callable's operations to `operation`; for DTensors, local parts'."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(is_wrapper_subclass, types)):
            return NotImplemented  # its own dispatch comes back with this process's parts
        if imagined():
            return func(*args, **(kwargs or {}))
        make_way()
        if not isinstance(func, torch._ops.OpOverload):
            return self.higher_order(func, args, kwargs or {})
        does = self.decompose if operator(func).composite else self.operation
        return does(func, args, kwargs or {})

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse an operator that takes functions. The run is rolled back."""
        raise HigherOrder(func.name())
