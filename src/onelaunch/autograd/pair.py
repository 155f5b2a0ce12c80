"""A captured forward and its backward recordings, joined by one node of autograd.

The forward's autograd graph is kept, with its saved tensors in the recording's memory. Each replay
of the forward fills them anew, so that the ordinary backward over that graph gives this call's
gradients. The first backward of a variant runs that way, which is its warm-up; from the second on
it is one launch.

A second forward before the backward must not fill those saved tensors. While a `Lease` is out, it
gets another recording with memory of its own, as `runtime.phase` allows. Nor are gradients
overwritten that the caller still holds; see `Backward.available`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.autograd.accumulate import Anchors
from onelaunch.autograd.backward import Backward, Gradients, Moved, StaticGraph, backward_title
from onelaunch.autograd.capture import capture_backward
from onelaunch.autograd.chain import Link
from onelaunch.autograd.components import Component, ComponentNode
from onelaunch.autograd.first_backward import FirstBackward
from onelaunch.autograd.graph_walk import packing_hooks
from onelaunch.autograd.node import InFlightForward, Lease, Saved, SavedOver, launched
from onelaunch.autograd.order import InOrder
from onelaunch.call.wrappers import is_wrapped
from onelaunch.driver.protocol import DevicePool, Graph, InPlace, Launch, Released, Travel
from onelaunch.errors import CaptureError, GraphError, GraphWarning, let_go
from onelaunch.source import levels_to_user
from onelaunch.trace_names import named
from onelaunch.watch.difference import TRIES

_C: Any = torch._C
_functorch: Callable[[], object] = _C._functorch.peek_interpreter_stack
_EAGERLY = "the backward runs eagerly"
_IN_PLACE = "keep what changes in a tensor on the device, and write into it: `t.fill_(number)`"
_MOST_CHANGES = 8  # the most captures of a variant of backward while a number that it reads changes


@dataclass(slots=True, eq=False)
class _BackwardVariant:
    """A variant of backward: gradients of one layout, in the same modes. The first run goes
    operation by operation, in the thread and on the stream of the capture. It is the warm-up."""

    fits: Callable[[], bool]
    same_layout: Callable[..., bool]  # a check that gradients have this layout
    warm: bool = False  # True once it ran operation by operation
    first_run: FirstBackward | None = None
    differing: int = 0  # captures in a row that differed from the run before them
    changes: int = 0  # captures that no longer fit the state that they read
    refused: bool = False
    static_gradients: Backward | None = None
    launch: Callable[[Gradients], list[Tensor | None] | None] | None = None
    """Launch of `static_gradients`; returns None while its memory must not be written."""
    fresh_gradients: Backward | None = None


class Watched(NamedTuple):
    """Tensors that eager would have saved for a backward, except results of the node."""

    inputs: list[int]  # indices of inputs of the recording
    tensors: list[Tensor]  # tensors of the callable's state
    plain: list[int]  # indices of results that need no gradient
    memory: list[int]  # storages of all watched tensors, in the recording


@dataclass(slots=True, eq=False)
class AutogradPair:
    """A captured forward, joined to autograd, with the recordings of its backward. A change in
    place of a watched tensor before the backward is an error: eager would have saved it."""

    static: StaticGraph
    pool: DevicePool
    new_pool: Callable[[], DevicePool]  # makes memory that no other recording uses
    make_room: Callable[[], bool]
    """Keeps the pool that counts all this within its budget; returns whether it is."""
    results: list[int]  # indices of the results that come out of the node
    arguments: list[int]  # indices of the inputs that are inputs of the node
    parameters: list[Tensor]  # tensors of the callable's state that are further inputs of the node
    direct: list[Tensor]  # other leaves of the callable's state; the backward adds to their `.grad`
    watched: Watched  # tensors that eager would have saved, except results of the node
    watched_results: list[int]  # positions of saved results among the node's
    saved: Saved  # the watched tensors that eager saves as objects, not as a view or its memory
    saves: bool  # True if the backward reads anything of the forward
    raises: bool  # True if a backward that cannot be captured is an error
    link: Link | None = None  # chain's memory and stream, shared with forwards before and after it
    components: list[Component] = field(default_factory=list)
    """Groups of results whose graphs share no node; empty if there is one group."""
    lease: Lease = field(default_factory=Lease)
    retired: bool = False
    uncopied: dict[int, SavedOver] = field(default_factory=dict)
    """Position of an input without a copy among the watched -> tensors saved over it."""
    _in_place: InPlace | None = None
    anchors: Anchors = field(init=False)
    _leaves: InOrder = field(init=False)
    _variants: dict[object, list[_BackwardVariant]] = field(default_factory=dict)
    _latest: _BackwardVariant | None = None
    _warned: bool = False

    def __post_init__(self) -> None:
        device = self.static.device
        self.anchors = Anchors(device, self.static.driver.stream_reader(device), self.direct)
        self._leaves = InOrder(self.static.outputs, self.static.inputs, self.parameters)

    # The forward.

    def take(self) -> InFlightForward | None:
        """Return the recording's lease for one forward, or None while another is in flight. Atomic.
        None also if hooks pack saved tensors."""
        if packing_hooks(True) is not None:
            return None
        if not self.saves:
            return InFlightForward(None)
        token = self.lease.take()
        return None if token is None else InFlightForward(token)

    @property
    def overwritten(self) -> Sequence[tuple[int, Tensor]]:
        written = self.static.overwritten
        return [(place, written.statics[place]) for place in written.places]

    @property
    def in_flight(self) -> bool:
        return self.lease.taken

    def nodes(self) -> list[ComponentNode]:
        """Return a node for each of the components, if there are several."""
        return [ComponentNode(self, component) for component in self.components]

    def attach(
        self,
        in_flight: InFlightForward,
        tensors: tuple[Tensor, ...],
        inputs: Sequence[Tensor],
        watched: tuple[Tensor, ...],
        forwards: list[InFlightForward],
        nodes: Sequence[ComponentNode],
    ) -> tuple[Tensor, ...]:
        """Return the results of one launch, as results of a node of autograd, or of each of the
        `nodes`. `forwards`: gets the in-flight forward of each."""
        leaves = self._leaves.of(inputs)
        anchor = (self.anchors.of_this_stream(),) if self.direct else ()
        if not nodes:
            forwards.append(in_flight)
            return launched((self, in_flight, tensors, watched), *anchor, *leaves)
        results = list(tensors)
        for component in nodes:
            node, inside = component.of(in_flight, tensors, leaves, watched)
            forwards.append(node[1])
            own = launched(node, *anchor, *inside)
            for place, t in zip(component.results, own, strict=True):
                results[place] = t
        return tuple(results)

    # The backward.

    def reach(
        self, in_place: InPlace, readable: Mapping[int, SavedOver], inputs: Collection[int]
    ) -> None:
        """Let backwards reach the caller's memory too, where that is proven. `readable`: position
        of a watched input that a backward can read there -> tensors saved over it. `inputs`:
        indices of the forward's inputs that its launches do not copy."""
        self._in_place = in_place
        reached = ((at, over) for at, over in readable.items() if self.watched.inputs[at] in inputs)
        self.uncopied = dict(reached)

    def _there(self, at: int, t: Tensor) -> Moved:
        """Return pairs of the saved tensors over a watched input, and the caller's memory."""
        if at in self.saved.inputs:
            return [(self.saved.inputs[at], t)]
        first = t.storage_offset()
        return [
            (saved, t.as_strided(saved.shape, saved.stride(), first + distance))
            for saved, distance in self.uncopied[at]
        ]

    def backward(self, grads: Gradients, given: Sequence[Tensor]) -> list[Tensor | None]:
        moved: Moved = ()
        if given:
            places = zip(self.uncopied, given, strict=True)
            moved = [pair for at, t in places for pair in self._there(at, t)]
        variant = self._variant(grads)
        if variant is None or variant.refused:
            return self.static.run(grads, moved)
        if variant.static_gradients is not None and not variant.static_gradients.fits:
            self._drop(variant, variant.static_gradients)
        if variant.launch is None and variant.warm:
            self._capture(variant, grads, moved, kept=True)
        if variant.launch is None and not variant.warm and not variant.refused:
            gradients, variant.first_run = self.static.run_watched(grads, moved)
            variant.warm = True
            return gradients
        gradients = self._launched(variant, grads, moved)
        return self.static.run(grads, moved) if gradients is None else gradients

    def edited(
        self,
        changed: Sequence[int],
        moved: Sequence[tuple[int, Tensor]],
        grads: Gradients,
        needed: Sequence[bool],
        again: bool,
    ) -> list[Tensor | None]:
        storages = {self.watched.memory[i] for i in changed}
        if again:
            storages |= self.static.overwritten.saved
        alike: list[tuple[Tensor, Tensor]] = []
        inputs = [pair for at, t in moved for pair in self._there(at, t)]
        for static, t in [*self.saved.state, *inputs]:
            if (static.shape, static.dtype, static.device) == (t.shape, t.dtype, t.device):
                alike.append((static, t))
            else:  # the layout differs: padded to a bucket, for example
                storages.add(self.static.driver.storage(static))
        return self.static.edited(storages, alike, grads, needed)

    def capture_ahead(self) -> None:
        """Capture the backward for gradients laid out as the results are. Like all backwards it is
        captured in the engine's thread: later ones find the same modes."""
        grads = [torch.zeros_like(t) for t in self.static.outputs]
        variant = self._variant(grads)
        if variant is not None and variant.launch is None:
            self._capture(variant, grads, (), kept=True, ahead=True)

    def _variant(self, grads: Gradients) -> _BackwardVariant | None:
        """Return the variant of these gradients, or None if no recording may replace eager."""
        if _C._len_torch_dispatch_stack() or torch.is_anomaly_enabled():
            return None
        latest = self._latest
        if latest is not None and latest.fits() and latest.same_layout(grads):
            return latest
        if _functorch() is not None:
            return None
        like = type(self.static.outputs[0])
        for g in grads:
            if g is not None and (
                type(g) not in (Tensor, like)
                or g.layout is not torch.strided
                or g.is_conj()
                or g.is_neg()
                or is_wrapped(g)
            ):
                return None
        key = tuple([None if g is None else (g.shape, g.stride(), g.dtype) for g in grads])
        variants = self._variants.setdefault(key, [])
        for variant in variants:
            if variant.fits():
                self._latest = variant
                return variant
        variants.append(_BackwardVariant(_C._dynamo.guards.GlobalStateGuard().check, _like(grads)))
        return variants[-1]

    def _launched(
        self, variant: _BackwardVariant, grads: Gradients, moved: Moved
    ) -> list[Tensor | None] | None:
        """Return the gradients by one launch, or None if eager must run."""
        if variant.launch is None:
            return None
        inputs = [*grads, *(t for _, t in moved)] if moved else grads
        try:
            gradients = variant.launch(inputs)
            if gradients is not None:
                return gradients
            if variant.fresh_gradients is None:  # somebody keeps the gradients of an earlier launch
                self._capture(variant, grads, moved, kept=False)
            return None if variant.fresh_gradients is None else variant.fresh_gradients.run(inputs)
        except Released:
            return None

    def _drop(self, variant: _BackwardVariant, outdated: Backward) -> None:
        """Free the recordings of a variant after a change of its state, for a new capture."""
        change = outdated.verdict and outdated.verdict.guard.difference()
        for backward in (outdated, variant.fresh_gradients):
            if backward is not None:
                backward.graph.reset()
        variant.static_gradients = variant.fresh_gradients = variant.launch = None
        self._note_change(variant, change)

    def _note_change(self, variant: _BackwardVariant, change: str | None) -> None:
        """Note that state which a variant reads changed: another run is to be compared."""
        variant.first_run, variant.warm = None, False
        variant.changes += 1
        if variant.changes == _MOST_CHANGES:
            variant.refused = True
            what = f"it reads state that changed {variant.changes} times; {change}"
            why = "a recording repeats what its Python read"
            self._warn(GraphError("OL306", what, why=why, fix=_IN_PLACE).warning(_EAGERLY))

    def _capture(
        self,
        variant: _BackwardVariant,
        grads: Gradients,
        moved: Moved,
        *,
        kept: bool,
        ahead: bool = False,
    ) -> None:
        """Capture a backward, if the lock is free. The holder of the lock may be waiting for this
        thread, if it is the engine's."""
        driver, link = self.static.driver, self.link if ahead else None
        if self.retired or driver.capturing() or not driver.lock.acquire(blocking=False):
            return
        try:
            pool = self.pool
            if kept:
                pool = self.new_pool() if link is None else link.backwards
            with torch.no_grad(), named(f"onelaunch capture: {backward_title(grads)}"):
                backward = capture_backward(
                    self.static,
                    grads,
                    moved,
                    pool,
                    kept=kept,
                    first_run=variant.first_run,
                    in_place=self._in_place,
                    ahead=ahead,
                )
            verdict = backward.verdict
            if verdict is not None and verdict.difference is not None:
                backward.graph.reset()
                if kept and verdict.changed is not None:
                    self._note_change(variant, f"{verdict.changed} is not as before")
                    return
                variant.differing += 1
                if variant.differing == TRIES:
                    raise verdict.difference.refusal()
                if kept:
                    variant.first_run, variant.warm = None, False  # another run is to be compared
            elif not self.make_room():
                backward.graph.reset()
                variant.refused = True
                self._warn(GraphError("OL304", "no room for it in the pool").warning(_EAGERLY))
            elif kept:
                variant.static_gradients, variant.differing = backward, 0
                variant.launch = backward.launched if link is None else link.backward(backward)
            else:
                variant.fresh_gradients = backward
        except CaptureError as error:
            let_go(error)
            if self.raises:
                raise
            variant.refused = True
            self._warn(error.warning(_EAGERLY, "OL306"))
        finally:
            driver.lock.release()

    def _warn(self, warning: GraphWarning) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(warning, stacklevel=levels_to_user())

    def backwards(self) -> list[Backward]:
        variants = [variant for alike in self._variants.values() for variant in alike]
        recordings = [b for v in variants for b in (v.static_gradients, v.fresh_gradients)]
        return [backward for backward in recordings if backward is not None]

    def retire(self) -> None:
        """Free the backward recordings. A forward in flight runs its backward eagerly."""
        self.retired = True
        for backward in self.backwards():
            backward.graph.reset()
        self._variants.clear()
        self._latest = None


def _like(grads: Gradients) -> Callable[[Gradients], bool]:
    """Return a check that gradients have the type and layout of `grads`: 0.3 us for one."""
    given = [g for g in grads if g is not None]
    which = [g is not None for g in grads]
    if len({id(g) for g in given}) < len(given):
        return lambda grads: False  # the guard refuses the same tensor twice
    check = _C._dynamo.guards.TensorGuards(
        *given, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check

    def like(grads: Gradients) -> bool:
        return [g is not None for g in grads] == which and check(
            *[g for g in grads if g is not None]
        )

    return like


class ForwardGraph:
    """The forward's `Graph`, its `nodes` too, with the backwards' memory and lifetime."""

    def __init__(self, graph: Graph, pair: AutogradPair) -> None:
        self._graph = graph
        self._pair = pair
        self.travels: tuple[Travel, ...] = graph.travels
        self.rebound, self.nodes, self.schedule = graph.rebound, graph.nodes, graph.schedule
        launch: Launch = graph.launch
        self.launch = launch if pair.link is None else pair.link.forward(pair.lease, launch)
        self.scalar_patch = graph.scalar_patch

    @property
    def lost(self) -> str | None:
        """See `Graph.lost`. A backward that lost something runs eagerly."""
        return self._graph.lost

    @property
    def memory_bytes(self) -> int:
        backwards = sum(b.graph.memory_bytes for b in self._pair.backwards())
        return self._graph.memory_bytes + backwards

    @property
    def driver_bytes(self) -> int:
        backwards = sum(b.graph.driver_bytes for b in self._pair.backwards())
        return self._graph.driver_bytes + backwards

    def reset(self) -> None:
        self._graph.reset()
        self._pair.retire()
