"""The reads and writes of a watched run, kept to be applied to other calls.

Tensors are identified by their places: the number of an argument, the name of a slot. Each call has
new arguments, and slots may hold other tensors by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onelaunch.errors import CaptureError


def places(
    arguments: Sequence[Tensor], slots: Iterable[tuple[str, Tensor]]
) -> list[tuple[object, Tensor]]:
    """Return each tensor of a call with its place.

    Args:
        slots: the tensors of the callable's state, named.
    """
    return [*enumerate(arguments), *slots]


@dataclass(slots=True)
class CompiledAccesses:
    """The reads and writes of one run.

    Args:
        external: storage -> tensors over it that were read by address, except arguments.
        wrote: storage -> a tensor over it, for memory that existed before and was written.
        counted: the storages whose version counters the writes advanced.
        draws: draws from the host's default generator.
        refused: the error for a use of host tensors that no replay repeats.
        places: storage -> the places of the tensors over it.
    """

    external: Mapping[int, Sequence[Tensor]]
    wrote: Mapping[int, Tensor]
    version_bumped: set[int]
    draws: Sequence[Callable[[], object]]
    refused: CaptureError | None
    places: Mapping[int, Sequence[object]]

    def read(self, now: Mapping[object, Tensor]) -> Iterator[Tensor]:
        """Return the tensors that a call with these places reads by address."""
        for storage, held in self.external.items():
            yield from self._now(storage, held, now)

    def written(self, now: Mapping[object, Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Return the tensors that it writes, and whether their version counters advance."""
        for storage, t in self.wrote.items():
            for other in self._now(storage, [t], now):
                yield other, storage in self.version_bumped

    def _now(
        self, storage: int, held: Sequence[Tensor], now: Mapping[object, Tensor]
    ) -> Sequence[Tensor]:
        """Return the tensors now in the places of these; the same ones if they have no place."""
        return [now[place] for place in self.places.get(storage, ()) if place in now] or held
