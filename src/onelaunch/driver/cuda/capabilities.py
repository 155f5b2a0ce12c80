"""The abilities of this machine's CUDA."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from onelaunch.driver.cuda import nodes


@dataclass(frozen=True)
class Capabilities:
    """The abilities of the driver and cuda-bindings here."""

    records: bool  # calls can be recorded: the nodes of a graph can be found and changed
    rebind: bool  # kernels can be made to read an input where the caller has it
    why_not: str  # the reason for missing abilities; empty if there are none
    versions: str  # the versions of the driver and of cuda-bindings, as far as they are known


@functools.cache
def capabilities() -> Capabilities:
    """Probe once; creates no CUDA context and allocates nothing on the device."""
    if not torch.cuda.is_available():
        return Capabilities(False, False, "no CUDA device", "")
    if torch.version.hip is not None:
        return Capabilities(False, False, "ROCm has no bindings for graph nodes", "ROCm")
    try:
        version, bindings = nodes.versions()
    except (ImportError, RuntimeError) as error:
        why_not = f"cuda-bindings cannot be used ({error}); pip install cuda-bindings"
        return Capabilities(False, False, why_not, "")
    versions = f"driver {version // 1000}.{version % 1000 // 10}, cuda-bindings {bindings}"
    missing = nodes.missing()
    if missing:
        why_not = f"cuda-bindings {bindings} has no {missing[0]}; pip install -U cuda-bindings"
        return Capabilities(False, False, why_not, versions)
    if version < 12040:
        why_not = "the CUDA driver is older than 12.4 and does not tell kernel parameters"
        return Capabilities(True, False, why_not, versions)
    return Capabilities(True, True, "", versions)
