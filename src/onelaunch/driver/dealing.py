"""Lanes for the operations of a capture, in which memory is reused.

An operation may not take the memory that another frees, which could run beside it. So memory is
reused within a lane alone, and an operation goes where it has to wait anyway.
"""

from __future__ import annotations

from onelaunch.driver.protocol import OperatorCall

LANES = 40
_NARROW = range(8)
"""The lanes of products, each with a workspace of cuBLAS, and of operations on large tensors."""
_WIDE = range(8, LANES)
"""The lanes of all others: their memory costs little."""
_LARGE_BYTES = 1 << 20
"""The size from which the allocator takes segments of 20 MiB."""


class Dealer:
    """A choice of a lane for each operation, by the storages that it reads and writes.

    Attributes:
        last: lane -> its last operation; -1 if it has none.
    """

    def __init__(self) -> None:
        self.last = [-1] * LANES
        self._behind: list[int] = []
        """Operation number -> a bit for each operation that comes before it."""
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        """Storage -> the last operation that wrote it, and those that read it since."""
        self._needed: set[int] = set()

    def lane(self, call: OperatorCall) -> int:
        """Choose a lane by its last operation, which comes before this call anyway. Else take a
        free lane, or the lane unused for longest."""
        needed = {self._writer[s] for s in call.storages.values() if s in self._writer}
        for s in _written(call):
            needed.update(self._readers.get(s, ()))
        self._needed, before = needed, 0
        for other in needed:
            before |= self._behind[other]
        large = call.op.multiplies or any(t.nbytes > _LARGE_BYTES for t in call.on_device)
        lanes = _NARROW if large else _WIDE
        follows = [lane for lane in lanes if self.last[lane] in needed]
        if not follows:
            follows = [n for n in lanes if self.last[n] >= 0 and before >> self.last[n] & 1]
        if follows:
            return max(follows, key=self.last.__getitem__)
        return min(lanes, key=self.last.__getitem__)

    def ran(self, call: OperatorCall, lane: int | None) -> None:
        """Record the call that `lane` was last asked about: it has work of the device. `lane` is
        None if it used none."""
        number, before = len(self._behind), 0
        for other in self._needed:
            before |= self._behind[other] | 1 << other
        self._behind.append(before)
        if lane is not None:
            self.last[lane] = number
        read = set(call.storages.values())
        for s in _written(call) | {s for _, s in call.made if s not in read}:
            self._writer[s], self._readers[s] = number, []
        for s in read:
            self._readers.setdefault(s, []).append(number)


def _written(call: OperatorCall) -> set[int]:
    if not call.op.writes:
        return set()
    written = call.op.written(call.args, call.kwargs)
    return {call.storages[id(t)] for t in written if id(t) in call.storages}
