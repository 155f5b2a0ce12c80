"""The state of reading a file: the functions under way, and what rules are told."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from onelaunch.doctor.source.program import Function, Program
from onelaunch.doctor.source.values import Value
from onelaunch.rules import RULES
from onelaunch.rules.finding import Finding


@dataclass
class SourceCall:
    """A call.

    Attributes:
        name: the full name of a function of a library.
        on: the object of a method, and `method` its name.
    """

    node: ast.Call
    name: str | None
    on: Value
    method: str | None
    args: list[Value]
    kwargs: dict[str, Value]

    @property
    def values(self) -> list[Value]:
        return [*self.args, *self.kwargs.values()]


class Rules:
    """A set of rules: told of what is read, in order; each may report."""

    def truth(self, at: Scope, node: ast.expr, value: Value) -> None:
        """Hear that the truth of a value is asked for."""

    def text(self, at: Scope, node: ast.AST, value: Value) -> None:
        """Hear that a value is printed, or formatted."""

    def call(self, at: Scope, call: SourceCall) -> None:
        """Hear of a call, before it."""

    def contains(self, at: Scope, node: ast.Compare, value: Value, among: Value) -> None:
        """Hear of ``value in among``."""

    def compare(self, at: Scope, node: ast.Compare) -> None:
        """Hear of a comparison."""

    def bound(self, at: Scope, node: ast.expr, value: Value) -> None:
        """Hear that a value bounds a slice."""

    def index(self, at: Scope, node: ast.Subscript, value: Value, index: Value) -> None:
        """Hear of ``value[index]``, read."""

    def name(self, at: Scope, node: ast.expr, value: Value) -> None:
        """Hear that a global, or an attribute of the object, is read."""

    def store(self, at: Scope, target: ast.expr, value: Value, before: Value | None) -> None:
        """Hear of an assignment.

        Args:
            before: what the target was, of ``target += ...``.
        """

    def set_item(self, at: Scope, target: ast.Subscript, into: Value, index: Value) -> None:
        """Hear of ``into[index] = ...``."""

    def result(self, at: Scope, node: ast.Return, value: Value) -> None:
        """Hear what a function returns."""


@dataclass
class Frame:
    """A function under way, or the file itself.

    Attributes:
        env: its variables.
        returns: what it has returned.
        globals: names that it declares global or nonlocal.
        way: the line that called it, as findings show it.
        root: whether it is what is graphed, and not called by that.
        moving: its numbers that it changes in a loop.
        nonlocals: those of them that a function around it has.
        asked: places of dicts that were asked for a key, attributes that were compared.
    """

    function: Function | None
    env: dict[str, Value]
    returns: list[Value] = field(default_factory=list)
    globals: set[str] = field(default_factory=set)
    way: str = ""
    root: bool = False
    moving: frozenset[str] = frozenset()
    nonlocals: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)


class Scope:
    """The state of reading a file.

    Attributes:
        program: the file.
        rules: those that are told.
        frames: the functions under way, innermost last; `frame` is that.
        reporting: whether what is read now would be inside a graph.
        entry: whether the outermost function is surely graphed by itself.
        found: the findings.
    """

    def __init__(self, program: Program, rules: Iterable[Rules]) -> None:
        self.program = program
        self.rules = tuple(rules)
        self.frames = [Frame(None, program.globals)]
        self.frame = self.frames[0]
        self.reporting = False
        self.entry = False
        self.found: list[Finding] = []

    def enter(self, frame: Frame) -> None:
        """Begin a function."""
        self.frames.append(frame)
        self.frame = frame

    def leave(self) -> Frame:
        """End the innermost function."""
        left = self.frames.pop()
        self.frame = self.frames[-1]
        return left

    @property
    def env(self) -> dict[str, Value]:
        return self.frame.env

    def look_up(self, name: str) -> Value | None:
        """Return what is known of a variable; None: it is no variable of the file."""
        value = self.env.get(name)
        if value is not None or len(self.frames) == 1:
            return value
        function = self.frame.function
        around = function.around.get(name) if function is not None else None
        return around or self.program.globals.get(name)

    def dotted(self, node: ast.expr) -> str | None:
        """Return the full name of what belongs to a library; None for the file's own."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner.id not in self.program.imports:
            return None
        return None if self.look_up(inner.id) is not None else self.program.dotted(node)

    def methods_under_way(self) -> set[str]:
        """Return the names of the functions under way."""
        return {f.function.name for f in self.frames if f.function is not None}

    def report(self, code: str, node: ast.AST, what: str, fix: str | None = None) -> None:
        """Report a fault at a node, where it would be inside a graph."""
        if not self.reporting:
            return
        rule = RULES[code]
        line, column = position(node)
        text = self.program.lines[line - 1] if line <= len(self.program.lines) else ""
        self.found.append(
            Finding(
                code=code,
                name=rule.name,
                severity=rule.severity,
                what=what,
                file=self.program.file,
                line=line,
                column=len(text.encode()[: column - 1].decode(errors="ignore")) + 1,  # of bytes
                source=text.strip(),
                fix=fix or rule.fix,
                found_by=("source",),
                calls=tuple(frame.way for frame in self.frames if frame.way),
            )
        )

    def place(self, node: ast.AST) -> str:
        """Return a line as the way to a finding has it."""
        name = self.frame.function.name if self.frame.function is not None else "the file"
        return f"{self.program.file}:{position(node)[0]} in {name}"


def position(node: ast.AST) -> tuple[int, int]:
    """Return the line and column at which the interpreter runs a node; both count from 1.

    Of a method called on another line than that of its object, it is that of its name.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        func = node.func
        if func.lineno != (func.end_lineno or func.lineno):
            return func.end_lineno or 0, (func.end_col_offset or 0) - len(func.attr) + 1
    return getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
