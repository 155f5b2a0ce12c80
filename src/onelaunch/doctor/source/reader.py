"""Statements: a function is read from the top, both sides of a branch, each loop once."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from onelaunch.doctor.source.calls import BARE, GRAPHING, Calls, merge
from onelaunch.doctor.source.objects import assigned_attributes, moving_names
from onelaunch.doctor.source.program import Class, Function
from onelaunch.doctor.source.scope import Frame
from onelaunch.doctor.source.values import (
    PLAIN,
    TENSOR,
    UNKNOWN,
    Value,
    computed,
    element,
    join,
)

_FALSE_IN_CAPTURE = frozenset({"is_scripting", "is_in_onnx_export"})
_TRUE_IN_CAPTURE = frozenset(
    {"is_current_stream_capturing", "is_cuda_stream_capturing", "is_tracing"}
)
_DEBUG = frozenset({"debug", "verbose", "_debug", "_verbose", "DEBUG", "VERBOSE"})
_PYTHON = frozenset({"int", "float", "bool", "str", "list", "tuple", "dict", "Number"})
_INPLACE = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
    ast.FloorDiv,
    ast.Mod,
    ast.BitAnd,
    ast.BitOr,
    ast.BitXor,
)


class Reader(Calls):
    """A reader of one file."""

    def run_file(self) -> None:
        """Read the statements of the file itself, and the functions that graph something."""
        self.frame.moving = moving_names(self.program.tree.body, self.program.has_globals)
        self.run(self.program.tree.body)

    def run_body(self, function: Function) -> None:
        if isinstance(function.node, ast.Lambda):
            self.frame.returns.append(self.evaluate(function.node.body))
            return
        if not self.reporting:
            self.frame.moving = moving_names(function.node.body, self.program.has_globals)
        self.run(function.node.body)

    def run(self, body: Iterable[ast.stmt]) -> bool:
        """Read statements; return whether they end in a `return`, `raise` or the like."""
        return any(self._statement(statement) for statement in body)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Expr():
                self.evaluate(node.value)
            case ast.Assign():
                self._assign(node.targets, node.value)
            case ast.AnnAssign():
                self._annotated(node)
            case ast.AugAssign():
                self._augmented(node)
            case ast.If():
                return self._if(node)
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While():
                self._while(node)
            case ast.With() | ast.AsyncWith():
                return self._with(node)
            case ast.Try() | ast.TryStar():
                return self._try(node)
            case ast.Return():
                self._return(node)
                return True
            case ast.Assert():
                self.test(node.test)
                self.env.update(self.narrowed(node.test, True))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node)
            case ast.ClassDef():
                self._define_class(node)
            case ast.Import() | ast.ImportFrom():
                self.program.bring(node)
            case ast.Global() | ast.Nonlocal():
                self.frame.globals.update(node.names)
                if isinstance(node, ast.Nonlocal):
                    self.frame.nonlocals.update(node.names)
            case ast.Raise() | ast.Continue() | ast.Break():
                return True  # what a message holds is read only where the call fails anyway
            case ast.Match():
                self.evaluate(node.subject)
                for case in node.cases:
                    self._way(case.body, self.env)
            case _:
                pass
        return False

    def _return(self, node: ast.Return) -> None:
        value = self.evaluate(node.value)
        self.frame.returns.append(value)
        for rules in self.rules:
            rules.result(self, node, value)

    def _assign(self, targets: list[ast.expr], source: ast.expr) -> None:
        value = self.evaluate(source)
        for target in targets:
            self.bind(target, value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        declared = self.program.annotated(node.annotation)
        value = self.evaluate(node.value) if node.value is not None else declared
        self.bind(node.target, declared if value.kind == "unknown" else value)

    def bind(self, target: ast.expr, value: Value) -> None:
        """Assign a value to a target, and tell the rules."""
        match target:
            case ast.Name():
                self._bind_name(target, value)
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value)
            case ast.Starred():
                self.bind(target.value, Value("list", parts=(element(value),)))
            case ast.Attribute():
                self._bind_attribute(target, value)
            case ast.Subscript():
                into, index = self.evaluate(target.value), self.evaluate(target.slice)
                for rules in self.rules:
                    rules.set_item(self, target, into, index)
                    rules.store(self, target, value, None)
            case _:
                self.evaluate(target)

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        exact = value.kind == "tuple" and len(value.parts) == len(targets)
        if exact and not any(isinstance(t, ast.Starred) for t in targets):
            for target, part in zip(targets, value.parts, strict=True):
                self.bind(target, part)
            return
        for target in targets:
            self.bind(target, value if isinstance(target, ast.Starred) else element(value))

    def _bind_name(self, target: ast.Name, value: Value) -> None:
        for rules in self.rules:
            rules.store(self, target, value, None)
        name = target.id
        if name in self.frame.globals:
            return
        if self.frame.function is None or not self.reporting:
            if value.kind in ("number", "list", "dict", "set", "iterator", "rng", "generator"):
                moves = name if value.kind == "number" and name in self.frame.moving else None
                value = value._replace(place=name, moving=value.moving or moves)
        elif value.place is not None and value.kind == "number":
            value = value._replace(place=None)
        self.env[name] = value

    def _bind_attribute(
        self, target: ast.Attribute, value: Value, before: Value | None = None
    ) -> None:
        on = self.evaluate(target.value)
        for rules in self.rules:
            rules.store(self, target, value, before)
        if on.kind != "instance":
            return
        owner: Class = on.target
        function = self.frame.function
        if on.place != "self":
            if not self.reporting:
                owner.assigned.setdefault(target.attr, set()).add("")
                owner.moved.add(target.attr)
        elif function is not None and function.name == "__init__":
            self._note_attribute(owner, target.attr, value)
        else:
            self.env[f"self.{target.attr}"] = value

    def _note_attribute(self, owner: Class, name: str, value: Value) -> None:
        attributes = owner.attributes if owner.attributes is not None else {}
        value = value._replace(place=f"self.{name}", given=False)
        attributes[name] = join(attributes[name], value) if name in attributes else value
        self.env[f"self.{name}"] = attributes[name]

    def _augmented(self, node: ast.AugAssign) -> None:
        target = node.target
        before = self.evaluate(target)  # a tensor that is indexed is read and written
        value = self.evaluate(node.value)
        if before.is_tensor and isinstance(node.op, _INPLACE):
            result = before
        else:
            result = computed([before, value])._replace(place=before.place)
        if isinstance(target, ast.Name):
            for rules in self.rules:
                rules.store(self, target, value, before)
            if target.id not in self.frame.globals:
                self.env[target.id] = result
        elif isinstance(target, ast.Attribute):
            self._bind_attribute(target, value if not before.is_tensor else before, before)
        else:
            into, index = self.evaluate(target.value), self.evaluate(target.slice)
            for rules in self.rules:
                rules.set_item(self, target, into, index)
                rules.store(self, target, value, before)

    def _if(self, node: ast.If) -> bool:
        self.test(node.test)
        ways: list[dict[str, Value]] = []
        for body, holds in ((node.body, True), (node.orelse, False)):
            if self.is_dead(node.test, holds):
                continue
            env = {**self.env, **self.narrowed(node.test, holds)}
            after = self._way(body, env)
            if after is not None:
                ways.append(after)
        if not ways:
            return True
        self.frame.env = ways[0] if len(ways) == 1 else merge(*ways)
        return False

    def _way(self, body: list[ast.stmt], env: dict[str, Value]) -> dict[str, Value] | None:
        """Read one of several ways with a copy of the variables; None: it ends the function."""
        before = self.frame.env
        self.frame.env = dict(env)
        ended = self.run(body)
        after = self.frame.env
        self.frame.env = before
        return None if ended else after

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self.bind(node.target, element(self.evaluate(node.iter)))
        self._loop(node.body, node.orelse)

    def _while(self, node: ast.While) -> None:
        self.test(node.test)
        self._loop(node.body, node.orelse)

    def _loop(self, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        after = self._way(body, self.env)
        if after is not None:
            self._set(merge(self.env, after))
        self.run(orelse)

    def _set(self, env: dict[str, Value]) -> None:
        if self.frame.function is None:  # the functions of the file hold this very dict
            self.env.clear()
            self.env.update(env)
        else:
            self.frame.env = env

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        bare = False
        for item in node.items:
            value = self.evaluate(item.context_expr)
            called = getattr(item.context_expr, "func", item.context_expr)
            bare |= self.dotted(called) in BARE
            if item.optional_vars is not None:
                self.bind(item.optional_vars, UNKNOWN if not value.is_plain else value)
        if not bare or self.reporting:
            return self.run(node.body)
        self.reporting = True
        try:
            return self.run(node.body)
        finally:
            self.reporting = False

    def _try(self, node: ast.Try | ast.TryStar) -> bool:
        start = dict(self.env)
        ways = [self._way([*node.body, *node.orelse], start)]
        ways += [self._way(handler.body, start) for handler in node.handlers]
        going = [way for way in ways if way is not None]
        if going:
            env = going[0]
            for way in going[1:]:
                env = merge(env, way)
            self._set(env)
        return self.run(node.finalbody) or not going

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        top = self.program.functions.get(node.name)
        known = top if top is not None and top.node is node else None
        function = known or self.define(node)
        value = Value("function", target=function)
        self.note_decorated(value)
        self.env[node.name] = value

    def note_decorated(self, value: Value) -> None:
        """Note a function that a decorator graphs."""
        node = value.target.node
        for mark in node.decorator_list:
            names = {self.program.dotted(mark)}
            if isinstance(mark, ast.Call) and mark.args:  # partial(torch.compile, ...)
                names.add(self.program.dotted(mark.args[0]))
            if names & GRAPHING:
                self.roots.append(value)

    def _define_class(self, node: ast.ClassDef) -> None:
        top = self.program.classes.get(node.name)
        known = top if top is not None and top.node is node else None
        if known is None:
            known = self.program.make_class(node)
            for method in known.methods.values():
                method.around = self.visible()
                self.defined[method.node] = method
        self.env[node.name] = Value("class", target=known)

    def narrowed(self, test: ast.expr, holds: bool) -> dict[str, Value]:
        """See `Expressions`: `isinstance` is understood, and what is built of it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.narrowed(test.operand, not holds)
        if isinstance(test, ast.BoolOp):
            if isinstance(test.op, ast.And) != holds:
                return {}
            return {n: v for part in test.values for n, v in self.narrowed(part, holds).items()}
        if not (isinstance(test, ast.Call) and test.args and isinstance(test.args[0], ast.Name)):
            return {}
        name = test.args[0].id
        value = self.env.get(name)
        if value is None:
            return {}
        called = self.program.dotted(test.func) or ""
        if called == "torch.is_tensor":
            return {name: self._as_tensor(value, holds)}
        if called != "isinstance" or len(test.args) < 2:
            return {}
        kinds = test.args[1].elts if isinstance(test.args[1], ast.Tuple) else [test.args[1]]
        last = {(self.program.dotted(kind) or "").rpartition(".")[2] for kind in kinds}
        if last == {"Tensor"}:
            return {name: self._as_tensor(value, holds)}
        if not holds:
            return {}
        return {name: PLAIN if last <= _PYTHON - {"list", "tuple", "dict"} else UNKNOWN}

    def _as_tensor(self, value: Value, holds: bool) -> Value:
        if value.is_tensor:
            return value if holds else UNKNOWN
        return TENSOR if holds else value

    def is_dead(self, test: ast.expr, holds: bool) -> bool:
        """See `Expressions`: code for tracing and for debugging, and code not for captures."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_dead(test.operand, not holds)
        if isinstance(test, ast.BoolOp):
            parts = [self.is_dead(part, holds) for part in test.values]
            return any(parts) if isinstance(test.op, ast.And) == holds else all(parts)
        if isinstance(test, ast.Constant):
            return bool(test.value) != holds
        name = self.program.dotted(test.func if isinstance(test, ast.Call) else test) or ""
        last = name.rpartition(".")[2]
        if isinstance(test, ast.Call):
            if last in _FALSE_IN_CAPTURE or name == "torch.jit.is_tracing":
                return holds
            return last in _TRUE_IN_CAPTURE and not holds
        return holds and (last in _DEBUG or last == "TYPE_CHECKING")

    def attributes(self, owner: Class) -> dict[str, Value]:
        """See `Calls`: what `__init__` assigns, less what other methods assign differently."""
        if owner.attributes is not None:
            return owner.attributes
        owner.attributes = {}
        for parent in owner.parents:
            owner.attributes.update(self.attributes(parent))
            owner.moved |= parent.moved
            for name, methods in parent.assigned.items():
                owner.assigned.setdefault(name, set()).update(methods)
        self._class_body(owner)
        init = owner.methods.get("__init__")
        if init is not None:
            self._read_init(owner, init)
        assigned_attributes(owner, self.program)
        return owner.attributes

    def _class_body(self, owner: Class) -> None:
        assert owner.attributes is not None
        for statement in owner.node.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if isinstance(statement.value, ast.Constant | ast.List | ast.Dict):
                    kept = self.evaluate(statement.value)._replace(place=f"self.{name}")
                    owner.attributes[name] = kept

    def _read_init(self, owner: Class, init: Function) -> None:
        before, self.reporting = self.reporting, False
        frames, self.frames = self.frames, self.frames[:1]
        self_value = Value("instance", target=owner, place="self")
        try:
            self.read(init, self.arguments(init, [self_value], {}))
        finally:
            self.reporting, self.frames, self.frame = before, frames, frames[-1]

    def read_root(self, value: Value, entry: bool) -> None:
        """Read what is graphed: report what stops it.

        Args:
            entry: whether it is surely graphed by itself, and not as a part of something else.
        """
        function, bound = value.target, value.bound
        if value.kind in ("instance", "class"):
            owner: Class = value.target
            function = owner.find("forward" if owner.is_module else "__call__")
            bound = Value("instance", target=owner)
        if not isinstance(function, Function):
            return
        bound = bound._replace(place="self") if bound is not None else None
        env = self.arguments(function, [bound] if bound is not None else [], {}, bound)
        if entry:
            env = {name: v._replace(given=v.kind == "tensor") for name, v in env.items()}
        self.reporting, self.entry = True, entry
        self.enter(Frame(function, env, root=True))
        try:
            self.run_body(function)
        finally:
            self.leave()
            self.reporting = self.entry = False

    def read_silently(self, function: Function) -> None:
        """Read a function that graphs something, for what it hands over."""
        bound = None
        if function.owner is not None and function.method:
            bound = Value("instance", target=function.owner, place="self")
        args = [bound] if bound is not None else []
        self.read(function, self.arguments(function, args, {}, bound))
