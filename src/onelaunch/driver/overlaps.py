"""Tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onelaunch.driver.protocol import Driver, Region


class Overlaps:
    """A search for tensors that share memory, with one another or with fixed tensors. Each overlap
    is (i, j, bytes from the start of i to the start of j), where `j` counts on through the fixed
    tensors. Fixed tensors are not compared with each other. Costs 1 us for each of the others."""

    def __init__(self, driver: Driver, fixed: Sequence[Tensor] = ()) -> None:
        self._driver = driver
        self._fixed: dict[int, list[tuple[int, Region]]] = {}
        for j, region in enumerate(map(driver.region, fixed)):
            self._fixed.setdefault(region.storage, []).append((j, region))

    def __call__(self, *tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
        storages = [self._driver.storage(t) for t in tensors]
        if len({*storages}) == len(storages) and self._fixed.keys().isdisjoint(storages):
            return ()
        pairs: list[tuple[int, int, int]] = []
        regions = [self._driver.region(t) for t in tensors]
        for i, region in enumerate(regions):
            others = [(j, regions[j]) for j in range(i + 1, len(regions))]
            others += [(len(regions) + j, r) for j, r in self._fixed.get(region.storage, ())]
            pairs += [(i, j, r.start - region.start) for j, r in others if region.overlaps(r)]
        return tuple(pairs)


def joined(driver: Driver, tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the first that it shares memory with, through others too."""
    first = list(range(len(tensors)))
    for i, j, _ in Overlaps(driver)(*tensors):
        low, high = sorted((first[i], first[j]))
        first = [low if n == high else n for n in first]
    return first
