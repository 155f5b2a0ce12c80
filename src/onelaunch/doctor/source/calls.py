"""Calls: of libraries by name, of the file's own functions by reading them too."""

from __future__ import annotations

import ast
import builtins

from onelaunch.doctor.source.expressions import Expressions
from onelaunch.doctor.source.program import Class, Function, Program, parameters
from onelaunch.doctor.source.results import flat, of_layer, of_library, of_method
from onelaunch.doctor.source.scope import Frame, Rules, SourceCall
from onelaunch.doctor.source.torch_names import SHARED, is_layer
from onelaunch.doctor.source.values import (
    ARGUMENT,
    COMPUTED,
    NUMBER,
    TENSOR,
    UNKNOWN,
    Value,
    element,
    join,
    joined,
)

GRAPHING = frozenset(
    {
        "onelaunch.graph",
        "onelaunch.api.graph",
        "onelaunch.make_graphed_callables",
        "onelaunch.compat.make_graphed_callables",
        "torch.compile",
        "torch.cuda.make_graphed_callables",
        "torch.cuda.graphs.make_graphed_callables",
    }
)
"""Functions whose first argument is graphed."""
BARE = frozenset({"torch.cuda.graph", "torch.cuda.graphs.graph"})
"""Contexts whose body is captured."""
_DEEPEST = 10
_CONTEXTS = 4  # ways of arguments in which a function is read; more say nothing new
_BUILTINS = frozenset(dir(builtins))


class Calls(Expressions):
    """Expressions whose calls are followed into the functions of the file.

    Attributes:
        roots: what is given to a function that graphs it.
    """

    def __init__(self, program: Program, rules: list[Rules]) -> None:
        super().__init__(program, rules)
        self.roots: list[Value] = []
        self._results: dict[tuple[object, ...], Value] = {}
        self._contexts: dict[Function, int] = {}

    def run_body(self, function: Function) -> None:
        """Read the body of a function in the innermost frame."""
        raise NotImplementedError

    def attributes(self, owner: Class) -> dict[str, Value]:
        """Return what is known of the attributes of a class's objects."""
        raise NotImplementedError

    def attribute_of(self, value: Value, name: str) -> Value:
        """Return an attribute of an object: what was assigned here, its method, or its own."""
        stored = self.env.get(f"self.{name}") if self._is_self(value) else None
        if stored is not None:
            return stored
        owner: Class = value.target
        method = owner.find(name)
        if method is not None:
            marks = method.node.decorator_list if not isinstance(method.node, ast.Lambda) else []
            if any(
                self.program.dotted(mark)
                in ("property", "functools.cached_property", "cached_property")
                for mark in marks
            ):
                node = method.node
                return (
                    UNKNOWN
                    if isinstance(node, ast.Lambda)
                    else self.program.annotated(node.returns)
                )
            return Value("function", target=method, bound=value if method.method else None)
        return self.attributes(owner).get(name, UNKNOWN)

    def _is_self(self, value: Value) -> bool:
        return value.place == "self"

    def call(self, node: ast.Call) -> Value:
        """Return what a call gives, and tell the rules of it."""
        call, called = self._taken_apart(node)
        for rules in self.rules:
            rules.call(self, call)
        if call.name in GRAPHING:
            self._note_roots(call)
            return call.args[0] if call.args else UNKNOWN
        if call.name is not None:
            if call.name.endswith("checkpoint.checkpoint") and call.args:
                return self.invoke(call.args[0], call.args[1:], {}, node)
            if self.program.bends_default_device and _makes_by_default(call):
                return UNKNOWN
            return of_library(call, self.program.dotted)
        if called.kind in ("function", "instance", "class", "module"):
            return self.invoke(called, call.args, call.kwargs, node)
        return self._method(call)

    def _taken_apart(self, node: ast.Call) -> tuple[SourceCall, Value]:
        """Evaluate what is called, and the arguments."""
        func, on, method, called = node.func, UNKNOWN, None, UNKNOWN
        name = self.dotted(func)
        if name is None and isinstance(func, ast.Attribute):
            method = func.attr
            on = self._parent(func.value) or self.evaluate(func.value)
            if on == COMPUTED and method in SHARED:
                on = TENSOR  # no number has it
            if on.kind in ("instance", "class"):
                called = self.attribute_of(on, method)
        elif name is None and isinstance(func, ast.Name) and self._is_builtin(func.id):
            name = f"builtins.{func.id}"
        elif name is None:
            called = self.evaluate(func)
        args = [
            UNKNOWN if isinstance(a, ast.Starred) and self.evaluate(a.value) else self.evaluate(a)
            for a in node.args
        ]
        kwargs = {k.arg or "**": self.evaluate(k.value) for k in node.keywords}
        return SourceCall(node, name, on, method, args, kwargs), called

    def _is_builtin(self, name: str) -> bool:
        if name not in _BUILTINS or self.look_up(name) is not None:
            return False
        return name not in self.program.functions and name not in self.program.classes

    def _parent(self, node: ast.expr) -> Value | None:
        """Return the object as one of its parent class, for ``super()``."""
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"):
            return None
        function = self.frame.function
        owner = function.owner if function is not None else None
        if owner is None or len(owner.parents) != 1:
            return UNKNOWN
        return Value("instance", target=owner.parents[0], place="self")

    def _note_roots(self, call: SourceCall) -> None:
        for value in flat(call.args[:1]):
            if value.kind in ("function", "instance", "class"):
                self.roots.append(value)

    def _method(self, call: SourceCall) -> Value:
        """Return what a method gives that is not the file's own."""
        on, name = call.on, call.method or ""
        if on.kind in ("list", "dict", "set", "tuple", "iterator"):
            return self._of_container(call)
        if name in ("parameters", "buffers") and on.kind in ("instance", "module"):
            part = TENSOR._replace(place=f"{name} of a module")
            return Value("iterator", parts=(part,))
        if name in ("named_parameters", "named_buffers") and on.kind in ("instance", "module"):
            part = TENSOR._replace(place=f"{name[6:]} of a module")
            return Value("iterator", parts=(Value("tuple", parts=(UNKNOWN, part)),))
        if name == "format" and on.kind == "plain":
            for value in call.values:
                self.as_text(call.node, value)
            return on
        if on.kind in ("rng", "plain", "number"):
            return NUMBER if on.kind == "rng" else UNKNOWN
        return of_method(call, self.program.dotted)

    def _of_container(self, call: SourceCall) -> Value:
        on, func = call.on, call.node.func
        if call.method in ("append", "insert", "add", "extend") and call.args:
            added = call.args[-1] if call.method != "extend" else element(call.args[-1])
            parts = (joined([*on.parts, added]),)
            name = getattr(func.value, "id", "") if isinstance(func, ast.Attribute) else ""
            if name in self.env:
                self.env[name] = on._replace(parts=parts)
            return NUMBER
        if call.method == "items":
            return Value("iterator", parts=(Value("tuple", parts=(UNKNOWN, UNKNOWN)),))
        return joined(list(on.parts)) if call.method == "pop" else UNKNOWN

    def invoke(
        self, called: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        """Return what the call of a function or object of the file gives, by reading it."""
        if called.kind == "module":
            return of_layer(str(called.target), args)
        if called.kind == "class":
            return Value("instance", target=called.target)
        if called.kind == "instance":
            name = "forward" if called.target.is_module else "__call__"
            called = self.attribute_of(called._replace(place=None), name)
            if called.kind != "function":
                return UNKNOWN
            called = called._replace(bound=called.bound or UNKNOWN._replace(place=None))
        if called.kind != "function":
            return UNKNOWN
        return self._read_call(called, args, kwargs, node)

    def _read_call(
        self, called: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        function: Function = called.target
        declared = self.program.annotated(getattr(function.node, "returns", None))
        under_way = any(frame.function is function for frame in self.frames)
        if under_way or len(self.frames) > _DEEPEST or not self.reporting:
            return declared
        spread = isinstance(node, ast.Call) and any(isinstance(a, ast.Starred) for a in node.args)
        bound = called.bound._replace(place="self") if called.bound is not None else None
        values = [] if spread else [*([bound] if bound is not None else []), *args]
        env = self.arguments(function, values, {} if spread else kwargs, bound)
        key = (function, *sorted(env.items(), key=lambda item: item[0]))
        if key not in self._results:
            self._contexts[function] = self._contexts.get(function, 0) + 1
            if self._contexts[function] > _CONTEXTS:
                return declared
            self._results[key] = declared  # of a call that comes back to itself
            self._results[key] = self.read(function, env, self.place(node))
        found = self._results[key]
        return declared if found.kind == "unknown" else found

    def arguments(
        self,
        function: Function,
        args: list[Value],
        kwargs: dict[str, Value],
        bound: Value | None = None,
    ) -> dict[str, Value]:
        """Return the variables with which a function begins."""
        env: dict[str, Value] = {}
        telling = self._telling(function)
        of = function.node.args
        bare = len(of.posonlyargs) + len(of.args) - len(of.defaults)
        for number, parameter in enumerate(parameters(function.node)):
            name = parameter.arg
            given = args[number] if number < len(args) else kwargs.get(name)
            if given is None and number == 0 and bound is not None:
                given = bound
            if given is None or given.kind == "unknown":
                given = TENSOR if name in telling else self.program.declared(function, parameter)
                # With a default it may be a number, and its arithmetic gives one.
                if given.kind == "unknown" and parameter.annotation is None and number < bare:
                    given = ARGUMENT
            env[name] = given
        for rest in (function.node.args.vararg, function.node.args.kwarg):
            if rest is not None:
                env[rest.arg] = UNKNOWN
        return env

    def _telling(self, function: Function) -> set[str]:
        """Return the parameters that are used as tensors are, by layers of torch too."""
        found = self.program.telling(function)
        names = set(found.surely)
        if found.called and function.owner is not None:
            attributes = self.attributes(function.owner)
            for name, by in found.called:
                layer = attributes.get(by, UNKNOWN)
                if layer.kind == "module" and is_layer(str(layer.target)):
                    names.add(name)
        return names

    def read(self, function: Function, env: dict[str, Value], way: str = "") -> Value:
        """Read a function with these variables; return what it gives."""
        self.enter(Frame(function, env, way=way))
        try:
            self.run_body(function)
        finally:
            frame = self.leave()
        return joined(frame.returns)


def _makes_by_default(call: SourceCall) -> bool:
    name = call.name or ""
    return (
        name.startswith("torch.")
        and "." not in name[6:]
        and "device" not in call.kwargs
        and (not any(v.is_tensor for v in flat(call.values)))
    )


def merge(a: dict[str, Value], b: dict[str, Value]) -> dict[str, Value]:
    """Return what is known of variables after one of two ways."""
    merged = dict(a)
    for name, value in b.items():
        if name in a:
            merged[name] = join(a[name], value)
        else:
            merged[name] = UNKNOWN if name.startswith("self.") else value
    for name in a.keys() - b.keys():
        if name.startswith("self."):
            merged[name] = UNKNOWN
    return merged
