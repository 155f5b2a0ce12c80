"""The reads and writes of a watched run, kept to be applied to other calls.

Tensors are identified by their places: the number of an argument, the name of a slot. Each call has
new arguments, and slots may hold other tensors by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onelaunch.errors import CaptureError
from onelaunch.watch.observer import Observer


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
        version_bumped: the storages whose version counters the writes advanced.
        draws: draws from the host's default generator.
        refused: the error for what no replay repeats.
        suspected: the error for what a capture refuses if compiled code does it too.
        places: storage -> the places of the tensors over it.
    """

    external: Mapping[int, Sequence[Tensor]]
    wrote: Mapping[int, Tensor]
    version_bumped: set[int]
    draws: Sequence[Callable[[], object]]
    refused: CaptureError | None
    suspected: CaptureError | None
    places: Mapping[int, Sequence[object]]

    @staticmethod
    def of(observer: Observer, places: Iterable[tuple[object, Tensor]]) -> CompiledAccesses:
        """Return the accesses of a run that was watched; the places are those before it."""
        by_storage: dict[int, list[object]] = {}
        for place, t in places:
            storage = observer.storage_of(t)
            if storage is not None:
                by_storage.setdefault(storage, []).append(place)
        return CompiledAccesses(
            observer.external,
            observer.written,
            observer.version_bumped,
            observer.admission.draws,
            observer.refused,
            observer.suspected,
            by_storage,
        )

    def give(
        self,
        observer: Observer,
        now: Mapping[object, Tensor],
        originals: Sequence[Tensor],
        statics: Sequence[Tensor],
    ) -> None:
        """Have an observer take these accesses for those of its own run.

        Args:
            now: place -> tensor of its run, for the places of the run that was watched.
            originals, statics: the inputs of the recording, and the tensor the callable got for
                each.
        """
        observer.admission.draws += self.draws
        stands_for: dict[int | None, list[Tensor]] = {}
        for t, static in zip(originals, statics, strict=True):
            storage = observer.storage_of(t)
            if storage is not None and static is t:
                observer.external.setdefault(storage, []).append(t)  # read where it is
            elif storage is not None:
                stands_for.setdefault(storage, []).append(static)
        for known, tensors in self.external.items():
            for t in self._now(known, tensors, now):
                storage = observer.storage_of(t)
                if storage is not None and storage not in stands_for:
                    held = observer.external.setdefault(storage, [])
                    held += [] if any(t is other for other in held) else [t]
        for known, wrote in self.wrote.items():
            for t in self._now(known, [wrote], now):
                for memory in stands_for.get(observer.storage_of(t), [t]):
                    storage = observer.storage_of(memory)
                    assert storage is not None
                    observer.written.setdefault(storage, memory)
                    if known in self.version_bumped:
                        observer.version_bumped.add(storage)

    def _now(
        self, storage: int, held: Sequence[Tensor], now: Mapping[object, Tensor]
    ) -> Sequence[Tensor]:
        """Return the tensors now in the places of these; the same ones if they have no place."""
        return [now[place] for place in self.places.get(storage, ()) if place in now] or held
