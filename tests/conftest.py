"""Marks of what a test needs: one marked `gpu` or `browser` is skipped only where there is none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Generator

import pytest
import torch
import tqdm
from torch.utils import _python_dispatch

from onelaunch import testing

# Threads of Inductor's and of its progress bars would stay; where others run, a number that is
# drawn from NumPy may be theirs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
tqdm.tqdm.monitor_interval = 0
# What the terminal that the tests are started from asks of the texts that they read.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
NEEDS = {"gpu": 1, "multi_gpu": 2}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CAN_BROWSE = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a test that skips for want of a GPU, or skips at all while marked gpu, fails instead",
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="likewise for the tests marked browser, which need chromium",
    )


def pytest_configure() -> None:
    """Register the emulated device before the autograd engine starts, which counts the devices
    once. Not beside CUDA: there it comes last, see below. One thread, from before the engine makes
    its own, which keep the number that they find: how a sum is split depends on it."""
    torch.set_num_threads(1)
    # What a shell runs in the background ignores Ctrl-C, and so would the processes of the tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available():
        testing.install()


@pytest.fixture(autouse=True)
def tf32() -> Generator[None]:
    """The benchmarks turn it off for their process; after a test it is as it was."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    yield
    if (cudnn.allow_tf32, matmul.allow_tf32) != before:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def dispatching() -> Generator[None]:
    """Torch's flags that a dispatch mode is on are of the whole process; left on, nothing is
    compiled any more."""
    yield
    flags = {name: on for name, on in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    assert not any(flags.values()), flags


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, needed in NEEDS.items():
        if item.get_closest_marker(mark) is not None and torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} NVIDIA GPU{'s' * (needed > 1)}")
    if item.get_closest_marker("browser") is not None and not CAN_BROWSE:
        pytest.skip("needs playwright, and chromium: apt-get install chromium")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marked = any(item.get_closest_marker(mark) is not None for mark in NEEDS)
    in_browser = item.get_closest_marker("browser") is not None
    for needed, option in ((marked, "--require-gpu"), (in_browser, "--require-browser")):
        if report.skipped and needed and item.config.getoption(option):
            report.outcome = "failed"
            report.longrepr = f"skipped under {option}: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CUDA first: once the emulated device is registered, torch takes it for the accelerator, and
    CUDA's backward passes fail."""
    items.sort(key=lambda item: item.get_closest_marker("gpu") is None)
