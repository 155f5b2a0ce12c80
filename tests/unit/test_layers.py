"""Imports go downward only, devices are named in one place, and files stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "onelaunch"
LAYERS = {
    "pure": (
        "errors",
        "source",
        "collection",
        "shards",
        "seeds",
        "refusals",
        "hostreads",
        "tree",
        "spec",
        "unwound",
        "fitting",
        "buckets",
        "options",
    ),
    "driver": ("driver",),
    "core": (
        *("symbols", "loads", "members", "peek", "reads", "origins", "frames"),
        *("slots", "contents", "state"),
        *("native", "guard"),
        *("known", "watching", "observe", "plan"),
        *("ledger", "hostvalues", "hostmemory"),
        *("hyperparameters", "optimizers", "steps", "dials", "turnable"),
        *("leaves", "direct", "backward", "streams", "chain", "flight", "parts"),
        *("autograd", "ahead"),
        *("recording", "forward", "spent", "gradients", "relied", "distributed"),
        "unrepeated",
        *("before", "outcome", "rebinding", "inspection", "keepers", "recorder", "signature"),
        *("lines", "matching", "viewing", "launching", "callpath"),
        *("flows", "bounds", "displacement", "trace", "shadow", "blame", "alignment", "look"),
        *("independence", "padding", "samples", "agreement", "backprop", "rehearsal", "proving"),
        "way",
        *(
            "stats",
            "pool",
            "changing",
            "table",
            "callee",
            "surroundings",
            "warmup",
            "trial",
            "graphed",
        ),
        *("pieces", "bucketed", "module", "entry", "callables", "prefetch"),
    ),
    "tools": ("bench",),
    "edge": ("report", "cli", "__main__", "__init__"),
}
"""From the bottom to the top. A layer may import itself and those before it."""
TOOLS = LAYERS["tools"]
RANK = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}
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
    assert {top(name) for name in NAMES} <= set(RANK)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_downward(file: Path) -> None:
    mine = top(name_of(file))
    for module in imported(ast.parse(file.read_text())):
        theirs = top(module)
        assert theirs != "__init__", "the package's own parts are imported, not the package"
        assert RANK[theirs] <= RANK[mine], f"{mine} imports {module}"
        if mine in TOOLS and theirs in TOOLS:
            assert mine == theirs, "the tools do not import each other"


def test_no_import_at_the_top_goes_round() -> None:
    graph: dict[str, set[str]] = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        tops = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        graph[name_of(file)] = set(imported(tops))
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_drivers_and_tools_name_a_device_interface(file: Path) -> None:
    if top(name_of(file)) in ("driver", *TOOLS, *LAYERS["edge"]):
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "cuda"), f"line {node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            assert not any(n.startswith(("cuda", "torch.cuda")) for n in names), node.lineno


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_names_say_something(file: Path) -> None:
    assert file.stem not in ("utils", "util", "helpers", "common", "base", "misc")
