"""Checks before and after a run: they refuse effects that no replay could repeat."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onelaunch.autograd.graph_walk import is_freed, is_pure_view
from onelaunch.call.kinds import kinds_in
from onelaunch.call.spec import has_strides, layout_of, lies_on, tree_difference
from onelaunch.call.tree import (
    Constant,
    Flat,
    Tree,
    constants,
    flatten_call,
    is_code,
    is_plain,
    unflatten,
)
from onelaunch.call.wrappers import is_compound, local
from onelaunch.capture.io_plan import (
    Argument,
    ArgumentView,
    Held,
    HeldView,
    Inputs,
    Output,
    Outputs,
    Own,
)
from onelaunch.capture.recording import NeedsGrad
from onelaunch.driver.protocol import Travel
from onelaunch.driver.refusals import error_here
from onelaunch.errors import CaptureError, CaptureSignal, describe_type
from onelaunch.frames.peek import METHODS, attributes_of, object_of
from onelaunch.frames.reads import Reads
from onelaunch.source import changed_at, loaded_at, user_frame
from onelaunch.state.slots import MISSING, Slot, gradient_of, node_of
from onelaunch.state.walk import StateWalk
from onelaunch.watch.observer import Observer


class RunArguments(NamedTuple):
    tree: Tree
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    paths: Sequence[str]
    statics: Sequence[Tensor]  # their tensors, in the recording's memory
    before: Sequence[tuple[int, object]]  # the (address, graph) of each tensor before the run

    @staticmethod
    def of(tree: Tree, statics: Sequence[Tensor]) -> RunArguments:
        args, kwargs = unflatten(tree, list(statics))
        paths = flatten_call(args, kwargs, kinds_in(tree)).paths
        before = [(t.data_ptr(), t.grad_fn) for t in statics]
        return RunArguments(tree, args, kwargs, paths, statics, before)

    def check(self, plan: Inputs, observer: Observer, codes: Collection[CodeType]) -> None:
        """Refuse changes other than writes into tensors, after the run."""
        tree, statics = self.tree, self.statics
        flat = flatten_call(self.args, self.kwargs, kinds_in(tree))
        pairs = zip(flat.paths, flat.tensors, statics, strict=False)
        changed = next((path for path, a, b in pairs if a is not b), None)
        if flat.tree != tree:
            changed = tree_difference(tree, flat.tree)[0]
        if changed is not None:
            what = f"the callable changed a container among its arguments, `{changed}`"
            raise CaptureError("OL105", what, fix=_ON_A_COPY)
        for path, t, spec in zip(flat.paths, statics, plan.specs, strict=False):
            if t.shape != spec.shape or t.stride() != spec.stride or t.dtype != spec.dtype:
                what = f"`{path}`, {spec}, became {list(t.shape)}"
                raise CaptureError("OL107", what, where=observer.memory.reshaped_at(t))
        for path, t, original in zip(flat.paths, flat.tensors, plan.tensors, strict=False):
            if t is not original:
                refuse_attributes([(path, t)], codes, vars(original))
        refuse_gradients(self.paths, statics, plan, codes, read=False)
        for t, spec, (address, graph) in zip(statics, plan.specs, self.before, strict=False):
            if t.data_ptr() != address:
                where = observer.memory.reshaped_at(t)
                raise CaptureError("OL107", "an argument was given other memory", where=where)
            if t.grad_fn is not graph:
                what = f"an argument, {spec}, is written with values that require grad"
                raise error_here("OL113", what, fix=_GRADED)


_GRADED = "call under `torch.no_grad()`, if no backward follows; or return a copy, `x = x.clone()`"
_ON_A_COPY = (
    "return what is stored there; or graph a function that changes a copy and returns it, `lambda "
    "batch: f(copy.copy(batch))`"
)


def refuse_attributes(
    tensors: Iterable[tuple[str, Tensor]],
    codes: Collection[CodeType],
    before: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Refuse attributes that the callable set on tensors: the tensors of a replay lack them."""
    for path, t in tensors:
        now = {**dict.fromkeys(before, MISSING), **vars(t)}
        names = [k for k, value in now.items() if value is not before.get(k, MISSING)]
        name = next((name for name in names if not name.startswith(_TORCH_MARKS)), None)
        if name is not None:
            what = f"`{path}.{name}` is set in the call, on a tensor"
            where = changed_at(codes, name)
            raise CaptureError("OL105", what, where=where, why=_ATTRIBUTE, fix=_BESIDE)


_TORCH_MARKS = ("_dynamo", "_is_param")
_ATTRIBUTE = "a replay sets no attributes"
_BESIDE = "return it beside the tensor, or set it after the call"


def refuse_gradients(
    paths: Sequence[str],
    statics: Sequence[Tensor],
    plan: Inputs,
    codes: Collection[CodeType],
    read: bool,
) -> None:
    """Refuse gradients of arguments, as the callable sees only the recording's memory. `read`: True
    before the run, for gradients that it may read; False after it, for new ones."""
    for path, static, t in zip(paths, statics, plan.tensors, strict=False):
        if static is t or not static.is_leaf:  # the caller's own; or one that gets no gradient
            continue
        if static.grad is not None:
            what = f"the callable gives `{path}` a gradient"
            raise CaptureError("OL115", what, where=loaded_at(codes, "backward"))
        if read and t.is_leaf and t.grad is not None:
            what = f"`{path}` has a gradient, which the callable may read"
            where = loaded_at(codes, "grad") or loaded_at(codes, "backward")
            raise CaptureError("OL115", what, where=where)


def refuse_opaque(tree: Tree, before: Collection[int]) -> None:
    """Refuse results other than tensors and plain values: they would be shared between calls. Code
    and modules in `before`, ids of objects from before the call, are returned as they are."""
    for path, constant in constants(tree):
        value = constant.value
        lasts = is_code(value) or isinstance(value, nn.Module)
        if not (constant.is_plain or (lasts and (id(value) in before or is_fixed(value, before)))):
            kind = type(value)
            what = f"`{path or 'result'}` is a {kind.__module__}.{kind.__qualname__}"
            raise CaptureError("OL108", what)


def is_fixed(value: object, before: Collection[int]) -> bool:
    """Return whether a value is code without values of the call, as a closure may have."""
    if isinstance(value, METHODS):
        of = object_of(value)
        return of is None or is_plain(of) or id(of) in before or isinstance(of, type)
    if isinstance(value, types.FunctionType):
        module = sys.modules.get(value.__module__)
        contents = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)
        return not contents or getattr(module, value.__name__, None) is value
    return isinstance(value, type | types.ModuleType)


def refuse_parts(
    results: Sequence[Tensor], stored: Sequence[tuple[Slot, object]], known: Collection[int]
) -> None:
    """Refuse results that are DTensors, or tensors made of several. A replay gives plain memory
    alone. Gradients and DTensors from before the call stay as they are."""
    unchanged = {id(t) for slot, t in stored if slot.key is gradient_of} | set(known)
    for t in results:
        if not has_strides(t):
            what = f"the result holds {describe_type(t) if is_compound(t) else layout_of(t)}"
            raise CaptureError("OL108", what, fix=_PLAIN)
        if local(t) is not t and id(t) not in unchanged:
            what = f"the result holds {describe_type(t)}"
            raise CaptureError("OL108", what, fix="return t.full_tensor(), or t.to_local()")


def refuse_made_parameters(outputs: Outputs, results: Sequence[Tensor]) -> None:
    """Refuse parameters that the callable made: a replay returns and stores plain tensors. Hooks
    that move weights to the device in each call make such parameters."""
    for output, t in zip(outputs.tensors, results, strict=True):
        if isinstance(t, nn.Parameter) and not isinstance(output.memory, Argument | Held):
            what = f"the callable makes a parameter, {output.spec}, and returns or stores it"
            raise CaptureError("OL108", what, fix=_MOVED)


_MOVED = (
    "return and store plain tensors; or where hooks move the weights in each call (accelerate's "
    "`cpu_offload`), keep these on the device: `remove_hook_from_module(model, recurse=True)`, "
    "then `model.to(device)`"
)


_PLAIN = "return it as a plain tensor, by `t.dequantize()` or `t.to_dense()` say"


def refuse_lazy(before: StateWalk) -> None:
    """Refuse (OL110) to run a callable that reaches a parameter without a size, of a lazy module.
    The run may give it one, which could not be undone."""
    for slot, value in before.slots.values():
        if isinstance(value, Tensor) and is_lazy(value):
            raise CaptureError("OL110", f"`{slot.name}` of a lazy module has no size yet", fix=_RUN)


_RUN = "call the lazy module itself once, `model(x)`, before it is captured; or take it out"


def refuse_compound_leaves(before: StateWalk) -> None:
    """Refuse a run with gradients that reaches a leaf made of several tensors. A capture could put
    no stand-in over its memory, nor write its gradient there."""
    if not (torch.is_grad_enabled() or before.runs_backward()):
        return
    for slot, t in before.slots.values():
        if is_compound(t) and before.is_read(slot) and t.requires_grad:
            kind = describe_type(t)
            what = f"`{slot.name}`, {kind}, requires grad and is made of several tensors"
            raise CaptureError("OL114", what, why=_UNSEEN, fix=_FROZEN)


_UNSEEN = "its gradient would go to memory that a replay does not know"
_FROZEN = (
    "freeze it, `weight.requires_grad_(False)`, or call under `torch.no_grad()`; a weight that "
    "learns must be a plain tensor"
)


WRITE_IN_PLACE = (
    "write into the memory that is there: `p.data.copy_(new)`, or under torch.no_grad() "
    "`p.sub_(lr * p.grad)`, for `p.data = new` and `vector_to_parameters`"
)


def refuse_uncovered(
    before: StateWalk,
    after: StateWalk,
    every: Sequence[Tensor],
    observer: Observer,
    device: torch.device,
    codes: Collection[CodeType],
) -> None:
    """Refuse tensors of the recording in places that no replay renews."""
    covered = {id(t) for t in every}
    for slot, t in after.tensors():
        if id(t) not in covered and lies_on(t, device) and observer.memory.is_own(t):
            if before.slots.get(slot.id, (slot, None))[1] is t:
                what = f"`{slot.name}` is given memory made in the call"
                place = changed_at(codes, "data") or loaded_at(codes, "vector_to_parameters")
                where = place or observer.memory.made_at(t)
                raise CaptureError("OL105", what, where=where, fix=WRITE_IN_PLACE)
            what = f"`{slot.name}` keeps a tensor made in the call"
            raise CaptureError("OL105", what, where=observer.memory.made_at(t))


# Leaves of autograd graphs, and results of a whole step: their graphs are used up in it.


class BackwardInside(CaptureSignal):
    """The callable ran a backward itself, or made a leaf for one."""


@contextmanager
def leaves_refused() -> Generator[None]:
    """Refuse (OL113) an in-place operation that autograd forbids in a capture alone, on a stand-in.
    Stand-ins for arguments and parameters are leaves, where eager may have none."""
    try:
        yield
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        place = user_frame(error.__traceback__)
        what = "a tensor that requires grad is changed in place"
        raise CaptureError("OL113", what, where=place) from error


def refuse_leaves_of_host(plan: Inputs) -> None:
    """Refuse (OL103) arguments that require grad and are copied to the device."""
    for index in plan.going(Travel.FILL):
        if plan.tensors[index].requires_grad:
            fix = "keep it on the device, `torch.tensor(0.5, device=x.device, requires_grad=True)`"
            what = f"an argument, {plan.specs[index]}, is copied to the device"
            raise CaptureError("OL103", f"{what}, and its gradient back", fix=fix)


def mark_freed(
    outputs: Outputs,
    results: Sequence[Tensor],
    stored: Iterable[tuple[Slot, Flat]],
    observer: Observer,
    held: Mapping[int, Sequence[Tensor]],
) -> None:
    """Mark results, and tensors in slots, whose backward has run inside. Raises `NeedsGrad`: a
    tensor still needs a backward, and is more than a view of the caller's memory."""
    graded = any(output.spec.requires_grad for output in outputs.tensors)
    ends = {node_of(t) for ts in held.values() for t in ts} if graded else set[object]()
    slots = [(t, slot) for slot, part in stored for t in part.tensors]
    for t, slot in [*((t, None) for t in results), *slots]:
        output = outputs.tensors[outputs.numbers[id(t)]]
        owned = isinstance(output.memory, Own)
        output.freed = owned and is_freed(t)
        if output.spec.requires_grad and not output.freed and (owned or not is_pure_view(t, ends)):
            raise NeedsGrad(None if slot is None else (slot.name, observer.memory.made_at(t)))


def is_made_leaf(output: Output, t: Tensor, plan: Inputs) -> bool:
    """Return whether the call made a leaf over older memory, `x.detach().requires_grad_()`. Under
    `no_grad` a view of a tensor that requires grad looks the same."""
    match output.memory:
        case ArgumentView(index, _):
            owner = plan.specs[index].requires_grad
        case HeldView(tensor, _):
            owner = tensor.requires_grad
        case _:
            return False
    return output.spec.requires_grad and t.is_leaf and not (t._is_view() and owner)


# Attributes that code put on arguments that are tensors, `x.doubled = True`.

Check = Callable[[Tensor], bool]


def give_marks(statics: Sequence[Tensor], originals: Sequence[Tensor]) -> None:
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
    asks = reads.names(_LEAF_ATTRIBUTES)
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
                raise CaptureError("OL105", what, where=where, why=_READ_ONCE, fix=_AS_ARGUMENT)
        checks[index] = _check(values, None if every else frozenset(owner.names), leaf)
    return checks


_LEAF_ATTRIBUTES = frozenset({"is_leaf", "grad_fn", "retains_grad"})
"""Attributes that tell a leaf from a result. In a capture an argument is a leaf."""


def _check(values: dict[str, Constant], names: frozenset[str] | None, leaf: bool | None) -> Check:
    """Return a check of the attributes `names`, or of all: 0.1 us if there are none. `leaf`: what a
    tensor's `is_leaf` must be, if that matters."""

    def as_captured(t: Tensor) -> bool:
        if leaf is not None and t.is_leaf is not leaf:
            return False
        now = t.__dict__
        if not values:
            return not now if names is None else names.isdisjoint(now)
        present = now.keys() if names is None else names & now.keys()
        return present == values.keys() and all(c.matches(now[k]) for k, c in values.items())

    return as_captured


_READ_ONCE = "a replay would use what hung on the tensor of the capture"
_AS_ARGUMENT = "pass it as an argument beside the tensor"
