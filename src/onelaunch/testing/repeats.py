"""Operators on the tape: how a call is run in a capture, and repeated at fixed addresses."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, leaves, mapped, tensors

Step = Callable[[], object]

distributed: Any = getattr(torch._C, "_distributed_c10d", None)
"""Torch's bindings of collectives; a build may lack them, and then has no collectives either."""


def wraps(func: torch._ops.OpOverload) -> bool:
    """Tell whether an overload gives a tensor of another class over the argument's memory."""
    return func.name() == "_c10d_functional::_wrap_tensor_autograd"


def run(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator. The wait for its result adds no operation to a recording."""
    result = op.func(*args, **kwargs)
    # Gloo's reduce-scatter copies its result, by operations of torch, in each wait for it.
    if not (op.collective and "reduce_scatter" in op.name):
        return result
    wait(result)
    done = distributed.FakeWork().boxed()
    return mapped(result, lambda v: done if isinstance(v, torch.ScriptObject) else v)


def bind(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Make a function that repeats a call by the operator's C++, and gives its results."""
    call: Callable[..., Any] = op.func._op
    if op.collective:
        return Collective(call, args, kwargs)
    functional = op.func.namespace == "_c10d_functional"
    return functools.partial(_waiting(call) if functional else call, *args, **kwargs)


class Collective:
    """A call that goes to other processes, and waits for its end: its results are read next. It
    holds the process group, whose threads must have ended before the interpreter does."""

    alive: ClassVar[weakref.WeakSet[Collective]] = weakref.WeakSet()

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._call: tuple[Any, ...] = (call, args, kwargs)
        self.alive.add(self)

    def __call__(self) -> Any:
        call, args, kwargs = self._call
        result = call(*args, **kwargs)
        wait(result)
        return result

    @classmethod
    def release(cls) -> None:
        """Let go of every process group; no call can be repeated after that."""
        for step in list(cls.alive):
            step._call = ()


atexit.register(Collective.release)


def wait(result: Any) -> None:
    """Wait for the results of a collective."""
    for value in leaves(result):
        if isinstance(value, torch.ScriptObject):
            distributed.Work.unbox(value).wait()


def _waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Add to a functional collective the wait for its results, which are copied at once."""

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for t in tensors(result):
            torch.ops._c10d_functional.wait_tensor(t)
        return result

    return called


def storage_bytes(t: Tensor) -> Tensor:
    """View all bytes of the storage of host tensor `t`, as uint8 of shape (n,)."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(t.untyped_storage())  # pyright: ignore
