"""What `import onelaunch` gives, and what it does not do."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest

import onelaunch
from onelaunch import testing
from onelaunch.runtime.options import GraphOptions, Options

ROOT = Path(__file__).parents[2]
LEAN = """
import sys
sys.modules["cuda"] = None  # as if cuda-bindings were not installed
import torch
before = set(sys.modules)
from onelaunch import *
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
assert not any(name.startswith("onelaunch.testing") for name in sys.modules)
assert [float(fast(torch.full((), float(i)))) for i in range(4)] == [0.0, 2.0, 4.0, 6.0]
assert fast.recordings
later = {"onelaunch.autograd.pair", "onelaunch.split.graphed", "onelaunch.testing.tensors"}
assert not later & sys.modules.keys()
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
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

WITHOUT_TORCH = """
import sys
import onelaunch
from onelaunch.tools.cli import run
try:
    onelaunch.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
onelaunch.GraphError
for arguments in ["--version"], ["explain", "OL101"], ["--help"], ["compare", "--help"]:
    assert run(arguments) == 0
for arguments in ["explain", "host-read"], ["explain", "--list"], ["doctor", "--help"]:
    assert run(arguments) == 0
assert run(["optimize", "--help"]) == 0
for mistake in ["explian"], ["compare"], ["compare", "x.py:y", "--engines", "eagr"]:
    assert run(mistake) == 2
for mistake in ["doctor"], ["doctor", "x.py"], ["doctor", "x.py:y", "--select", "host-raed"]:
    assert run(mistake) == 2
assert run(["doctor", "onelaunch/tools/cli"]) == 0
assert onelaunch.GraphError("OL401", "what").code == "OL401"
assert onelaunch.CaptureError("OL101", "what").finding.name == "host-read"
onelaunch.Diagnosis("x", ()).to_json()
assert "torch" not in sys.modules
onelaunch.graph
assert "torch" in sys.modules
"""


def run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_import_is_lean() -> None:
    assert run(LEAN) == ""


@pytest.mark.parametrize("code", [WITHOUT_TORCH, TAPE, EMULATED], ids=["command", "tape", "device"])
def test_a_process_imports_what_it_needs(code: str) -> None:
    run(code)


def test_all_is_what_is_exported() -> None:
    assert dir(onelaunch) == sorted(onelaunch.__all__) == list(onelaunch.__all__)
    for name in onelaunch.__all__:
        module = importlib.import_module(onelaunch._MODULES[name])
        assert getattr(onelaunch, name) is getattr(module, name)
        assert importlib.util.find_spec(f"onelaunch.{name}") is None  # it would hide the name


def test_what_a_type_checker_sees_is_what_is_imported() -> None:
    file = ROOT / "src" / "onelaunch" / "__init__.py"
    imports = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    del seen["annotations"], seen["TYPE_CHECKING"]
    assert seen == onelaunch._MODULES
    assert sorted(seen) == onelaunch.__all__


def test_what_is_exported_is_documented() -> None:
    for package in (onelaunch, testing):
        for name in package.__all__:
            value = getattr(package, name)
            assert inspect.getdoc(value), name
            for member, part in inspect.getmembers(value if inspect.isclass(value) else None):
                said = inspect.getdoc(part) if not member.startswith("_") else None
                assert "internal" not in (said or "").lower(), f"{name}.{member}"


def test_the_options_of_graph_are_listed() -> None:
    given, kept = get_type_hints(GraphOptions), get_type_hints(Options)
    assert given.pop("pool") == onelaunch.Pool | None
    assert given == kept
    listed = inspect.signature(onelaunch.graph).parameters
    assert set(listed) == {"fn", "pool", *kept}
    assert {name: listed[name].default for name in kept} == vars(Options())
    documented = inspect.getdoc(onelaunch.graph) or ""
    assert all(f"\n    {name}: " in documented for name in listed)


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


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["torch_dynamo_backends"]
    assert points == {"onelaunch": "onelaunch.dynamo:onelaunch"}
    module, _, name = points["onelaunch"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
