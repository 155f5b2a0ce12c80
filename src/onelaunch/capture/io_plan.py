"""The ways of a call's tensors into a recording, and of its results to the caller.

Inputs that share memory share one buffer with the caller's layout, so the callable sees the same
overlaps and strides. Results are classified by the owner of their memory. The owner is the caller
(an argument or a view), something that outlives the call (a parameter), or the recording. Each call
copies results of the recording to fresh memory. `replay/launch.py` carries this plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec, contiguous_stride
from onelaunch.driver.overlaps import joined
from onelaunch.driver.protocol import Capture, Driver, Region, Travel
from onelaunch.driver.refusals import error_here
from onelaunch.errors import CaptureError
from onelaunch.identity import id
from onelaunch.sizes.dims import SizeLink, Varying
from onelaunch.watch.observer import Observer


class CannotPadInside(Exception):
    """An argument or result that no port of varying size can carry: the call is padded outside."""


@dataclass(slots=True, eq=False)
class Group:
    """Inputs that share memory, and the buffer that stands for it."""

    members: list[int]
    region: Region
    buffer: Tensor | None = None


COPIED = (Travel.NODE, Travel.COPY, Travel.FILL, Travel.PAD)
"""The ways of inputs that the callable gets in the recording's memory."""


@dataclass(slots=True, eq=False)
class Inputs:
    """The inputs of a recording, by index: arguments first, then tensors read from slots."""

    tensors: list[Tensor]
    specs: list[TensorSpec]
    travels: list[Travel]
    groups: list[Group]
    statics: list[Tensor] = field(default_factory=list)
    varying: dict[int, Varying] = field(default_factory=dict)
    """Input index -> how an input that may be smaller in a call varies."""

    def give_by_value(self, numbers: Collection[int]) -> None:
        """Pass 0-dim host tensors to the callable unchanged."""
        self.groups = [g for g in self.groups if g.members[0] not in numbers]
        for index in numbers:
            self.travels[index] = Travel.HOST

    def travel(self, group: Group) -> Travel:
        """Return the way of a group: all of its members have the same."""
        return self.travels[group.members[0]]

    def going(self, *ways: Travel) -> list[int]:
        """Return the indices of the inputs that travel in one of these ways."""
        return [i for i, how in enumerate(self.travels) if how in ways]

    def release(self) -> None:
        self.statics = []
        for group in self.groups:
            group.buffer = None


def plan_inputs(
    driver: Driver, tensors: Sequence[Tensor], device: torch.device, pinned: set[int]
) -> Inputs:
    """Decide how each input travels. An argument in `pinned`, storages that the callable also
    reaches by address, is read in place: the recording fits only calls with this very memory."""
    travels: list[Travel] = []
    groups: list[Group] = []
    for index, t in enumerate(tensors):
        if t.device.type != device.type:
            travels.append(Travel.FILL if is_filled(t, device) else Travel.HOST)
            if travels[-1] == Travel.FILL:
                groups.append(Group([index], Region(-1 - index, 0, t.element_size())))
            continue
        if t.device != device:
            raise CaptureError("OL109", f"tensors on {device} and on {t.device} in one call")
        travels.append(Travel.ADDRESS if driver.storage(t) in pinned else Travel.NODE)
    plan = Inputs(list(tensors), [TensorSpec.of(t) for t in tensors], travels, groups)
    members: dict[int, list[int]] = {}
    nodes = plan.going(Travel.NODE)
    for index, first in zip(nodes, joined(driver, [tensors[i] for i in nodes]), strict=True):
        members.setdefault(first, []).append(index)
    for several in members.values():
        regions = [driver.region(tensors[index]) for index in several]
        start, stop = min(r.start for r in regions), max(r.stop for r in regions)
        groups.append(Group(several, Region(regions[0].storage, start, stop)))
        if len(several) == 1 and regions[0].is_sparse(tensors[several[0]]):
            travels[several[0]] = Travel.COPY
    return plan


def is_filled(t: Tensor, device: torch.device) -> bool:
    """Return whether an argument is a number of the host, which a recording gets on the device."""
    return t.dim() == 0 and t.device.type != device.type


def staged_bytes(driver: Driver, tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """Return the known bytes of each input buffer before a capture."""
    here = [t for t in tensors if t.device == device and t.layout is torch.strided]
    groups = plan_inputs(driver, here, device, set()).groups
    return [group.region.nbytes for group in groups]


def stage(driver: Driver, capture: Capture, inputs: Inputs, device: torch.device) -> list[Tensor]:
    """Make the buffers, add the input ports, and return the callable's tensor for each input."""
    statics: list[Tensor] = list(inputs.tensors)
    alone = {group.members[0] for group in inputs.groups if len(group.members) == 1}
    for index in inputs.varying:
        if inputs.travels[index] != Travel.NODE or index not in alone:
            raise CannotPadInside
        inputs.travels[index] = Travel.PAD
    static_of: dict[int, Tensor] = {}  # one tensor that is given twice is one tensor there, too
    for group in inputs.groups:
        first, start = group.members[0], group.region.start
        example = inputs.tensors[first]
        if inputs.travel(group) == Travel.FILL:
            group.buffer = buffer = driver.empty(example.element_size(), device)
            static = driver.alias(buffer, example.dtype, (), (), 0)
            capture.input(example, static, Travel.FILL)
            statics[first] = static_of.setdefault(id(example), static)
            continue
        group.buffer = buffer = driver.empty(group.region.nbytes, device)
        tensors = [inputs.tensors[member] for member in group.members]
        base = _common_base(driver, tensors, group.region)
        for t in (*base, *tensors):
            if id(t) not in static_of and base and t is not base[0]:
                whole, first_at = static_of[id(base[0])], base[0].storage_offset()
                at = whole.storage_offset() + t.storage_offset() - first_at
                static_of[id(t)] = whole.as_strided(t.shape, t.stride(), at)
            elif id(t) not in static_of:
                static_of[id(t)] = _static(driver, buffer, t, driver.region(t).start - start)
        for member, t in zip(group.members, tensors, strict=True):
            statics[member] = static_of[id(t)]
        if inputs.travel(group) == Travel.COPY:
            capture.input(example, statics[first], Travel.COPY)
        elif first in inputs.varying:
            capture.input(example, buffer, Travel.PAD, 0, inputs.varying[first])
        else:
            capture.input(example, buffer, Travel.NODE, driver.region(example).start - start)
    capture.staged()
    inputs.statics = statics
    return statics


def _common_base(driver: Driver, tensors: Sequence[Tensor], region: Region) -> list[Tensor]:
    """Return the base of overlapping tensors if it fills the region; else nothing. AOTAutograd's
    code expects arguments that share memory to be views of one base."""
    bases = {id(b): b for b in (t if t._base is None else t._base for t in tensors)}
    base, *others = bases.values()
    span = driver.region(base)
    whole = (
        len(tensors) > 1 and not others and region.start <= span.start and span.stop <= region.stop
    )
    for t in (base, *tensors):
        whole &= not (t.requires_grad or t.is_conj() or t.is_neg() or t.is_inference())
        whole &= t.dtype == base.dtype
    return [base] if whole else []


def _static(driver: Driver, buffer: Tensor, t: Tensor, offset: int) -> Tensor:
    """Return a tensor over the buffer with the layout of `t`."""
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        static = driver.alias(buffer, t.dtype, t.shape, t.stride(), offset)
        if t.is_conj():
            static = torch._conj(static)
        if t.is_neg():
            static = torch._neg_view(static)
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(static, requires_grad=t.requires_grad)
    return static.requires_grad_(t.requires_grad) if t.requires_grad else static


# The memory of a result, with the name that `Recording.outputs` has for it. Offsets are in bytes.


class Argument(NamedTuple):
    """An input itself."""

    kind = "argument"
    number: int


class ArgumentView(NamedTuple):
    """Memory of an input, from an offset to the input's first element."""

    kind = "view"
    number: int
    offset: int


class Held(NamedTuple):
    """A tensor that exists outside the recording, such as a parameter."""

    kind = "held"
    tensor: Tensor


class HeldView(NamedTuple):
    """Memory of a tensor from outside, from an offset to its first element."""

    kind = "held view"
    tensor: Tensor
    offset: int


class Lasting(NamedTuple):
    """A gradient in the recording's own memory, which each replay writes and none copies."""

    kind = "held"
    tensor: Tensor


class Own(NamedTuple):
    """Memory of the recording, which each call copies to fresh memory with its `OwnGroup`."""

    kind = "own"
    group: int  # the index of the group
    start: int  # the first byte, in the storage of the group


class OwnView(NamedTuple):
    """A view of another result, which comes out of a node of autograd, from an offset to its first
    element."""

    kind = "own view"
    result: int
    offset: int


class HostConstant(NamedTuple):
    """A host tensor that the call made, the same at each call: the caller gets a copy."""

    kind = "host constant"
    tensor: Tensor


Memory = Argument | ArgumentView | Held | HeldView | Lasting | Own | OwnView | HostConstant


@dataclass(slots=True, eq=False)
class Output:
    """One tensor of the result."""

    spec: TensorSpec
    memory: Memory
    is_view: bool
    """True if autograd is to see it as a view of the memory's tensor."""
    follows: tuple[SizeLink, ...] = ()
    """The dimensions that follow the real sizes of a bucketed call."""
    graded: bool = True
    """True if autograd has a graph of it. A view made under `no_grad` has none, but requires grad
    where its base does."""
    freed: bool = False
    """True if its graph is used up: the callable has run the backward."""


@dataclass(slots=True, eq=False)
class OwnGroup:
    """Results in a shared storage of the recording, copied as one run of bytes."""

    storage: int
    start: int
    stop: int
    example: Tensor
    stays: bool = False  # in the recording's memory: ``outputs="static"``

    def is_whole(self, output: Output) -> bool:
        """Return whether a result of this group is all of its memory, and no view."""
        assert isinstance(output.memory, Own)
        spec = output.spec
        covers = spec.dense and spec.extent_bytes == self.stop - self.start
        plain = not (output.is_view or spec.conj or spec.neg)
        return covers and plain and output.memory.start == self.start


@dataclass(slots=True, eq=False)
class Outputs:
    """The results of a recording, each tensor object once."""

    tensors: list[Output] = field(default_factory=list)
    groups: list[OwnGroup] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """id of a tensor -> its index in `tensors`."""

    def from_before(self) -> list[Tensor]:
        """Return the tensors from before the call that are results, or bases of results."""
        memories = [output.memory for output in self.tensors]
        return [m.tensor for m in memories if isinstance(m, Held | HeldView)]

    def staying(self) -> list[int]:
        """Return the indices of results that stay in the recording's memory."""
        places = [(n, o.memory) for n, o in enumerate(self.tensors)]
        return [n for n, m in places if isinstance(m, Own) and self.groups[m.group].stays]

    def of_group(self, index: int) -> list[tuple[int, Output]]:
        """Return the results in a group, with their indices."""
        return [
            (number, output)
            for number, output in enumerate(self.tensors)
            if isinstance(output.memory, Own) and output.memory.group == index
        ]


def _on_host(t: Tensor, spec: TensorSpec, observer: Observer, state: Collection[int]) -> Memory:
    """Return the memory of a host tensor, whose values are the same in each call."""
    is_own = observer.host.made_here(t)
    wants_grad = t.grad_fn is not None or (t.requires_grad and torch.is_grad_enabled())
    if wants_grad or not (is_own or id(t) in state) or not observer.host.fixes(t):
        raise error_here("OL104", f"a result, {spec}, is on the host and varies")
    if is_own:
        return HostConstant(t.clone())
    return Held(t)


def plan_outputs(
    driver: Driver,
    results: Sequence[Tensor],
    inputs: Inputs,
    observer: Observer,
    device: torch.device,
    held: dict[int, list[Tensor]],
    lasting: set[int],
    state: Collection[int],
    viewed: Callable[[Tensor], Tensor | None],
) -> Outputs:
    """Classify every tensor that the callable returned or stored.

    Args:
        held: storage -> tensors that exist outside the recording.
        lasting: ids of results that stay in the recording's memory, for each replay to write.
        state: ids of the tensors that the callable reaches.
        viewed: see `graph_walk.viewed`.
    """
    plan = Outputs()
    statics = {id(s): i for i, s in enumerate(inputs.statics)}
    storages: dict[int, int] = {}
    for index in inputs.going(*COPIED):
        storages.setdefault(driver.storage(inputs.statics[index]), index)
    for t in results:
        if id(t) in plan.numbers:
            continue
        plan.numbers[id(t)] = len(plan.tensors)
        spec = TensorSpec.of(t)
        if id(t) in statics:
            memory = Argument(statics[id(t)])
        elif t.device.type != device.type:
            memory = _on_host(t, spec, observer, state)
        elif driver.storage(t) in observer.seeds:
            what = f"a result, {spec}, is the seed of a backward, which eager has on the host"
            raise error_here("OL104", what, fix="return the result of the operator alone")
        elif driver.storage(t) not in storages and driver.storage(t) in observer.host_scalars:
            observer.admission.read_by_host |= observer.host_scalars[driver.storage(t)]
            raise error_here("OL104", f"a result, {spec}, is a number that eager has on the host")
        else:
            memory = _outside(driver, t, inputs, storages, held, viewed(t))
            if memory is None:
                memory = Lasting(t) if id(t) in lasting else put_in_group(driver, plan, t)
        plan.tensors.append(Output(spec, memory, t._is_view(), graded=t.grad_fn is not None))
    return plan


def _outside(
    driver: Driver,
    t: Tensor,
    inputs: Inputs,
    storages: dict[int, int],
    held: dict[int, list[Tensor]],
    viewed: Tensor | None,
) -> Memory | None:
    """Return the memory of a result within an input or a held tensor; None for the recording's own.
    Where tensors share a storage, autograd says which is the base."""
    region = driver.region(t)
    if region.storage in storages:
        copied = inputs.going(*COPIED)
        several = [i for i in copied if driver.storage(inputs.statics[i]) == region.storage]
        # Views are made from an input of the same dtype if there is one: a plain as_strided.
        same_dtype = [i for i in several if inputs.statics[i].dtype == t.dtype]
        exact = [i for i in several if inputs.statics[i] is viewed]
        index = [*exact, *same_dtype, storages[region.storage]][0]
        offset = region.start - driver.region(inputs.statics[index]).start if t.numel() else 0
        return ArgumentView(index, offset)
    if region.storage in held:
        for other in held[region.storage]:
            if other is t:
                return Held(t)
        base = next((o for o in held[region.storage] if o is viewed), held[region.storage][0])
        offset = region.start - driver.region(base).start if t.numel() else 0
        return HeldView(base, offset)
    return None


def varying_group(plan: Outputs, index: int) -> Varying | None:
    """Return how the sizes of a group of results vary; None if they do not. Raises
    `CannotPadInside`: its results are views of each other, or not contiguous."""
    group = plan.groups[index]
    members = [output for _, output in plan.of_group(index)]
    follows = next((o.follows for o in members if o.follows), ())
    if not follows:
        return None
    spec = members[0].spec
    dims = tuple(sorted(f.dim for f in follows))
    contiguous = spec.stride == contiguous_stride(spec.shape)
    if len(members) > 1 or not group.is_whole(members[0]) or not contiguous or len(dims) > 2:
        raise CannotPadInside
    if any(f.more < 0 for f in follows):  # there may be no rows to copy
        raise CannotPadInside
    return Varying(spec.shape, spec.dtype, dims, (None,) * len(dims))


def put_in_group(driver: Driver, plan: Outputs, t: Tensor) -> Own:
    """Put a result into the group of its storage."""
    region = driver.region(t)
    for index, group in enumerate(plan.groups):
        if group.storage == region.storage:
            if not t.numel():
                return Own(index, group.start)
            if region.start < group.start:
                group.start, group.example = region.start, t
            group.stop = max(group.stop, region.stop)
            return Own(index, region.start)
    plan.groups.append(OwnGroup(region.storage, region.start, region.stop, t))
    return Own(len(plan.groups) - 1, region.start)


def written_groups(driver: Driver, plan: Inputs, among: Collection[int]) -> list[Group]:
    """Return the groups with memory in `among`, the storages that the callable wrote into."""
    return [g for g in plan.groups if g.buffer is not None and driver.storage(g.buffer) in among]


def output_ports(
    driver: Driver, capture: Capture, plan: Inputs, outputs: Outputs, observer: Observer
) -> None:
    """Add the ports that copy results out, and written inputs back to the caller."""
    for index, group in [(i, group) for i, group in enumerate(outputs.groups) if not group.stays]:
        buffer = driver.alias(group.example, torch.uint8, (group.stop - group.start,), (1,), 0)
        capture.output(buffer, 0, varying_group(outputs, index))
    for group in written_groups(driver, plan, observer.memory.written):
        travel = plan.travel(group)
        if travel == Travel.FILL:
            raise CaptureError("OL104", "a 0-dim host argument is written")
        assert group.buffer is not None
        example = plan.tensors[group.members[0]]
        displacement = driver.region(example).start - group.region.start
        capture.output(group.buffer, 0 if travel == Travel.COPY else displacement)
