"""The graphed children of a module that runs as it is, in the places of their forwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onelaunch.split.forward import has_forward

Forward = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _ReplacedForward:
    """A forward that is replaced for a while.

    Attributes:
        own: the instance's own forward before, or None.
        runs: the number of runs, in any thread, that have it replaced.
    """

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
                if not place.runs:
                    _restore(module, place)


def _restore(module: nn.Module, place: _ReplacedForward) -> None:
    _places.pop(id(module), None)
    if module.__dict__.get("forward") is not place.piece:
        return  # the run itself put another there, as it would have without us
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
    a forward (`nn.ModuleList`) is left out for its own children.

    Args:
        opened: ids of modules whose children are graphed too.
    """
    seen = {id(module)}
    rest = list(_children(module, name))[::-1]
    while rest:
        path, child = rest.pop()
        if id(child) in seen or _is_apart(child):
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


def _is_apart(module: nn.Module) -> bool:
    """Return whether a module is graphed already, or has no forward that could be replaced."""
    return isinstance(module, torch.jit.ScriptModule) or hasattr(type(module), "__graphed__")
