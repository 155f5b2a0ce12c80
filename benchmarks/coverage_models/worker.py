"""A process that runs cases until its input ends; what dies in it costs one engine of one model.

It reads a line of JSON for each task, and writes such lines: an engine that has begun, the row that
came of it, the end of the task. A task that comes again after a death leaves out what is known.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import sys
import warnings
from typing import Any

import torch

from onelaunch import testing

from . import catalogue
from .case import NoGradient, Reference, Undecided, judge, reference
from .diagnosed import DOCTOR
from .subject import NotBuilt, Subject


def main() -> None:
    """Run tasks from standard input; reports go to what was standard output."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no report
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    if sys.argv[1] == "tape":
        testing.install()
    device = torch.device(sys.argv[1])
    report({"ready": True}, reports)
    for line in sys.stdin:
        task = json.loads(line)
        _run(task, device, reports)
        _free(device)
        sound = _sound(device)
        report({"done": True, "ends": not sound}, reports)
        if not sound:
            return


def report(what: dict[str, Any], reports: Any) -> None:
    reports.write(json.dumps(what) + "\n")


def _run(task: dict[str, Any], device: torch.device, reports: Any) -> None:
    mode = task["mode"]
    report({"begun": "build"}, reports)
    compared = [name for name in task["engines"] if name != DOCTOR]
    subject: Subject | None = None
    eager: Reference | None = None
    why = ""
    try:
        subject = catalogue.build(task["name"])
        report({"begun": "eager", "about": subject.about}, reports)
        eager = reference(subject, mode, device) if compared else None
    except (NotBuilt, Undecided) as error:
        why = str(error)
    except NoGradient:
        why = "no result has a gradient"
    except Exception as error:  # noqa: BLE001  what eager does not run is no case
        lines = str(error).strip().splitlines() or [""]
        why = f"in eager: {type(error).__name__}: {lines[0][:200]}"
    if subject is None or why:
        report({"not_built": why[:600]}, reports)
        return
    if eager is not None:
        report({"engine": "eager", "row": eager.row()}, reports)
    for name in task["engines"]:
        report({"begun": name}, reports)
        row = judge(subject, name, mode, device, eager)
        _free(device)
        report({"engine": name, "row": row}, reports)
        if not _sound(device):  # what comes after it goes to another process
            return


def _free(device: torch.device) -> None:
    """Give memory back that other workers need, cuBLAS's too: it has some for each stream."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _sound(device: torch.device) -> bool:
    """Whether captures and random numbers still work here."""
    if device.type != "cuda":
        return True
    with contextlib.suppress(RuntimeError):  # of any kind: the device is in disorder
        torch.manual_seed(random.randrange(1 << 30))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        x = torch.ones(64, device=device)
        with torch.cuda.graph(graph):
            y = torch.dropout(x, 0.5, True)
        graph.replay()
        torch.cuda.synchronize()
        return bool((y * (y - 2) == 0).all()) and bool(torch.rand(4, device=device).ge(0).all())
    return False


if __name__ == "__main__":
    main()
