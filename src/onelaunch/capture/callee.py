"""The callable that is graphed, and where the state that it reaches begins."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from onelaunch.call.ambient import default_device
from onelaunch.call.tree import Flat, call_constants, flatten, is_plain
from onelaunch.driver.protocol import Driver
from onelaunch.driver.random_state import is_profiled
from onelaunch.driver.select import driver_of, select
from onelaunch.frames.reads import Reads
from onelaunch.frames.watch import FrameWatch
from onelaunch.state.snapshot import ReachableState
from onelaunch.state.walk import Change, StateWalk, reads_more

R = TypeVar("R")


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
        self.reads: Reads | None = None
        """What it was seen to read."""
        self._seen: dict[Hashable, torch.device] = {}
        """Where calls worked that reach no tensor there, by what they were given."""

    def roots(self, flat: Flat) -> list[tuple[str, object]]:
        """Where the state that a call reaches begins, named."""
        objects = [
            (path, c.value) for path, c in call_constants(flat.tree) if not is_plain(c.value)
        ]
        return [self.root, *objects]

    def reached(self, flat: Flat) -> ReachableState:
        """The state that a call reaches."""
        return ReachableState(self.roots(flat), self.reads)

    def watched(self, run: Callable[[], R]) -> Callable[[], R]:
        """A run of the callable after which it is known what it reads."""

        def watched() -> R:
            watch = self.watch()
            with nullcontext() if watch is None else watch.watching():
                result = run()
            self.saw(watch)
            return result

        return watched

    def watch(self) -> FrameWatch | None:
        """What is to see a run of the callable; None where a profiler has the hook for it."""
        if is_profiled():
            return None
        return FrameWatch(Reads() if self.reads is None else self.reads.copy())

    def saw(self, watch: FrameWatch | None) -> None:
        """After a run. Where nothing saw it, all that the callable reaches counts as read."""
        self.reads = None if watch is None else watch.reads

    def read_more(
        self, reached: ReachableState, before: StateWalk, found: Sequence[Change]
    ) -> bool:
        """Whether a capture has read what no run before it did; `found` is what it changed."""
        more = reads_more(reached.roots, self.reads, before, found)
        if not more and before.reads is not None:
            self.reads = before.reads  # so that guards of several recordings agree
        return more

    def where(
        self, flat: Flat, reached: ReachableState | None = None
    ) -> tuple[Driver, torch.device]:
        """The driver and device: an accelerator's if any argument, parameter or buffer is there, or
        the last run of such a call worked there; see `learn`."""
        driver, device = select(flat.tensors)
        if device.type == "cpu":
            found = (reached or self.reached(flat)).walk()
            driver, device = select(t for _, t in found.tensors())
        if device.type == "cpu" and self._seen:
            device = self._seen.get(_given(flat), device)
            driver = driver_of(device.type)
        return driver, device

    def learn(
        self, flat: Flat, taken: torch.device, result: object, left: ReachableState | None = None
    ) -> bool:
        """See where a run has worked that reached no tensor of an accelerator: where its results
        are, and what it has `left`. Whether that is elsewhere than it was `taken` to work."""
        key = _given(flat)
        if taken != _CPU and key not in self._seen:
            return False  # its arguments or state have told
        tensors = flatten(result, objects=True).tensors
        state = [] if left is None else [t for _, t in left.walk().tensors()]
        _, device = select([*tensors, *state])
        self._seen.pop(key, None)
        if device != _CPU:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = device
        return device != taken

    def on(self, driver: Driver) -> Callable[..., Any]:
        """What runs in warm-up and capture: the callable, or Inductor's version of it."""
        if not (self.compile and driver.records_compiled):
            return self.fn
        if self._compiled is None:
            self._compiled = _compiled(self.fn, self.compile, self.dynamic)
        return self._compiled


_CPU = torch.device("cpu")
_MOST_SEEN = 256


def _given(flat: Flat) -> Hashable:
    """What tells calls apart that reach no tensor of an accelerator."""
    return flat.tree, default_device()


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
