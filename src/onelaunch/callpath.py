"""The function that runs at every call of a recording, written for that recording.

Host time is what a graph is for, so the checks and the launch are straight-line code: source text
made from the signature and compiled once, as `dataclasses` and `namedtuple` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from onelaunch.autograd import Pair
from onelaunch.driver.driver import Driver, Released, Varying
from onelaunch.gradients import keeper
from onelaunch.plan import Output
from onelaunch.recording import Captured, StateOutput
from onelaunch.signature import overlaps
from onelaunch.slots import gradient_of
from onelaunch.spec import CallSpec, TensorSpec, default_device
from onelaunch.spent import spend
from onelaunch.tree import Constant, Container, Leaf, Tree, build, flatten


class _Miss:
    def __repr__(self) -> str:
        return "MISS"


MISS: Any = _Miss()
"""What a call path returns for a call that its recording does not fit."""

_C: Any = torch._C
_GUARDS: Any = _C._dynamo.guards


@dataclass
class _Source:
    """Lines of a function, and the objects that they name."""

    lines: list[str] = field(default_factory=lambda: cast(list[str], []))
    names: dict[str, Any] = field(default_factory=lambda: cast(dict[str, Any], {}))

    def line(self, text: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + text)

    def name(self, prefix: str, value: object) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}:")
        self.line("return MISS", 2)

    def compile(self, signature: str, label: str) -> Callable[..., Any]:
        text = "\n".join([f"def call({signature}):", *self.lines])
        exec(compile(text, f"<onelaunch {label}>", "exec"), self.names)
        # Names that held the function would be a cycle, and keep a recording's memory till the
        # next collection.
        return self.names.pop("call")


def build_call(
    captured: Captured, spec: CallSpec, label: str
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """The call path of a recording: ``call(args, kwargs)`` gives the result or `MISS`.

    A miss has no effect. The caller has seen to it that nothing ambient forbids a replay.
    """
    driver, device = captured.driver, captured.device
    source = _Source(names={"MISS": MISS})
    leaves: dict[int, str] = {}
    if driver.name == "cuda":  # on the tape a mode is active meanwhile
        source.miss_if(f"{source.name('capturing', driver.capturing)}()")
    _match(source, spec.tree, "args", "kwargs", leaves)
    inputs = [leaves[i] for i in range(len(leaves))]
    for slot in captured.hidden:
        name = f"h{len(inputs)}"
        source.line(f"{name} = {source.name('slot', slot.read)}()")
        inputs.append(name)
    _check_tensors(source, captured, inputs)
    _check_sizes(source, captured, inputs)
    _check_default_device(source, spec)
    _check_memory(source, driver, captured, inputs)
    source.miss_if(f"not {source.name('state', captured.guard.check)}()")
    if captured.dials.keys:
        source.miss_if(f"not {source.name('numbers', captured.dials.current)}()")
    if captured.pair is not None:  # the recording, if no other call has it in flight
        source.line(f"flight = {source.name('take', captured.pair.take)}()")
        source.miss_if("flight is None")
    made = _launch(source, driver, captured, inputs, device)
    for draw in captured.draws:
        source.line(f"{source.name('draw', draw)}()")
    source.line(f"return {_expression(source, captured.tree, [made[n] for n in captured.numbers])}")
    return source.compile("args, kwargs", label)


def _match(source: _Source, tree: Tree, args: str, kwargs: str, leaves: dict[int, str]) -> None:
    """Take args and kwargs apart, and compare all that is not a tensor."""
    assert isinstance(tree, Container)
    positional, named = cast(tuple[Container, Container], tree.children)
    conditions = f"len({args}) != {len(positional.children)}"
    if not named.children:
        conditions += f" or {kwargs}"
    elif len(named.children) == 1:
        conditions += f" or len({kwargs}) != 1"
    else:  # a callable that takes **kwargs sees their order
        conditions += f" or tuple({kwargs}) != {source.name('order', named.keys)}"
    source.miss_if(conditions)
    for index, child in enumerate(positional.children):
        _match_value(source, child, f"{args}[{index}]", leaves)
    for key, child in zip(named.keys, named.children, strict=True):
        _match_value(source, child, f"{kwargs}.get({key!r}, MISS)", leaves)


def _match_value(source: _Source, tree: Tree, value: str, leaves: dict[int, str]) -> None:
    if isinstance(tree, Leaf):
        leaves[tree.index] = f"t{tree.index}"
        source.line(f"t{tree.index} = {value}")
        return
    if isinstance(tree, Constant):
        _match_constant(source, tree, value)
        return
    name = f"v{len(source.lines)}"
    kind = source.name("kind", tree.kind)
    source.line(f"{name} = {value}")
    if tree.kind is tuple or tree.kind is list:
        source.miss_if(f"type({name}) is not {kind} or len({name}) != {len(tree.children)}")
        for index, child in enumerate(tree.children):
            _match_value(source, child, f"{name}[{index}]", leaves)
    elif tree.kind is dict:
        keys = source.name("keys", tree.keys)
        source.miss_if(f"type({name}) is not {kind} or tuple({name}) != {keys}")
        for key, child in zip(tree.keys, tree.children, strict=True):
            _match_value(source, child, f"{name}[{source.name('key', key)}]", leaves)
    else:
        _match_other(source, tree, name, kind, leaves)


def _match_other(
    source: _Source, tree: Container, name: str, kind: str, leaves: dict[int, str]
) -> None:
    """A dataclass, named tuple or registered container: flattened, and compared whole."""
    numbers = [leaf.index for leaf in _leaves(tree)]
    renumbered = source.name("tree", _renumbered(tree, {n: i for i, n in enumerate(numbers)}))
    source.miss_if(f"type({name}) is not {kind}")
    source.line(f"{name} = {source.name('flatten', flatten)}({name})")
    source.miss_if(f"{name}.tree != {renumbered}")
    for position, number in enumerate(numbers):
        leaves[number] = f"t{number}"
        source.line(f"t{number} = {name}.tensors[{position}]")


def _leaves(tree: Tree) -> list[Leaf]:
    if isinstance(tree, Leaf):
        return [tree]
    if isinstance(tree, Constant):
        return []
    return [leaf for child in tree.children for leaf in _leaves(child)]


def _renumbered(tree: Tree, numbers: dict[int, int]) -> Tree:
    if isinstance(tree, Leaf):
        return Leaf(numbers[tree.index])
    if isinstance(tree, Constant):
        return tree
    return Container(
        tree.kind, tree.keys, tuple(_renumbered(child, numbers) for child in tree.children)
    )


def _match_constant(source: _Source, constant: Constant, value: str) -> None:
    if constant.by_identity or constant.value is None or isinstance(constant.value, bool):
        source.miss_if(f"{value} is not {source.name('constant', constant.value)}")
    else:
        source.miss_if(f"not {source.name('matches', constant.matches)}({value})")


def _check_tensors(source: _Source, captured: Captured, inputs: Sequence[str]) -> None:
    """Type, dispatch keys (conj, neg, inference), dtype, device, sizes, strides, requires_grad:
    one call into C++, 0.2 us, and 0.1 us for each further tensor."""
    if not inputs:
        return
    unlike = [i for i in range(len(captured.inputs.tensors)) if _same_object_twice(captured, i)]
    checked = [name for i, name in enumerate(inputs) if i not in unlike]
    examples = [t for i, t in enumerate(captured.inputs.tensors) if i not in unlike]
    sizes = strides = None
    if captured.inputs.varying:
        varying = {id(captured.inputs.tensors[i]): v for i, v in captured.inputs.varying.items()}
        sizes = [_fixed_sizes(t, varying.get(id(t))) for t in examples]
        strides = [[None] * t.dim() if id(t) in varying else list(t.stride()) for t in examples]
    guards = _GUARDS.TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    source.miss_if(f"not {source.name('tensors', guards.check)}({', '.join(checked)})")
    for i in unlike:
        first = next(
            j for j, t in enumerate(captured.inputs.tensors) if t is captured.inputs.tensors[i]
        )
        source.miss_if(f"{inputs[i]} is not {inputs[first]}")


def _fixed_sizes(t: Tensor, varying: Varying | None) -> list[int | None]:
    moving = () if varying is None else varying.dims
    return [None if dim in moving else size for dim, size in enumerate(t.shape)]


def _check_sizes(source: _Source, captured: Captured, inputs: Sequence[str]) -> None:
    """The real sizes of a bucketed call, as `n0`, `n1`: all arguments agree on them, and the bucket
    serves them. 0.1 us each."""
    bucket = captured.bucket
    if bucket is None:
        return
    seen: set[int] = set()
    for index, varying in captured.inputs.varying.items():
        name = inputs[index]
        source.miss_if(f"not {name}.is_contiguous()")
        source.line(f"s{index} = {name}.shape")
        for dim, place in zip(varying.dims, bucket.places[index], strict=True):
            if place in seen:
                source.miss_if(f"s{index}[{dim}] != n{place}")
                continue
            seen.add(place)
            source.line(f"n{place} = s{index}[{dim}]")
            least, most = bucket.least[place], bucket.sizes[place]
            source.miss_if(f"n{place} < {least} or n{place} > {most}")


def _same_object_twice(captured: Captured, index: int) -> bool:
    """`TensorGuards` refuses the same tensor given twice."""
    tensors = captured.inputs.tensors
    return any(tensors[j] is tensors[index] for j in range(index))


def _check_default_device(source: _Source, spec: CallSpec) -> None:
    """A default device that was set is a function mode, and none of those is active otherwise."""
    modes = source.name("function_modes", _C._len_torch_function_stack)
    device = source.name("device", spec.device)
    read = source.name("default_device", default_device)
    condition = f"{read}() != {device}"
    source.miss_if(f"{modes}() and {condition}" if spec.device.type == "cpu" else condition)


def _check_memory(
    source: _Source, driver: Driver, captured: Captured, inputs: Sequence[str]
) -> None:
    """Where inputs lie, as far as it matters.

    An argument read in place must be that very memory. Arguments captured as one run of bytes must
    overlap as they did. Others may overlap as they please, unless the graph writes to an argument
    or to memory that it reads by address: then all must be as apart as they were.
    """
    travels = captured.inputs.travels
    for index, name in enumerate(inputs):
        if travels[index] == "address":
            address = captured.inputs.tensors[index].data_ptr()
            source.miss_if(f"{name}.data_ptr() != {address}")
    writes = bool(captured.written_inputs or captured.written)
    shared = any(len(group.members) > 1 for group in captured.inputs.groups)
    movable = [i for i, how in enumerate(travels) if how in ("node", "copy", "pad")]
    fixed = list(captured.written) if captured.written else []
    if captured.written_inputs:
        fixed = captured.guard.tensors
    if not movable or not (shared or (writes and (len(movable) > 1 or fixed))):
        return
    examples = [captured.inputs.tensors[i] for i in movable]
    pattern = source.name("pattern", overlaps(driver, examples, fixed))
    checker = source.name("overlaps", overlaps)
    names = ", ".join(inputs[i] for i in movable)
    driver_name, fixed_name = source.name("driver", driver), source.name("fixed", fixed)
    source.miss_if(f"{checker}({driver_name}, ({names},), {fixed_name}) != {pattern}")


def _launch(
    source: _Source,
    driver: Driver,
    captured: Captured,
    inputs: Sequence[str],
    device: torch.device,
) -> list[str]:
    """Allocate what the caller gets, launch, and name each result."""
    sources = [inputs[group.members[0]] for group in captured.inputs.groups]
    targets: list[str] = []
    names: dict[int, str] = {}
    if captured.statics:
        for number, output in enumerate(captured.outputs.made):
            if output.source == "own":
                names[number] = source.name("static", captured.statics[number])
    else:
        _allocate(source, driver, captured, device, targets, names)
    after: list[str] = []
    for index in _written_groups(captured):
        group = captured.inputs.groups[index]
        leaf = inputs[group.members[0]]
        if group.travel == "copy":
            buffer = f"w{index}"
            nbytes = group.region.stop - group.region.start
            empty, where = source.name("empty", driver.empty), source.name("device", device)
            source.line(f"{buffer} = {empty}({nbytes}, {where})")
            spec = captured.inputs.specs[group.members[0]]
            view = source.name("view", _viewer(Output("own", spec)))
            after.append(f"{leaf}.copy_({view}({buffer}))")
            targets.append(buffer)
        else:
            targets.append(leaf)
    launch = source.name("launch", captured.graph.launch)
    source.line("try:")
    source.line(f"{launch}(({_tuple(sources)}), ({_tuple(targets)}))", 2)
    source.line(f"except {source.name('released', Released)}:  # by another thread")
    source.line("return MISS", 2)
    for line in after:
        source.line(line)
    launches = source.name("launches", captured.launches)
    source.line(f"{launches}[0] += 1")
    if captured.clock is not None:
        source.line(f"{launches}[1] = {source.name('clock', captured.clock)}()")
    _bump_written(source, captured, inputs)
    if captured.pair is not None:
        _attach(source, captured.pair, inputs, names)
    if not captured.statics:  # those have the graph of the capture
        for number, output in enumerate(captured.outputs.made):
            if output.spent:
                source.line(f"{names[number]} = {source.name('spend', spend)}({names[number]})")
    for number, output in enumerate(captured.outputs.made):
        if number not in names:
            names[number] = _caller_result(source, output, inputs, names)
    made = [names[number] for number in range(len(names))]
    _rebind_slots(source, captured, made)
    return made


def _attach(source: _Source, pair: Pair, inputs: Sequence[str], names: dict[int, str]) -> None:
    """Give the results their node of autograd."""
    results = _tuple([names[number] for number in pair.results])
    arguments = _tuple([inputs[i] for i in pair.arguments])
    watched = _tuple([inputs[i] for i in pair.watched_inputs])
    watched += _tuple([source.name("saved", t) for t in pair.watched])
    attach = source.name("attach", pair.attach)
    source.line(f"({results}) = {attach}(flight, ({results}), ({arguments}), ({watched}))")


def _written_groups(captured: Captured) -> list[int]:
    written = set(captured.written_inputs)
    return [i for i, g in enumerate(captured.inputs.groups) if written & set(g.members)]


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _allocate(
    source: _Source,
    driver: Driver,
    captured: Captured,
    device: torch.device,
    targets: list[str],
    names: dict[int, str],
) -> None:
    """Fresh memory for each group of results, as the tensor itself where there is only one."""
    for index, group in enumerate(captured.outputs.groups):
        members = [
            (number, output)
            for number, output in enumerate(captured.outputs.made)
            if output.source == "own" and output.index == index
        ]
        nbytes = group.stop - group.start
        base = next((m for m in members if _is_whole(m[1], nbytes)), None)
        name, where = f"g{index}", source.name("device", device)
        if base is not None and base[1].follows:
            sized = source.name("sized", driver.sized_allocator(base[1].spec))
            made = f"{sized}({_sizes(base[1])})"
            names[base[0]] = name
        elif base is not None:
            made = f"{source.name('allocate', driver.allocator(base[1].spec))}()"
            names[base[0]] = name
        else:
            made = f"{source.name('empty', driver.empty)}({nbytes}, {where})"
        source.line(f"{name} = {made}")
        for number, output in members:
            if base is None or number != base[0]:
                names[number] = f"o{number}"
                source.line(f"o{number} = {source.name('view', _viewer(output))}({name})")
        targets.append(name)


def _sizes(output: Output) -> str:
    """Expressions for the size and the strides of a contiguous result of a bucketed call."""
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
    return f"({_tuple(sizes)}), ({_tuple(strides[::-1])})"


def _is_whole(output: Output, nbytes: int) -> bool:
    """Whether a result is its group's memory itself, and not a view of it."""
    spec = output.spec
    covers = spec.dense and spec.extent_bytes == nbytes and output.offset == 0
    return covers and not (output.is_view or spec.conj or spec.neg)


def _caller_result(
    source: _Source, output: Output, inputs: Sequence[str], names: dict[int, str]
) -> str:
    """A result that is the caller's memory, a view of another result, or a constant."""
    name = f"r{len(source.lines)}"
    if output.source == "argument":
        return inputs[output.index]
    if output.source == "held":
        return source.name("held", output.tensor)
    if output.source == "host constant":
        source.line(f"{name} = {source.name('constant', output.tensor)}.clone()")
        return name
    if output.source == "held view":
        base = source.name("base", output.tensor)
    else:
        base = (names if output.source == "own view" else inputs)[output.index]
    view = source.name("view", _viewer(output))
    source.line(f"{name} = {view}({base})")
    return name


def _viewer(output: Output) -> Callable[[Tensor], Tensor]:
    """Makes a result over the memory of `base`, sharing its version counter as a view does."""
    spec, offset = output.spec, output.offset
    if not spec.inference and torch.is_inference_mode_enabled():
        # A view of a normal tensor is normal in inference mode, but one of another dtype is not.
        outside = _viewer_of(spec, offset, output.is_view)
        return lambda base: _outside_inference_mode(outside, base)
    return _viewer_of(spec, offset, output.is_view)


def _outside_inference_mode(view: Callable[[Tensor], Tensor], base: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return view(base)


def _viewer_of(spec: TensorSpec, offset: int, is_view: bool) -> Callable[[Tensor], Tensor]:
    def view(base: Tensor) -> Tensor:
        if base.is_conj():
            base = torch._conj(base)
        if base.is_neg():
            base = torch._neg_view(base)
        size = base.element_size()
        start = base.storage_offset() + offset // size
        if base.dtype != spec.dtype:
            # The bytes as one run of the one dtype, seen as the other.
            count = -(-(offset % size + spec.extent_bytes) // size)
            base = base.as_strided((count,), (1,), start).view(spec.dtype)
            start = base.storage_offset() + offset % size // base.element_size()
        if base.requires_grad and not spec.requires_grad and torch.is_grad_enabled():
            base = base.detach()
        made = base.as_strided(spec.shape, spec.stride, start)
        if spec.conj:
            made = torch._conj(made)
        if spec.neg:
            made = torch._neg_view(made)
        return made if is_view else made.detach()

    return view


def _bump_written(source: _Source, captured: Captured, inputs: Sequence[str]) -> None:
    """Count the writes, as eager would have."""
    for name in [inputs[i] for i in captured.bumped_inputs]:
        source.line(f"{source.name('bump', _bump)}({name})")
    written = [t for t in captured.bumped if not t.is_inference()]
    if written:
        source.line(f"{source.name('count', _C._increment_version)}({source.name('all', written)})")


def _rebind_slots(source: _Source, captured: Captured, made: Sequence[str]) -> None:
    """Put what the callable would have stored where it would have."""
    kept = [state for state in captured.state if gradient_in(state, captured) is not None]
    if kept:
        gradients = [(state.slot.holder, gradient_in(state, captured)) for state in kept]
        source.line(f"{source.name('gradients', keeper(gradients))}()")
    for state in captured.state:
        if gradient_in(state, captured) is not None:
            continue
        value = _expression(source, state.tree, [made[n] for n in state.numbers])
        source.line(f"{source.name('rebind', state.slot.write)}({value})")


def gradient_in(state: StateOutput, captured: Captured) -> Tensor | None:
    """The tensor that each replay writes where it is, if it is that which a slot gets."""
    if state.slot.key is not gradient_of or not isinstance(state.tree, Leaf):
        return None
    output = captured.outputs.made[state.numbers[0]]
    return output.tensor if output.lasts else None


def _bump(t: Tensor) -> None:
    """Count a write, so that autograd sees that a saved tensor changed."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def _expression(source: _Source, tree: Tree, names: Sequence[str]) -> str:
    """An expression that puts a result together."""
    if isinstance(tree, Leaf):
        return names[tree.index]
    if isinstance(tree, Constant):
        return source.name("constant", tree.value)
    children = [_expression(source, child, names) for child in tree.children]
    if tree.kind is tuple:
        return f"({_tuple(children)})"
    if tree.kind is list:
        return f"[{', '.join(children)}]"
    if tree.kind is dict:
        keys = [source.name("key", key) for key in tree.keys]
        return "{" + ", ".join(f"{k}: {c}" for k, c in zip(keys, children, strict=True)) + "}"
    return f"{source.name('build', build)}({source.name('tree', tree)}, [{', '.join(children)}])"
