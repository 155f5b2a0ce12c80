"""Results that no recorded call can write to given memory: handed on, instead of copied.

torch gives such a result in memory of its own, at another address each time. A copy to the address
of the capture and another to the caller would double what a convolution costs. So where nobody but
the recording has the memory of the capture, the tensors that its calls see are moved to each new
result; and where the whole of it is what the caller gets, the caller gets the result itself.
"""

# Recording is done with the dispatcher's own tools, which torch keeps in `torch._C`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onelaunch.call.spec import TensorSpec
from onelaunch.driver.aten import Step
from onelaunch.driver.dispatch import no_functions, raw
from onelaunch.driver.tape.calls import Take, adopting, giving, giving_too
from onelaunch.driver.tape.memory import HostMemory
from onelaunch.driver.tape.ports import CopyPort, Port, Ports
from onelaunch.driver.tape.recorder import Recorder

_data: Any = torch._C.TensorBase.data
_move: Callable[[Tensor, Tensor], None] = _data.__set__
"""``_move(t, other)``: `t` becomes a tensor of the memory of `other`, laid out as that is."""

_LARGE = 1 << 14
"""Bytes from which a result's memory of the last launch is freed before the call: the new result
may get it then, while it is still in a cache."""


class Handing:
    """What is needed for that of a recording, until it is decided."""

    def __init__(
        self, steps: list[Step], recorder: Recorder, memory: HostMemory, ports: Ports
    ) -> None:
        self._steps = steps
        self._calls = recorder.calls
        self._written = recorder.written
        self._memory = memory
        self._ports = ports

    @property
    def nbytes(self) -> int:
        """Bytes that the recording needs."""
        return self._memory.nbytes

    def settle(self, fresh: Sequence[bool], given: dict[int, Tensor]) -> list[TensorSpec | None]:
        """Change the steps; see `Graph.settle`.

        Args:
            given: where the steps put what the caller gets, by the number of its port.
        """
        aliases, ports = self._memory.aliases(), _by_storage(self._ports.outputs)
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
                    takes[i] = giving(target, given, number)
                    if self._memory.asked(target) > 1:  # by the call itself and by later ones
                        takes[i] = giving_too(target, given, number)
                        self._steps[port.position] = self._let_go(target)
                    else:
                        self._memory.forget(target)
                        idle.append(port.position)
                else:
                    moving[i] = [*others, *(port.buffer for _, port in ends)]
            if call.copies or takes:
                gone = [
                    _emptied(t)
                    for i, others in moving.items()
                    if call.targets[i].nbytes >= _LARGE
                    for t in (call.targets[i], *others)
                ]
                takes |= {i: adopting(call.targets[i], moving[i]) for i in moving}
                self._steps[call.position] = call.hand(takes, gone)
        self._drop(idle)
        return gives

    def read_in_place(
        self, reads: list[Callable[[Tensor], object]], rests: list[Callable[[], object]]
    ) -> None:
        """Have calls read inputs where the caller has them, instead of copies: those that no call
        writes, and that one tensor stands for.

        Memory that a call writes may not be an input's: so nobody may have any of the recording's.
        What else calls write, the caller's and what lies behind, is kept apart by the call path.
        """
        aliases = self._memory.aliases()
        ends = Counter(_storage(p.buffer) for p in (*self._ports.inputs, *self._ports.outputs))
        if not self._memory.is_hidden(lambda key: len(aliases.get(key, ())) + ends[key]):
            return
        for number, port in enumerate(self._ports.inputs):
            key = _storage(port.buffer)
            seen = aliases.get(key, [])
            if not (isinstance(port, CopyPort) and port.whole and len(seen) == ends[key] == 1):
                continue
            if key not in self._written and _layout(seen[0]) == _layout(port.buffer):
                reads[number] = functools.partial(_move, seen[0])
                rests.append(self._let_go(seen[0]))

    def _is_alone(self, target: Tensor, known: int) -> bool:
        """Whether a result is all of its memory, and only so many tensors are in that."""
        storage, spec = target.untyped_storage(), TensorSpec.of(target)
        whole = spec.dense and target.nbytes == storage.nbytes() and not (spec.conj or spec.neg)
        return whole and self._memory.is_private(storage, known)

    def _let_go(self, t: Tensor) -> Step:
        """Has nothing of the recording refer to memory that the caller has, after a launch."""
        self._memory.forget(t)
        let_go = _emptied(t)
        with raw(), no_functions():
            let_go()
        return let_go

    def _drop(self, positions: Sequence[int]) -> None:
        """Take out steps that have nothing left to do."""
        for position in sorted(positions, reverse=True):
            del self._steps[position]
            for call in self._calls:
                call.position -= call.position > position


def _by_storage(ports: Sequence[Port]) -> dict[int, list[tuple[int, Port]]]:
    """Ports with their numbers, by the storage of the recording."""
    found: dict[int, list[tuple[int, Port]]] = {}
    for number, port in enumerate(ports):
        found.setdefault(_storage(port.buffer), []).append((number, port))
    return found


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _layout(t: Tensor) -> tuple[object, ...]:
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()


def _is_all(target: Tensor, number: int, port: Port, fresh: Sequence[bool]) -> bool:
    """Whether what a port takes to fresh memory is a whole result."""
    return fresh[number] and port.nbytes == target.nbytes


def _emptied(t: Tensor) -> Step:
    with raw(), no_functions():
        return functools.partial(_move, t, torch.empty(0, dtype=t.dtype, device="cpu"))
