"""Arguments that differ at each call, so that no signature ever comes again."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Constant, call_constants, is_code
from onelaunch.errors import describe_type

if TYPE_CHECKING:
    from onelaunch.runtime.candidate import SignatureStatus

MANY = 8
"""The signatures in a row, each used once and all different in one place, after which more are
expected. Also the recordings in a row, each for one call of a signature."""
_MOST_SIGNATURES = 32
"""The same number for sizes. A server may warm up at each size in turn, after which no new sizes
come."""


class ChangingArgument(NamedTuple):
    """A part of the arguments that differs at each call."""

    kind: str  # ``"number"``, ``"object"`` or ``"size"``
    path: str  # its place in the arguments
    newest: Any  # its value in the last call
    text: str  # the changing arguments, for the message
    fix: str  # the code to write instead


def note_newest(
    once: list[tuple[CallSpec, SignatureStatus]],
    spec: CallSpec,
    paths: Sequence[str],
    status: SignatureStatus,
) -> ChangingArgument | None:
    """Add a new signature to the newest, as long as each came once. Return the part in which all
    differ, or None. `status`: its status, now and later."""
    once[:] = [*[(s, k) for s, k in once if k.warmups == 1][-_MOST_SIGNATURES:], (spec, status)]
    specs = [s for s, _ in once]
    if len(specs) <= MANY:
        return None
    return _constant(specs[-MANY - 1 :]) or _growth(specs, paths)


def _constant(specs: Sequence[CallSpec]) -> ChangingArgument | None:
    """Return an object that differs in each signature; or a number, if nothing else differs."""
    maps = [dict(_places(spec)) for spec in specs]
    others = [
        place
        for place in maps[0]
        if all(place in each for each in maps) and len({each[place] for each in maps}) == len(maps)
    ]
    for path in others:
        constants = [each[path] for each in maps]
        parts = [c for c in constants if isinstance(c, Constant)]
        values = [c.value for c in parts]
        if len({type(value) for value in values}) != 1:
            continue
        newest, name = values[-1], type(values[-1]).__name__
        if parts[-1].is_plain:
            if len(others) > 1:
                continue  # any of them may be the reason
            shown = ", ".join(map(repr, values[-3:]))
            text = f"another `{path}` each time, {shown}: each value needs a recording"
            is_number = isinstance(newest, numbers.Number)
            tensor = f"pass a 0-dim tensor for one that changes, torch.tensor({newest!r})"
            return ChangingArgument(
                "number", path, newest, text, tensor if is_number else "keep to a few"
            )
        if not is_code(newest):
            text = f"another object for `{path}` each time, {describe_type(newest)}"
            return ChangingArgument("object", path, newest, text, _IS_IN_IT.format(name=name))
        if len({id(getattr(value, "__code__", value)) for value in values}) == 1:
            text = f"another `{type(newest).__name__}` for `{path}` each time"
            return ChangingArgument("object", path, newest, text, "make it once, before the calls")
    return None


_IS_IN_IT = (
    "pass its tensors, or a dataclass, a named tuple or a dict of them; or say what is in it: "
    "ol.register({name}, flatten, unflatten)"
)


def _places(spec: CallSpec) -> Iterator[tuple[str, Constant | TensorSpec]]:
    yield from call_constants(spec.tree)
    for index, tensor in enumerate(spec.tensors):
        yield f"tensor {index}", tensor


def _growth(specs: Sequence[CallSpec], paths: Sequence[str]) -> ChangingArgument | None:
    """Return a size that grows by the same amount from each signature to the next."""
    steps = [_grown(a, b) for a, b in itertools.pairwise(specs)]
    newest = steps[-1]
    if not newest:
        return None
    # A cache grows by one, and not by its batch.
    many = MANY if any(dim and step == 1 for _, dim, step in newest) else _MOST_SIGNATURES
    if len(steps) < many or any(step != newest for step in steps[-many:]):
        return None
    index, dim, _ = max(newest, key=lambda step: step[1] > 0)
    sizes = [spec.tensors[index].shape[dim] for spec in specs[-3:]]
    text = f"`{paths[index]}`, dim {dim}, larger each time, {', '.join(map(str, sizes))}"
    most = 1 << (4 * sizes[-1]).bit_length()
    fix = (
        f"buckets=ol.Buckets(dim={dim}, sizes={(most // 4, most // 2, most)}), which pad; or for a "
        "cache one of its full size that is written in place (transformers' StaticCache)"
    )
    return ChangingArgument("size", paths[index], sizes[-1], f"{text}: each needs a recording", fix)


def _grown(a: CallSpec, b: CallSpec) -> tuple[tuple[int, int, int], ...] | None:
    """Return (tensor, dimension, growth) for each size that grew from `a` to `b`. None if anything
    else differs, except integers, which may count along."""
    if (a.modes, a.device) != (b.modes, b.device) or len(a.tensors) != len(b.tensors):
        return None
    mine, theirs = list(call_constants(a.tree)), list(call_constants(b.tree))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return None
    for (_, x), (_, y) in zip(mine, theirs, strict=True):
        if x != y and not (isinstance(x.value, int) and isinstance(y.value, int)):
            return None
    grown: list[tuple[int, int, int]] = []
    for index, (x, y) in enumerate(zip(a.tensors, b.tensors, strict=True)):
        if (x.kind, x.dtype, x.device, len(x.shape)) != (y.kind, y.dtype, y.device, len(y.shape)):
            return None
        for dim, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)):
            if m < n:
                return None
            if m > n:
                grown.append((index, dim, m - n))
    return tuple(grown)
