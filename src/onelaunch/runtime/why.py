"""Why a call that no recording fits needs another one, for messages and `recordings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from onelaunch.call.spec import CallSpec
from onelaunch.errors import ReplayError
from onelaunch.state.host_values import bytes_of

if TYPE_CHECKING:
    from onelaunch.runtime.table import Entry


def why(entries: Sequence[Entry], spec: CallSpec, tensors: Sequence[Tensor] = ()) -> str:
    """Return why a call with these tensors needs another recording."""
    for entry in entries:
        if entry.spec == spec:
            numbers = None if entry.captured.scalars.write_current() else "an optimizer's numbers"
            unlike = entry.captured.unlike(tensors)
            moved = entry.captured.guard.difference()
            values = _other_value(entry, tensors)
            changed = moved or numbers or unlike or values or _other_count(entry)
            pair = entry.captured.pair
            if changed is None and pair is not None and pair.in_flight:
                return "an earlier forward still waits for its backward"
            return f"state changed: {changed or 'memory shared otherwise'}"
    if not entries:
        return "first signature"
    where, how = entries[0].spec.difference(spec, entries[0].paths)
    return f"{where}: {how}"


def _other_value(entry: Entry, tensors: Sequence[Tensor]) -> str | None:
    """Describe a host argument that has other values than the host read; or return None."""
    for index, value in entry.captured.values.items():
        if index < len(tensors) and bytes_of(tensors[index]) != value:
            return f"the values of `{entry.paths[index]}`, which the host reads"
    return None


def _other_count(entry: Entry) -> str | None:
    """Describe the numbers that a recording follows, but not to their present values; or return
    None."""
    slots = [count.slot for count in entry.captured.counts if not count.current()]
    followed = entry.captured.followed
    if not followed.arguments and not followed.serves():
        slots += followed.slots
    return ", ".join(f"{slot.name} is {slot.read()!r}" for slot in slots) or None


def mismatch(name: str, entry: Entry, spec: CallSpec) -> ReplayError:
    """Return the error of a call that differs from the only signature allowed."""
    where, how = entry.spec.difference(spec, entry.paths)
    what = f"`{name}` was captured for {entry.spec}, got {spec}"
    return ReplayError("OL201", what, where=f"{where}: {how}")


def varying(
    name: str,
    entries: Sequence[Entry],
    signatures: int,
    spec: CallSpec,
    tensors: Sequence[Tensor] = (),
) -> str:
    """Describe the difference between the calls of a callable that has too many recordings."""
    if not entries:
        return f"`{name}` was called with {signatures} signatures"
    if entries[0].spec == spec:
        return f"`{name}` has {len(entries)} recordings; {why(entries, spec, tensors)}"
    where, how = entries[0].spec.difference(spec, entries[0].paths)
    return f"`{name}` has {len(entries)} recordings; {where} varies: {how}"
