"""The reason why a call needs another recording, or gets none: for messages and `recordings`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from onelaunch.call.spec import CallSpec, tree_difference
from onelaunch.errors import CaptureError, ReplayError
from onelaunch.runtime.candidate import Candidate
from onelaunch.runtime.options import Options
from onelaunch.runtime.pool import PoolManager
from onelaunch.sizes.fit import fit
from onelaunch.source import user_line
from onelaunch.state.host_values import bytes_of
from onelaunch.state.parts import ContainerPart, flat_content

if TYPE_CHECKING:
    from onelaunch.runtime.table import TableEntry

_MOST_SIZES = 6  # the most sizes that a message offers for a dimension


def why(entries: Sequence[TableEntry], spec: CallSpec, tensors: Sequence[Tensor] = ()) -> str:
    """Return the reason for another recording."""
    for entry in entries:
        if entry.spec == spec:
            expected = entry.captured.expected
            unlike = expected and expected.unlike(tensors, entry.paths)
            moved = entry.captured.guard.difference()
            values = _other_value(entry, tensors)
            changed = moved or unlike or values or _other_count(entry) or _other_build(entry)
            pair = entry.captured.pair
            if changed is None and pair is not None and pair.in_flight:
                return "an earlier forward still waits for its backward"
            return f"state changed: {changed or 'memory shared otherwise'}"
    if not entries:
        return "first signature"
    near = _nearest(entries, spec)
    where, how = near.spec.difference(spec, near.paths)
    return f"{where}: {how}"


def _nearest(entries: Sequence[TableEntry], spec: CallSpec) -> TableEntry:
    """Return the recording that differs least from a call: in no size, or in few tensors."""

    def likeness(entry: TableEntry) -> tuple[int, int]:
        pairs = list(zip(entry.spec.tensors, spec.tensors, strict=False))
        return sum(a.shape == b.shape for a, b in pairs), sum(a == b for a, b in pairs)

    return max(entries, key=likeness)


def _other_value(entry: TableEntry, tensors: Sequence[Tensor]) -> str | None:
    """Describe a host argument with other values than the host read, or return None."""
    for index, value in entry.captured.values.items():
        if index < len(tensors) and bytes_of(tensors[index]) != value:
            return f"the values of `{entry.paths[index]}`, which the host reads"
    return None


def _other_count(entry: TableEntry) -> str | None:
    """Describe followed numbers whose present values are not served, or return None."""
    followed = entry.captured.followed
    if followed.serves():
        return None
    slots = (*followed.counted, *followed.slots)
    texts = [f"{slot.name} is {slot.read()!r}" for slot in slots]
    return ", ".join([*texts, *(["an optimizer's numbers"] if followed.keys else [])]) or None


def _other_build(entry: TableEntry) -> str | None:
    """Describe a container of state that is not built as the captured one, or return None."""
    for slot in entry.captured.state_input_slots:
        if isinstance(slot.key, ContainerPart):
            whole = slot.key.whole
            now = flat_content(whole.read(), slot.key.kept, whole.name).tree
            if now != slot.key.tree:
                where, how = tree_difference(slot.key.tree, now, whole.name)
                return f"{where}: {how}"
    return None


def mismatch(name: str, entry: TableEntry, spec: CallSpec) -> ReplayError:
    """Return the error of a call that differs from the only signature allowed."""
    where, how = entry.spec.difference(spec, entry.paths)
    what = f"`{name}` was captured for {entry.spec}, got {spec}"
    return ReplayError("OL201", what, where=f"{where}: {how}")


def varying(
    name: str,
    entries: Sequence[TableEntry],
    specs: Collection[CallSpec],
    spec: CallSpec,
    tensors: Sequence[Tensor] = (),
) -> tuple[str, str]:
    """Describe the differences between the calls of a callable with too many recordings, and the
    fix. The fix is empty for the usual code. `specs`: the signatures of its calls."""
    called = f"`{name}` was called with {len({*specs, spec})} signatures"
    if not entries:
        return called, ""
    recorded = f"{called}, and {len(entries)} are recorded"
    if any(entry.spec == spec for entry in entries):
        return f"`{name}` has {len(entries)} recordings; {why(entries, spec, tensors)}", ""
    sizes = varying_sizes(specs, spec, entries[0].paths)
    if sizes is not None:
        text, fix = sizes
        return f"{recorded}; {text}", fix
    where, how = entries[0].spec.difference(spec, entries[0].paths)
    return f"{recorded}; {where} varies: {how}", ""


def varying_sizes(
    specs: Collection[CallSpec], spec: CallSpec, paths: Sequence[str]
) -> tuple[str, str] | None:
    """Describe the sizes that vary between calls that are alike otherwise, and the buckets for
    them; None where no size varies."""
    sizes = _sizes(specs, spec)
    if not sizes:
        return None
    ranges = [
        f"{paths[index]}, dim {dim} varies from {min(seen)} to {max(seen)}"
        for (index, dim), seen in sizes.items()
    ]
    return "; ".join(ranges), _bucketed(sizes)


KEEP_IN_PLACE = (
    "write what changes into a tensor that stays where it is, `t.copy_(new)`, or pass it as an "
    "argument that is a tensor"
)


def recorded_in_vain(name: str, row: int, used: bool, reason: str) -> str:
    """Describe recordings in a row that did not pay. `used`: whether any recording served a call
    besides its own. `reason`: why the next recording is needed."""
    calls = "a few calls" if used else "one call"
    if reason == "first signature":
        reason = "each run reads other state than the one before it"
    return f"`{name}` was recorded {row} times in a row for {calls} each; {reason}"


def _sizes(specs: Collection[CallSpec], spec: CallSpec) -> dict[tuple[int, int], set[int]]:
    """Return (tensor, dimension) -> sizes, of calls that differ from `spec` in sizes alone."""
    same_form = [s.tensors for s in {*specs, spec} if _form(s) == _form(spec)]
    sizes = {
        (index, dim): {tensors[index].shape[dim] for tensors in same_form}
        for index, t in enumerate(spec.tensors)
        for dim in range(len(t.shape))
    }
    return {place: seen for place, seen in sizes.items() if len(seen) > 1}


def _form(spec: CallSpec) -> tuple[object, ...]:
    tensors = [(t.kind, t.dtype, t.device, len(t.shape)) for t in spec.tensors]
    return spec.tree, spec.modes, spec.device, tensors


def _bucketed(sizes: Mapping[tuple[int, int], set[int]]) -> str:
    seen: dict[int, set[int]] = {}
    for (_, dim), found in sizes.items():
        seen.setdefault(dim, set()).update(found - {0})
    fitted = {
        dim: fit(dict.fromkeys(found, 1.0), _MOST_SIZES) for dim, found in sorted(seen.items())
    }
    dims, chosen = list(fitted), list(fitted.values())
    several = f"dim={tuple(dims)}, sizes={tuple(chosen)}"
    shown = several if len(dims) > 1 else f"dim={dims[0]}, sizes={chosen[0]}"
    return f"buckets=ol.Buckets({shown}): calls are padded to a few sizes"


def still_waiting(name: str, count: int) -> str:
    """Describe forwards without a backward. In a worker thread grad mode may be on by mistake: each
    thread has its own."""
    text = f"{count} forwards of `{name}` wait for their backward"
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return text
    return f"{text}; grad mode is on in thread `{thread.name}`, whatever other threads have set"


def backward_inside(kept_graph: tuple[str, str | None] | None = None) -> CaptureError:
    """Return the refusal of a callable with a backward inside and results that require grad.
    `kept_graph`: (slot with a tensor that requires grad, line that made it), if it is no result."""
    if kept_graph is not None:
        name, line = kept_graph
        return CaptureError(
            "OL303",
            f"a backward runs inside, and `{name}` keeps a tensor with its graph",
            where=line or user_line(),
            why="a callable that runs its own backward is captured as one step, which leaves no "
            "graph for a backward of a later call",
            fix=f"keep it without its graph: `{name.rpartition('.')[2]} = value.detach()`",
        )
    return CaptureError(
        "OL303",
        "a backward runs inside, or a leaf is made for one, and the results require grad",
        where=user_line(),
        why="a callable that runs its own backward is captured as one step, whose results have no "
        "backward left for the caller",
        fix="where the caller runs no backward over a result, return it as `y.detach()`; where it "
        "does, graph two callables: the step, and the forward that gives the result",
    )


def grad_in_no_grad() -> CaptureError:
    """Return the refusal of a callable that enables grad mode for itself."""
    return CaptureError(
        "OL303",
        "results require grad in no_grad mode",
        where=user_line(),
        why="the callable turns grad mode on for itself, where its caller has it off",
        fix="call it outside of torch.no_grad(), or return `y.detach()` where no backward follows",
    )


def no_room(name: str, candidate: Candidate, pool: PoolManager) -> CaptureError:
    """Return the refusal of a recording that does not fit into the pool."""
    need = candidate.status.need_bytes
    foreseen = f"{need} bytes are foreseen" if need else "what it needs was not foreseen"
    what = f"`{name}`, called with {candidate.spec}: {foreseen}"
    return CaptureError("OL304", f"{what}, and the pool has max_bytes={pool.max_bytes}")


def offer_split(error: CaptureError, root: object, options: Options) -> None:
    """Add to the refusal of a module the way to run it in pieces. `root`: the module, if the
    callable is one."""
    if not isinstance(root, nn.Module) or next(root.children(), None) is None:
        return
    if options.on_refusal == "split":
        error.fix += "; or call the module, whose pieces are captured as it runs"
    elif error.code in _CODES_OF_ONE_MODULE and options.unsplit is None:
        error.fix += (
            '; or `ol.graph(..., on_refusal="split")`: the module that holds this line runs as it '
            "is, and the modules that it calls are graphed"
        )


_CODES_OF_ONE_MODULE = frozenset({"OL101", "OL102", "OL103", "OL104", "OL105", "OL108", "OL109"})
"""Refusals of a single module: its children can be captured without it."""
