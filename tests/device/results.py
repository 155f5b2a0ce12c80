"""What a run did, printed, and written where `ONELAUNCH_RESULTS` says."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any

import torch


def report(file: str, name: str, figures: dict[str, Any]) -> None:
    """Print the figures; merge them under `name` into `file` of the results folder, if any."""
    print(f"\n{name}: {figures}")
    folder = os.environ.get("ONELAUNCH_RESULTS")
    if not folder:
        return
    with (pathlib.Path(folder) / file).open("a+") as results:
        fcntl.flock(results, fcntl.LOCK_EX)  # tests may run in several processes
        results.seek(0)
        known: dict[str, Any] = json.loads(results.read() or "{}")
        known["torch"] = torch.__version__
        if torch.cuda.is_available():
            known["gpu"] = torch.cuda.get_device_name()
        known[name] = figures
        results.truncate(0)
        results.write(json.dumps(known, indent=2) + "\n")
