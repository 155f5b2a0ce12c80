"""Imports go downward only, devices are named in one place, and files stay readable."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "onelaunch"
LAYERS = (
    {"error_catalogue", "source", "gc_pause", "native", "trace_names", "uncompiled"},
    {"finding", "identity"},
    {"errors"},
    {"call_events"},
    {"beside"},
    {"unwinding"},
    {"call", "sizes", "frames"},
    {"driver"},
    {"testing"},
    {"state"},
    {"watch"},
    {"autograd", "optimizers"},
    {"capture"},
    {"replay"},
    {"runtime"},
    {"padding"},
    {"split"},
    {"module"},
    {"dynamo"},
    {"api", "compat"},
    {"tools.names", "tools.targets"},
    {"tools.rules"},
    {"tools.report"},
    {"tools.bench"},
    {"tools.profiler"},
    {"tools.doctor"},
    {"tools.checklist"},
    {"tools.cli"},
    {"tools"},
    {"__init__", "__main__"},
)
"""From the bottom to the top. A package imports itself and what is in rows below its own."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ENTRIES = {"onelaunch.testing.driver:TapeDriver", "onelaunch.driver.cuda:CudaDriver"}
"""The drivers, which `driver.select` names and imports for the first call on their device."""
NAME_DEVICES = {"driver", "tools", "__init__", "__main__"}
TOOLS = {name for name in RANK if name.startswith("tools")}
OUTSIDE = {*TOOLS, "testing", "__init__", "__main__"}
"""What is no core: the core imports none of it."""
INSTALLED = {"torch", "onelaunch", *sys.stdlib_module_names}
"""What the core may import anywhere."""
ASKED_FOR = {("numpy", "reads"), ("rich.console", "progress"), ("rich.progress", "progress")}
"""(package, file): NumPy where it asked for an array and is there, rich for a bar of progress."""
FILES = sorted(ROOT.rglob("*.py"))


def name_of(file: Path) -> str:
    """``driver.cuda.graph``; the package itself is ``__init__``."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)


NAMES = {name_of(file) for file in FILES}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of onelaunch that are imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names if node.module else ():
                full = f"{node.module}.{alias.name}"
                inside = full.removeprefix("onelaunch.") in NAMES
                yield from ours(full if inside else str(node.module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ours(alias.name)


def ours(module: str) -> Iterator[str]:
    if module == "onelaunch":
        yield "__init__"
    elif module.startswith("onelaunch."):
        yield module.removeprefix("onelaunch.")


def top(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "tools" else parts[0]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Module -> its syntax tree; in a function, as each worker of pytest imports this file."""
    return {name_of(file): ast.parse(file.read_text()) for file in FILES}


@functools.cache
def imports() -> dict[str, list[str]]:
    return {name: list(imported(tree)) for name, tree in trees().items()}


def test_every_module_has_a_layer() -> None:
    assert {top(name) for name in NAMES} == set(RANK)


def test_imports_go_downward() -> None:
    for file in FILES:
        name, mine = name_of(file), top(name_of(file))
        for module in imports()[name]:
            theirs = top(module)
            assert theirs != "__init__", f"{name}: the package's own parts are imported"
            assert theirs == mine or RANK[theirs] < RANK[mine], f"{name} imports {module}"


def test_drivers_are_named_in_one_place() -> None:
    for name, tree in trees().items():
        named = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        entries = {v for v in named if isinstance(v, str) and v in ENTRIES}
        assert entries == (ENTRIES if name == "driver.select" else set()), name
        if top(name) in ("driver", "testing") and "driver.cuda" not in name:
            assert not any(module.startswith("driver.cuda") for module in imports()[name]), name


def test_the_core_imports_torch_alone() -> None:
    """No tool, no emulated device, and nothing else that is installed: not even where it is asked
    for."""
    for file in FILES:
        if top(name_of(file)) in OUTSIDE:
            continue
        for node in ast.walk(trees()[name_of(file)]):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                at = name, file.stem
                assert name.partition(".")[0] in INSTALLED or at in ASKED_FOR, at
        assert not {top(m) for m in imports()[name_of(file)]} & OUTSIDE, file


def test_no_import_at_the_top_goes_round() -> None:
    graph: dict[str, set[str]] = {}
    for file in FILES:
        tree = trees()[name_of(file)]
        tops = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        graph[name_of(file)] = set(imported(tops))
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_drivers_and_tools_name_a_device_interface() -> None:
    for file in FILES:
        name = name_of(file)
        if top(name).partition(".")[0] in NAME_DEVICES:
            continue
        for node in ast.walk(trees()[name]):
            at = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "cuda"), at
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [a.name for a in node.names]
                if module.startswith("onelaunch."):  # `cudagraph_policy` is ours, and no device's
                    names = [n for n in names if n == "cuda"]
                assert not any(n.startswith(("cuda", "torch.cuda")) for n in [*names, module]), at


def test_a_file_holds_one_idea() -> None:
    for file in FILES:
        assert file.stem not in ("utils", "util", "helpers", "common", "base", "misc"), file
        assert len(file.read_text().splitlines()) <= 500, file
