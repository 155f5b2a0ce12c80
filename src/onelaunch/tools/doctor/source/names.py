"""The names of a file: its imports, its functions, and what it graphs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_GRAPHING = frozenset({"graph", "compile", "make_graphed_callables"})
_BASES = (
    *("Module", "Model", "Layer", "Net", "Network", "Block"),
    *("MessagePassing", "Encoder", "Decoder"),
)
"""Endings of the names of modules' base classes."""


class Function(NamedTuple):
    """A function of the file, or a body of statements, and the methods of its class."""

    node: Any
    methods: dict[str, Function]


class FileNames:
    """The names of a file.

    Attributes:
        functions: name -> a function that is no method.
        inside: the functions that run inside a graph: `forward` of modules, and what is graphed.
        local: the variables of the functions that were looked at so far.
    """

    def __init__(self, file: str, text: str, tree: ast.Module) -> None:
        self.file, self.text = file, text
        self.lines = re.split(r"\r\n|\r|\n", text)  # a form feed ends no line of Python's
        self.imports: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.inside: list[Function] = []
        self.local: set[str] = set()
        self._methods: dict[str, Function] = {}
        self._modules: set[str] = set()
        nodes = list(walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._note_import(node)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self._note_class(node)
            elif isinstance(node, ast.FunctionDef):
                self._note_function(node)
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and self._graphs(node.func):
                for value in getattr(node.args[0], "elts", node.args[:1]):
                    self._note_graphed(value)

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imports[alias.asname or alias.name] = f"{module}.{alias.name}"
            else:
                first = alias.name.partition(".")[0]
                self.imports[alias.asname or first] = alias.name if alias.asname else first

    def _note_class(self, node: ast.ClassDef) -> None:
        own: dict[str, Function] = {}
        own |= {s.name: Function(s, own) for s in node.body if isinstance(s, ast.FunctionDef)}
        self._methods |= own
        bases = {self.dotted(base) for base in node.bases}
        named = any(base.startswith("torch.nn.") or base.endswith(_BASES) for base in bases)
        if named or not bases.isdisjoint(self._modules):
            self._modules.add(node.name)
            self.inside += [own["forward"]] if "forward" in own else []

    def _note_function(self, node: ast.FunctionDef) -> None:
        function = self._methods.get(node.name)
        if function is None or function.node is not node:
            self.functions[node.name] = function = Function(node, {})
        marks = (getattr(mark, "func", mark) for mark in node.decorator_list)
        self.inside += [function] if any(map(self._graphs, marks)) else []

    def dotted(self, node: ast.AST) -> str:
        """Return the name of an expression in full, ``torch.nn.functional.relu`` for ``F.relu``.

        A call has no name: "".
        """
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        before = self.dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""

    def _graphs(self, function: ast.AST) -> bool:
        package, _, last = self.dotted(function).rpartition(".")
        return last in _GRAPHING and package.startswith(("onelaunch", "torch"))

    def _note_graphed(self, value: ast.expr) -> None:
        table = self._methods if isinstance(value, ast.Attribute) else self.functions
        found = table.get(getattr(value, "attr", getattr(value, "id", "")))
        found = Function(value, {}) if isinstance(value, ast.Lambda) else found
        self.inside += [found] if found else []


def text_of(target: ast.AST) -> str:
    """Return a variable, or an attribute of `self`, as text; "" for other expressions."""
    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
        return f"self.{target.attr}"
    return getattr(target, "id", "")


def walk(node: ast.AST, skipped: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """Return a node and all below it in the order of the text, but for some types of nodes."""
    rest: list[Any] = [node]
    while rest:
        at = rest.pop()
        if type(at) in skipped:
            continue
        yield at
        for value in reversed(at.__dict__.values()):
            if isinstance(value, ast.AST):
                rest.append(value)
            elif type(value) is list:
                rest += [part for part in reversed(value) if isinstance(part, ast.AST)]
