"""A mode that sees the operations of a run as they are recorded."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from onelaunch.call.dtensor import is_wrapper_subclass
from onelaunch.driver.aten import imagined, operator
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame
from onelaunch.unwinding import DispatchMode


class HigherOrder(CaptureError):
    """An operator that takes functions, such as `flex_attention`, is called, or was before."""

    def __init__(self, name: str) -> None:
        place = user_frame()
        where = str(place) if place else None
        what = f"`{name}` takes functions, which it compiles itself"
        super().__init__("OL109", what, where=where)

    def mend_dynamo(self) -> None:
        """Have Dynamo begin anew. It never again compiles a function that it has met under a mode,
        and these operators have it compile theirs at each call."""
        torch._dynamo.reset()


class TakingApart(DispatchMode):
    """Hands `operation` each one, composite ones taken apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.taken_apart(func, args, kwargs or {})

    def taken_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or those that it is composed of."""
        if operator(func).composite:
            with self:
                return operator(func).decomposed(args, kwargs)
        return self.operation(func, args, kwargs)

    @abstractmethod
    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and give its result."""


class Watching(TakingApart):
    """Hands `operation` those of a callable, on the parts of this process."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # its own dispatch comes back with this process's parts
        if imagined():
            return func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            raise HigherOrder(func.name())
        return self.taken_apart(func, args, kwargs or {})
