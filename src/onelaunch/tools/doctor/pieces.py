"""The pieces that ``on_refusal="split"`` makes of a callable that cannot be captured whole."""

from __future__ import annotations

import importlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from onelaunch.api import graph
from onelaunch.errors import GraphWarning, let_go
from onelaunch.runtime.stats import GraphStats
from onelaunch.tools.bench.entry import only_errors
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.diagnosis import Pieces
from onelaunch.tools.doctor.run import run_backward

_CALLS = 16
"""Calls at most until all are launched that can be; each level of modules takes some."""


def pieces(workload: Workload, backward: bool) -> Pieces | None:
    """Graph a workload in pieces, and call it until nothing new is captured; None if that never
    ends, or if Dynamo fails.

    In a thread of its own: where Dynamo fails half way, it leaves modes of its thread behind. What
    Inductor keeps for its CUDA graphs belongs to the thread that imports it: this one
    (https://github.com/pytorch/pytorch/issues/123177).
    """
    importlib.import_module("torch._inductor.cudagraph_trees")
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        warnings.simplefilter("ignore", GraphWarning)
        return thread.submit(_pieces, workload, backward, *modes).result()


def _pieces(workload: Workload, backward: bool, grad: bool, inference: bool) -> Pieces | None:
    fast: Any = graph(workload.fn, on_refusal="split")
    try:
        hushed = only_errors("torch._dynamo")  # it is to break graphs, and need not say so
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), hushed:
            for _ in range(_CALLS):
                workload.cut_history()
                before = fast.stats()
                result = fast(*workload.args, **workload.kwargs)
                if backward:
                    run_backward(result)
                del result
                after = fast.stats()
                if after.split and _made(after) == _made(before):
                    break
            else:
                return None
    except Exception as error:  # noqa: BLE001  Dynamo's own; the callable itself has run in eager
        let_go(error)
        return None
    stats = fast.stats()
    lines = dict.fromkeys(part.where or part.module for part in stats.split)
    return Pieces(stats.split_launches, tuple(lines))


def _made(stats: GraphStats) -> tuple[int, int]:
    return stats.captures, stats.warmup_calls
