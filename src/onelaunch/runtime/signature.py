"""The signature of a call, which decides what it can replay."""

from __future__ import annotations

import torch
from torch import nn

from onelaunch.autograd.pair import packing
from onelaunch.call.ambient import default_device, modes
from onelaunch.call.spec import CallSpec, TensorSpec
from onelaunch.call.tree import Flat, call_constants, is_code, is_plain
from onelaunch.driver.overlaps import Overlaps
from onelaunch.driver.protocol import Driver
from onelaunch.driver.select import recordable
from onelaunch.errors import kind_of


def spec_of(driver: Driver, flat: Flat, device: torch.device) -> CallSpec:
    """Return the signature of a call whose arguments are flattened."""
    here = [t for t in flat.tensors if t.device.type == device.type]
    numbers = [i for i, t in enumerate(flat.tensors) if t.device.type == device.type]
    shared = tuple((numbers[i], numbers[j], offset) for i, j, offset in Overlaps(driver)(*here))
    specs = tuple(TensorSpec.of(t) for t in flat.tensors)
    return CallSpec(flat.tree, specs, shared, modes(), default_device())


def is_unrecordable(driver: Driver, flat: Flat) -> bool:
    """Return whether a call runs inline: in another capture, under hooks that pack saved tensors,
    or with a tensor that is more than its memory (a subclass, sparse, quantized, a dual number)."""
    return driver.capturing() or packing() or not all(map(recordable, flat.tensors))


def opaque(flat: Flat) -> str | None:
    """Describe an argument that cannot be compared with another call's, or return None."""
    for path, constant in call_constants(flat.tree):
        value = constant.value
        known = is_plain(value) or is_code(value) or isinstance(value, nn.Module)
        if not known and not hasattr(value, "__dict__"):
            return f"`{path}` is {kind_of(value)}"
    return None
