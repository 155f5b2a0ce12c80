"""The attributes that code put on arguments that are tensors, `x.doubled = True`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import CodeType

from torch import Tensor

from onelaunch.call.tree import Constant
from onelaunch.errors import CaptureError
from onelaunch.frames.peek import attributes_of
from onelaunch.frames.reads import Reads
from onelaunch.source import loaded_at

Check = Callable[[Tensor], bool]


def give_marks(statics: Sequence[Tensor], originals: Sequence[Tensor]) -> None:
    """Give the callable's tensors the attributes of the caller's."""
    for static, t in zip(statics, originals, strict=False):
        attributes = attributes_of(t)
        if attributes and static is not t:
            vars(static).update(attributes)


def marks_read(
    reads: Reads,
    statics: Sequence[Tensor],
    originals: Sequence[Tensor],
    paths: Sequence[str],
    codes: Collection[CodeType],
) -> dict[int, Check]:
    """Return input index -> check that an argument has the attributes read in the capture. If
    the user's code tells leaves from results, an argument that requires grad must be as then.
    Refuse (OL105) a value that can change by itself, as a tensor's."""
    checks: dict[int, Check] = {}
    inputs = zip(statics, originals, paths, strict=False)
    asks = reads.names(_OF_LEAVES)
    for index, (static, t, path) in enumerate(inputs):
        leaf = static.is_leaf if asks and t.requires_grad else None
        if leaf is not None:
            checks[index] = lambda t, leaf=leaf: t.is_leaf is leaf
        owner = reads.of(static)
        if owner is None or static is t:
            continue
        attributes = attributes_of(t) or {}
        every = owner.opaque or owner.asked
        values = {k: Constant(v) for k, v in attributes.items() if every or k in owner.names}
        for name, value in values.items():
            if not value.is_plain:
                where = loaded_at(codes, name)
                what = f"`{path}.{name}`, an attribute of an argument, is read in the call"
                raise CaptureError("OL105", what, where=where, why=_READ_ONCE, fix=_BESIDE)
        checks[index] = _check(values, None if every else frozenset(owner.names), leaf)
    return checks


_OF_LEAVES = frozenset({"is_leaf", "grad_fn", "retains_grad"})
"""Attributes that tell a leaf from a result. In a capture an argument is a leaf."""


def _check(values: dict[str, Constant], names: frozenset[str] | None, leaf: bool | None) -> Check:
    """Return a check of the attributes `names`, or of all: 0.1 us if there are none. `leaf`: what a
    tensor's `is_leaf` must be, if that matters."""

    def kept(t: Tensor) -> bool:
        if leaf is not None and t.is_leaf is not leaf:
            return False
        now = t.__dict__
        if not values:
            return not now if names is None else names.isdisjoint(now)
        found = now.keys() if names is None else names & now.keys()
        return found == values.keys() and all(c.matches(now[k]) for k, c in values.items())

    return kept


_READ_ONCE = "a replay would use what hung on the tensor of the capture"
_BESIDE = "pass it as an argument beside the tensor"
