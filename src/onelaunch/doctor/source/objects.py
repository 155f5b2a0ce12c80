"""Numbers that change: attributes assigned by several methods, variables of loops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from onelaunch.doctor.source.program import Class, Program, walk
from onelaunch.doctor.source.values import TENSOR, UNKNOWN

_ARITHMETIC = frozenset({"min", "max", "abs", "round", "float", "int"})
_RATES = frozenset({"lr", "learning_rate", "step_size"})
_REGISTER = frozenset({"register_buffer", "register_parameter"})


def assigned_attributes(owner: Class, program: Program) -> None:
    """Note which methods of a class assign which attributes, and what that says of them.

    A number that is assigned by what it was moves, and a learning rate that is assigned at all, but
    not one that is set up; one that may become something else, and
    anything but a tensor that is assigned again, is unknown.
    """
    assert owner.attributes is not None
    for name, method in owner.methods.items():
        for node in method.nodes if program.assigns(method.node) else ():
            if isinstance(node, ast.Call):
                _note_registered(owner, node)
            elif isinstance(node, ast.Assign | ast.AugAssign) and name != "__init__":
                _note_assigned(owner, program, name, node)
    for name, value in owner.attributes.items():
        rated = name in _RATES and bool(owner.assigned.get(name))
        if value.kind == "number" and not value.flag and (rated or name in owner.moved):
            owner.attributes[name] = value._replace(moving=f"self.{name}")


def _note_registered(owner: Class, node: ast.Call) -> None:
    """Note a buffer or parameter; one that may be None is not surely a tensor."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr in _REGISTER and node.args):
        return
    name, attributes = node.args[0], owner.attributes
    if isinstance(name, ast.Constant) and isinstance(name.value, str) and attributes is not None:
        none = len(node.args) < 2 or isinstance(node.args[1], ast.Constant)
        kept = TENSOR._replace(place=f"self.{name.value}", registered=True)
        attributes[name.value] = UNKNOWN if none else kept


def _note_assigned(
    owner: Class, program: Program, method: str, node: ast.Assign | ast.AugAssign
) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    attributes = owner.attributes if owner.attributes is not None else {}
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if not _is_own(part):
                continue
            name = part.attr
            owner.assigned.setdefault(name, set()).add(method)
            if isinstance(node, ast.AugAssign) or _reads(node.value, name):
                owner.moved.add(name)
            value = attributes.get(name)
            if value is None or (value.is_tensor and isinstance(node, ast.AugAssign)):
                continue
            if value.registered and not isinstance(node.value, ast.Constant):
                continue  # a module takes nothing but a tensor there
            if value.kind in ("list", "dict", "set") and _is_empty(node.value):
                continue  # cleared
            if value.kind != "number" or part is not target or not _is_number(node.value, program):
                attributes[name] = UNKNOWN


def _reads(node: ast.expr, name: str) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == name for part in walk(node))


def _is_own(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Dict | ast.Call) and not list(
        getattr(node, "elts", None) or getattr(node, "keys", None) or getattr(node, "args", ())
    )


def _is_number(node: ast.expr, program: Program) -> bool:
    """Return whether an expression can be taken for a number, where the attribute was one."""
    return all(_in_number(part, program) for part in walk(node))


def _in_number(part: ast.AST, program: Program) -> bool:
    if isinstance(part, ast.Call):
        name = program.dotted(part.func) or ""
        return name.startswith("math.") or name in _ARITHMETIC
    if isinstance(part, ast.Constant):
        return isinstance(part.value, int | float)
    return not isinstance(part, ast.List | ast.Dict | ast.Tuple | ast.Subscript)


def moving_names(body: list[ast.stmt], has_globals: bool) -> frozenset[str]:
    """Return the names that statements assign again: in a loop, or by ``name += ...``.

    What a nested function declares global or nonlocal, and assigns, counts too.
    """
    return frozenset(_moving(body, False, has_globals))


def _moving(body: list[ast.stmt], looped: bool, has_globals: bool) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if has_globals:
                yield from _declared(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign) and looped:
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif not isinstance(node, ast.ClassDef):
            inner = looped or isinstance(node, ast.For | ast.While | ast.AsyncFor)
            for part in ("body", "orelse", "finalbody"):
                yield from _moving(getattr(node, part, []), inner, has_globals)


def _declared(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    names: set[str] = set()
    for part in walk(node):
        if isinstance(part, ast.Global | ast.Nonlocal):
            names.update(part.names)
    if not names:
        return
    for part in walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id in names:
            yield part.id
