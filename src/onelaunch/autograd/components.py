"""Connected components: results of a forward whose graphs share no node, with a node for each.

Each can then have its own backward, as in eager, without checks of the other's saved tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from onelaunch.autograd.backward import Gradients
from onelaunch.autograd.node import InFlightForward, SavedOver

if TYPE_CHECKING:
    from onelaunch.autograd.pair import AutogradPair


class Component(NamedTuple):
    """The part of a recording that belongs to some of its results."""

    results: list[int]
    inputs: list[int]  # positions of the arguments and parameters behind them
    watched: list[int]  # positions of watched tensors that eager would have saved for them
    watched_results: list[int]
    """Positions among these results of results that eager would have saved."""
    saves: bool  # True if their backward reads anything of the forward
    statics: list[Tensor]
    """The recording's tensors for the watched tensors, and then the watched results."""


class ComponentNode:
    """A component of a recording, as an in-flight forward sees it; see `AutogradPair`."""

    def __init__(self, whole: AutogradPair, component: Component) -> None:
        self._whole = whole
        self._component = component
        self.results = component.results
        self.watched_results = component.watched_results
        self.static, self.direct, self.anchors = whole.static, whole.direct, whole.anchors
        self.saves = component.saves
        self.uncopied: dict[int, SavedOver] = {}
        saved = whole.saved.inputs
        own = [(p, place) for p, place in enumerate(component.watched) if place in saved]
        self.saved = whole.saved._replace(inputs={p: saved[place] for p, place in own})
        self._places = [list(saved).index(place) for _, place in own]

    def of(
        self,
        whole: InFlightForward,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        watched: Sequence[Tensor],
    ) -> tuple[
        tuple[ComponentNode, InFlightForward, tuple[Tensor, ...], tuple[Tensor, ...]], list[Tensor]
    ]:
        """Return the node's state and its inputs, out of the whole recording's."""
        results = tuple([tensors[place] for place in self.results])
        watched_here = tuple([watched[place] for place in self._component.watched])
        own = [inputs[place] for place in self._component.inputs]
        in_flight = InFlightForward(whole)
        in_flight.places = [whole.places[i] for i in self._places]
        return (self, in_flight, results, watched_here), own

    @property
    def overwritten(self) -> Sequence[tuple[int, Tensor]]:
        """(position, the recording's copy) of tensors that a backward was seen to write. Positions
        count the watched tensors, then the watched results."""
        written = {id(static) for _, static in self._whole.overwritten}
        here = enumerate(self._component.statics)
        return [(place, static) for place, static in here if id(static) in written]

    def backward(self, grads: Gradients, given: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of its inputs and direct leaves; `given` are the uncopied inputs."""
        return self._own(self._whole.backward(self._padded(grads), given))

    def edited(
        self,
        changed: Sequence[int],
        moved: Sequence[tuple[int, Tensor]],
        grads: Gradients,
        needed: Sequence[bool],
        again: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of wanted inputs and direct leaves as eager gives them after edits.
        `changed`: positions of watched tensors that were changed in place. `moved`: (position,
        tensor) of those with other memory. `again`: whether a backward over this forward wrote to
        its saved tensors."""
        inputs, of, whole = self._component.inputs, self._component.watched, self._whole
        width = len(whole.arguments) + len(whole.parameters)
        asked = [False] * width + list(needed[len(inputs) :])
        for place, want in zip(inputs, needed, strict=False):
            asked[place] = want
        places, elsewhere = [of[p] for p in changed], [(of[p], t) for p, t in moved]
        return self._own(whole.edited(places, elsewhere, self._padded(grads), asked, again))

    def _padded(self, grads: Gradients) -> Gradients:
        padded: list[Tensor | None] = [None] * len(self._whole.results)
        for place, g in zip(self.results, grads, strict=True):
            padded[place] = g
        return padded

    def _own(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        first = len(gradients) - len(self.direct)
        return [gradients[place] for place in self._component.inputs] + gradients[first:]
