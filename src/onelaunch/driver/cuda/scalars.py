"""Numbers in the arguments of recorded kernels: finding them, and writing others there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from onelaunch.driver.cuda import nodes
from onelaunch.driver.protocol import Ambiguities, AmbiguousMatch

Form = Callable[[float], bytes]
"""The form of a number in a kernel: its own bytes, its negative's or its reciprocal's."""


def _single(value: float) -> bytes:
    return bytes(ctypes.c_float(value))


def _double(value: float) -> bytes:
    return bytes(ctypes.c_double(value))


def _over(value: float) -> float:
    return 1 / value if value else math.copysign(math.inf, value)


def _rounded(value: float) -> float:
    return ctypes.c_float(value).value


FORMS: tuple[Form, ...] = (
    _double,
    _single,
    lambda v: _double(-v),
    lambda v: _single(-v),
    lambda v: _double(_over(v)),
    lambda v: _single(_over(_rounded(v))),
    lambda v: _single(_over(v)),
)
"""The first form that fits counts. The last two agree for most numbers, except stand-ins for an
optimizer's. To divide by a host number torch multiplies by the reciprocal of the rounded number, so
this form goes first."""


class _WordPlace(NamedTuple):
    number: int
    form: Form
    word: ctypes.Array[ctypes.c_char]  # the bytes in the block, to be written
    offset: int  # their offset in the block


class CudaScalarPatch:
    """The places in an executable graph that hold some numbers; see `ScalarPatch`. Raises
    `AmbiguousMatch`: a match may be half an address."""

    def __init__(
        self,
        raw: tuple[int, int],
        lock: AbstractContextManager[Any],
        numbers: Sequence[float],
        confirmed: Ambiguities = frozenset(),
    ) -> None:
        graph, executable = raw
        self._lock = lock
        self._setters: list[nodes.Setter] = []
        self._places: list[_WordPlace] = []
        patterns = patterns_of(numbers)
        doubts: set[tuple[int, ...]] = set()
        for index, node in enumerate(nodes.handles(graph)):
            if nodes.kind(node) != "KERNEL":
                continue
            kernel = nodes.KernelNode.read(node)
            if kernel is None or kernel.name.startswith(nodes.OWN):
                continue
            own: list[_WordPlace] = []
            for number, block in enumerate(kernel.blocks):
                for place, doubtful in places(block, patterns):
                    at = (index, number, place.offset, place.number)
                    if doubtful and at not in confirmed:
                        doubts.add(at)
                    own.append(place)
            if own:
                self._places += own
                self._setters.append(kernel.setter(executable))
        if doubts:
            raise AmbiguousMatch(frozenset(doubts))
        self.held = frozenset(place.number for place in self._places)

    def write(self, numbers: Sequence[float]) -> None:
        with self._lock:
            for number, form, word, _ in self._places:
                word.raw = form(numbers[number])
            nodes.apply(self._setters)


class Patterns(NamedTuple):
    """Bytes to look for, and the first 4 of each as a number."""

    whole: dict[bytes, tuple[int, Form]]
    first: frozenset[int]


def patterns_of(numbers: Sequence[float]) -> Patterns:
    whole: dict[bytes, tuple[int, Form]] = {}
    for form in FORMS:
        for index, number in enumerate(numbers):
            if number:
                whole.setdefault(form(number), (index, form))
    return Patterns(whole, frozenset(memoryview(p).cast("I")[0] for p in whole))


def places(
    block: ctypes.Array[ctypes.c_char], patterns: Patterns
) -> Iterator[tuple[_WordPlace, bool]]:
    """Find the patterns in a block of arguments, in steps of 4 bytes, each with a doubt. With the 4
    bytes after it, a match may be the address of device memory. These bytes may also be padding,
    with garbage of the stack."""
    content = block.raw
    # Most blocks hold none, and there are a million words in the kernels of a large model.
    if patterns.first.isdisjoint(memoryview(content)[: len(content) // 4 * 4].cast("I")):
        return
    offset = 0
    while offset + 4 <= len(content):
        wide, narrow = content[offset : offset + 8], content[offset : offset + 4]
        size = 8 if wide in patterns.whole and len(wide) == 8 else 4
        hit = patterns.whole.get(wide if size == 8 else narrow)
        if hit is not None:
            word = (ctypes.c_char * size).from_buffer(block, offset)
            yield _WordPlace(*hit, word, offset), size == 4 and _is_address(content, offset)
            offset += size
        else:
            offset += 4


def _is_address(content: bytes, offset: int) -> bool:
    """Tell whether 4 bytes may be the lower half of an address."""
    word = content[offset : offset + 8]
    return offset % 8 == 0 and len(word) == 8 and nodes.is_address(int.from_bytes(word, "little"))
