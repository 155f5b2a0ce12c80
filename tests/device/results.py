"""What a run did, printed, and written where `ONELAUNCH_RESULTS` says."""

from __future__ import annotations

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
    path = pathlib.Path(folder) / file
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known["torch"] = torch.__version__
    if torch.cuda.is_available():
        known["gpu"] = torch.cuda.get_device_name()
    known[name] = figures
    path.write_text(json.dumps(known, indent=2) + "\n")
