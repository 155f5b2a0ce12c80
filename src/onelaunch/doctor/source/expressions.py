"""The value of an expression, as far as the source shows it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from onelaunch.doctor.source.program import Definition, Function, Program
from onelaunch.doctor.source.scope import Rules, Scope
from onelaunch.doctor.source.values import (
    FLAG,
    NUMBER,
    PLAIN,
    TENSOR,
    UNKNOWN,
    Value,
    computed,
    element,
    joined,
)

_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_SIZES = frozenset({"shape", "ndim"})
_CONSTANTS = ("torch.inf", "torch.pi", "torch.nan", "torch.e", "math.pi", "math.inf", "math.e")


class Expressions(Scope):
    """A scope that evaluates expressions, and tells the rules what it meets.

    Attributes:
        defined: the functions inside others that were met.
    """

    def __init__(self, program: Program, rules: list[Rules]) -> None:
        super().__init__(program, rules)
        self.defined: dict[Definition, Function] = {}
        self._cases: dict[type[ast.expr], Callable[[Any], Value]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Call: self.call,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._boolean,
            ast.Compare: self._compare,
            ast.IfExp: self._either,
            ast.Tuple: self._tuple,
            ast.List: self._list,
            ast.Set: self._list,
            ast.Dict: self._dict,
            ast.JoinedStr: self._joined,
            ast.Lambda: self._lambda,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._dict_comprehension,
            ast.NamedExpr: self._named,
            ast.Slice: self._slice,
        }

    def evaluate(self, node: ast.expr | None) -> Value:
        """Return what is known of an expression."""
        if node is None:
            return PLAIN
        case = self._cases.get(type(node))
        if case is not None:
            return case(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child)
        return UNKNOWN

    def call(self, node: ast.Call) -> Value:
        """Return what a call gives."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Value) -> None:
        """Bind a target of a loop or an assignment."""
        raise NotImplementedError

    def attribute_of(self, value: Value, name: str) -> Value:
        """Return what is known of an attribute of an object of the file."""
        raise NotImplementedError

    def narrowed(self, test: ast.expr, holds: bool) -> dict[str, Value]:
        """Return the variables where a test is known to hold, or not to."""
        raise NotImplementedError

    def test(self, node: ast.expr) -> None:
        """Evaluate an expression whose truth is asked for."""
        if isinstance(node, ast.BoolOp):
            self._operands(node, last=True)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.test(node.operand)
        else:
            value = self.evaluate(node)
            for rules in self.rules:
                rules.truth(self, node, value)

    def as_text(self, node: ast.AST, value: Value) -> None:
        """Tell that a value, or its parts, are made text."""
        parts = value.parts if value.kind in ("tuple", "list") else (value,)
        for part in parts:
            for rules in self.rules:
                rules.text(self, node, part)

    def _constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, bool):
            return FLAG
        return NUMBER if isinstance(node.value, int | float) else PLAIN

    def _name(self, node: ast.Name) -> Value:
        value = self.look_up(node.id)
        if value is None:
            if node.id in self.program.functions:
                return Value("function", target=self.program.functions[node.id])
            if node.id in self.program.classes:
                return Value("class", target=self.program.classes[node.id])
            return UNKNOWN
        if node.id not in self.env and value.kind == "number":
            for rules in self.rules:
                rules.name(self, node, value)
        return value

    def _attribute(self, node: ast.Attribute) -> Value:
        name = self.dotted(node)
        if name is not None:
            return NUMBER if name in _CONSTANTS else UNKNOWN
        value = self.evaluate(node.value)
        if node.attr in _SIZES and value.kind in ("tensor", "host", "unknown"):
            return PLAIN._replace(shaped=True)
        if value.is_tensor:
            if node.attr in _VIEWS:
                return value._replace(registered=False)
            return TENSOR if node.attr == "grad" and value.kind == "tensor" else PLAIN
        if value.kind in ("instance", "class"):
            found = self.attribute_of(value, node.attr)
            if found.place is not None and found.kind == "number":
                for rules in self.rules:
                    rules.name(self, node, found)
            return found
        return PLAIN if value.kind == "plain" else UNKNOWN

    def _subscript(self, node: ast.Subscript) -> Value:
        value = self.evaluate(node.value)
        index = self.evaluate(node.slice)
        if value.is_tensor or value.kind == "unknown":
            for rules in self.rules:
                rules.index(self, node, value, index)
        if value.is_tensor:
            parts = index.parts if index.kind == "tuple" else (index,)
            if all(part.is_plain for part in parts):
                return value._replace(place=None, registered=False)
            return value._replace(given=False, place=None)
        if value.kind == "tuple" and isinstance(node.slice, ast.Constant):
            at = node.slice.value
            if isinstance(at, int) and at < len(value.parts):
                return value.parts[at]
        if value.kind in ("tuple", "list") and not isinstance(node.slice, ast.Slice):
            return joined(list(value.parts))
        if value.kind in ("tuple", "list"):
            return Value("list", parts=(joined(list(value.parts)),))
        return NUMBER._replace(shaped=True) if value.shaped else UNKNOWN

    def _slice(self, node: ast.Slice) -> Value:
        for bound in (node.lower, node.upper, node.step):
            if bound is not None:
                value = self.evaluate(bound)
                for rules in self.rules:
                    rules.bound(self, bound, value)
        return PLAIN

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Mod) and _is_text(node.left):
            self.as_text(node, right)
            return PLAIN
        if left.kind == right.kind == "list":
            return Value("list", parts=(joined([*left.parts, *right.parts]),))
        if left.kind == right.kind == "tuple" and isinstance(node.op, ast.Add):
            return Value("tuple", parts=left.parts + right.parts)
        if {left.kind, right.kind} & {"list", "tuple"}:
            return UNKNOWN
        result = computed([left, right])
        logical = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
        return result._replace(mask=logical and left.mask and right.mask)

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            self.test(node.operand)
            return NUMBER
        value = self.evaluate(node.operand)
        if value.is_tensor:
            inverted = isinstance(node.op, ast.Invert) and value.mask
            return Value(value.kind, mask=inverted, moving=value.moving)
        return value if value.is_plain else computed([value])

    def _boolean(self, node: ast.BoolOp) -> Value:
        return joined(self._operands(node, last=False))

    def _operands(self, node: ast.BoolOp, last: bool) -> list[Value]:
        """Evaluate the operands: each is reached where those before it hold, or do not."""
        before, values = dict(self.env), list[Value]()
        for operand in node.values:
            if last or operand is not node.values[-1]:
                self.test(operand)
                values.append(UNKNOWN)
            else:
                values.append(self.evaluate(operand))
            if self.is_dead(operand, isinstance(node.op, ast.And)):
                break
            self.env.update(self.narrowed(operand, isinstance(node.op, ast.And)))
        self.env.update(before)
        return values

    def _compare(self, node: ast.Compare) -> Value:
        left, others = self.evaluate(node.left), [self.evaluate(c) for c in node.comparators]
        values = [left, *others]
        for rules in self.rules:
            rules.compare(self, node)
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            for rules in self.rules:
                rules.contains(self, node, left, others[0])
            return NUMBER
        if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return NUMBER
        if any(v.kind == "plain" for v in values):  # with None, a string, a dtype
            return NUMBER if any(v.kind != "unknown" for v in values) else UNKNOWN
        result = computed(values)
        if len(node.ops) > 1 and result.is_tensor:
            for rules in self.rules:
                rules.truth(self, node, result)
        return result._replace(mask=True) if result.is_tensor else result

    def _either(self, node: ast.IfExp) -> Value:
        self.test(node.test)
        before, sides = dict(self.env), list[Value]()
        for side, holds in ((node.body, True), (node.orelse, False)):
            if self.is_dead(node.test, holds):
                continue
            self.env.update(self.narrowed(node.test, holds))
            sides.append(self.evaluate(side))
            self.env.update(before)
        return joined(sides)

    def is_dead(self, test: ast.expr, holds: bool) -> bool:
        """Return whether the side of a test never runs in a capture."""
        raise NotImplementedError

    def _tuple(self, node: ast.Tuple) -> Value:
        if any(isinstance(part, ast.Starred) for part in node.elts):
            return self._list(node)
        parts = tuple(self.evaluate(part) for part in node.elts)
        return Value("tuple", parts=parts, shaped=any(part.shaped for part in parts))

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        parts = list[Value]()
        for part in node.elts:
            if isinstance(part, ast.Starred):
                parts.append(element(self.evaluate(part.value)))
            else:
                parts.append(self.evaluate(part))
        return Value(
            "set" if isinstance(node, ast.Set) else "list",
            parts=(joined(parts),) if parts else (),
            shaped=any(p.shaped for p in parts),
        )

    def _dict(self, node: ast.Dict) -> Value:
        values = [self.evaluate(part) for part in (*node.keys, *node.values) if part is not None]
        return Value("dict", shaped=any(v.shaped for v in values))

    def _joined(self, node: ast.JoinedStr) -> Value:
        shaped = False
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.evaluate(part.value)
                shaped |= value.shaped
                self.as_text(part.value, value)
        return PLAIN._replace(shaped=shaped)

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("function", target=self.define(node))

    def define(self, node: Definition) -> Function:
        """Return the function of a definition inside another, with the variables that it sees."""
        made = self.defined[node] = Function(node, around=self.visible())
        return made

    def visible(self) -> dict[str, Value]:
        """Return the variables that a function defined here sees beside the globals."""
        if len(self.frames) == 1:
            return self.env
        function = self.frame.function
        return {**(function.around if function is not None else {}), **self.env}

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        before = dict(self.env)
        self._loops(node.generators)
        value = self.evaluate(node.elt)
        self.env.update(before)
        kind = "iterator" if isinstance(node, ast.GeneratorExp) else "list"
        return Value(kind, parts=(value,))

    def _dict_comprehension(self, node: ast.DictComp) -> Value:
        before = dict(self.env)
        self._loops(node.generators)
        self.evaluate(node.key)
        self.evaluate(node.value)
        self.env.update(before)
        return Value("dict")

    def _loops(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self.bind(generator.target, element(self.evaluate(generator.iter)))
            for condition in generator.ifs:
                self.test(condition)
                self.env.update(self.narrowed(condition, True))

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.bind(node.target, value)
        return value


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
