"""What `Graphed` asks about calls in grad mode."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch

from onelaunch.recording import Captured
from onelaunch.spec import CallSpec
from onelaunch.state import walk
from onelaunch.tree import Flat

WARMING: list[int] = []
"""The threads that are in a warm-up. A graphed callable called inside one runs inlined, as it does
inside a capture, so that what will be captured is what has been warmed up."""


@contextmanager
def inlining() -> Generator[None]:
    """This thread warms a callable up."""
    ident = get_ident()
    WARMING.append(ident)
    try:
        yield
    finally:
        WARMING.remove(ident)


class Entry(Protocol):
    """A recording in the table."""

    spec: CallSpec
    captured: Captured


def in_flight(entries: Iterable[Entry], spec: CallSpec) -> int:
    """How many recordings of a signature, fit for the state as it is, wait for a backward."""
    return sum(
        entry.captured.pair is not None
        and entry.captured.pair.in_flight
        and entry.spec == spec
        and entry.captured.guard.check()
        for entry in entries
    )


def trains(fn: Callable[..., Any], call: Flat, roots: Sequence[tuple[str, object]]) -> bool:
    """Whether a call seems to be a forward whose backward will run outside.

    Its warm-up runs on the caller's own stream: an AccumulateGrad node lives on the stream where
    it was made, as long as somebody keeps the loss, and PyTorch warns where the next backward's
    gradient comes from another. A capture has no such node. A callable that names a backward may
    run it itself; then the nodes are in its capture, and must live on the capture's stream.
    """
    if not torch.is_grad_enabled():
        return False
    found = walk(roots)
    if any("backward" in name or name == "autograd" for name in found.names):
        return False
    tensors = [*call.tensors, *(t for _, t in found.tensors())]
    return any(t.requires_grad for t in tensors)
