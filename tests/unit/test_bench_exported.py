"""The engines of other packages really run, and scripts do what the rows of engines say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit import engine_runs

RUNS = [(name, engine) for name, engines in engine_runs.RUN.items() for engine in engines]
RUNS += [(name, engine) for name in engine_runs.RUN for engine in engine_runs.LAST]
PRINTED = re.compile(r"relative error (\S+) against eager\nmedian (\S+) us per call\n")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(Path(engine_runs.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_an_engine_is_right_on_every_draw_and_returns_what_the_callable_does(
    name: str, engine: str, found: dict[str, dict[str, Any]]
) -> None:
    row = found[f"{name} {engine}"]
    assert (row["status"], row["reason"]) == ("ok", None)
    assert row["error"] < 1e-6
    assert row["form"] is True
    assert row["us"] > 0


@pytest.mark.parametrize(("name", "engine"), [r for r in RUNS if r[0] in engine_runs.SCRIPTED])
def test_the_script_of_an_engine_reproduces_its_row(
    name: str, engine: str, found: dict[str, dict[str, Any]]
) -> None:
    row = found[f"{name} {engine}"]
    printed = PRINTED.fullmatch(row["script"])
    assert printed is not None, row["script"]
    assert float(printed[1]) < 1e-6
    assert row["us"] / 10 < float(printed[2]) < row["us"] * 10
