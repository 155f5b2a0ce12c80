"""One eager run, watched: every ATen operation, and every call of torch that a listener asks for.

Nothing is refused and nothing changes what the callable computes. It works on any machine: where
there is no GPU, the tensors of the CPU stand for the device's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from onelaunch.autograd.graph_walk import is_freed
from onelaunch.call.tree import flatten
from onelaunch.driver.aten import Operator
from onelaunch.driver.function_modes import UnnoticedMode, call
from onelaunch.finding import Finding
from onelaunch.tools.bench.workload import Workload, parts
from onelaunch.tools.doctor.place import here
from onelaunch.tools.doctor.spot import Spot
from onelaunch.watch.operations import HigherOrder, Watching


class RanOperation(NamedTuple):
    """One ATen operation of the run. Do not keep its tensors: the run would need their memory.

    Attributes:
        op: the operator.
        result: what it gave.
        spot: finds the place, which costs some 10 us.
    """

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    spot: Callable[[], Spot]


class FunctionCall(NamedTuple):
    """One call of a function of torch's, before it runs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spot: Callable[[], Spot]


class Listener:
    """A part of the doctor that makes findings of a run.

    Attributes:
        concerns: the functions of torch's whose calls it wants to see.
    """

    concerns: frozenset[Any] = frozenset()

    def begin(self, workload: Workload, spot: Callable[[], Spot]) -> AbstractContextManager[object]:
        """See the workload before the run; return a context for the run.

        Args:
            spot: finds the line that runs at the time.
        """
        return nullcontext()

    def operation(self, event: RanOperation) -> None:
        """See an operation, after it ran."""

    def function(self, event: FunctionCall) -> None:
        """See a call of one of the functions that concern it, before it runs."""

    def end(self, result: Any) -> None:
        """See the result of the run."""

    def findings(self) -> list[Finding]:
        """Return the findings of the run."""
        return []


def watch(workload: Workload, listeners: Sequence[Listener], backward: bool) -> None:
    """Run a workload once, with listeners.

    Args:
        backward: whether a backward of its results follows, as in training.

    Raises:
        HigherOrder: it calls an operator that compiles functions, which modes are in the way of.
        Exception: the callable's own.
    """
    with ExitStack() as contexts:
        for listener in listeners:
            contexts.enter_context(listener.begin(workload, _spot))
        contexts.enter_context(_Functions(listeners))
        contexts.enter_context(_Operations(listeners))
        try:
            result = run_watched(workload, backward)
        except HigherOrder as error:
            error.mend_dynamo()
            raise
    for listener in listeners:
        listener.end(result)


def run_watched(workload: Workload, backward: bool) -> Any:
    """Run the callable; the frames below this one are its own."""
    result = workload()
    if backward:
        run_backward(result)
    return result


def trains(workload: Workload) -> bool:
    """Return whether a workload is the forward of a training step: gradients are wanted, and a
    module behind the callable is in train mode."""
    modules = [part for part in parts(workload.fn) if isinstance(part, nn.Module)]
    learns = any(p.requires_grad for p in workload.parameters())
    return torch.is_grad_enabled() and learns and any(module.training for module in modules)


def run_backward(result: Any) -> None:
    """Run a backward of the sum of all results that require grad. Results whose graph was used up,
    by a backward inside the callable, are left out."""
    wanted = [t for t in flatten(result).tensors if t.requires_grad and not is_freed(t)]
    if wanted:
        torch.autograd.backward([t.sum().abs() if t.is_complex() else t.sum() for t in wanted])


_OUTERMOST: CodeType = run_watched.__code__
_spot = functools.partial(here, _OUTERMOST)


class _Operations(Watching):
    """The mode that hands every operation to the listeners, composite ones in parts."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        super().__init__()
        self._listeners = listeners

    def operation(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op.func(*args, **kwargs)
        event = RanOperation(op, args, kwargs, result, _spot)
        for listener in self._listeners:
            listener.operation(event)
        return result


class _Functions(UnnoticedMode):
    """The mode that hands calls of torch's functions to the listeners that they concern."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        super().__init__()
        self._by_function: dict[Any, list[Listener]] = {}
        for listener in listeners:
            for function in listener.concerns:
                self._by_function.setdefault(function, []).append(listener)
        self.concerns = frozenset(self._by_function)

    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        event = FunctionCall(func, args, kwargs, _spot)
        for listener in self._by_function[func]:
            listener.function(event)
        return call(func, types, args, kwargs)
