"""Docstrings begin with what they document: of a function a verb, of a class or a field a noun."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.unit.prose import faults

SOURCE = Path(__file__).parents[2] / "src/onelaunch"
CLAUSES = r"By|For|From|How|If|In|Of|Where|Whether|What|When|Which"
NO_VERB = re.compile(rf"({CLAUSES}|An?|All|Its|None|One|Th(at|e|ese|is|ose)|True|\w*[^s]s)\b")
NO_NOUN = re.compile(rf"({CLAUSES}|Held|Kept|Those|Told|Used)\b")
SENTENCE = re.compile(r"See |\w+[^s]s (an?|its|the|how|what|when|where|whether|which) ")
"""The beginning of a class that "Counts the" or "Says which"."""


def documented() -> Iterator[tuple[Path, int, str, str]]:
    """The file, the line, the kind and the text of each docstring."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                if any(ast.unparse(d).endswith("property") for d in node.decorator_list):
                    kind = "field"
                yield file, node.lineno, kind, ast.get_docstring(node) or ""
            body = getattr(node, "body", None)
            for assigned, text in itertools.pairwise(body if isinstance(body, list) else ()):
                match assigned, text:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(said))):
                        yield file, text.lineno, "field", said


def is_odd(kind: str, text: str) -> bool:
    if kind == "function":
        return NO_VERB.match(text) is not None
    return bool(NO_NOUN.match(text) or (kind == "class" and SENTENCE.match(text)))


def test_docstrings_begin_with_what_they_document() -> None:
    odd = [
        f"{file}:{line}: {kind}: {text[:60]}"
        for file, line, kind, text in documented()
        if is_odd(kind, text)
    ]
    assert not odd, "\n".join(odd)


def test_sentences_are_short_and_name_their_things() -> None:
    found = [
        f"{file}:{line}: {fault}" for file, line, _, text in documented() for fault in faults(text)
    ]
    assert not found, "\n".join(found)


def test_each_class_has_a_name_of_its_own() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    shared = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not shared, "\n".join(shared)
