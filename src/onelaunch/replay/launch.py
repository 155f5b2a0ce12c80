"""The part of a call path that launches, and passes results and writes on to the caller.

It follows the plan of `capture/io_plan.py`: results that are arguments, or views of arguments or
results, are made anew here, and version counters advance as eager's do. The graph's own launch
copies the arguments in; on CUDA, `driver/cuda/graph.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from onelaunch.autograd.graph_walk import mark_freed
from onelaunch.call.spec import TensorSpec
from onelaunch.call.tree import Above, Attribute, Constant, Leaf, Same, Shared, Tree, build
from onelaunch.capture.effects import keeper
from onelaunch.capture.io_plan import (
    Argument,
    ArgumentView,
    Held,
    HeldView,
    HostConstant,
    Lasting,
    Output,
    Own,
    OwnView,
)
from onelaunch.capture.recording import CapturedCall, StateOutput
from onelaunch.driver.protocol import Released, Travel
from onelaunch.replay.generated import GeneratedFunction, tuple_of
from onelaunch.state.slots import gradient_of
from onelaunch.trace_names import annotated, profiler

if TYPE_CHECKING:
    from onelaunch.autograd.pair import AutogradPair

_C: Any = torch._C


def write_launch(source: GeneratedFunction, title: str) -> list[str]:
    """Allocate the caller's results, launch under a title, and name each result."""
    captured, inputs = source.captured, source.inputs
    sources = [inputs[group.members[0]] for group in captured.inputs.groups]
    targets: list[str] = []
    names: dict[int, str] = {}
    static = captured.outputs.staying()
    for number, t in zip(static, captured.statics, strict=True):
        names[number] = source.name("static", t)
    for index, group in enumerate(captured.outputs.groups):
        if not group.stays:
            targets.append(_make_group(source, index, names))
    after = _take_writes(source, targets)
    replay = source.name("launch", captured.graph.launch)
    traced = source.name(
        "annotated", annotated(captured.graph.launch, f"onelaunch replay: {title}")
    )
    ends = f"(({tuple_of(sources)}), ({tuple_of(targets)}))"
    source.line("try:")
    source.line(f"if {source.name('profiler', profiler)}._is_profiler_enabled:", 2)
    source.line(f"{traced}{ends}", 3)
    source.line("else:", 2)
    source.line(f"{replay}{ends}", 3)
    source.line(f"except {source.name('released', Released)}:  # by another thread")
    source.line("return MISS", 2)
    for line in after:
        source.line(line)
    launches = source.name("launches", captured.launches)
    source.line(f"{launches}[0] += 1")
    if captured.clock is not None:
        source.line(f"{launches}[1] = {source.name('clock', captured.clock)}()")
    if captured.pair is not None:
        for number in captured.pair.results:
            if number not in names:
                output = captured.outputs.tensors[number]
                names[number] = _caller_result(source, output, names)
        _attach(source, captured.pair, names)
    # Only now: torch hides the node of a chunk after a write to it.
    _bump_written(source)
    for number, output in enumerate(captured.outputs.tensors):
        if output.freed and number not in static:  # which has the graph of the capture
            mark = source.name("mark_freed", mark_freed)
            source.line(f"{names[number]} = {mark}({names[number]})")
    for number, output in enumerate(captured.outputs.tensors):
        if number not in names:
            names[number] = _caller_result(source, output, names)
    results = [names[number] for number in range(len(names))]
    _rebind_slots(source, results)
    return results


def _take_writes(source: GeneratedFunction, targets: list[str]) -> list[str]:
    """Add the targets of written inputs to `targets`, after the results. Return the lines after the
    launch that copy back the inputs whose elements are too far apart for a memcpy."""
    after: list[str] = []
    captured = source.captured
    for index, group in enumerate(captured.inputs.groups):
        if not set(captured.writes.inputs) & set(group.members):
            continue
        leaf = source.inputs[group.members[0]]
        if captured.inputs.travel(group) == Travel.COPY:
            buffer = f"w{index}"
            source.line(f"{buffer} = {_empty(source, group.region.nbytes)}")
            spec = captured.inputs.specs[group.members[0]]
            view = source.name("view", viewer(spec))
            after.append(f"{leaf}.copy_({view}({buffer}))")
            targets.append(buffer)
        else:
            targets.append(leaf)
    return after


def _empty(source: GeneratedFunction, nbytes: int) -> str:
    empty, device = source.captured.driver.empty, source.captured.device
    return f"{source.name('empty', empty)}({nbytes}, {source.name('device', device)})"


def _attach(source: GeneratedFunction, pair: AutogradPair, names: dict[int, str]) -> None:
    inputs = source.inputs
    results = tuple_of([names[number] for number in pair.results])
    arguments = tuple_of([inputs[i] for i in pair.arguments])
    # Of an uncopied input with saved views: whatever the argument becomes, a backward reads the
    # memory that it had.
    viewed = pair.uncopied.keys() - pair.saved.inputs.keys()
    arguments_watched = enumerate(inputs[i] for i in pair.watched.inputs)
    watched = tuple_of([f"{t}.detach()" if at in viewed else t for at, t in arguments_watched])
    watched += tuple_of([source.name("saved", t) for t in pair.watched.tensors])
    watched += tuple_of([names[number] for number in pair.watched.plain])
    if pair.saved.inputs:
        places = [f"{inputs[pair.watched.inputs[i]]}.data_ptr()" for i in pair.saved.inputs]
        source.line(f"flight.places = [{', '.join(places)}]")
    attach = source.name("attach", pair.attach)
    nodes = source.name("nodes", pair.nodes())
    source.line("forwards = []")
    operands = f"flight, ({results}), ({arguments}), ({watched}), forwards, {nodes}"
    source.line(f"({results}) = {attach}({operands})")


def _make_group(source: GeneratedFunction, index: int, names: dict[int, str]) -> str:
    """Allocate memory for a group of results, and return its name."""
    driver, outputs = source.captured.driver, source.captured.outputs
    group, members = outputs.groups[index], outputs.of_group(index)
    base = next((member for member in members if group.is_whole(member[1])), None)
    requires_grad = any(output.spec.requires_grad for _, output in members)
    name = f"g{index}"
    # The callable may turn inference mode on or off for itself.
    inference = any(output.spec.inference for _, output in members)
    depth = 1
    if inference is not torch.is_inference_mode_enabled():
        source.line(f"with {source.name('inference_mode', torch.inference_mode)}({inference}):")
        depth = 2
    if base is None:
        source.line(f"{name} = {_empty(source, group.stop - group.start)}", depth)
    else:
        spec = base[1].spec
        allocate = source.name("allocate", driver.allocator(spec))
        sizes = f"{source.name('size', spec.shape)}, {source.name('stride', spec.stride)}"
        sizes = _sizes(base[1]) if base[1].follows else sizes
        source.line(f"{name} = {allocate}({sizes})", depth)
    for number, output in members:
        if base is not None and number == base[0]:
            names[number] = name
            continue
        names[number] = f"o{number}"
        of = name
        if output.is_view and requires_grad and not output.spec.requires_grad:
            of = f"{name}.detach()"  # a view of a tensor with a node would require grad, too
        assert isinstance(output.memory, Own)
        offset = output.memory.start - group.start
        view = source.name("view", viewer(output.spec, offset, output.is_view))
        source.line(f"o{number} = {view}({of})", depth)
    return name


def _sizes(output: Output) -> str:
    """Return an expression for the size and strides of a contiguous result of a bucketed call."""
    sizes: list[str] = [str(size) for size in output.spec.shape]
    for follow in output.follows:
        scaled = f"{follow.scale} * n{follow.place}" if follow.scale > 1 else f"n{follow.place}"
        sizes[follow.dim] = f"{scaled} + {follow.more}" if follow.more else scaled
    strides: list[str] = []
    number, factors = 1, list[str]()
    for size in reversed(sizes):
        strides.append(
            " * ".join([str(number), *factors])
            if number > 1 or not factors
            else " * ".join(factors)
        )
        if size.isdigit():
            number *= max(int(size), 1)
        else:
            factors.append(f"({size})" if " " in size else size)
    return f"({tuple_of(sizes)}), ({tuple_of(strides[::-1])})"


def _caller_result(source: GeneratedFunction, output: Output, names: dict[int, str]) -> str:
    name = f"r{len(source.lines)}"
    match output.memory:
        case Argument(index):
            return source.inputs[index]
        case Held(tensor) | Lasting(tensor):
            return source.name("held", tensor)
        case HostConstant(tensor):
            source.line(f"{name} = {source.name('constant', tensor)}.clone()")
            return name
        case ArgumentView(index, offset):
            base = source.inputs[index]
        case HeldView(tensor, offset):
            base = source.name("base", tensor)
        case OwnView(result, offset):
            base = names[result]
        case Own():
            raise AssertionError("the results of a group have their names")
    view = viewer(output.spec, offset, output.is_view)
    in_autograd = output.is_view and output.spec.requires_grad
    if in_autograd and output.graded is not torch.is_grad_enabled():  # as where it was made
        view = torch.set_grad_enabled(output.graded)(view)
    source.line(f"{name} = {source.name('view', view)}({base})")
    return name


def _bump_written(source: GeneratedFunction) -> None:
    captured = source.captured
    for name in [source.inputs[i] for i in captured.writes.bumped_inputs]:
        source.line(f"{source.name('bump', _bump)}({name})")
    written = [t for t in captured.writes.bumped if not t.is_inference()]
    if written:
        source.line(f"{source.name('count', _C._increment_version)}({source.name('all', written)})")
    if captured.pair is not None and (written or captured.writes.bumped_inputs):
        source.line("for forward in forwards:")
        source.line("forward.written()", 2)


def _rebind_slots(source: GeneratedFunction, values: Sequence[str]) -> None:
    captured = source.captured
    in_place = [state for state in captured.state if gradient_in(state, captured) is not None]
    if in_place:
        gradients = [(state.slot.holder, gradient_in(state, captured)) for state in in_place]
        source.line(f"{source.name('gradients', keeper(gradients))}()")
    for state in captured.state:
        if gradient_in(state, captured) is not None:
            continue
        if state.fresh is not None:
            value = f"{source.name('fresh', state.fresh)}()"
            source.line(f"{source.name('rebind', state.slot.write)}({value})")
            continue
        value = expression(source, state.tree, [values[n] for n in state.output_indices])
        if state.step is not None:
            number = f"{source.name('read', state.slot.reader)}()"
            if isinstance(state.step, int):
                moved = f"{number} + {state.step}"
            else:
                moved = f"{source.name('step', state.step)}({number})"
            source.line(f"{source.name('rebind', state.slot.writer)}({moved})")
            continue
        indent = 1
        if isinstance(state.tree, Constant):  # a store in a dict that reports changes costs a check
            source.line(f"if {source.name('read', state.slot.reader)}() is not {value}:")
            indent = 2
        source.line(f"{source.name('rebind', state.slot.write)}({value})", indent)


def gradient_in(state: StateOutput, captured: CapturedCall) -> Tensor | None:
    """Return the gradient that each replay writes in place, if the slot is for a gradient."""
    if state.slot.key is not gradient_of or not isinstance(state.tree, Leaf):
        return None
    memory = captured.outputs.tensors[state.output_indices[0]].memory
    return memory.tensor if isinstance(memory, Lasting) else None


def _bump(t: Tensor) -> None:
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def _access(source: GeneratedFunction, steps: Sequence[object]) -> str:
    """Return an expression for an object among the arguments, by the steps to it."""
    text = ("args", "kwargs")[cast(int, steps[0])]
    for step in steps[1:]:
        inside = isinstance(step, Attribute)
        text += f".{step.name}" if inside else f"[{source.name('key', step)}]"
    return text


def expression(source: GeneratedFunction, tree: Tree, names: Sequence[str]) -> str:
    """Return an expression that builds a result. Add lines for shared containers."""
    if isinstance(tree, Shared):
        name = f"shared{tree.number}"
        if tree.number not in source.shared:
            source.line(f"{name} = {expression(source, tree.tree, names)}")
            source.shared.add(tree.number)
        return name
    if isinstance(tree, Leaf):
        return names[tree.index]
    if isinstance(tree, Constant):
        return source.name("constant", tree.value)
    if isinstance(tree, Same):
        return (
            source.name("same", tree.value) if tree.steps is None else _access(source, tree.steps)
        )
    assert not isinstance(tree, Above)  # only arguments have it
    children = [expression(source, child, names) for child in tree.children]
    if tree.kind is tuple:
        return f"({tuple_of(children)})"
    if tree.kind is list:
        return f"[{', '.join(children)}]"
    if tree.kind is dict:
        keys = [source.name("key", key) for key in tree.keys]
        return "{" + ", ".join(f"{k}: {c}" for k, c in zip(keys, children, strict=True)) + "}"
    return f"{source.name('build', build)}({source.name('tree', tree)}, [{', '.join(children)}])"


def viewer(spec: TensorSpec, offset: int = 0, is_view: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a result over the memory of `base`, sharing its version counter
    as a view does. `offset`: the bytes from the first element of `base`. `is_view`: whether
    autograd is to see the result as a view of `base`."""
    if not spec.inference and torch.is_inference_mode_enabled():
        # In inference mode a view of a normal tensor is normal, unless its dtype is another.
        return torch.inference_mode(False)(torch.no_grad()(_viewer_of(spec, offset, is_view)))
    return _viewer_of(spec, offset, is_view)


def _viewer_of(spec: TensorSpec, offset: int, is_view: bool) -> Callable[[Tensor], Tensor]:
    def view(base: Tensor) -> Tensor:
        if base.is_conj():
            base = torch._conj(base)
        if base.is_neg():
            base = torch._neg_view(base)
        if base.requires_grad and not spec.requires_grad:
            base = base.detach()
        size = base.element_size()
        start = base.storage_offset() + offset // size
        if base.dtype != spec.dtype:
            # The bytes as a run of the base's dtype, seen as the result's.
            count = -(-(offset % size + spec.extent_bytes) // size)
            base = _as_dtype(base.as_strided((count,), (1,), start), spec.dtype)
            start = base.storage_offset() + offset % size // base.element_size()
        viewed = base.as_strided(spec.shape, spec.stride, start)
        if spec.conj:
            viewed = torch._conj(viewed)
        if spec.neg:
            viewed = torch._neg_view(viewed)
        return viewed if is_view else viewed.detach()

    return view


def _as_dtype(run: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a run of elements as elements of another dtype. With a gradient, real numbers become
    complex numbers, or the reverse."""
    if not run.requires_grad:
        return run.view(dtype)
    as_complex = dtype.is_complex
    return (
        torch.view_as_complex(run.view(-1, 2)) if as_complex else torch.view_as_real(run).view(-1)
    )
