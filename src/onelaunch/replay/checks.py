"""The checks in a call path that decide whether its recording fits a call."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from onelaunch.call.ambient import default_device
from onelaunch.call.kinds import kinds_in
from onelaunch.call.spec import CallSpec
from onelaunch.call.tree import (
    AnyNumber,
    Constant,
    Container,
    Leaf,
    Tree,
    flatten,
    leaf_numbers,
    mapped,
)
from onelaunch.capture.recording import ExpectedInputs
from onelaunch.driver.protocol import Travel
from onelaunch.replay.generated import GeneratedFunction
from onelaunch.state.host_values import bytes_of

_C: Any = torch._C


def match(
    source: GeneratedFunction, tree: Tree, args: str, kwargs: str, leaves: dict[int, str]
) -> list[str]:
    """Compare all arguments but tensors. Return the names of the numbers that may differ."""
    numbers: list[str] = []
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
        _match_value(source, child, f"{args}[{index}]", leaves, numbers)
    for key, child in zip(named.keys, named.children, strict=True):
        _match_value(source, child, f"{kwargs}.get({key!r}, MISS)", leaves, numbers)
    return numbers


def _match_value(
    source: GeneratedFunction, tree: Tree, value: str, leaves: dict[int, str], numbers: list[str]
) -> None:
    if isinstance(tree, Leaf):
        leaves[tree.index] = f"t{tree.index}"
        source.line(f"t{tree.index} = {value}")
        return
    if isinstance(tree, AnyNumber):
        numbers.append(f"m{len(numbers)}")
        source.line(f"{numbers[-1]} = {value}")
        return
    if isinstance(tree, Constant):
        if tree.by_identity or tree.value is None or isinstance(tree.value, bool):
            source.miss_if(f"{value} is not {source.name('constant', tree.value)}")
        else:
            source.miss_if(f"not {source.name('matches', tree.matches)}({value})")
        return
    assert isinstance(tree, Container)
    name = f"v{len(source.lines)}"
    kind = source.name("kind", tree.kind)
    source.line(f"{name} = {value}")
    if tree.kind is tuple or tree.kind is list:
        source.miss_if(f"type({name}) is not {kind} or len({name}) != {len(tree.children)}")
        for index, child in enumerate(tree.children):
            _match_value(source, child, f"{name}[{index}]", leaves, numbers)
    elif tree.kind is dict:
        keys = source.name("keys", tree.keys)
        source.miss_if(f"type({name}) is not {kind} or tuple({name}) != {keys}")
        for key, child in zip(tree.keys, tree.children, strict=True):
            _match_value(source, child, f"{name}[{source.name('key', key)}]", leaves, numbers)
    else:
        _match_other(source, tree, name, kind, leaves)


def _match_other(
    source: GeneratedFunction, tree: Container, name: str, kind: str, leaves: dict[int, str]
) -> None:
    """Flatten a dataclass, named tuple, object or registered container, and compare it whole."""
    numbers = list(leaf_numbers(tree))
    alone = mapped(tree, lambda t: Leaf(numbers.index(t.index)) if isinstance(t, Leaf) else t)
    renumbered = source.name("tree", alone)
    source.miss_if(f"type({name}) is not {kind}")
    flat = functools.partial(flatten, objects=kinds_in(tree)) if kinds_in(tree) else flatten
    source.line(f"{name} = {source.name('flatten', flat)}({name})")
    source.miss_if(f"{name}.tree != {renumbered}")
    for position, number in enumerate(numbers):
        leaves[number] = f"t{number}"
        source.line(f"t{number} = {name}.tensors[{position}]")


def check_tensors(source: GeneratedFunction, expected: ExpectedInputs) -> None:
    """Check type, dispatch keys (conj, neg, inference), dtype, device, sizes, strides and
    requires_grad: a call into C++, 0.2 us, and 0.1 us for each further tensor."""
    inputs = source.inputs
    if not inputs:
        return
    check = source.name("tensors", expected.tensors.check)
    source.miss_if(f"not {check}({', '.join(expected.checked(inputs))})")
    for i, other in expected.twice.items():
        source.miss_if(f"{inputs[i]} is not {inputs[other]}")


def check_values(source: GeneratedFunction) -> None:
    """Check the elements of host arguments that the host reads: a microsecond each."""
    for index, value in source.captured.values.items():
        read = source.name("bytes_of", bytes_of)
        source.miss_if(f"{read}({source.inputs[index]}) != {source.name('value', value)}")


def check_marks(source: GeneratedFunction) -> None:
    """Check the attributes of arguments that the callable read: 0.1 us each."""
    for index, kept in source.captured.marks.items():
        source.miss_if(f"not {source.name('marks', kept)}({source.inputs[index]})")


def check_gradients(source: GeneratedFunction) -> None:
    """Check that no argument of a whole step has a gradient, which the callable would not see."""
    if source.captured.pair is not None or not torch.is_grad_enabled():
        return
    plan = source.captured.inputs
    for name, spec, how in zip(source.inputs, plan.specs, plan.travels, strict=False):
        if spec.requires_grad and how != Travel.ADDRESS:
            source.miss_if(f"{name}.is_leaf and {name}.grad is not None")


def check_sizes(source: GeneratedFunction) -> None:
    """Read the real sizes of a bucketed call as `n0`, `n1`. Check that all arguments have the same
    sizes, within the bucket. 0.1 us each."""
    bucket = source.captured.bucket
    if bucket is None:
        return
    seen: set[int] = set()
    for index, varying in source.captured.inputs.varying.items():
        name = source.inputs[index]
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


def check_default_device(source: GeneratedFunction, spec: CallSpec) -> None:
    """Check the default device. Setting it adds the only function mode that may be active here."""
    modes = source.name("function_modes", _C._len_torch_function_stack)
    device = source.name("device", spec.device)
    read = source.name("default_device", default_device)
    condition = f"{read}() != {device}"
    source.miss_if(f"{modes}() and {condition}" if spec.device.type == "cpu" else condition)


def check_memory(source: GeneratedFunction, expected: ExpectedInputs) -> None:
    """Check the addresses and overlaps of inputs that the recording relies on. An argument read in
    place must be the captured memory. The callable may compare arguments with its own tensors, so
    an argument must be the same own tensor as in the capture, or none. For overlaps see
    `ExpectedInputs`."""
    inputs, captured = source.inputs, source.captured
    for index, address in expected.addresses.items():
        source.miss_if(f"{inputs[index]}.data_ptr() != {address}")
    guarded = captured.guard.tensor_ids()
    ids = source.name("kept", guarded)
    for index, name in enumerate(inputs[: captured.caller_input_count] if guarded else ()):
        kept = expected.kept.get(index)
        source.miss_if(f"id({name}) in {ids}" if kept is None else f"id({name}) != {id(kept)}")
    if expected.overlapping is not None:
        names = ", ".join(inputs[i] for i in expected.movable)
        pattern = source.name("pattern", expected.overlaps)
        overlaps = source.name("overlaps", expected.overlapping)
        source.miss_if(f"{overlaps}({names}) != {pattern}")
