"""One file as a program: its imports, functions and classes, and what their annotations say."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from onelaunch.doctor.source.torch_names import (
    ANNOTATIONS,
    FUNCTIONS,
    JAXTYPING,
    SHARED,
    TELLING,
)
from onelaunch.doctor.source.values import (
    MASK,
    NUMBER,
    PLAIN,
    TENSOR,
    UNKNOWN,
    Value,
)

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


_BASES = (
    "Module",
    "Model",
    "Layer",
    "Net",
    "Network",
    "Block",
    "MessagePassing",
    "Encoder",
    "Decoder",
)
"""Endings of the names of bases from elsewhere that are modules."""
_ASSIGNS = re.compile(r"self\.\w+[ \t]*[-+*/%&|^@]{0,2}=(?!=)|register_")
_LAYERS = re.compile(r"\bregister_(buffer|parameter|module)\(|\bnn\.[A-Z]\w*\(|\bParameter\(")


@dataclass(eq=False)
class Function:
    """A function of the file.

    Attributes:
        node: its definition.
        owner: the class whose method it is.
        around: the variables of the function that it is defined in.
        method: whether its first argument is the object.
    """

    node: Definition
    owner: Class | None = None
    around: dict[str, Value] = field(default_factory=dict)
    method: bool = False

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(walk(self.node))

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(eq=False)
class Class:
    """A class of the file.

    Attributes:
        bases: the dotted names of its bases.
        parents: those that are classes of the file.
        methods: its own functions.
        attributes: what is known of ``self.x``; None: not yet read.
        makes_layers: whether its `__init__` makes parameters, buffers or layers of torch.
        assigned: attribute -> the names of the methods that assign it; ``""`` is code outside.
        moved: the attributes that are assigned by what they were, or by code outside.
    """

    node: ast.ClassDef
    bases: list[str]
    parents: list[Class]
    methods: dict[str, Function]
    makes_layers: bool = False
    attributes: dict[str, Value] | None = None
    assigned: dict[str, set[str]] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)

    def find(self, method: str) -> Function | None:
        """Return a method, its own or of a class of the file that it inherits from."""
        if method in self.methods:
            return self.methods[method]
        found = (parent.find(method) for parent in self.parents)
        return next((f for f in found if f is not None), None)

    @cached_property
    def is_module(self) -> bool:
        """True if it is surely an `nn.Module` that can be called."""
        forward = self.find("forward")
        return forward is not None and forward.method and self._derives

    @cached_property
    def _derives(self) -> bool:
        """True if its bases, or what it is made of, say that it is an `nn.Module`."""
        if any(base.endswith("Function") for base in self.bases):  # of autograd
            return False
        if any(base.startswith("torch.nn.") or _named_so(base) for base in self.bases):
            return True
        made = self.makes_layers and bool(self.bases)
        return made or any(parent._derives for parent in self.parents)


def _named_so(base: str) -> bool:
    return base.rpartition(".")[2].endswith(_BASES)


class Program:
    """A file.

    Attributes:
        file: its path, as findings show it.
        lines: its text.
        imports: name -> the dotted name that it stands for.
        classes, functions: those at the top of the file.
        globals: what is known of its variables.
    """

    def __init__(self, file: str, text: str, tree: ast.Module) -> None:
        self.file = file
        self.lines = text.splitlines()
        self.tree = tree
        self.imports: dict[str, str] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Function] = {}
        self.globals: dict[str, Value] = {}
        self.has_globals = "global " in text or "nonlocal " in text
        self.bends_default_device = "set_default_device" in text or "with torch.device(" in text
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._assigning = [bisect_right(starts, m.start()) for m in _ASSIGNS.finditer(text)]
        self._annotated: dict[ast.AST, Value] = {}
        self._telling: dict[Function, Telling] = {}
        self.registers_generators = "register_generator_state" in text
        for statement in _at_top(tree.body):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.bring(statement)
            elif isinstance(statement, ast.ClassDef):
                self.classes[statement.name] = self.make_class(statement)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[statement.name] = Function(statement)

    def assigns(self, node: Definition) -> bool:
        """Return whether a line of a function may assign an attribute of `self`."""
        at = bisect_left(self._assigning, node.lineno)
        return at < len(self._assigning) and self._assigning[at] <= (node.end_lineno or 0)

    def text_of(self, node: ast.stmt | ast.expr) -> str:
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno])

    def bring(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Note what an import names."""
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                self.imports[name] = alias.name if alias.asname else name
            elif statement.level == 0 and statement.module:
                self.imports[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
            else:
                self.imports[alias.asname or alias.name] = f".{alias.name}"

    def make_class(self, node: ast.ClassDef) -> Class:
        names = [self.dotted(base) or "?" for base in node.bases]
        parents = [self.classes[name] for name in names if name in self.classes]
        made = Class(node, names, parents, {})
        for statement in _at_top(node.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = {self.dotted(mark) for mark in statement.decorator_list}
                bound = not marks & {"staticmethod", "classmethod"}
                made.methods[statement.name] = Function(statement, made, method=bound)
                if statement.name == "__init__":
                    made.makes_layers = _LAYERS.search(self.text_of(statement)) is not None
        return made

    def dotted(self, node: ast.AST) -> str | None:
        """Return the name of an expression in full: ``torch.nn.functional.relu`` for ``F.relu``.

        Of a call or a subscript it is the name of what is called or subscribed.
        """
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value) if not isinstance(node.value, ast.Call) else None
            return None if before is None else f"{before}.{node.attr}"
        if isinstance(node, ast.Call):
            return self.dotted(node.func)
        return self.dotted(node.value) if isinstance(node, ast.Subscript) else None

    def annotated(self, node: ast.AST | None) -> Value:
        """Return what an annotation says."""
        if node is None:
            return UNKNOWN
        if node not in self._annotated:
            self._annotated[node] = self._annotation(node)
        return self._annotated[node]

    def _annotation(self, node: ast.AST) -> Value:
        if isinstance(node, ast.Constant):
            return self._constant(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [self.annotated(side) for side in (node.left, node.right) if not _none(side)]
            return sides[0] if len(sides) == 1 or sides[0] == sides[1] else UNKNOWN
        name = (self.dotted(node) or "").rpartition(".")[2]
        if isinstance(node, ast.Subscript):
            return self._subscribed(name, node.slice)
        if name in ANNOTATIONS:
            return TENSOR
        if name == "BoolTensor":
            return MASK
        if name in ("int", "float", "bool"):
            return NUMBER
        if name == "Generator" and (self.dotted(node) or "").startswith("torch"):
            return Value("generator")
        return PLAIN if name in ("str", "Size", "dtype", "device") else UNKNOWN

    def declared(self, function: Function, parameter: ast.arg) -> Value:
        """Return what the annotation of a parameter says, if its default agrees."""
        value, of = self.annotated(parameter.annotation), function.node.args
        places = [*of.posonlyargs, *of.args]
        defaults = dict(zip(reversed(places), reversed(of.defaults), strict=False))
        defaults |= dict(zip(of.kwonlyargs, of.kw_defaults, strict=True))
        default = defaults.get(parameter)
        other = isinstance(default, ast.Constant) and default.value is not None
        return UNKNOWN if value.is_tensor and other else value

    def _constant(self, value: object) -> Value:
        if value is None:
            return PLAIN
        if not isinstance(value, str):
            return UNKNOWN
        try:
            return self.annotated(ast.parse(value, mode="eval").body)
        except SyntaxError:  # of jaxtyping's sizes, "batch channels", say
            return UNKNOWN

    def _subscribed(self, name: str, inner: ast.expr) -> Value:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Optional":
            return self.annotated(inner)
        if name == "Union":
            kept = [self.annotated(part) for part in parts if not _none(part)]
            return kept[0] if kept and all(k == kept[0] for k in kept) else UNKNOWN
        if name == "Annotated" or name in JAXTYPING:
            return self.annotated(parts[0])
        if name == "Bool":
            return self.annotated(parts[0])._replace(mask=True)
        known = tuple(self.annotated(part) for part in parts)
        if name in ("tuple", "Tuple"):
            if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...:
                return Value("list", parts=known[:1])
            return Value("tuple", parts=known)
        return Value("list", parts=known[:1]) if name in ("list", "List", "Sequence") else UNKNOWN

    def telling(self, function: Function) -> Telling:
        """Return the parameters without an annotation that are used as only tensors are."""
        found = self._telling.get(function)
        if found is None:
            found = self._telling[function] = self._tell(function)
        return found

    def _tell(self, function: Function) -> Telling:
        free = {a.arg for a in parameters(function.node) if a.annotation is None}
        free -= {"self", "cls"}
        bound: dict[str, int] = {}
        used: list[tuple[str, str, int]] = []
        for node in function.nodes if free else ():
            if isinstance(node, ast.Name) and node.id in free and isinstance(node.ctx, ast.Store):
                bound[node.id] = min(bound.get(node.id, node.lineno), node.lineno)
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and node.args:
                    free -= {getattr(node.args[0], "id", "")}
                used += self._tells(node)
        early = [(n, by) for n, by, line in used if n in free and line <= bound.get(n, line)]
        return Telling(
            frozenset(name for name, by in early if not by),
            frozenset((name, by) for name, by in early if by),
        )

    def _tells(self, call: ast.Call) -> Iterator[tuple[str, str, int]]:
        """Return names that a call uses as tensors, and the attribute of `self` that it calls."""
        func, line = call.func, call.lineno
        of = func.value if isinstance(func, ast.Attribute) else None
        if isinstance(func, ast.Attribute) and isinstance(of, ast.Name):
            if func.attr in TELLING or func.attr in SHARED:
                yield of.id, "", line
            elif of.id == "self" and call.args and isinstance(call.args[0], ast.Name):
                yield call.args[0].id, func.attr, line
        name = self.dotted(func) or ""
        if not (name.startswith("torch.") and call.args and isinstance(call.args[0], ast.Name)):
            return
        part, _, last = name.rpartition(".")
        functional = part == "torch.nn.functional" and last != "pad"
        if functional or (part == "torch" and last in FUNCTIONS - {"asarray", "as_tensor"}):
            yield call.args[0].id, "", line


class Telling(NamedTuple):
    """Parameters that are used as tensors are.

    Attributes:
        surely: those that are.
        called: those that an attribute of `self` is called with, and its name.
    """

    surely: frozenset[str]
    called: frozenset[tuple[str, str]]


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Return a node and all below it but for classes, three times as fast as `ast.walk` does."""
    rest = [node]
    while rest:
        at = rest.pop()
        yield at
        for value in at.__dict__.values():
            if isinstance(value, ast.AST):
                rest.append(value)
            elif type(value) is list:
                rest += [p for p in value if isinstance(p, ast.AST) and type(p) is not ast.ClassDef]


def parameters(node: Definition) -> list[ast.arg]:
    """Return the parameters of a function, but for ``*args`` and ``**kwargs``."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _at_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a body, and of its conditions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _at_top([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [s for handler in statement.handlers for s in handler.body]
            yield from _at_top([*statement.body, *handlers])
