"""Errors have four parts and a code, and every code is in the catalogue and in use."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import onelaunch as ol
from onelaunch.errors import (
    CATALOGUE,
    ArgumentError,
    CaptureError,
    GraphError,
    GraphWarning,
    ReplayError,
    describe_type,
)
from onelaunch.source import Place

SOURCE = Path(__file__).parents[2] / "src" / "onelaunch"
KINDS = (GraphError, ArgumentError, CaptureError, ReplayError, GraphWarning)


def codes_in(file: Path) -> set[str]:
    strings = (
        n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)
    )
    return {s for s in strings if isinstance(s, str) and re.fullmatch(r"OL\d+", s)}


def test_every_code_in_use_is_explained_and_every_explanation_is_used() -> None:
    used = set[str]()
    for file in SOURCE.rglob("*.py"):
        if file.name != "error_catalogue.py" and not {"rules", "doctor"} & set(file.parts):
            used |= codes_in(file)
    assert used == set(CATALOGUE)


def test_bad_arguments_are_argument_errors() -> None:
    for file in SOURCE.rglob("*.py"):
        for call in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)):
            first = call.args[0] if call.args else None
            if isinstance(first, ast.Constant) and re.fullmatch(r"OL4\d\d", str(first.value)):
                assert ast.unparse(call.func) == "ArgumentError", f"{file}:{call.lineno}"


@pytest.mark.parametrize("code", CATALOGUE)
def test_entries(code: str) -> None:
    entry = CATALOGUE[code]
    assert re.fullmatch(r"OL[1-4]\d\d", code)
    for part in (entry.title, entry.why, entry.fix):
        assert part
        assert part == part.strip()
        assert not part.endswith(".")


def test_the_four_parts() -> None:
    error = CaptureError("OL101", "x.item() reads 3.0", where="model.py:7: y = x.item()")
    entry = CATALOGUE["OL101"]
    assert str(error).splitlines() == [
        "[OL101] x.item() reads 3.0",
        "  where: model.py:7: y = x.item()",
        f"  why:   {entry.why}",
        f"  fix:   {entry.fix}",
    ]
    other = GraphError("OL401", "what", why="because", fix="do()")
    assert str(other) == "[OL401] what\n  why:   because\n  fix:   do()"


def test_a_refusal_is_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def f(x):\n    return x.item()\n")
    error = CaptureError("OL101", "`.item()` reads", where=f"{file}:2: return x.item()", fix="f()")
    finding = error.finding
    assert finding is not None
    assert finding.to_dict() == {
        "code": "OL101",
        "name": "host-read",
        "severity": "blocks-capture",
        "what": "`.item()` reads",
        "file": str(file),
        "line": 2,
        "column": 5,
        "source": "return x.item()",
        "fix": "f()",
        "found_by": ["capture"],
    }
    assert pickle.loads(pickle.dumps(error)).finding == finding


def test_a_refusal_of_no_line_is_a_finding_without_one() -> None:
    finding = CaptureError("OL111", "no room", where="args[0]").finding
    assert finding is not None
    assert (finding.file, finding.line, finding.column, finding.source) == ("", 0, 0, "")
    gone = CaptureError("OL101", "reads", where="gone.py:7: x.item()\nhere.py:1").finding
    assert gone is not None
    assert (gone.file, gone.line, gone.column, gone.source) == ("gone.py", 7, 1, "x.item()")


def test_a_refusal_that_is_no_fault_of_the_code_is_no_finding() -> None:
    assert CaptureError("OL304", "the pool is full").finding is None


def test_a_warning_in_the_place_of_an_error_says_first_what_came_of_it() -> None:
    error = CaptureError("OL101", "x.item() reads 3.0", where="a.py:7", why="because", fix="do()")
    parts = ["  where: a.py:7", "  why:   because", "  fix:   do()"]
    assert str(error.warning("it runs eagerly")).splitlines() == [
        "[OL101] it runs eagerly: x.item() reads 3.0",
        *parts,
    ]
    assert str(error.warning("it runs eagerly", "OL306")).splitlines() == [
        "[OL306] it runs eagerly: [OL101] x.item() reads 3.0",
        *parts,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind: type[GraphError] | type[GraphWarning]) -> None:
    error = kind("OL201", "what", where="here", why="because", fix="do()")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert vars(again) == vars(error)
        assert str(again) == str(error)


def test_an_unknown_code_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        GraphError("OL999", "what")


def test_the_tree_of_errors() -> None:
    assert issubclass(GraphError, RuntimeError)
    assert CaptureError.__bases__ == ReplayError.__bases__ == (GraphError,)
    assert ArgumentError.__bases__ == (GraphError, ValueError)
    assert issubclass(ol.GraphWarning, UserWarning)


def test_the_kind_of_a_value() -> None:
    assert [describe_type(v) for v in (1, "x", None, KeyError())] == [
        "an int",
        "a str",
        "a NoneType",
        "a KeyError",
    ]


def test_a_long_line_of_source_is_cut() -> None:
    assert str(Place("/nowhere/f.py", 3, "x = 1")) == "/nowhere/f.py:3: x = 1"
    assert len(str(Place("/nowhere/f.py", 3, "x + " * 300))) < 200
