"""Imports go downward only, devices are named in one place, and files stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "onelaunch"
LAYERS = (
    {"error_catalogue", "source", "gc_pause", "native", "trace_names"},
    {"rules"},
    {"errors"},
    {"targets"},
    {"call_events"},
    {"unwinding"},
    {"call", "sizes", "frames"},
    {"driver"},
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
    {"bench"},
    {"profiler"},
    {"testing"},
    {"doctor"},
    {"checklist"},
    {"report"},
    {"cli"},
    {"__init__", "__main__"},
)
"""From the bottom to the top. A package imports itself and what is in rows below its own."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
DRIVERS = ("cuda", "tape")
NAME_DEVICES = {
    *("driver", "bench", "profiler", "doctor", "checklist", "report", "cli"),
    *("__init__", "__main__"),
}
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
    return module.partition(".")[0]


def test_every_module_has_a_layer() -> None:
    assert {top(name) for name in NAMES} == set(RANK)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_downward(file: Path) -> None:
    mine = top(name_of(file))
    for module in imported(ast.parse(file.read_text())):
        theirs = top(module)
        assert theirs != "__init__", "the package's own parts are imported, not the package"
        assert theirs == mine or RANK[theirs] < RANK[mine], f"{mine} imports {module}"


@pytest.mark.parametrize("file", [f for f in FILES if top(name_of(f)) == "driver"], ids=name_of)
def test_drivers_do_not_know_each_other(file: Path) -> None:
    mine = name_of(file).split(".")[1:2]
    for module in imported(ast.parse(file.read_text())):
        theirs = module.split(".")[1:2]
        if top(module) == "driver" and theirs != mine and theirs[0] in DRIVERS:
            assert mine == ["select"], f"{mine} imports {module}"


def test_no_import_at_the_top_goes_round() -> None:
    graph: dict[str, set[str]] = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        tops = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        graph[name_of(file)] = set(imported(tops))
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_drivers_and_tools_name_a_device_interface(file: Path) -> None:
    if top(name_of(file)) in NAME_DEVICES:
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "cuda"), f"line {node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [a.name for a in node.names]
            if module.startswith("onelaunch."):  # `cudagraph_policy` is ours, and no device's
                names = [n for n in names if n == "cuda"]
            assert not any(n.startswith(("cuda", "torch.cuda")) for n in [*names, module]), (
                node.lineno
            )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_holds_one_idea(file: Path) -> None:
    assert file.stem not in ("utils", "util", "helpers", "common", "base", "misc")
    assert len(file.read_text().splitlines()) <= 500
