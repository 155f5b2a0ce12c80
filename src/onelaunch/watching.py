"""A mode that sees the operations of a run as they are recorded."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.driver.operators import imagined, operator
from onelaunch.shards import stands_for_another


class Watching(TorchDispatchMode):
    """Hands `operation` each one, composite ones taken apart, on the parts of this process."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(stands_for_another, types)):
            return NotImplemented  # its own dispatch comes back with this process's parts
        if imagined():
            return func(*args, **kwargs)
        if operator(func).composite:
            with self:
                return operator(func).decomposed(args, kwargs)
        return self.operation(func, args, kwargs)

    @abstractmethod
    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and give its result."""
