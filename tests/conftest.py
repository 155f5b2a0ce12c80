"""Marks of what a test needs: one marked `gpu` or `browser` is skipped only where there is none."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Generator

import pytest
import torch
import tqdm
from torch.utils import _python_dispatch

import onelaunch
from onelaunch import testing
from onelaunch.beside import BESIDE
from onelaunch.runtime.options import Options
from tests import selection

# Threads of Inductor's and of its progress bars would stay; where others run, a number that is
# drawn from NumPy may be theirs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
tqdm.tqdm.monitor_interval = 0
# What the terminal that the tests are started from asks of the texts that they read.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
NEEDS = {"gpu": 1, "multi_gpu": 2}
HUNG_S = 300
"""The seconds after which a test that has not ended fails: its process ends with the stacks of its
threads, and pytest-xdist starts another."""
STDERR = pytest.StashKey[int]()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CAN_BROWSE = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a test that would be skipped for want of a GPU fails instead",
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="likewise for the tests marked browser, which need chromium",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every combination of parameters, and the tests marked thorough; see selection.py",
    )
    parser.addoption("--parallel", action="store_true", help="graph everything with parallel=True")


def pytest_configure(config: pytest.Config) -> None:
    """Register the emulated device before the autograd engine starts, which counts the devices
    once. Not beside CUDA: there it comes last, see below. One thread, from before the engine makes
    its own, which keep the number that they find: how a sum is split depends on it."""
    config.stash[STDERR] = os.dup(2)  # tests run with another, which is shown if they end
    installed = os.environ.get("ONELAUNCH_INSTALLED", "")  # see scripts/installed
    assert str(onelaunch.__file__).startswith(installed), onelaunch.__file__
    torch.set_num_threads(1)
    if config.getoption("--parallel"):
        Options.__init__.__kwdefaults__["parallel"] = True
    # What a shell runs in the background ignores Ctrl-C, and so would the processes of the tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available():
        testing.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(HUNG_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def backends() -> Generator[None]:
    """Benchmarks and the docs' programs set these for their process; after a test they are as
    before."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    yield
    if (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark) != before:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


@pytest.fixture(autouse=True)
def dispatching() -> Generator[None]:
    """Torch's flags that a dispatch mode is on are of the whole process; left on, nothing is
    compiled any more. A capture beside calls may be under way still, which has modes on."""
    yield
    end = time.monotonic() + 30
    while BESIDE and time.monotonic() < end:
        time.sleep(0.005)
    flags = {name: on for name, on in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    assert not any(flags.values()), flags


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, needed in NEEDS.items():
        if item.get_closest_marker(mark) is not None and torch.cuda.device_count() < needed:
            pytest.fail(f"it needs {needed} NVIDIA GPU{'s' * (needed > 1)}")
    if item.get_closest_marker("browser") is not None and not CAN_BROWSE:
        what = "needs playwright, and chromium: apt-get install chromium"
        if item.config.getoption("--require-browser"):
            pytest.fail(f"{what}, and --require-browser is given")
        pytest.skip(what)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of GPUs that are not there, and what `--thorough` alone runs. CUDA first:
    once the emulated device is registered, torch takes it for the accelerator, and CUDA's backward
    passes fail."""
    gpus = torch.cuda.device_count()
    kept = [item for item in items if config.getoption("--require-gpu") or _fits(item, gpus)]
    if not config.getoption("--thorough") and not any("::" in arg for arg in config.args):
        kept = selection.chosen(kept)
    kept.sort(key=lambda item: item.get_closest_marker("gpu") is None)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _fits(item: pytest.Item, gpus: int) -> bool:
    """Whether the machine has the device of a test. The emulated device needs one without a GPU:
    several workers share the tests, in any order."""
    needed = max((n for mark, n in NEEDS.items() if item.get_closest_marker(mark)), default=0)
    return needed <= gpus and not (gpus and selection.params_of(item).get("device") == "tape")
