"""A module's forward, in pieces where it cannot be captured whole: its children are graphed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import nn

from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager, User
from onelaunch.runtime.stats import GraphStats, SplitModule
from onelaunch.split.forward import ModuleForward
from onelaunch.split.in_pieces import InPieces, Told
from onelaunch.split.pieces import in_place, members, own_forward

P = ParamSpec("P")
R = TypeVar("R")

_OPENING = 4
"""Number of the first runs in pieces. Each looks a level deeper for modules that are called."""


class SplitGraphed(InPieces[P, R]):
    """The forward of a module, graphed whole where it can be captured. Made by `graph`.

    A refused signature runs as it is, with graphed forwards in place of the children's. A refused
    child is split in turn.

    Args:
        tree: the pieces of the whole, for a child.
    """

    PIECES = "the children"

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
        self._refusals = {}
        self._pieces: dict[int, SplitGraphed[..., Any]] = {}
        """id of a child -> its graphed forward in the last run in pieces."""
        self._tree = tree or _Tree(self)
        self._told = self._tree.told
        self._runs = 0
        """Number of runs in pieces so far, up to `_OPENING`."""
        self._opened: dict[int, nn.Module] = {}
        """id -> a child that is not called itself, whose children are called."""

    # After a refusal.

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        found = self._replacements()
        with in_place(found):
            result = self.fn(*args, **kwargs)
        if self._runs < _OPENING:
            self._open(found)
        return result

    def _watches(self) -> bool:
        return self._tree.root() is self

    def _open(self, found: Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]) -> None:
        """Look for children that the module reaches through without a call, as in
        `self.encoder.layers[0](x)`. Their own children are graphed from now on."""
        self._runs += 1
        called = {
            id(module) for module, piece in found if piece._signatures.states or piece._refusals
        }
        self._opened |= {id(module): module for module, _ in found if id(module) not in called}
        if self._runs == _OPENING:
            self._opened = {
                key: module
                for key, module in self._opened.items()
                if key not in called and any(id(below) in called for below in module.modules())
            }

    def _replacements(self) -> Sequence[tuple[nn.Module, SplitGraphed[..., Any]]]:
        """Return (module, graphed forward) for the forwards to replace."""
        found = [
            (child, self._piece(child, name))
            for name, child in members(self._forward.module, self._name, self._opened)
        ]
        self._pieces = {id(child): piece for child, piece in found}
        return found

    def _piece(self, module: nn.Module, name: str) -> SplitGraphed[..., Any]:
        """Return the graphed form of a module's present forward, shared with other parents."""
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

    @property
    def _user(self) -> User:
        return self._tree.root() or self

    # For users.

    def _every_piece(self) -> Iterator[SplitGraphed[..., Any]]:
        """Return the whole and the pieces below it, outer pieces first, without repeats."""
        seen: set[int] = set()
        rest: list[SplitGraphed[..., Any]] = [self]
        while rest:
            part = rest.pop(0)
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                rest += part._pieces.values()

    def _figures(self) -> Iterable[GraphStats]:
        return [super(InPieces, part).stats() for part in self._every_piece()]

    def _refused_parts(self) -> Iterable[SplitModule]:
        return [refusal for part in self._every_piece() for refusal in part._refusals.values()]

    def reset(self) -> None:
        """Free every recording, and forget every signature and refusal; see `Graphed.reset`."""
        for part in list(self._every_piece()):
            super(SplitGraphed, part).reset()
            part._refusals.clear()
            part._pieces, part._runs, part._opened = {}, 0, {}
        self._told.reset()


class _Tree:
    """The pieces of a graphed module, and its measured call in pieces.

    Attributes:
        root: a weak reference to the graphed forward of the whole.
        pieces: id of a module -> its graphed forward, shared by its parents.
    """

    def __init__(self, root: SplitGraphed[..., Any]) -> None:
        self.root = weakref.ref(root)
        self.pieces: weakref.WeakValueDictionary[int, SplitGraphed[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        self.lock = threading.Lock()
        self.told = Told()
