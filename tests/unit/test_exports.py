"""What `import onelaunch` gives, and what it does not do."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import onelaunch
from onelaunch import testing

ROOT = Path(__file__).parents[2]
LEAN = """
import sys
sys.modules["cuda"] = None  # as if cuda-bindings were not installed
import torch
before = set(sys.modules)
import onelaunch
heavy = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "numpy", "sympy")
heavy += ("transformers", "torchvision", "sklearn", "triton", "rich", "typer", "cuda")
new = {name for name in set(sys.modules) - before if name.startswith(heavy)}
assert not new, new
assert not torch.cuda.is_initialized()
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
"""
TAPE = """
import sys
import torch
import onelaunch
fast = onelaunch.graph(lambda x: x * 2, warmup=1)
assert [float(fast(torch.full((), float(i)))) for i in range(4)] == [0.0, 2.0, 4.0, 6.0]
assert fast.recordings
assert not any(name.startswith("onelaunch.testing") for name in sys.modules)
"""
EMULATED = """
import torch
import onelaunch.testing
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
onelaunch.testing.install()
onelaunch.testing.install()
fast = onelaunch.graph(lambda x: x * 2, warmup=1)
x = torch.ones(3, device="tape")
assert fast(fast(fast(x))).tolist() == [8.0] * 3
assert fast.recordings
assert onelaunch.testing.memory_allocated() > 0
assert not torch.cuda.is_initialized()
"""


def run(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert not done.stdout + done.stderr


def test_the_import_is_lean() -> None:
    run(LEAN)


def test_the_tape_needs_no_emulated_device() -> None:
    run(TAPE)


def test_the_emulated_device_starts_when_asked() -> None:
    run(EMULATED)


def test_all_is_what_is_exported() -> None:
    public = {
        name
        for name, value in vars(onelaunch).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(onelaunch.__all__)
    assert sorted(onelaunch.__all__) == list(onelaunch.__all__)


def test_what_is_exported_is_documented() -> None:
    for package in (onelaunch, testing):
        for name in package.__all__:
            assert inspect.getdoc(getattr(package, name)), name


def test_the_wheel_has_what_is_not_python() -> None:
    package = ROOT / "src" / "onelaunch"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["onelaunch"]
    named = {file for pattern in patterns for file in package.glob(pattern)}
    there = {
        file
        for file in package.rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }
    assert there == named
