"""The emulated device in place of a GPU, for a process that only diagnoses.

On a CPU nothing is a copy between host and device. There, what a GPU would refuse for that reason
can be seen only where the two are apart.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from onelaunch import testing
from onelaunch.bench.workload import Workload, parts


def install() -> None:
    """Add the emulated device to this process, if it has no GPU; before its first backward."""
    if not torch.accelerator.is_available():
        testing.install()


def emulated(workload: Workload) -> Workload:
    """Copy a workload of the CPU to the emulated device.

    Return the workload itself where there is none, where eager does not run there, or where an
    optimizer would step parameters that stay behind.
    """
    backend = torch._C._get_privateuse1_backend_name()
    if workload.device.type != "cpu" or backend != "tape" or _steps(workload):
        return workload
    try:
        moved = workload.on(torch.device(backend))
        moved.copy()()
    except (RuntimeError, NotImplementedError, TypeError):  # an operation that it does not have
        return workload
    return moved


def _steps(workload: Workload) -> bool:
    return any(isinstance(part, Optimizer) for part in parts(workload.fn))
