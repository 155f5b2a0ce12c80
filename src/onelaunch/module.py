"""A graphed module is a module: an instance of a subclass of its class, sharing its state."""

from __future__ import annotations

import copy
import functools
import typing
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from onelaunch import distributed
from onelaunch.bucketed import graphed
from onelaunch.errors import GraphError
from onelaunch.graphed import Graphed
from onelaunch.options import Options
from onelaunch.pool import Pool

M = TypeVar("M", bound=nn.Module)

_HANDED_ON = ("capture", "recordings", "memory_bytes", "stats", "reset", "capture_all")


class _Forward:
    """What a recording of a module runs: the module's own forward, without the hooks on it.

    Hooks on the module are Python that eager runs at every call; they run around the launch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__name__ = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """For `inspect.signature`, by which callers see which arguments a model takes."""
        return self.module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self.module, memo))


class _Fabric(type):
    """Whose classes, when called, make the module that they are twins of: `twin[:2]` of an
    `nn.Sequential` makes another of its class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__bases__[1](*args, **kwargs)


class _Twin(nn.Module):
    """Mixed into the class of a module to make the class of its graphed twin."""

    __slots__ = ("__graphed__",)
    __graphed__: Graphed[..., Any]

    def __new__(cls) -> Any:
        """An original, for what fills it itself: `DataParallel` makes replicas so."""
        return object.__new__(cls.__bases__[1])

    def _get_name(self) -> str:
        return f"Graphed{type(self).__bases__[1].__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _hooks(self) or _has_any_global_hook():
            if "_initialize_hook" in self.__dict__:
                _initialize(self, args, kwargs)
            return super().__call__(*args, **kwargs)
        return self.__graphed__(*args, **kwargs)

    @property
    def forward(self) -> Any:
        """The recording's call path. A data descriptor: it goes before an instance's own."""
        return self.__graphed__

    @forward.setter
    def forward(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.__dict__["forward"] = value
        self.__graphed__.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        forward = cast(_Forward, self.__graphed__.fn)
        return graph_module(copy.deepcopy(forward.module, memo), self.__graphed__.options, None)

    def __copy__(self) -> nn.Module:
        forward = cast(_Forward, self.__graphed__.fn)
        return graph_module(copy.copy(forward.module), self.__graphed__.options, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickled by a function of the standard library that returns its second argument.
        return typing.cast, (None, cast(_Forward, self.__graphed__.fn).module)


def graph_module(module: M, options: Options, pool: Pool | None) -> M:
    """The graphed twin of a module."""
    if isinstance(module, torch.jit.ScriptModule):
        fix = "graph the Python module it was scripted from, or `ol.graph(lambda x: scripted(x))`"
        raise GraphError("OL401", "a ScriptModule has no Python state to share", fix=fix)
    if isinstance(module, _Twin):
        raise GraphError("OL401", "this module is graphed already", fix="use it as it is")
    distributed.refuse_module(module)
    fast = graphed(_Forward(module), options, pool, root=("", module))
    twin = object.__new__(_twin_class(type(module)))
    twin.__dict__ = module.__dict__
    twin.__graphed__ = fast
    return cast(M, twin)


def _initialize(twin: _Twin, args: Any, kwargs: Any) -> None:
    """Do what the first hook of a lazy module does, to the original: it gets another class, which
    no twin can get."""
    original = cast(Any, twin.__graphed__.fn).module
    original._infer_parameters(original, args, kwargs)
    twin.__class__ = _twin_class(type(original))


def _hooks(module: nn.Module) -> bool:
    """Whether anything is to run around the forward: then `nn.Module` calls it, 1 us slower."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


@functools.cache
def _twin_class(kind: type[nn.Module]) -> type[_Twin]:
    """The class of the twins of a class. Names that the class uses itself stay its own."""
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__slots__": (),
    }
    for name in _HANDED_ON:
        if not hasattr(kind, name):
            members[name] = property(lambda twin, name=name: getattr(twin.__graphed__, name))
    meta = _Fabric if type(kind) is type else type("_Fabric", (_Fabric, type(kind)), {})
    return cast(type[_Twin], meta(f"Graphed{kind.__name__}", (_Twin, kind), members))
