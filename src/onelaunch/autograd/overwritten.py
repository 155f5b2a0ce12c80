"""Memory from before a backward that it writes, as a cross entropy that scales its saved tensor.

Eager frees saved tensors after a backward, and ignores their version counters from then on. A
captured graph serves every replay, which fills its saved tensors anew, so their counters are set
back. Writes to a copy of the caller's tensor are copied to the caller's tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.autograd.graph_walk import CapturedGraph

_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = cast(
    Any, torch._C
)._autograd._unsafe_set_version_counter


class Overwritten:
    """Writes of the backwards over one captured graph, as they were seen. `outputs`: the results
    where the graph begins."""

    def __init__(self, outputs: Sequence[Tensor], storage_of: Callable[[Tensor], int]) -> None:
        self._outputs = outputs
        self._storage_of = storage_of
        self._tensors: list[Tensor] | None = None
        self.statics: list[Tensor] = []
        """The recording's tensors whose originals the caller has: inputs, state and results that
        eager would save."""
        self.places: set[int] = set()  # indices of the written tensors in `statics`
        self.saved: set[int] = set()
        """Storages of saved tensors with versions that a backward advanced. Eager's next backward
        over their graph raises."""

    @contextlib.contextmanager
    def counters_kept(self) -> Generator[None]:
        """Surround a backward, whose writes to saved tensors are not counted."""
        if self._tensors is None:
            self._tensors = CapturedGraph(self._outputs).saved() or []
        before = [(t, t._version) for t in self._tensors]
        try:
            yield
        finally:
            written = [(t, version) for t, version in before if t._version != version]
            self.saved.update(self._storage_of(t) for t, _ in written)
            set_versions(written)

    def note(self, written: Collection[int]) -> None:
        if written:
            storages = enumerate(map(self._storage_of, self.statics))
            self.places.update(place for place, storage in storages if storage in written)


def set_versions(tensors: Sequence[tuple[Tensor, int]]) -> None:
    """Set the version counters of tensors. Torch makes the node of a view anew after a change of
    its version: here, outside of any run."""
    _set_versions(tuple(t for t, _ in tensors), tuple(version for _, version in tensors))
    for t, _ in tensors:
        _ = t.grad_fn


@torch.no_grad()
def hand_over(static: Tensor, t: Tensor) -> None:
    """Copy to the caller's tensor from the recording's copy, which may be padded."""
    if static is t:
        torch.autograd.graph.increment_version(t)
    else:
        t.copy_(static[tuple(map(slice, t.shape))])
