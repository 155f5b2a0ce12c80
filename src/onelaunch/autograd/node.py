"""The autograd node of a launched forward, until its backward is done.

The forward's saved tensors lie in the recording, which no other call may use meanwhile. The
caller's tensors that eager would have saved are watched for changes in place. Here is decided when
a backward under `retain_graph`, or a second one without it, may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from onelaunch.autograd.accumulate import give_directly, wanted_gradients
from onelaunch.autograd.backward import Gradients
from onelaunch.autograd.graph_walk import AGAIN, MODIFIED
from onelaunch.autograd.overwritten import hand_over
from onelaunch.call.wrappers import is_wrapped
from onelaunch.errors import GraphError
from onelaunch.source import user_line

if TYPE_CHECKING:
    from onelaunch.autograd.components import ComponentNode
    from onelaunch.autograd.pair import AutogradPair

    RecordedForward = AutogradPair | ComponentNode  # which has docstrings of what both have

_TWICE = (
    f"{AGAIN} (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward."
)
_bindings: Any = torch._C
_keep_graph: Callable[[], bool] = _bindings._autograd._get_current_graph_task_keep_graph
"""A reader: whether the backward that runs in this thread retains its graph."""


class Saved(NamedTuple):
    """The caller's tensors that eager saves as objects. After `t.data = ...` eager's backward reads
    the new memory, which no version counter shows."""

    state: list[tuple[Tensor, Tensor]]
    """(proxy leaf in the captured graph, tensor of the callable's state)."""
    inputs: dict[int, Tensor]
    """Position of an input among the watched tensors -> the tensor of the captured graph."""
    unmoved: Callable[[], bool]
    """A check that the state's tensors kept their memory. It fails if the callable wrote over a
    saved tensor: then gradients that do not depend on this tensor run eagerly."""


SavedOver = Sequence[tuple[Tensor, int]]
"""(tensor that a captured graph saved over one input, its distance from the input in elements)."""


class Lease:
    """A lease of a recording: one forward at a time has it, as long as it holds the token. The
    token's reference count decides, not a finalizer. The garbage collector may take objects of
    contexts for unreachable while another thread works on an autograd graph. It then finalizes them
    too early, as torch's count of a node's owners changes meanwhile."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = [object()]

    def take(self) -> object | None:
        """Return the token, or None while somebody has it. Atomic."""
        try:
            token, owners = _popped(self._tokens)
        except IndexError:
            return None  # another thread is in between
        self._tokens.append(token)
        return token if owners == _NOBODY else None

    @property
    def taken(self) -> bool:
        return self.take() is None


def _popped(tokens: list[object]) -> tuple[object, int]:
    """Return the token, and the number of references to it. Which of its own Python 3.14 counts
    depends on the function that asks."""
    token = tokens.pop()
    return token, getrefcount(token)


_, _NOBODY = _popped([object()])


class InFlightForward:
    """A forward in flight, until its backward or the end of its autograd graph frees it. Until then
    the recording holds this call's saved tensors, and no other call may use it. `token`: of the
    recording's `Lease`, if its backward reads anything of the forward; of a component the whole
    forward in flight, which has it."""

    __slots__ = ("inputs", "overwritten", "places", "released", "token", "versions", "watched")

    def __init__(self, token: object) -> None:
        self.token = token
        self.released = False
        self.overwritten = False  # True once a backward wrote to a saved tensor of the forward
        self.watched: tuple[Tensor, ...] = ()
        """The caller's tensors that eager would have saved, at these `versions`."""
        self.versions: list[int] = []
        self.places: list[int] = []
        """Addresses of the tensors of `Saved.inputs` at the call, set by the call path."""
        self.inputs: tuple[Tensor, ...] = ()

    def written(self) -> None:
        """Count all writes so far as the forward's own."""
        self.versions = [t._version for t in self.watched]

    def release(self) -> None:
        self.released = True
        self.watched, self.versions, self.places, self.inputs = (), [], [], ()
        self.token = None


class _Launched(torch.autograd.Function):
    """The node of a forward that was launched. Its first input is an anchor if its backward adds to
    the gradients of leaves."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        launched: tuple[RecordedForward, InFlightForward, tuple[Tensor, ...], tuple[Tensor, ...]],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        pair, in_flight, results, watched = launched
        ctx.pair = pair
        ctx.in_flight = in_flight
        ctx.set_materialize_grads(False)
        # Results could not be kept on the context: they keep it.
        if pair.watched_results:
            ctx.save_for_backward(*[results[i] for i in pair.watched_results])
        # By hand, at a quarter of the cost of a saved tensor.
        in_flight.watched, in_flight.inputs = watched, inputs
        in_flight.versions = [t._version for t in watched]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pair: RecordedForward = ctx.pair
        gradients = _gradients(ctx, grads)
        if not pair.direct:
            return (None, *gradients)
        first = len(gradients) - len(pair.direct)
        give_directly(ctx, pair.anchors, pair.direct, gradients[first:])
        return (None, None, *gradients[:first])


# `Function.apply` without its check for functorch, under which no call is launched: 3 us less.
launched: Any = cast(Any, super(torch.autograd.Function, _Launched)).apply


def _gradients(ctx: Any, grads: Gradients) -> Sequence[Tensor | None]:
    """Return the gradients of a node's inputs, after the checks that they can be computed."""
    pair: RecordedForward = ctx.pair
    in_flight: InFlightForward = ctx.in_flight
    if in_flight.released:
        raise RuntimeError(_TWICE)
    if pair.watched_results:
        _ = ctx.saved_tensors  # raises where one was changed in place
    watched = in_flight.watched
    if (
        not in_flight.overwritten
        and [t._version for t in watched] == in_flight.versions
        and [watched[i].data_ptr() for i in pair.saved.inputs] == in_flight.places
        and pair.saved.unmoved()
    ):
        gradients = pair.backward(grads, [watched[i] for i in pair.uncopied])
    else:
        gradients = _edited(ctx, grads)
    for place, static in pair.overwritten:  # what it wrote to the recording's copies
        there = [*in_flight.watched, *(ctx.saved_tensors if pair.watched_results else ())]
        hand_over(static, there[place])
    in_flight.overwritten = bool(pair.static.overwritten.saved)
    if torch.is_grad_enabled():
        by = [*in_flight.inputs, *(g for g in grads if g is not None)]
        gradients = _once(gradients, by, pair.static.forward.where)
    if pair.saves and not _keep_graph():
        in_flight.release()
    return gradients


def _edited(ctx: Any, grads: Gradients) -> list[Tensor | None]:
    """Return the gradients that the engine wants, if none depends on a tensor changed in place."""
    pair: RecordedForward = ctx.pair
    in_flight: InFlightForward = ctx.in_flight
    pairs = enumerate(zip(in_flight.watched, in_flight.versions, strict=True))
    changed = [i for i, (t, version) in pairs if t._version != version]
    placed = zip(pair.saved.inputs, in_flight.places, strict=True)
    elsewhere = {i for i, place in placed if in_flight.watched[i].data_ptr() != place}
    # What a function keeps on its context, and does not save, may have changed.
    elsewhere.update(set(changed) & pair.saved.inputs.keys(), pair.uncopied)
    moved = [(i, in_flight.watched[i]) for i in sorted(elsewhere)]
    try:
        needed = wanted_gradients(ctx, pair.direct)
        return pair.edited(changed, moved, grads, needed, in_flight.overwritten)
    except RuntimeError as error:
        if MODIFIED not in str(error) or not changed:
            raise
    t, version = in_flight.watched[changed[0]], in_flight.versions[changed[0]]
    raise RuntimeError(  # with eager's message
        f"one of the variables needed for gradient computation {MODIFIED}: "
        f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version "
        f"{version} instead."
    )


class _Once(torch.autograd.Function):
    """A node over gradients that raises OL202 if they are differentiated again. All tensors behind
    the gradients are inputs, so that the engine reaches this node for any."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradients: Sequence[Tensor | None], where: str | None, *_: Tensor
    ) -> Any:
        ctx.where = where
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _not_twice("a backward through the backward of a recording", ctx.where)


def _once(
    gradients: list[Tensor | None], by: Sequence[Tensor], where: str | None
) -> Sequence[Tensor | None]:
    if any(g is not None and is_wrapped(g) for g in gradients):
        what = "a graph of the backward of a recording, for a batch of gradients"
        raise _not_twice(what, where)
    return _Once.apply([None if g is None else g.detach() for g in gradients], where, *by)


def _not_twice(what: str, where: str | None) -> GraphError:
    """Return OL202 with the line of the backward, or of the callable. The engine's threads run no
    line of the user's."""
    return GraphError("OL202", what, where=user_line() or where)
