"""A module's forward, in pieces where it cannot be captured whole: its children are graphed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from onelaunch.capture.callee import Callee
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.split.forward import ModuleForward, has_forward
from onelaunch.split.in_pieces import InPieces

P = ParamSpec("P")
R = TypeVar("R")

_OPENING = 4
"""Number of the first runs in pieces. Each looks a level deeper for modules that are called."""


class SplitGraphed(InPieces[P, R]):
    """The forward of a module, graphed whole where it can be captured. Made by `graph`. A refused
    signature runs as it is, with graphed forwards in place of the children's. A refused child is
    split in turn. `whole`: the graphed forward of the whole, for a child."""

    PIECES = "the children"

    def __init__(
        self,
        fn: ModuleForward,
        options: Options,
        pool: PoolManager | None = None,
        root: tuple[str, object] | None = None,
        callee: Callee | None = None,
        whole: SplitGraphed[..., Any] | None = None,
    ) -> None:
        super().__init__(fn, options, pool, root, callee)
        self._forward = fn
        self._pieces: dict[int, SplitGraphed[..., Any]] = {}
        """id of a child -> its graphed forward in the last run in pieces."""
        self._whole = weakref.ref(whole or self)
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[int, SplitGraphed[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        """id of a module -> its graphed forward, shared by its parents; in the whole alone."""
        self._runs = 0  # number of runs in pieces so far, up to `_OPENING`
        self._opened: dict[int, nn.Module] = {}
        """id -> a child that is not called itself, whose children are called."""

    # After a refusal.

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        forwards = self._replacements()
        with in_place(forwards):
            result = self.fn(*args, **kwargs)
        if self._runs < _OPENING:
            self._open(forwards)
        return result

    def _open(self, forwards: Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]) -> None:
        """Look for children that the module reaches through without a call, as in
        `self.encoder.layers[0](x)`. Their own children are graphed from now on."""
        self._runs += 1
        called = {
            id(child) for child, piece in forwards if piece._signatures.statuses or piece._refusals
        }
        self._opened |= {id(module): module for module, _ in forwards if id(module) not in called}
        if self._runs == _OPENING:
            self._opened = {
                key: module
                for key, module in self._opened.items()
                if key not in called and any(id(below) in called for below in module.modules())
            }

    def _replacements(self) -> Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]:
        """Return (module, graphed forward) for the forwards to replace."""
        forwards = [
            (child, self._piece(child, name))
            for name, child in members(self._forward.module, self._name, self._opened)
        ]
        self._pieces = {id(child): piece for child, piece in forwards}
        return forwards

    def _piece(self, module: nn.Module, name: str) -> SplitGraphed[..., Any]:
        """Return the graphed form of a module's present forward, shared with other parents."""
        last = self._pieces.get(id(module))
        if last is not None and last._forward.is_of(module, module.__dict__.get("forward")):
            return last
        own, whole = own_forward(module), self._user
        with whole._lock:
            piece = whole._shared.get(id(module))
            if piece is None or not piece._forward.is_of(module, own):
                forward = ModuleForward(module, own, name)
                piece = SplitGraphed(forward, self.options, self._pool, ("", module), whole=whole)
                whole._shared[id(module)] = piece
            return piece

    @property
    def _user(self) -> SplitGraphed[..., Any]:
        return self._whole() or self

    # For users.

    def _every_piece(self) -> Iterator[SplitGraphed[..., Any]]:
        seen: set[int] = set()
        rest: list[SplitGraphed[..., Any]] = [self]
        while rest:
            part = rest.pop(0)
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                rest += part._pieces.values()

    def reset(self) -> None:
        """Free every recording, and forget every signature and refusal; see `InPieces.reset`."""
        pieces = list(self._every_piece())
        super().reset()
        for piece in pieces:
            piece._pieces, piece._runs, piece._opened = {}, 0, {}


Forward = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _ReplacedForward:
    """A forward that is replaced for a while. `own`: the instance's own forward before, or None.
    `runs`: the number of runs, in any thread, that have it replaced."""

    own: Any
    piece: Forward
    runs: int = 0


_places: dict[int, _ReplacedForward] = {}
_lock = threading.RLock()


@contextmanager
def in_place(pieces: Sequence[tuple[nn.Module, Forward]]) -> Generator[None]:
    """Replace the forwards of modules, below their hooks, during a run. Of two runs at once the
    first replaces."""
    taken: list[tuple[nn.Module, _ReplacedForward]] = []
    try:
        with _lock:
            for module, piece in pieces:
                place = _places.get(id(module))
                if place is None:
                    place = _places[id(module)] = _ReplacedForward(own_forward(module), piece)
                taken.append((module, place))
                place.runs += 1
                if place.runs == 1:
                    module.__dict__["forward"] = piece
        yield
    finally:
        with _lock:
            for module, place in taken:
                place.runs -= 1
                if place.runs:
                    continue
                _places.pop(id(module), None)
                if module.__dict__.get("forward") is not place.piece:
                    continue  # the run itself put another there, as it would have without us
                if place.own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = place.own


def own_forward(module: nn.Module) -> Any:
    """Return the forward of an instance, or None if it has its class's."""
    with _lock:
        forward = module.__dict__.get("forward")
        place = _places.get(id(module))
        return place.own if place is not None and place.piece is forward else forward


def members(
    module: nn.Module, name: str, opened: Collection[int] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Return (name, module) for the children to graph while a module runs as it is. A child without
    a forward (`nn.ModuleList`) is left out for its own children. `opened`: ids of modules whose
    children are graphed too."""
    seen = {id(module)}
    rest = list(_children(module, name))[::-1]
    while rest:
        path, child = rest.pop()
        if id(child) in seen:
            continue
        # One that is graphed already, or has no forward that could be replaced.
        if isinstance(child, torch.jit.ScriptModule) or hasattr(type(child), "__graphed__"):
            continue
        seen.add(id(child))
        callable_ = has_forward(child)
        if callable_:
            yield path, child
        if not callable_ or id(child) in opened:
            rest += list(_children(child, path))[::-1]


def _children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module._modules.items():
        if child is not None:
            yield f"{name}.{key}", child
