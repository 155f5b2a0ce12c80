"""The function that runs at every call of a recording, generated for the recording.

To save host time the checks and the launch are straight-line code: source text made from the
signature and compiled once, as `dataclasses` and `namedtuple` do.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from onelaunch.call.spec import CallSpec
from onelaunch.capture.recording import CapturedCall
from onelaunch.replay.checks import (
    check_default_device,
    check_gradients,
    check_marks,
    check_memory,
    check_sizes,
    check_tensors,
    check_values,
    match,
)
from onelaunch.replay.generated import GeneratedFunction
from onelaunch.replay.launch import expression, write_launch
from onelaunch.state.parts import ContainerPart
from onelaunch.trace_names import sizes


class Miss(Enum):
    """The type of `MISS`."""

    MISS = "MISS"


MISS: Final = Miss.MISS  # value that a call path returns for a call that its recording does not fit

CallPath = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""A function ``call(args, kwargs)`` that returns the result, or `MISS`."""


def build_call(captured: CapturedCall, spec: CallSpec, label: str) -> CallPath:
    """Return the call path of a recording. A miss has no effect. The caller must have checked that
    no ambient mode forbids a replay."""
    expected = captured.expected
    assert expected is not None
    source = GeneratedFunction(captured, names={"MISS": MISS})
    leaves: dict[int, str] = {}
    source.miss_if(f"{source.name('capturing', captured.driver.capturing)}()")
    numbers = match(source, spec.tree, "args", "kwargs", leaves)
    source.inputs = inputs = [leaves[i] for i in range(len(leaves))]
    containers: dict[object, str] = {}
    for slot in captured.state_input_slots:
        part, name = slot.key, f"h{len(inputs)}"
        if not isinstance(part, ContainerPart):
            source.line(f"{name} = {source.name('slot', slot.reader)}()")
        else:
            every = containers.get(part.whole.id)
            if every is None:
                every = containers[part.whole.id] = f"c{len(inputs)}"
                source.line(f"{every} = {source.name('tensors', part.all)}()")
                source.miss_if(f"{every} is None")
            source.line(f"{name} = {every}[{part.what}]")
        inputs.append(name)
    check_tensors(source, expected)
    check_values(source)
    check_marks(source)
    check_gradients(source)
    check_sizes(source)
    check_default_device(source, spec)
    check_memory(source, expected)
    source.miss_if(f"not {source.name('state', captured.guard.check)}()")
    if captured.followed:
        read = source.name("followed", captured.followed.write_current)
        source.miss_if(f"not {read}({', '.join(numbers)})")
    if captured.pair is not None:  # the recording, if no other call has it in flight
        source.line(f"flight = {source.name('take', captured.pair.take)}()")
        source.miss_if("flight is None")
    title = f"{label} {sizes([t.shape for t in spec.tensors])}".rstrip()
    launch = write_launch(source, title)
    for draw in captured.draws:
        source.line(f"{source.name('draw', draw)}()")
    source.line(
        f"return {expression(source, captured.tree, [launch[n] for n in captured.output_indices])}"
    )
    return source.compile("args, kwargs", label)
