"""What the doctor says of a model, as a row beside those of the engines."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

import onelaunch as ol

from .subject import Subject

DOCTOR = "doctor"
MOST = 40
"""The findings of a row; more are counted only."""


def diagnosed(subject: Subject, training: bool, arguments: tuple[Any, Any], device: Any) -> Any:
    """Diagnose a model; the row has what blocks a capture, each with its code and its line."""
    model = copy.deepcopy(subject.model).to(device).train(training)
    args, kwargs = arguments
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        found = ol.diagnose(model, args, kwargs)
    blocks = [f for f in found.findings if f.severity == "blocks-capture"]
    return {
        "verdict": "blocked" if blocks else "clean",
        "replayed": found.replayed,
        "found": [[f.code, f"{in_packages(f.file)}:{f.line}: {f.source}"] for f in blocks[:MOST]],
        "findings": len(found.findings),
        "seconds": round(time.perf_counter() - start, 2),
    }


def in_packages(file: str) -> str:
    """Return a file's path from the folder of installed packages."""
    return file.rpartition("site-packages/")[2]
