"""Recordings in a process that the driver suspends and resumes, as `cuda-checkpoint` does."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = """
import json, sys, torch, onelaunch as ol
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers).to(device).eval().requires_grad_(False)
fast = ol.graph(model, buckets=ol.Buckets.powers_of_two(8))
inputs = [torch.randn(rows, 64, device=device) for rows in (1, 3, 8)]
with torch.inference_mode():
    inputs = [x.clone() for x in inputs]
    expected = [model(x).cpu() for x in inputs]
    fast.warm_up(inputs[:1])
    before = [fast(x).cpu() for x in inputs]
    print("ready", flush=True)
    sys.stdin.readline()
    after = [fast(x).cpu() for x in inputs]
    later = ol.graph(torch.sin)
    late = [torch.equal(later(x), x.sin()) for x in inputs[:1] * 6]
alike = [torch.allclose(a, b, atol=1e-5) for a, b in zip(after, expected, strict=True)]
same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
stats = fast.stats()
print(json.dumps({"right": all(alike + same + late), "replays": stats.replays,
                  "captures": stats.captures, "later": later.stats().replays}))
"""
"""Records, waits while it is suspended, replays, and records again."""
RECORDED = {"right": True, "replays": 6, "captures": 4, "later": 3}
DRIVER = """
import ctypes, sys
driver, pid = ctypes.CDLL("libcuda.so.1"), int(sys.argv[1])
lock = (ctypes.c_uint * 16)(10_000)  # CUcheckpointLockArgs: milliseconds, then reserved
code = driver.cuInit(0)
for step in sys.argv[2:]:
    args = ctypes.byref(lock) if step == "Lock" else None
    code = code or getattr(driver, "cuCheckpointProcess" + step)(pid, args)
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        sys.exit(f"cuCheckpointProcess{step}: {(name.value or b'').decode() or code}")
"""
"""Makes calls of the driver for a process, and ends at the first that fails."""
MOST_SECONDS = 90.0
Way = Callable[[int], str | None]
"""Does something to a process, and returns an error."""


def told(*command: str) -> str | None:
    """Run a command, and return its error. It may not take long: a driver may wait for ever."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    return (done.stderr.strip() or str(done.returncode)) if done.returncode else None


def ways() -> tuple[Way, Way]:
    """Return what suspends a process, and what resumes it."""
    driver = ctypes.CDLL("libcuda.so.1")
    if hasattr(driver, "cuCheckpointProcessLock"):
        start = sys.executable, "-c", DRIVER
        return (
            lambda pid: told(*start, str(pid), "Lock", "Checkpoint"),
            lambda pid: told(*start, str(pid), "Restore", "Unlock"),
        )
    tool = shutil.which("cuda-checkpoint")
    if tool is None:
        pytest.skip("neither the driver's cuCheckpointProcess* nor cuda-checkpoint is there")
    toggle: Way = lambda pid: told(tool, "--toggle", "--pid", str(pid))  # noqa: E731
    return toggle, toggle


@pytest.fixture
def recorded() -> Callable[[Callable[[int], None]], object]:
    """Returns a function that runs the program, and something while it waits."""

    def run(meanwhile: Callable[[int], None]) -> object:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                meanwhile(process.pid)
                return json.loads(process.communicate("go\n", 120)[0])
            finally:
                process.kill()

    return run


@pytest.mark.thorough
def test_the_program(recorded: Callable[[Callable[[int], None]], object]) -> None:
    assert recorded(lambda pid: None) == RECORDED


@pytest.mark.gpu
def test_recordings_survive_being_suspended(
    recorded: Callable[[Callable[[int], None]], object],
) -> None:
    suspend, resume = ways()

    def meanwhile(pid: int) -> None:
        refused = suspend(pid)
        if refused is not None:
            pytest.skip(f"this machine suspends no process: {refused}")
        assert resume(pid) is None

    assert recorded(meanwhile) == RECORDED
