"""Inductor's caches under ``torch.compile(backend="onelaunch")``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json
import torch
from torch._dynamo.utils import counters
from onelaunch.dynamo import onelaunch

weight = torch.ones(8, requires_grad=True)
fast = torch.compile(lambda x: (x * weight).sin().cos(), backend=onelaunch)
fast(torch.ones(4, 8)).sum().backward()
with torch.no_grad():
    fast(torch.ones(4, 8))
print(json.dumps(counters["inductor"]))
"""


def counted(cache: Path) -> dict[str, int]:
    paths = os.pathsep.join(sys.path)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Neither a forward, nor its backward, nor a forward alone."""
    first, second = counted(tmp_path), counted(tmp_path)
    assert first["fxgraph_cache_miss"] == 3
    assert second.get("fxgraph_cache_miss", 0) == 0
    assert second["fxgraph_cache_hit"] == 3
