"""Results that no recorded call can write to given memory: handed on, instead of copied.

torch gives such a result in memory of its own, at another address each time. A copy to the address
of the capture and another to the caller would double what a convolution costs. So where nobody but
the recording has the memory of the capture, the tensors that its calls see are moved to each new
result; and where the whole of it is what the caller gets, the caller gets the result itself.
"""

# Recording is done with the dispatcher's own tools, which torch keeps in `torch._C`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from onelaunch.driver.calls import Call, Take, adopting, giving
from onelaunch.driver.memory import HostMemory
from onelaunch.driver.operators import Step
from onelaunch.driver.ports import Port
from onelaunch.driver.raw import no_functions, raw
from onelaunch.spec import TensorSpec


class Handing:
    """What is needed for that of a recording, until it is decided."""

    def __init__(
        self, steps: list[Step], calls: Sequence[Call], memory: HostMemory, outputs: Sequence[Port]
    ) -> None:
        self._steps = steps
        self._calls = calls
        self._memory = memory
        self._outputs = outputs

    def settle(self, fresh: Sequence[bool], given: dict[int, Tensor]) -> list[TensorSpec | None]:
        """Change the steps; see `Graph.settle`.

        Args:
            given: where the steps put what the caller gets, by the number of its port.
        """
        aliases, ports = self._memory.aliases(), self._ports()
        results = Counter(_storage(t) for call in self._calls for t in call.targets.values())
        gives: list[TensorSpec | None] = [None] * len(fresh)
        idle: list[int] = []
        for call in self._calls:
            takes: dict[int, Take] = {}
            moving: dict[int, list[Tensor]] = {}
            for i, target in call.targets.items():
                key = _storage(target)
                others, ends = [t for t in aliases[key] if t is not target], ports.get(key, [])
                known = 1 + len(others) + len(ends)
                if results[key] > 1 or not self._is_alone(target, known):
                    continue
                if len(ends) == 1 and not others and _is_all(target, *ends[0], fresh):
                    number, port = ends[0]
                    gives[number] = TensorSpec.of(target)
                    used = self._memory.asked(target) > 1  # by the call itself and by later ones
                    takes[i] = giving(target, given, number, used)
                    if used:
                        self._steps[port.position] = _letting_go(target)
                    else:
                        idle.append(port.position)
                else:
                    moving[i] = [*others, *(port.buffer for _, port in ends)]
            if call.copies or takes:
                takes |= {i: adopting(call.targets[i], moving[i]) for i in moving}
                self._steps[call.position] = call.hand(takes)
        self._drop(idle)
        return gives

    def _ports(self) -> dict[int, list[tuple[int, Port]]]:
        """The output ports, numbered, by the storage that they read."""
        found: dict[int, list[tuple[int, Port]]] = {}
        for number, port in enumerate(self._outputs):
            found.setdefault(_storage(port.buffer), []).append((number, port))
        return found

    def _is_alone(self, target: Tensor, known: int) -> bool:
        """Whether a result is all of its memory, and only so many tensors are in that."""
        storage, spec = target.untyped_storage(), TensorSpec.of(target)
        whole = spec.dense and target.nbytes == storage.nbytes() and not (spec.conj or spec.neg)
        return whole and self._memory.is_private(storage, known)

    def _drop(self, positions: Sequence[int]) -> None:
        """Take out steps that have nothing left to do."""
        for position in sorted(positions, reverse=True):
            del self._steps[position]
            for call in self._calls:
                call.position -= call.position > position


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _is_all(target: Tensor, number: int, port: Port, fresh: Sequence[bool]) -> bool:
    """Whether what a port takes to fresh memory is a whole result."""
    return fresh[number] and port.nbytes == target.nbytes


def _letting_go(target: Tensor) -> Step:
    """After a launch nothing of the recording refers to what the caller got."""
    with raw(), no_functions():
        rest = torch.empty(0, dtype=target.dtype)

    def let_go() -> None:
        target.data = rest

    return let_go
