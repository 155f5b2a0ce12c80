"""The forward of a module, without its hooks: the callable that a recording of a module runs."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn


class ModuleForward:
    """The callable that a recording of a module runs: the module's forward, without its hooks. The
    module's hooks run around the launch. A replaced forward stays itself, as the new forward may
    call it. `own`: the instance's own forward, or None for its class's."""

    def __init__(self, module: nn.Module, own: Any, name: str | None = None) -> None:
        self.module = module
        self.own = own
        self.__name__ = name or type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The forward, also for `inspect.signature`."""
        if self.own is not None:
            return self.own
        if "forward" not in self.module.__dict__:
            return self.module.forward
        kind = type(self.module)
        forward: Any = inspect.getattr_static(kind, "forward")
        return forward.__get__(self.module, kind) if hasattr(forward, "__get__") else forward

    def is_of(self, module: nn.Module, own: Any) -> bool:
        return self.module is module and self.own is own

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleForward:
        module, own = copy.deepcopy(self.module, memo), copy.deepcopy(self.own, memo)
        return ModuleForward(module, own, self.__name__)


def has_forward(module: nn.Module) -> bool:
    of_class = inspect.getattr_static(type(module), "forward")
    return "forward" in module.__dict__ or of_class is not nn.Module.forward
