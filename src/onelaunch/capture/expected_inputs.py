"""Conditions on the inputs of a recording, which its capture makes once, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.call.tree import first_places
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.protocol import Travel
from onelaunch.sizes.dims import Varying
from onelaunch.state.counterparts import Counterparts

if TYPE_CHECKING:
    from onelaunch.capture.recording import CapturedCall

_C: Any = torch._C


class ExpectedInputs(NamedTuple):
    """Conditions on the inputs of a recording: the call's tensors, then tensors in slots."""

    number: int
    twice: dict[int, int]  # input index -> the first input that is the same tensor
    tensors: Any
    """The check in C++ of type, dispatch keys, dtype, device, sizes, strides and `requires_grad` of
    all other inputs."""
    addresses: dict[int, int]  # index of an input that is read in place -> its address
    kept: dict[int, Tensor]  # input index -> the argument that the callable keeps
    movable: Sequence[int]  # indices of the inputs that may lie elsewhere in each call
    overlapping: Overlaps | None
    """The search for memory that movable inputs share with each other, or with memory that the
    graph uses by address; None if any overlap will do."""
    overlaps: object  # the result of `overlapping` in the capture

    @classmethod
    def of(cls, captured: CapturedCall) -> ExpectedInputs:
        """Return the conditions of a recording, while it still has the tensors of its capture.
        Arguments captured as one run of bytes must overlap as they did. Other overlaps matter only
        if the graph writes to an argument, or to memory that it reads by address."""
        inputs = captured.inputs
        first = first_places(inputs.tensors)
        twice = {i: first[id(t)] for i, t in enumerate(inputs.tensors) if first[id(t)] != i}
        held = captured.guard.tensor_ids()
        arguments = inputs.tensors[: captured.given]
        movable = inputs.going(Travel.NODE, Travel.COPY, Travel.PAD)
        fixed = list(captured.writes.tensors)
        if captured.writes.inputs:
            fixed = [t for t in captured.guard.tensors if t.device.type == captured.device.type]
        writes = bool(captured.writes.inputs or captured.writes.tensors)
        shared = any(len(group.members) > 1 for group in inputs.groups)
        matters = movable and (shared or (writes and (len(movable) > 1 or fixed)))
        overlapping = Overlaps(captured.driver, fixed) if matters else None
        # `TensorGuards` refuses one tensor twice.
        checked = [(i, t) for i, t in enumerate(inputs.tensors) if i not in twice]
        return cls(
            len(inputs.tensors),
            twice,
            _tensor_guards(checked, inputs.varying),
            {i: inputs.tensors[i].data_ptr() for i in inputs.going(Travel.ADDRESS)},
            {i: t for i, t in enumerate(arguments) if id(t) in held},
            movable,
            overlapping,
            overlapping and overlapping(*(inputs.tensors[i] for i in movable)),
        )

    def transferred(self, parts: Counterparts) -> ExpectedInputs:
        """Return the same conditions over other objects."""
        # Memory keeps its place, and so does what it overlaps with.
        return self._replace(kept={i: parts.of(t) for i, t in self.kept.items()})

    def checked(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs for `tensors` to check."""
        return [value for i, value in enumerate(values) if i not in self.twice]

    def unlike(self, tensors: Sequence[Tensor], names: Sequence[str]) -> str | None:
        """Describe how inputs, by their names, differ from the captured inputs; None if they do
        not."""
        if len(tensors) != self.number:  # tensors that the callable keeps are missing
            return None
        given = self.checked(tensors)
        found = self.tensors.check_verbose(*given, tensor_check_names=self.checked(names))
        return None if found is True else str(found)


def _tensor_guards(examples: Sequence[tuple[int, Tensor]], varying: dict[int, Varying]) -> Any:
    sizes = strides = None
    if varying:
        moving = {i: how.dims for i, how in varying.items()}
        sizes = [
            [None if dim in moving.get(i, ()) else size for dim, size in enumerate(t.shape)]
            for i, t in examples
        ]
        strides = [[None] * t.dim() if i in varying else list(t.stride()) for i, t in examples]
    return _C._dynamo.guards.TensorGuards(
        *(t for _, t in examples), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
