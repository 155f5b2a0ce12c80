"""Function modes of ours, which torch's own code does not notice. They are on in backwards and in
the functions of tensor classes."""

from __future__ import annotations

import inspect
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from onelaunch.uncompiled import leave_alone
from onelaunch.unwinding import FunctionMode, function_modes

_C: Any = torch._C
_Variable: Any = Variable
_TORCH_HANDLERS: Any = (Tensor.__torch_function__.__func__, _C._disabled_torch_function_impl)
_PLAIN = frozenset({(), (Tensor,), (Parameter,), (Tensor, Parameter), (Parameter, Tensor)})
_BACKWARDS: frozenset[Any] = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


class UnnoticedMode(FunctionMode):
    """A function mode that `torch.overrides.has_torch_function` does not notice. Torch turns a mode
    off while the mode handles a function. That would exclude everything in a backward: hooks, an
    `autograd.Function`, the recomputation of a checkpoint. It would exclude the
    `__torch_function__` of a class too. This mode is on again there."""

    concerns: frozenset[Any]  # the functions of torch's that it does not just run

    def __enter__(self) -> Self:
        _unnoticed.begin()
        super().__enter__()
        _join()
        return self

    def __exit__(self, *raised: Any) -> None:
        _part()
        super().__exit__(*raised)
        _unnoticed.end()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        types = () if types in _PLAIN else _overriding(types)
        if not types and func not in _BACKWARDS:
            if func in self.concerns:
                return self.function(func, types, args, kwargs)
            return func(*args, **kwargs)
        try:
            _off.modes.append(self)
            if func in self.concerns:
                return self.function(func, types, args, kwargs)
            return call(func, types, args, kwargs)
        finally:
            if _off.modes:  # a Ctrl-C may come first
                _off.modes.pop()

    @abstractmethod
    def function(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one of the functions that concern this mode, by `call`, and return its result."""


class _Joined(FunctionMode):
    """Several modes of ours in the place of one: each costs 8 us a function, and few concern any.
    `modes`: the outermost first."""

    def __init__(self, modes: Sequence[UnnoticedMode]) -> None:
        super().__init__()
        self.modes = modes
        sets = [mode.concerns for mode in modes]
        # `CountedPlaces` has a set of every function, which a union would take for empty.
        every = next((concerns for concerns in sets if type(concerns) is not frozenset), None)
        self._concerns = _BACKWARDS.union(*sets) if every is None else every

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._concerns or (types not in _PLAIN and _overriding(types)):
            with _on(self.modes):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def joined(mode: object) -> Sequence[UnnoticedMode]:
    """Return the modes of ours that a mode on the stack stands for; none if it is another's."""
    if isinstance(mode, _Joined):
        return mode.modes
    return [mode] if isinstance(mode, UnnoticedMode) else []


def _join() -> None:
    """Join the two innermost modes of this thread, if both are ours."""
    outer, inner = ([], *map(joined, function_modes()[-2:]))[-2:]
    if outer and inner:
        _C._pop_torch_function_stack()
        _C._pop_torch_function_stack()
        _C._push_on_torch_function_stack(_Joined([*outer, *inner]))


def _part() -> None:
    """Put joined modes on the stack of this thread one by one, if they are the innermost."""
    for mode in function_modes()[-1:]:
        if isinstance(mode, _Joined):
            _C._pop_torch_function_stack()
            for part in mode.modes:
                _C._push_on_torch_function_stack(part)


def call(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch's from a mode that handles it. The modes are on in the
    `__torch_function__` of the classes of its arguments, `types`."""
    if types and not _C._len_torch_function_stack():
        with _on_again():
            for kind in types:
                result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
    return func(*args, **kwargs)


def _overriding(types: Any) -> Any:
    """Return the classes of arguments if torch asks any of them to handle a function. Torch also
    passes `Tensor`, and classes that are off or handle functions in instances alone."""
    if not _C._is_torch_function_enabled():
        return ()
    methods = [getattr(kind, "__torch_function__", None) for kind in types]
    own = [f for f in methods if getattr(f, "__func__", f) not in _TORCH_HANDLERS]
    return types if own and all(map(inspect.ismethod, own)) else ()


class _Off(threading.local):
    """The modes that are off in a thread because they handle a function."""

    def __init__(self) -> None:
        self.modes: list[UnnoticedMode] = []


_off = _Off()


@contextmanager
def _on_again() -> Generator[None]:
    off, _off.modes = _off.modes, []
    try:
        with _on(off[::-1]):
            yield
    finally:
        _off.modes = off


@contextmanager
def _on(modes: Sequence[UnnoticedMode]) -> Generator[None]:
    for mode in modes:
        _C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            _C._pop_torch_function_stack()


class EngineSubstitute:
    """A substitute for autograd's engine, which passes on what it does not change."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class _ModeKeepingEngine(EngineSubstitute):
    """An engine that turns the modes on again around a backward. The engine's threads get the modes
    of the thread that calls it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with _on_again():
            return self.engine.run_backward(*args, **kwargs)


class _UnnoticedModes:
    """Substitutes while any unnoticed mode is on: for `torch.overrides.has_torch_function`, which
    then does not count the modes, and for the engine. `nn.TransformerEncoder` and
    `nn.MultiheadAttention` use fused operations, with other results, only if this function finds
    nothing. So they decide on packing sequences, which zeroes masked elements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._off = 0  # as many of the active modes are off, around compiled code
        self._asked = torch.overrides.has_torch_function
        self._answers = False
        self._engine = _Variable._execution_engine

    def begin(self) -> None:
        with self._lock:
            self._active += 1
            self._switch()
            if self._active == 1:
                self._engine = _Variable._execution_engine
                _Variable._execution_engine = _ModeKeepingEngine(self._engine)

    def end(self) -> None:
        with self._lock:
            self._active -= 1
            self._switch()
            if not self._active:
                _Variable._execution_engine = self._engine

    @contextmanager
    def torch_asked(self) -> Generator[None]:
        """Put torch's own function back while the modes are off. Dynamo guards which it is."""
        with self._lock:
            before, self._off = self._off, self._active
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                self._off = before
                self._switch()

    def _switch(self) -> None:
        """Put the substitute there, or torch's function, as the modes say."""
        answers = self._active > self._off
        if answers and not self._answers:
            self._asked = torch.overrides.has_torch_function
            torch.overrides.has_torch_function = self._answer
        elif self._answers and not answers:
            torch.overrides.has_torch_function = self._asked
        self._answers = answers

    def wrap_engine(self, wrap: Callable[[Any], Any]) -> None:
        """Put a substitute for the engine below this one, for the process."""
        with self._lock:
            if self._active:
                self._engine = _Variable._execution_engine.engine = wrap(self._engine)
            else:
                _Variable._execution_engine = wrap(_Variable._execution_engine)

    def _answer(self, relevant_args: Any) -> bool:
        modes = function_modes()
        if not all(map(joined, modes)):
            return self._asked(relevant_args)  # the callable has a mode of its own
        for _ in modes:
            _C._pop_torch_function_stack()
        try:
            return self._asked(relevant_args)
        finally:
            for mode in modes:
                _C._push_on_torch_function_stack(mode)


# Dynamo sets Python's random state before it skips it itself.
leave_alone(UnnoticedMode.__torch_function__, calls=False)
leave_alone(_Joined.__torch_function__, calls=False)
_unnoticed = _UnnoticedModes()
wrap_engine = _unnoticed.wrap_engine
torch_asked = _unnoticed.torch_asked
