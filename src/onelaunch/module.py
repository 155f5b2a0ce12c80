"""Graphed modules: a twin is an instance of a subclass of the module's class, sharing its state."""

from __future__ import annotations

import copy
import functools
import typing
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from onelaunch.capture import distributed
from onelaunch.errors import ArgumentError
from onelaunch.runtime.graphed import Graphed, graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.split.forward import ModuleForward, has_forward

M = TypeVar("M", bound=nn.Module)

_FORWARDED = (
    *("capture", "recordings", "memory_bytes", "stats", "reset"),
    *("warm_up", "ready", "readiness", "metrics", "batcher"),
)


class _ForwardOfTwin:
    """The descriptor of a twin's `forward`: the graphed form of the module's forward. A data
    descriptor, so that it precedes an instance's own attribute."""

    def __get__(self, twin: _Twin | None, kind: type[_Twin]) -> Any:
        return kind.__bases__[1].forward if twin is None else _current(twin)

    def __set__(self, twin: _Twin, value: Any) -> None:
        given = value.fn if isinstance(value, Graphed) else None
        if isinstance(given, ModuleForward) and given.module.__dict__ is twin.__dict__:
            value = given.own  # a twin's own path: the original runs it too, and is not graphed
        if value is None:
            twin.__dict__.pop("forward", None)
        else:
            twin.__dict__["forward"] = value

    def __delete__(self, twin: _Twin) -> None:
        if "forward" not in twin.__dict__:
            raise AttributeError("forward")
        del twin.__dict__["forward"]


class _Forwarded:
    """The descriptor of a name of ours on a twin, such as `stats`. It is no data descriptor: the
    module's own attribute precedes it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, twin: _Twin | None, kind: type[_Twin]) -> Any:
        if twin is None:
            return self
        for held in ("_parameters", "_buffers", "_modules"):
            if self._name in twin.__dict__.get(held, ()):  # a scripted module has none
                return twin.__dict__[held][self._name]
        return getattr(_current(twin), self._name)


class _TwinMeta(type):
    """The metaclass of twins: a call of a twin's class makes a module of the original class, as
    `twin[:2]` of an `nn.Sequential` does."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__bases__[1](*args, **kwargs)


class _Twin(nn.Module):
    """The mixin that, with a module's class, makes the class of its graphed twin."""

    __slots__ = ("_graphed",)
    _graphed: tuple[Graphed[..., Any]]
    """The callable, in a tuple: Dynamo of torch 2.11 binds a value from a slot as if it were a
    method; 2.13 does not (pytorch#182742)."""

    def __new__(cls) -> Any:
        """Return an empty module of the original class, for replicas of `DataParallel`."""
        return object.__new__(cls.__bases__[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__
        if (  # it is more than the class's forward: `nn.Module` calls it, 1 us slower
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or _has_any_global_hook()
        ):
            if "_initialize_hook" in state:
                _initialize(self, args, kwargs)
            return super().__call__(*args, **kwargs)
        fast: Any = self._graphed[0]
        if fast.fn.own is not None:  # the instance had a forward of its own
            fast = _current(self)
        return fast(*args, **kwargs)

    @property
    def __graphed__(self) -> Graphed[..., Any]:
        return self._graphed[0]

    forward: Any = _ForwardOfTwin()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return graph_module(copy.deepcopy(_original(self), memo), self.__graphed__.options, None)

    def __copy__(self) -> nn.Module:
        return graph_module(copy.copy(_original(self)), self.__graphed__.options, None)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the original for `torch.jit.script` to compile: a recording is no code."""
        module: Any = _original(self)
        prepare = getattr(module, "__prepare_scriptable__", None)
        return module if prepare is None else prepare()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickled by a function of the standard library that returns its second argument.
        return typing.cast, (None, _original(self))


def graph_module(module: M, options: Options, pool: PoolManager | None) -> M:
    if isinstance(module, _Twin):
        raise ArgumentError("OL401", "this module is graphed already", fix="use it as it is")
    kind: type[nn.Module] = type(module)
    if not has_forward(module) and kind.__call__ is not nn.Module.__call__:
        name = kind.__name__
        raise ArgumentError(
            "OL401",
            f"{name} has no `forward`: calls go to the `__call__` of its own",
            fix="graph a function that calls it, `ol.graph(lambda *args: module(*args))`, or the "
            "module inside of it",
        )
    distributed.refuse_module(module)
    forward = ModuleForward(module, module.__dict__.get("forward"))
    fast = graphed(forward, options, pool, ("", module))
    twin = object.__new__(_twin_class(type(module)))
    object.__setattr__(twin, "__dict__", module.__dict__)
    object.__setattr__(twin, "_graphed", (fast,))
    return cast(M, twin)


def _initialize(twin: _Twin, args: Any, kwargs: Any) -> None:
    """Run the first hook of a lazy module on the original: the hook changes its class."""
    original: Any = _original(twin)
    original._infer_parameters(original, args, kwargs)
    _set_class(twin, type(original))


def _original(twin: _Twin) -> nn.Module:
    return cast(ModuleForward, twin.__graphed__.fn).module


def _class(twin: _Twin) -> type[nn.Module]:
    return type(_original(twin))


def _set_class(twin: _Twin, kind: type[nn.Module]) -> None:
    """Give the original another class, as a parametrization does, and the twin its twin class."""
    original: Any = _original(twin)
    original.__class__ = kind
    object.__dict__["__class__"].__set__(twin, _twin_class(kind))


def _current(twin: _Twin) -> Graphed[..., Any]:
    """Return the graphed form of the module's present forward."""
    fast, own = twin.__graphed__, twin.__dict__.get("forward")
    before = cast(ModuleForward, fast.fn)
    if before.own is not own:
        module = before.module
        forward = ModuleForward(module, own)
        fast = type(fast)(forward, fast.options, fast._pool, fast._callee.root)
        twin._graphed = (fast,)
    return fast


@functools.cache
def _twin_class(kind: type[nn.Module]) -> type[_Twin]:
    """Return the class of the twins of a class. It keeps the names that the class uses, and the
    class's own name: libraries choose by it, and write it to files."""
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": (),
        "__class__": property(_class, _set_class),
    }
    for name in _FORWARDED:
        if not hasattr(kind, name):
            members[name] = _Forwarded(name)
    if kind.__call__ is not nn.Module.__call__:  # as gpytorch's: it runs around the launch
        members["__call__"] = kind.__call__
    meta = _TwinMeta if type(kind) is type else type("_TwinMeta", (_TwinMeta, type(kind)), {})
    return cast(type[_Twin], meta(kind.__name__, (_Twin, kind), members))
