"""A copy of the user's callable, as the steps rewrite it, and the callable that comes out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onelaunch.api import graph
from onelaunch.tools.bench.workload import Workload, parts
from onelaunch.tools.doctor.run import watch
from onelaunch.tools.doctor.slow.listener import Slow
from onelaunch.tools.doctor.slow.record import Record

Change = Callable[[Tensor], Tensor]
Compiled = Literal["default", "max-autotune"]
WARMUP = 3


class NotPossible(Exception):
    """The reason why a step cannot be taken on this callable or machine."""


@dataclass(frozen=True)
class Setting:
    """A setting of the process, in force during the calls alone."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    value: Any


NO_GRAD = Setting(torch.is_grad_enabled, torch._C._set_grad_enabled, False)


@dataclass
class Subject:
    """A copy of a callable with its arguments. Steps change the modules behind it in place, and
    note here the settings of its calls.

    Attributes:
        workload: the callable and its arguments, copies of the user's.
        before: changes of the arguments' tensors.
        after: changes of the results' tensors.
        autocast: the dtype of autocast around the callable, or None.
        inference: True to call it in inference mode.
        settings: of the process, during the calls.
        compiled: the mode of Inductor, or None.
        graphed: True to make it one launch.
        shared: True if modules of the user's could not be copied, and so may not be changed.
    """

    workload: Workload
    before: list[Change] = field(default_factory=list)
    after: list[Change] = field(default_factory=list)
    autocast: torch.dtype | None = None
    inference: bool = False
    settings: list[Setting] = field(default_factory=list)
    compiled: Compiled | None = None
    graphed: bool = False
    shared: bool = False

    @property
    def device(self) -> torch.device:
        return self.workload.device

    @property
    def roots(self) -> list[nn.Module]:
        """The modules behind the callable: itself, or those that a function or object holds.

        Raises:
            NotPossible: they are the user's own, since they cannot be copied.
        """
        if self.shared:
            raise NotPossible("a module behind the callable cannot be copied")
        return modules_behind(self.workload)

    def modules(self) -> list[nn.Module]:
        """List all modules behind the callable, each once.

        Raises:
            NotPossible: there are none.
        """
        found = {id(m): m for root in self.roots for m in root.modules()}
        if not found:
            raise NotPossible("there is no module behind the callable")
        return list(found.values())

    def by_path(self) -> dict[str, nn.Module]:
        """Return the modules by their paths, without those that two roots have."""
        found: dict[str, list[nn.Module]] = {}
        for root in self.roots:
            for path, module in root.named_modules():
                found.setdefault(path or type(module).__name__, []).append(module)
        return {path: same[0] for path, same in found.items() if len(same) == 1}

    def follow(self) -> Record:
        """Run a copy once, and see which layer feeds which."""
        listener = Slow()
        with torch.no_grad():
            watch(self.workload.copy(), [listener], backward=False)
        return listener.record

    def put(self, old: nn.Module, new: nn.Module) -> None:
        """Let a module take the place of another wherever that is a child.

        Raises:
            NotPossible: it is the callable itself, or a function holds it.
        """
        if any(root is old for root in self.roots):
            raise NotPossible(f"{type(old).__name__} is the callable itself")
        for module in self.modules():
            for name, child in module._modules.items():
                if child is old:
                    module._modules[name] = new

    def call(self) -> Callable[..., Any]:
        """Build the callable that comes out. It compiles and captures in its first calls."""
        fn = self.workload.fn
        if self.before or self.after or self.autocast is not None:
            fn = Edges(self)
        settings = list(self.settings)
        if self.graphed:
            compiled: Any = {None: False, "default": True}.get(self.compiled, self.compiled)
            fn = graph(fn, compile=compiled, warmup=WARMUP, on_refusal="raise")
            # A recording is made for a grad mode: one and the same, whatever the caller's is.
            settings += [NO_GRAD] if self.inference else []
        elif self.compiled is not None:
            fn = torch.compile(fn, mode=_modes[self.compiled])
        inference = self.inference and not self.graphed
        return Within(fn, tuple(settings), inference) if settings or inference else fn


_modes: dict[Compiled, str | None] = {
    "default": None,
    # The mode without these words has CUDA graphs of its own, whose results the next call
    # overwrites.
    "max-autotune": "max-autotune-no-cudagraphs",
}


class Edges(nn.Module):
    """A callable with changes of its arguments and results; a module, for the compilers' sake."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.fn = subject.workload.fn
        self.before, self.after = tuple(subject.before), tuple(subject.after)
        self.autocast, self.device_type = subject.autocast, subject.device.type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before:
            args, kwargs = pytree.tree_map_only(Tensor, self._enter, (args, kwargs))
        if self.autocast is None:
            modes = nullcontext()
        else:
            modes = torch.autocast(self.device_type, self.autocast)
        with modes:
            result = self.fn(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._leave, result) if self.after else result

    def _enter(self, t: Tensor) -> Tensor:
        for change in self.before:
            t = change(t)
        return t

    def _leave(self, t: Tensor) -> Tensor:
        for change in self.after:
            t = change(t)
        return t


class Within:
    """A callable within modes and settings, which are put back after each call."""

    def __init__(
        self, fn: Callable[..., Any], settings: tuple[Setting, ...], inference: bool
    ) -> None:
        self.fn = fn
        self._settings = settings
        self._inference = inference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inference:
            with torch.inference_mode():
                return self._set(args, kwargs)
        return self._set(args, kwargs)

    def _set(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found: list[tuple[Setting, Any]] = []
        try:
            for setting in self._settings:
                found.append((setting, setting.get()))
                setting.set(setting.value)
            return self.fn(*args, **kwargs)
        finally:
            for setting, value in reversed(found):
                setting.set(value)


def modules_behind(workload: Workload) -> list[nn.Module]:
    """List the modules that a callable is or holds."""
    return [part for part in parts(workload.fn) if isinstance(part, nn.Module)]


def subject_of(workload: Workload) -> Subject:
    """Copy a workload for the steps to change; the user's is only read."""
    copied = replace(workload, share_parameters=False).copy()
    held = _held(workload)
    return Subject(copied, shared=bool(held & _held(copied)))


def _held(workload: Workload) -> set[int]:
    """Return the identities of the modules and parameters behind a callable."""
    modules = [m for root in modules_behind(workload) for m in root.modules()]
    return {id(held) for m in modules for held in (m, *m.parameters(recurse=False))}
