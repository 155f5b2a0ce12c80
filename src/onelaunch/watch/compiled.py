"""What a watched run of a callable read and wrote, to be told of other calls.

Tensors are told by their places: the number of an argument, the name of a slot. Each call brings
arguments of its own, and state may hold other tensors by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onelaunch.errors import CaptureError


def places(
    arguments: Sequence[Tensor], slots: Iterable[tuple[str, Tensor]]
) -> list[tuple[object, Tensor]]:
    """Each tensor of a call with the place that it is in.

    Args:
        slots: the tensors of the callable's state, named.
    """
    return [*enumerate(arguments), *slots]


@dataclass(slots=True)
class CompiledAccesses:
    """What one run did.

    Args:
        external: storage -> tensors over it that were read by address, arguments apart.
        wrote: storage -> a tensor over it, for memory that existed before and was written.
        counted: the storages whose version counters that advanced.
        draws: draws from the host's default generator.
        refused: what it did with tensors of the host that no replay repeats.
        places: storage -> the places of the tensors over it.
    """

    external: Mapping[int, Sequence[Tensor]]
    wrote: Mapping[int, Tensor]
    counted: set[int]
    draws: Sequence[Callable[[], object]]
    refused: CaptureError | None
    places: Mapping[int, Sequence[object]]

    def read(self, now: Mapping[object, Tensor]) -> Iterator[Tensor]:
        """The tensors that a call with these in its places reads by address."""
        for storage, held in self.external.items():
            yield from self._now(storage, held, now)

    def written(self, now: Mapping[object, Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Those that it writes, and whether autograd counts it."""
        for storage, t in self.wrote.items():
            for other in self._now(storage, [t], now):
                yield other, storage in self.counted

    def _now(
        self, storage: int, held: Sequence[Tensor], now: Mapping[object, Tensor]
    ) -> Sequence[Tensor]:
        """What is where these were; themselves where no place leads to them."""
        return [now[place] for place in self.places.get(storage, ()) if place in now] or held
