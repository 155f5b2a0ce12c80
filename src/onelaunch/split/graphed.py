"""A module's forward that runs in pieces where it cannot be captured whole."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from onelaunch.call.tree import Flat
from onelaunch.capture.recording import Recording
from onelaunch.driver.protocol import Driver
from onelaunch.errors import CaptureError
from onelaunch.replay.call_path import MISS, Miss
from onelaunch.runtime.attempt import AS_IT_IS, Eager, Phase, SignatureState, Strategy
from onelaunch.runtime.graphed import Graphed
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager, User
from onelaunch.runtime.stats import GraphStats, SplitModule
from onelaunch.source import user_line
from onelaunch.split.forward import ModuleForward
from onelaunch.split.message import message
from onelaunch.split.pieces import in_place, members, own_forward

P = ParamSpec("P")
R = TypeVar("R")

_UNSETTLED = 32
"""The calls in pieces after which they are told of, even if some of these are never launched."""

_OPENING = 4
"""The first runs in pieces, each of which looks one level deeper for modules that are called."""


class SplitGraphed(Graphed[P, R]):
    """The forward of a module, graphed whole where it can be captured. Made by `graph`.

    A signature that is refused runs as it is, and meanwhile the forwards of the module's children
    are replaced by graphed ones, which are split in turn where they are refused.

    Args:
        tree: the pieces that it belongs to, if it is one.
    """

    def __init__(
        self,
        fn: ModuleForward,
        options: Options,
        pool: PoolManager | None = None,
        root: tuple[str, object] | None = None,
        tree: _Tree | None = None,
    ) -> None:
        super().__init__(fn, options, pool, root)
        self._forward = fn
        self._refusals: dict[tuple[str, str | None], SplitModule] = {}
        """The refusals of signatures, by code and line."""
        self._pieces: dict[int, SplitGraphed[..., Any]] = {}
        """id of a child -> its graphed forward, as of the last run in pieces."""
        self._tree = tree or _Tree(self)
        self._runs = 0
        """The first runs in pieces, in which `_open` looks for more of them."""
        self._opened: dict[int, nn.Module] = {}
        """id -> a child that is not called, whose children are."""

    # What a refusal leads to.

    def _phase(
        self, driver: Driver, device: torch.device, flat: Flat, strategy: Strategy = AS_IT_IS
    ) -> Phase:
        phase = super()._phase(driver, device, flat, strategy)
        if isinstance(phase, Eager) and phase.code == "OL302":
            self._split(CaptureError("OL302", phase.why))
            return Eager()
        return phase

    def _refused(self, signature: SignatureState, error: CaptureError) -> Miss:
        return self._ungraphed(signature, error)

    def _ungraphed(self, signature: SignatureState, why: CaptureError) -> Miss:
        signature.eager = why.code
        self._split(why)
        return MISS

    def _split(self, why: CaptureError) -> None:
        where = why.where or user_line()
        refusal = SplitModule(self._name, why.code, why.what, where)
        self._refusals.setdefault((why.code, where), refusal)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if not self._refusals:
            return super()._as_it_is(args, kwargs)
        found = self._replacements()
        watched = self._watched() if self._tree.watches(self) else nullcontext()
        with watched, in_place(found):
            result = super()._as_it_is(args, kwargs)
        if self._runs < _OPENING:
            self._open(found)
        return result

    def _open(self, found: Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]) -> None:
        """Look for children that the module does not call but reaches through, as in
        `self.encoder.layers[0](x)`: their own children are graphed then."""
        self._runs += 1
        called = {id(module) for module, piece in found if piece._signatures or piece._refusals}
        self._opened |= {id(module): module for module, _ in found if id(module) not in called}
        if self._runs == _OPENING:
            self._opened = {
                key: module
                for key, module in self._opened.items()
                if key not in called and any(id(below) in called for below in module.modules())
            }

    def _replacements(self) -> Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]:
        """Return the modules to replace the forwards of, with their graphed ones."""
        found = [
            (child, self._piece(child, name))
            for name, child in members(self._forward.module, self._name, self._opened)
        ]
        self._pieces = {id(child): piece for child, piece in found}
        return found

    def _piece(self, module: nn.Module, name: str) -> SplitGraphed[..., Any]:
        """Return the graphed form of a module's present forward, which its other users share."""
        last = self._pieces.get(id(module))
        if last is not None and last._forward.is_of(module, module.__dict__.get("forward")):
            return last
        own, tree = own_forward(module), self._tree
        with tree.lock:
            known = tree.pieces.get(id(module))
            if known is None or not known._forward.is_of(module, own):
                forward = ModuleForward(module, own, name)
                known = SplitGraphed(forward, self.options, self._pool, ("", module), tree)
                tree.pieces[id(module)] = known
            return known

    @contextmanager
    def _watched(self) -> Generator[None]:
        """Measure a run in pieces, and tell of the first in which nothing warmed up or was
        captured."""
        before, started = self.stats(), time.perf_counter()
        yield
        host_us = (time.perf_counter() - started) * 1e6
        after, tree = self.stats(), self._tree
        tree.calls += 1
        settled = (after.captures, after.warmup_calls) == (before.captures, before.warmup_calls)
        if settled or tree.calls >= _UNSETTLED:
            tree.told = True
            tree.launches, tree.host_us = after.replays - before.replays, host_us
            self._warn("OL311", message(self._name, self.stats(), settled))

    @property
    def _user(self) -> User:
        return self._tree.root() or self

    # For users.

    def _parts(self) -> Iterator[SplitGraphed[..., Any]]:
        """Return this one and the pieces below it, each once, the outer ones first."""
        seen: set[int] = set()
        rest: list[SplitGraphed[..., Any]] = [self]
        while rest:
            part = rest.pop(0)
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                rest += part._pieces.values()

    @property
    def recordings(self) -> list[Recording]:
        """The recordings of the whole, then those of its pieces; of each the newest first."""
        return list(self.stats().recordings)

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the recordings hold, a shared pool counted once."""
        recorded = any(part._entries for part in self._parts())
        return self._pool.memory_bytes if recorded else 0

    def stats(self) -> GraphStats:
        """Return the figures of the whole and its pieces together, and what was split."""
        parts = list(self._parts())
        every = [super(SplitGraphed, part).stats() for part in parts]
        return GraphStats(
            recordings=tuple(recording for one in every for recording in one.recordings),
            captures=sum(one.captures for one in every),
            capture_seconds=sum(one.capture_seconds for one in every),
            replays=sum(one.replays for one in every),
            evictions=sum(one.evictions for one in every),
            warmup_calls=sum(one.warmup_calls for one in every),
            eager_calls=sum(one.eager_calls for one in every),
            split=tuple(refusal for part in parts for refusal in part._refusals.values()),
            split_launches=self._tree.launches,
            split_us=self._tree.host_us,
        )

    def reset(self) -> None:
        """Free every recording of the whole and the pieces, and forget every signature and
        refusal; see `Graphed.reset`."""
        for part in list(self._parts()):
            super(SplitGraphed, part).reset()
            part._refusals.clear()
            part._pieces, part._runs, part._opened = {}, 0, {}
        self._tree.reset()


class _Tree:
    """The pieces of one graphed module, and its call in pieces that was measured.

    Attributes:
        root: a weak reference to the graphed forward of the whole.
        pieces: id of a module -> its graphed forward; a module that several use is graphed once.
        calls: the calls in pieces before the measured one.
        launches, host_us: the cost of that call.
    """

    def __init__(self, root: SplitGraphed[..., Any]) -> None:
        self.root = weakref.ref(root)
        self.pieces: weakref.WeakValueDictionary[int, SplitGraphed[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        self.lock = threading.Lock()
        self.reset()

    def watches(self, part: SplitGraphed[..., Any]) -> bool:
        """Return whether a run of this part is to be measured."""
        return not self.told and self.root() is part

    def reset(self) -> None:
        """Forget the measured call: the next pieces are told of anew."""
        self.told, self.calls, self.launches, self.host_us = False, 0, 0, 0.0
