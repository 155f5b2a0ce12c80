"""A launched forward in autograd: one node, until its backward is done.

What the forward saves lies in the recording, which no other call may use meanwhile. The caller's
tensors that eager would have saved are watched for changes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from onelaunch.autograd.accumulate import accumulate, executed, is_backward
from onelaunch.autograd.backward import Gradients
from onelaunch.autograd.proxies import MODIFIED, keep_graph
from onelaunch.call.dtensor import is_wrapped
from onelaunch.errors import GraphError
from onelaunch.source import user_line

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward."
)


class Saved(NamedTuple):
    """The tensors that eager saves themselves: after `t.data = ...` its backward reads the new
    memory, of which no version tells."""

    state: list[tuple[Tensor, Tensor]]
    """Of the callable's state, each after what stands for it in the captured graph."""
    inputs: dict[int, Tensor]
    """What stands there for watched inputs, by position among what is watched."""
    unmoved: Callable[[], bool]
    """Whether those of the state have the memory that they had. False as well where the callable
    wrote over what it saved: then all gradients that do not depend on that are eager's."""


class Joined(Protocol):
    """A recording of a forward, as a forward in flight sees it; see `AutogradPair`."""

    direct: list[Tensor]
    watched_results: list[int]
    saved: Saved
    saves: bool

    @property
    def where(self) -> str | None:
        """The line where the callable begins."""
        ...

    @property
    def width(self) -> int:
        """How many inputs the node has, its anchor apart."""
        ...

    def backward(self, grads: Gradients) -> list[Tensor | None]:
        """The gradients of the node's inputs, from those of its results."""
        ...

    def edited(
        self,
        changed: Sequence[int],
        moved: Sequence[tuple[int, Tensor]],
        grads: Gradients,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """`backward` for some of the inputs and direct leaves, where of what is watched some, by
        position, were changed in place or given other memory; see `StaticGraph.edited`."""
        ...


class Lease:
    """Who has a recording: one forward at a time, as long as it holds the token.

    Told by the token's owners, not by a finalizer. The garbage collector finalizes what it takes
    for unreachable before it looks again, and while another thread works on an autograd graph it
    may take for that what the graph's contexts hold: torch shows it who owns a node by a count that
    changes meanwhile.
    """

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = [object()]

    def take(self) -> object | None:
        """The token, or None while somebody has it. Atomic."""
        try:
            token = self._tokens.pop()
        except IndexError:
            return None  # another thread asks
        free = getrefcount(token) == _NOBODY
        self._tokens.append(token)
        return token if free else None

    @property
    def taken(self) -> bool:
        """Whether somebody has it."""
        return self.take() is None


def _owners_of_none() -> int:
    """How many owners `Lease.take` counts of a token that nobody has."""
    token = [object()].pop()
    return getrefcount(token)


_NOBODY = _owners_of_none()


class InFlightForward:
    """From a forward until its backward has freed it, or its autograd graph is gone.

    Until then the recording holds this call's saved tensors, and no other call may use it.

    Args:
        token: of the recording's `Lease`, if its backward reads anything of the forward's.
    """

    __slots__ = ("inputs", "places", "released", "token", "versions", "watched")

    def __init__(self, token: object) -> None:
        self.token = token
        self.released = False
        self.watched: tuple[Tensor, ...] = ()
        """What eager would have saved of the caller's tensors, and the versions of each."""
        self.versions: list[int] = []
        self.places: list[int] = []
        """Where those of `Saved.inputs` lay, filled in by the call path."""
        self.inputs: tuple[Tensor, ...] = ()
        """The node's."""

    def release(self) -> None:
        """Give the recording free."""
        self.released = True
        self.watched, self.versions, self.places, self.inputs = (), [], [], ()
        self.token = None


class _Launched(torch.autograd.Function):
    """The node: its forward has been launched."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        launched: tuple[Joined, InFlightForward, tuple[Tensor, ...], tuple[Tensor, ...]],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        pair, in_flight, made, watched = launched
        ctx.pair = pair
        ctx.in_flight = in_flight
        ctx.set_materialize_grads(False)
        # Results could not be kept on the context: they keep it.
        if pair.watched_results:
            ctx.save_for_backward(*[made[i] for i in pair.watched_results])
        # By hand, at a quarter of what a saved tensor costs.
        in_flight.watched, in_flight.inputs = watched, inputs
        in_flight.versions = [t._version for t in watched]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, *_gradients(ctx, grads))


class _LaunchedDirectly(torch.autograd.Function):
    """The node where the backward adds to the gradients of leaves itself; its first input is an
    anchor."""

    forward = staticmethod(_Launched.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = _gradients(ctx, grads)
        leaves = ctx.pair.direct
        first = len(found) - len(leaves)
        if is_backward(ctx):
            accumulate(leaves, found[first:])
        return (None, None, *found[:first])


# `Function.apply` without its look for functorch, under which no call is launched: 3 us less.
launched: Any = cast(Any, super(torch.autograd.Function, _Launched)).apply
launched_directly: Any = cast(Any, super(torch.autograd.Function, _LaunchedDirectly)).apply


def _gradients(ctx: Any, grads: Gradients) -> Sequence[Tensor | None]:
    """The gradients of a node's inputs, once it is known that they can be had."""
    pair: Joined = ctx.pair
    in_flight: InFlightForward = ctx.in_flight
    if in_flight.released:
        raise RuntimeError(_TWICE)
    if pair.watched_results:
        _ = ctx.saved_tensors  # raises where one was changed in place
    watched = in_flight.watched
    if (
        [t._version for t in watched] == in_flight.versions
        and [watched[i].data_ptr() for i in pair.saved.inputs] == in_flight.places
        and pair.saved.unmoved()
    ):
        found = pair.backward(grads)
    else:
        found = _edited(ctx, grads)
    if torch.is_grad_enabled():
        by = [*in_flight.inputs, *(g for g in grads if g is not None)]
        found = _once(found, by, pair.where)
    if pair.saves and not keep_graph():
        in_flight.release()
    return found


def _edited(ctx: Any, grads: Gradients) -> list[Tensor | None]:
    """The gradients that the engine wants, if none depends on what was changed in place."""
    pair: Joined = ctx.pair
    in_flight: InFlightForward = ctx.in_flight
    pairs = enumerate(zip(in_flight.watched, in_flight.versions, strict=True))
    changed = [i for i, (t, version) in pairs if t._version != version]
    now = [(i, in_flight.watched[i]) for i in pair.saved.inputs]
    moved = [
        at for at, place in zip(now, in_flight.places, strict=True) if at[1].data_ptr() != place
    ]
    try:
        return pair.edited(changed, moved, grads, executed(ctx, len(pair.direct)))
    except RuntimeError as error:
        if MODIFIED not in str(error) or not changed:
            raise
    raise RuntimeError(_told(in_flight.watched[changed[0]], in_flight.versions[changed[0]]))


def _told(t: Tensor, version: int) -> str:
    """What eager says of a saved tensor that was changed in place."""
    return (
        f"one of the variables needed for gradient computation {MODIFIED}: "
        f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version "
        f"{version} instead."
    )


class _Once(torch.autograd.Function):
    """Gradients that raise when somebody differentiates them again, by whatever they depend on:
    asked for some gradients alone, the engine goes by no other way."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, found: Sequence[Tensor | None], where: str | None, *_: Tensor
    ) -> Any:
        ctx.where = where
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _not_twice("a backward through the backward of a recording", ctx.where)


def _once(
    found: list[Tensor | None], by: Sequence[Tensor], where: str | None
) -> Sequence[Tensor | None]:
    if any(g is not None and is_wrapped(g) for g in found):
        what = "a graph of the backward of a recording, for a batch of gradients"
        raise _not_twice(what, where)
    return _Once.apply([None if g is None else g.detach() for g in found], where, *by)


def _not_twice(what: str, where: str | None) -> GraphError:
    """Name the line of the backward, or the callable: the engine's threads run no user's line."""
    return GraphError("OL202", what, where=user_line() or where)
