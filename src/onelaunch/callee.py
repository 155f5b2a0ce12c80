"""The callable that is graphed, and where the state that it reaches begins."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.before import Reached
from onelaunch.driver.driver import Driver
from onelaunch.driver.select import select
from onelaunch.tree import Flat, call_constants, is_plain


class Callee:
    """A callable, as it is called and as it is captured.

    Args:
        fn: what the caller calls.
        compile: whether Inductor's version of it is captured; see `_compiled`.
        dynamic: whether one such version serves all sizes.
        root: what state is sought from, and its name: the module whose forward `fn` is, or `fn`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        compile: bool | str,
        dynamic: bool,
        root: tuple[str, object] | None,
    ) -> None:
        self.fn = fn
        self.compile = compile
        self.dynamic = dynamic
        self.root = root or (getattr(fn, "__name__", "callable"), fn)
        self._compiled: Callable[..., Any] | None = None

    def roots(self, flat: Flat) -> list[tuple[str, object]]:
        """Where the state that a call reaches begins, named."""
        objects = [
            (path, c.value) for path, c in call_constants(flat.tree) if not is_plain(c.value)
        ]
        return [self.root, *objects]

    def reached(self, flat: Flat) -> Reached:
        """The state that a call reaches."""
        return Reached(self.roots(flat))

    def where(self, flat: Flat, reached: Reached | None = None) -> tuple[Driver, torch.device]:
        """The driver and device: an accelerator's if any argument, parameter or buffer is there."""
        driver, device = select(flat.tensors)
        if device.type == "cpu":
            found = (reached or self.reached(flat)).walk()
            driver, device = select(t for _, t in found.tensors())
        return driver, device

    def on(self, driver: Driver) -> Callable[..., Any]:
        """What runs in warm-up and capture: the callable, or Inductor's version of it."""
        if not self.compile or driver.name != "cuda":
            return self.fn
        if self._compiled is None:
            self._compiled = _compiled(self.fn, self.compile, self.dynamic)
        return self._compiled


_COMPILES = 1 << 16
"""How often Dynamo may compile one function. After the eighth it would run it eagerly from then on,
and not say so; how many recordings there are is bounded by options of our own."""


def _compiled(fn: Callable[..., Any], mode: bool | str, dynamic: bool) -> Callable[..., Any]:
    """`fn` compiled by Inductor, its own CUDA graphs off: the recording takes their place.

    Args:
        mode: True or ``"default"``, or ``"max-autotune"`` (slow to build).
        dynamic: compile it for all sizes at once (but 1, which Inductor treats apart), instead of
            for each.
    """
    if mode == "max-autotune":
        compiled = torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=dynamic)
    else:
        compiled = torch.compile(fn, options={"triton.cudagraphs": False}, dynamic=dynamic)
    config: Any = importlib.import_module("torch._dynamo").config

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(recompile_limit=_COMPILES, accumulated_recompile_limit=_COMPILES):
            return compiled(*args, **kwargs)

    return run
