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

    Args:
        reads: the reads of the capture.
        codes: the code that the callable runs.

    Raises:
        CaptureError: OL105, a value can change by itself, as a tensor's.
    """
    checks: dict[int, Check] = {}
    inputs = zip(statics, originals, paths, strict=False)
    asks = reads.names(_OF_LEAVES)
    for index, (static, t, path) in enumerate(inputs):
        if asks and t.requires_grad:
            leaf = static.is_leaf
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
                raise CaptureError(
                    "OL105", what, where=where and str(where), why=_READ_ONCE, fix=_BESIDE
                )
        marks = _check(values, None if every else frozenset(owner.names))
        checks[index] = _both(checks[index], marks) if index in checks else marks
    return checks


_OF_LEAVES = frozenset({"is_leaf", "grad_fn", "retains_grad"})
"""Attributes that tell a leaf from a result. In a capture an argument is a leaf."""


def _both(first: Check, second: Check) -> Check:
    return lambda t: first(t) and second(t)


def _check(values: dict[str, Constant], names: frozenset[str] | None) -> Check:
    """Return a check of the attributes `names`, or of all: 0.1 us if there are none."""

    def kept(t: Tensor) -> bool:
        now = t.__dict__
        if not values:
            return not now if names is None else names.isdisjoint(now)
        found = now.keys() if names is None else names & now.keys()
        return found == values.keys() and all(c.matches(now[k]) for k, c in values.items())

    return kept


_READ_ONCE = "a replay would use what hung on the tensor of the capture"
_BESIDE = "pass it as an argument beside the tensor"
