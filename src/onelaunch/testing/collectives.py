"""Collectives in a capture of the tape: nothing is sent, as in a capture on a GPU.

The values that they give are this process's own. Nobody reads them: a replay computes all anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onelaunch.driver.aten import Operator, group_of, mapped, tensors
from onelaunch.testing.repeats import distributed, run


def run_alone(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; a collective of several processes without the others."""
    if not op.communicates:
        return run(op, args, kwargs)
    made: list[Any] = []

    def alone(value: Any) -> Any:
        group = group_of(value)
        if group is None or group.size() == 1:
            return value
        made.append(_stand_in(group))
        return made[0].group_name if isinstance(value, str) else made[0].boxed()

    args, kwargs = mapped((args, kwargs), alone)
    if not made:
        return run(op, args, kwargs)
    distributed._register_process_group(made[0].group_name, made[0])
    try:
        result = run(op, args, kwargs)
    finally:
        distributed._unregister_process_group(made[0].group_name)
    if not op.collective:
        return result
    work = _done(tensors(args[0]))
    return mapped(result, lambda v: work if isinstance(v, torch.ScriptObject) else v)


def _stand_in(group: Any) -> Any:
    """Make a process group of the same size and rank that sends nothing."""
    made = distributed.ProcessGroup(distributed.HashStore(), group.rank(), group.size())
    backend = distributed.FakeProcessGroup._create_internal(group.rank(), group.size())
    made._register_backend(torch.device("cpu"), made.BackendType.CUSTOM, backend)
    made._set_group_name(f"{group.group_name}, in a capture")
    return made


def _done(results: list[Tensor]) -> Any:
    """Make the work of a collective that has ended, with the results that DDP asks it for."""
    future: Any = torch.futures.Future()
    # Outside of a backward nobody asks, and the work must keep no memory of the capture.
    future.set_result(results if torch._C._current_graph_task_id() >= 0 else [])
    return distributed._create_work_from_future(future).boxed()
