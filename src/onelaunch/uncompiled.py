"""Code of ours that Dynamo leaves alone. Dynamo is imported when someone compiles, never by us."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_C: Any = torch._C
_eval_frame: Any = _C._dynamo.eval_frame
_PACKAGES = (
    *("autograd", "call_events", "capture", "driver", "frames", "gc_pause", "optimizers", "replay"),
    *("source", "state", "testing", "trace_names", "unwinding", "watch"),
)


def leave_alone(function: Any, *, calls: bool = True) -> None:
    """Have Dynamo compile neither a function nor, with `calls`, the functions that it calls."""
    action = _eval_frame._FrameAction
    of_calls = action.SKIP if calls else action.DEFAULT
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, of_calls)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)


@functools.cache
def leave_ours_alone() -> None:
    """Have Dynamo compile none of our code between the frames of a compiled function."""
    once_imported("torch._dynamo", _add_rules)


def _add_rules() -> None:
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    *most, last = _PACKAGES
    rules.SKIP_DIRS += [os.path.join(os.path.dirname(__file__), package) for package in most]
    rules.add(f"onelaunch.{last}")  # makes a pattern of them all, in 2 ms


def once_imported(name: str, then: Callable[[], object]) -> None:
    """Call a function now, or at the end of a module's import in any thread."""
    watch = _ImportWatch(name, then)
    sys.meta_path.insert(0, watch)
    if name in sys.modules:
        importlib.import_module(name)  # waits for another thread that imports it
        watch.imported()


class _ImportWatch:
    """A finder of one module that calls a function at the end of the module's import."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for watch in list(sys.meta_path):
                    if isinstance(watch, _ImportWatch) and watch._name == name:
                        watch.imported()

            loader.exec_module = exec_module
        return spec

    def imported(self) -> None:
        """End the watch, and call the function if it was not called yet."""
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another thread was here
            return
        self._then()
