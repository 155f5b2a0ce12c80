"""The engines of other packages really run, and their code does what their rows say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.unit import engine_runs

LSTM = "output 2 is float32[1, 1, 2, 16] where eager's is float32[1, 2, 16]"
"""What torch 2.11 makes of an LSTM that it exports, but for its own engines."""
TORCHAX = "AttributeError: '_OpNamespace' 'aten' object has no attribute 'cholesky'"
"""What torchax 0.0.13 says of torch 2.15, as it is imported."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "names", [("layers",), ("function",), ("strided", "convolutions", "sequence")], ids=" ".join
)
def test_engines_are_right_and_so_is_their_code(names: tuple[str, ...]) -> None:
    """On every draw, and with results of the form of the callable's own."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(engine_runs.__file__), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    for name, rows in json.loads(done.stdout).items():
        assert list(rows) == list(engine_runs.RUN[name])
        for engine, row in rows.items():
            if name == "sequence" and engine in ("openxla", "tvm") and torch.__version__ < (2, 12):
                assert (row["status"], row["reason"]) == ("wrong", LSTM)
                continue
            if engine == "openxla" and torch.__version__ >= (2, 15):
                assert (row["status"], row["reason"]) == ("failed", TORCHAX)
                continue
            _check(f"{name}: {engine}", row, name in engine_runs.CODED)


def _check(what: str, row: dict[str, Any], coded: bool) -> None:
    assert (row["status"], row["reason"]) == ("ok", None), what
    assert row["error"] < 1e-6, what
    assert row["form"] is True, (what, row["form"])
    if coded:
        assert isinstance(row["code"], float), (what, row["code"])
        assert row["code"] < 1e-5, what
