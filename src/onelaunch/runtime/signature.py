"""What of a call decides whether and what it can replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelaunch.call.spec import CallSpec, TensorSpec, default_device, modes
from onelaunch.call.tree import Flat, call_constants, is_code, is_plain
from onelaunch.driver.protocol import Driver, Region
from onelaunch.driver.select import DEVICES
from onelaunch.errors import kind_of


def spec_of(driver: Driver, flat: Flat, device: torch.device) -> CallSpec:
    """The signature of a call whose arguments are flattened."""
    here = [t for t in flat.tensors if t.device.type == device.type]
    numbers = [i for i, t in enumerate(flat.tensors) if t.device.type == device.type]
    shared = tuple((numbers[i], numbers[j], offset) for i, j, offset in Overlaps(driver)(*here))
    specs = tuple(TensorSpec.of(t) for t in flat.tensors)
    return CallSpec(flat.tree, specs, shared, modes(), default_device())


def foreign(tensors: Sequence[Tensor]) -> Tensor | None:
    """A tensor that is more than its memory: a subclass, sparse, quantized, a dual number."""
    for t in tensors:
        if t.layout is not torch.strided or t.is_quantized or t.device.type not in DEVICES:
            return t
        if (
            type(t) not in (Tensor, nn.Parameter)
            and type(t).__module__ != "onelaunch.driver.emulated.device"
        ):
            return t
    return None


def opaque(flat: Flat) -> str | None:
    """Which argument cannot be told equal to that of another call, or None."""
    for path, constant in call_constants(flat.tree):
        value = constant.value
        known = is_plain(value) or is_code(value) or isinstance(value, nn.Module)
        if not known and not hasattr(value, "__dict__"):
            return f"`{path}` is {kind_of(value)}"
    return None


class Overlaps:
    """Which tensors share memory, with one another and with memory that stays where it is.

    What it gives is (i, j, bytes from the start of i to the start of j), where `j` counts on
    through the fixed ones, whose members are compared with the tensors only. 1 us for each tensor,
    however many are fixed.
    """

    def __init__(self, driver: Driver, fixed: Sequence[Tensor] = ()) -> None:
        self._driver = driver
        self._fixed: dict[int, list[tuple[int, Region]]] = {}
        for j, region in enumerate(map(driver.region, fixed)):
            self._fixed.setdefault(region.storage, []).append((j, region))

    def __call__(self, *tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
        storages = [self._driver.storage(t) for t in tensors]
        if len({*storages}) == len(storages) and self._fixed.keys().isdisjoint(storages):
            return ()
        found: list[tuple[int, int, int]] = []
        regions = [self._driver.region(t) for t in tensors]
        for i, region in enumerate(regions):
            others = [(j, regions[j]) for j in range(i + 1, len(regions))]
            others += [(len(regions) + j, r) for j, r in self._fixed.get(region.storage, ())]
            found += [(i, j, r.start - region.start) for j, r in others if region.overlaps(r)]
        return tuple(found)
