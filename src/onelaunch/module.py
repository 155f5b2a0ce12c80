"""A graphed module is a module: an instance of a subclass of its class, sharing its state."""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from onelaunch.capture import distributed
from onelaunch.errors import ArgumentError
from onelaunch.padding.bucketed import graphed
from onelaunch.runtime.graphed import Graphed, like
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager

M = TypeVar("M", bound=nn.Module)

_HANDED_ON = ("capture", "recordings", "memory_bytes", "stats", "reset", "capture_all")


class _Forward:
    """What a recording of a module runs: a forward of the module's own, without the hooks on it.

    Hooks on the module are Python that eager runs at every call; they run around the launch. It
    stays the forward that it was when another one has taken its place, which may call it.

    Attributes:
        own: the forward that the instance has, or None for that of its class.
    """

    def __init__(self, module: nn.Module, own: Any) -> None:
        self.module = module
        self.own = own
        self.__name__ = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """For `inspect.signature` too, by which callers see which arguments a model takes."""
        if self.own is not None:
            return self.own
        if "forward" not in self.module.__dict__:
            return self.module.forward
        kind = type(self.module)
        found: Any = inspect.getattr_static(kind, "forward")
        return found.__get__(self.module, kind) if hasattr(found, "__get__") else found

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self.module, memo), copy.deepcopy(self.own, memo))


class _CallPath:
    """The attribute `forward` of twins: the graphed form of what the module has there.

    A data descriptor, so that it goes before an instance's own.
    """

    def __get__(self, twin: _Twin | None, kind: type[_Twin]) -> Any:
        return kind.__bases__[1].forward if twin is None else _current(twin)

    def __set__(self, twin: _Twin, value: Any) -> None:
        given = value.fn if isinstance(value, Graphed) else None
        if isinstance(given, _Forward) and given.module.__dict__ is twin.__dict__:
            value = given.own  # as it was given out; the original runs it too, and is not graphed
        if value is None:
            twin.__dict__.pop("forward", None)
        else:
            twin.__dict__["forward"] = value

    def __delete__(self, twin: _Twin) -> None:
        if "forward" not in twin.__dict__:
            raise AttributeError("forward")
        del twin.__dict__["forward"]


class _Fabric(type):
    """Whose classes, when called, make the module that they are twins of: `twin[:2]` of an
    `nn.Sequential` makes another of its class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__bases__[1](*args, **kwargs)


class _Twin(nn.Module):
    """Mixed into the class of a module to make the class of its graphed twin."""

    __slots__ = ("_graphed",)
    _graphed: tuple[Graphed[..., Any]]
    """In a tuple: Dynamo of torch 2.11 binds what it reads from a slot as it would a method."""

    def __new__(cls) -> Any:
        """An original, for what fills it itself: `DataParallel` makes replicas so."""
        return object.__new__(cls.__bases__[1])

    def _get_name(self) -> str:
        return f"Graphed{type(self).__bases__[1].__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _looked_into(self) or _has_any_global_hook():
            if "_initialize_hook" in self.__dict__:
                _initialize(self, args, kwargs)
            return super().__call__(*args, **kwargs)
        return self._graphed[0](*args, **kwargs)

    @property
    def __graphed__(self) -> Graphed[..., Any]:
        return self._graphed[0]

    forward: Any = _CallPath()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        forward = cast(_Forward, self.__graphed__.fn)
        return graph_module(copy.deepcopy(forward.module, memo), self.__graphed__.options, None)

    def __copy__(self) -> nn.Module:
        forward = cast(_Forward, self.__graphed__.fn)
        return graph_module(copy.copy(forward.module), self.__graphed__.options, None)

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` compiles: the original; no recording is code."""
        module: Any = cast(_Forward, self.__graphed__.fn).module
        prepare = getattr(module, "__prepare_scriptable__", None)
        return module if prepare is None else prepare()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickled by a function of the standard library that returns its second argument.
        return typing.cast, (None, cast(_Forward, self.__graphed__.fn).module)


def graph_module(module: M, options: Options, pool: PoolManager | None) -> M:
    """The graphed twin of a module."""
    if isinstance(module, torch.jit.ScriptModule):
        fix = "graph the Python module it was scripted from, or `ol.graph(lambda x: scripted(x))`"
        raise ArgumentError("OL401", "a ScriptModule has no Python state to share", fix=fix)
    if isinstance(module, _Twin):
        raise ArgumentError("OL401", "this module is graphed already", fix="use it as it is")
    distributed.refuse_module(module)
    fast = graphed(_Forward(module, module.__dict__.get("forward")), options, pool, ("", module))
    twin = object.__new__(_twin_class(type(module)))
    twin.__dict__ = module.__dict__
    twin._graphed = (fast,)
    return cast(M, twin)


def _initialize(twin: _Twin, args: Any, kwargs: Any) -> None:
    """Do what the first hook of a lazy module does, to the original: it gets another class, which
    no twin can get."""
    original = cast(Any, twin.__graphed__.fn).module
    original._infer_parameters(original, args, kwargs)
    twin.__class__ = _twin_class(type(original))


def _current(twin: _Twin) -> Graphed[..., Any]:
    """The graphed form of the forward that the module has now."""
    fast, own = twin.__graphed__, twin.__dict__.get("forward")
    before = cast(_Forward, fast.fn)
    if before.own is not own:
        module = before.module
        fast = like(fast, _Forward(module, own))
        twin._graphed = (fast,)
    return fast


def _looked_into(module: nn.Module) -> object:
    """Whether a call is more than the forward of the class: hooks run around it, or the instance
    has a forward of its own. Then `nn.Module` calls it, 1 us slower."""
    state = module.__dict__
    return (  # no `bool` around it, which takes longer than to ask for `forward`
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
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
            members[name] = property(lambda twin, name=name: getattr(_current(twin), name))
    meta = _Fabric if type(kind) is type else type("_Fabric", (_Fabric, type(kind)), {})
    return cast(type[_Twin], meta(f"Graphed{kind.__name__}", (_Twin, kind), members))
