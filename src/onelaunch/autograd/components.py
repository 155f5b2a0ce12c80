"""Results of one forward whose graphs have no node in common: each a node of autograd of its own.

So each can have a backward of its own, as in eager, and nothing that the others saved is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from onelaunch.autograd.backward import Gradients
from onelaunch.autograd.node import InFlightForward, Joined


class Component(NamedTuple):
    """What of a recording belongs to some of its results.

    Args:
        results: their positions.
        inputs: the arguments and parameters that they lead to, by position.
        watched: what eager would have saved for them, by position.
        watched_results: by position among these results.
        saves: whether their backward reads anything of the forward's.
    """

    results: list[int]
    inputs: list[int]
    watched: list[int]
    watched_results: list[int]
    saves: bool


class ComponentNode:
    """Some of the results of a recording, as a forward in flight sees them; see `node.Joined`.

    Args:
        whole: the recording.
        share: what of it.
        count: of all results.
    """

    def __init__(self, whole: Joined, share: Component, count: int) -> None:
        self._whole = whole
        self._count = count
        self._share = share
        self.results = share.results
        self.watched_results = share.watched_results
        self.direct = whole.direct
        self.saves = share.saves
        saved = whole.saved.inputs
        own = [(p, place) for p, place in enumerate(share.watched) if place in saved]
        self.saved = whole.saved._replace(inputs={p: saved[place] for p, place in own})
        self._places = [list(saved).index(place) for _, place in own]

    def of(
        self,
        whole: InFlightForward,
        made: Sequence[Tensor],
        inputs: Sequence[Tensor],
        watched: Sequence[Tensor],
    ) -> tuple[
        tuple[ComponentNode, InFlightComponent, tuple[Tensor, ...], tuple[Tensor, ...]],
        list[Tensor],
    ]:
        """What its node is made of and its inputs, from those of the whole."""
        results = tuple([made[place] for place in self.results])
        seen = tuple([watched[place] for place in self._share.watched])
        wanted = [inputs[place] for place in self._share.inputs]
        in_flight = InFlightComponent(whole)
        in_flight.places = [whole.places[i] for i in self._places]
        return (self, in_flight, results, seen), wanted

    @property
    def where(self) -> str | None:
        """See `node.Joined.where`."""
        return self._whole.where

    @property
    def width(self) -> int:
        """See `node.Joined.width`."""
        return len(self._share.inputs)

    def backward(self, grads: Gradients) -> list[Tensor | None]:
        """The gradients of its inputs and of the direct leaves, from those of its results."""
        return self._own(self._whole.backward(self._every(grads)))

    def edited(
        self,
        changed: Sequence[int],
        moved: Sequence[tuple[int, Tensor]],
        grads: Gradients,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """See `node.Joined.edited`."""
        asked = [False] * self._whole.width + list(wanted[self.width :])
        for place, want in zip(self._share.inputs, wanted, strict=False):
            asked[place] = want
        of = self._share.watched
        places, elsewhere = [of[p] for p in changed], [(of[p], t) for p, t in moved]
        return self._own(self._whole.edited(places, elsewhere, self._every(grads), asked))

    def _every(self, grads: Gradients) -> Gradients:
        every: list[Tensor | None] = [None] * self._count
        for place, g in zip(self.results, grads, strict=True):
            every[place] = g
        return every

    def _own(self, found: list[Tensor | None]) -> list[Tensor | None]:
        first = len(found) - len(self.direct)
        return [found[place] for place in self._share.inputs] + found[first:]


class InFlightComponent(InFlightForward):
    """The forward of a component, which keeps that of the whole: it ends once no part holds it."""

    __slots__ = ("_whole",)

    def __init__(self, whole: InFlightForward) -> None:
        super().__init__(None)
        self._whole: InFlightForward | None = whole

    def release(self) -> None:
        """Let go of the recording."""
        super().release()
        self._whole = None
