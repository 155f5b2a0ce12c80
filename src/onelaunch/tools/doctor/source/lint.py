"""The faults that names and patterns show, in one function after another; nothing is run.

A value is a tensor where an annotation or a function of torch says so, at each assignment of its
variable. A value that is not known is never at fault.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Literal

from onelaunch.finding import Finding
from onelaunch.tools.doctor.source.names import FileNames, Function, text_of, walk
from onelaunch.tools.doctor.spot import Spot

Kind = Literal["", "tensor", "mask", "maybe"]
"""A value: unknown, a tensor, a tensor of bools, or an argument without an annotation; that, or
arithmetic on it, may be a tensor."""


def _names(text: str, before: str = "") -> frozenset[str]:
    return frozenset(before + name for name in text.split())


_ANNOTATED = re.compile(
    r"(Optional\[)?([A-Z]\w+\[)?([\w.]+\.)?(\w*Tensor|Parameter)(, .*\])?\]?( \| None)?"
)
_MASKS = _names("all any eq ge gt isfinite isin isinf isnan le logical_and logical_not lt ne")
_GIVE = _MASKS | _names(
    "abs amax amin argmax argmin argsort argwhere baddbmm bincount bmm bool cat ceil clamp clone "
    "contiguous cos cuda cumsum detach diff double einsum empty_like erf exp flatten flip float "
    "floor full_like gather half index_select log log_softmax logsumexp long masked_fill "
    "masked_select matmul max mean min mm mul multinomial neg new_ones new_zeros nonzero norm "
    "ones_like outer permute pow prod rand_like randn_like relu repeat_interleave reshape roll "
    "rsqrt scatter sigmoid sign sin softmax sqrt square squeeze stack std sum tanh to tril triu "
    "transpose unique unsqueeze var view where zeros_like"
)
"""Functions of torch that give a tensor; a value with a method of the same name is a tensor."""
_MAKING = _names("arange empty eye full linspace ones rand randint randn randperm tensor zeros")
_GROWING = _names("append appendleft extend")
_READING = _names("bool int float complex range str repr format print any all max min sorted")
_METHODS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("item", "tolist", "numpy"), ("OL101", "`.{}()` reads a tensor on the host")),
    **dict.fromkeys(("equal", "allclose", "is_nonzero"), ("OL101", "`{}` gives Python a bool")),
    **dict.fromkeys(
        ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
        ("OL102", "the result of `{}` is as large as the data says"),
    ),
    "cpu": ("OL103", "`.{}()` copies a tensor to the host"),
}
"""Method or function of a tensor -> the code and the text of its fault."""
_FUNCTIONS: dict[str, tuple[str, str]] = {
    r"torch\.(random\.|cuda\.)?(manual_)?seed(_all)?": ("OL106", "`{}` sets the random state"),
    r"torch\.(cuda|accelerator)\.synchronize": ("OL109", "`{}` waits for the device"),
    r"time\.(time|perf_counter|monotonic)(_ns)?|datetime\.\w+\.(utc)?now|datetime\.\w+\.today": (
        "OL503",
        "`{}` reads a clock in the capture only",
    ),
    r"(numpy\.)?random\.(?!.*state|seed|Random|default_rng|Generator)\w+": (
        "OL502",
        "`{}` draws on the host, in the capture only",
    ),
}
"""Pattern of functions -> the code and the text of their fault, for any arguments."""
_SURE, _ANY = {"tensor", "mask"}, {"tensor", "mask", "maybe"}
_APART = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Raise)
"""Code that runs at another time, or as an exception is raised."""


def lint(file: str, text: str, tree: ast.Module) -> list[Finding]:
    """Find the faults of the functions inside a graph, and of those of the file that they name."""
    names, found = FileNames(file, text, tree), list[Finding]()
    ways: list[tuple[Function, tuple[str, ...]]] = [(function, ()) for function in names.inside]
    known: set[ast.AST] = set()
    for function, way in ways:
        if function.node not in known:
            known.add(function.node)
            one = _Lint(names, function, way)
            found += one.find()
            ways += one.named()
    return found


class _Lint:
    """One function: the kinds of its variables, then its faults.

    Args:
        way: the lines that lead there, as `Finding.calls` has them.
    """

    def __init__(self, names: FileNames, function: Function, way: tuple[str, ...]) -> None:
        self._names, self._function, self._way = names, function, way
        self._found, node = list[Finding](), function.node
        self._shared: dict[str, str] = {}
        """Variable of another scope that the function assigns -> the code of a count in it."""
        self._kinds: dict[str, Kind] = {}
        """Variable of the function -> its kind."""
        self._values: dict[ast.AST, Kind] = {}
        """Target of an assignment -> the kind of its value."""
        self._note_arguments(node.args)
        body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        nodes = [n for part in body for n in walk(part, _APART)]
        never: set[ast.AST] = set()
        for n in nodes:
            self._note_variables(n)
            if isinstance(n, ast.Assert) and n.msg is not None:
                never.update(walk(n.msg))
            elif isinstance(n, ast.If) and _is_aside(n.test):
                never.update([n], walk(n.test), *map(walk, n.body))
        self._nodes = [n for n in nodes if n not in never]
        names.local |= self._kinds.keys() - self._shared.keys()

    def _note_arguments(self, of: ast.arguments) -> None:
        plain = [*of.posonlyargs, *of.args, *of.kwonlyargs]
        defaults = [*[None] * (len(of.posonlyargs + of.args) - len(of.defaults)), *of.defaults]
        for argument, default in zip(plain, [*defaults, *of.kw_defaults], strict=True):
            said = "" if argument.annotation is None else ast.unparse(argument.annotation)
            kind: Kind = "" if said or default or argument.arg in ("self", "cls") else "maybe"
            if _ANNOTATED.fullmatch(said.strip("'")) and getattr(default, "value", None) is None:
                kind = "mask" if "Bool" in said else "tensor"
            self._kinds[argument.arg] = kind

    def _note_variables(self, node: ast.AST) -> None:
        """Note what a statement gives a variable, which has a kind if all of its values have."""
        match node:
            case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
                self._values[target] = self._kind(value)
            case ast.AugAssign(target=target):
                self._values[target] = self._kind(target)
            case ast.For(target=target, iter=over) | ast.comprehension(target=target, iter=over):
                self._values[target] = "tensor" if self._kind(over) in _SURE else ""
            case ast.Name(id=name, ctx=ast.Store()):
                kind = self._values.get(node, "")
                both = {self._kinds.get(name, kind), kind}
                joined = "" if "" in both else "maybe" if "maybe" in both else "tensor"
                self._kinds[name] = kind if both == {kind} else joined
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as asked, _]):
                self._kinds[asked.id] = ""
            case ast.Global() | ast.Nonlocal():
                code = "OL504" if isinstance(node, ast.Global) else "OL501"
                self._shared |= dict.fromkeys(node.names, code)
            case _:
                pass

    def _dotted(self, node: ast.AST) -> str:
        """Return the full name of an import's or of Python's own function; "" for others."""
        name, root = self._names.dotted(node), node
        while isinstance(root, ast.Attribute):
            root = root.value
        own = getattr(root, "id", "")
        if own in self._kinds or own in self._names.functions:
            return ""
        builtin = root is node and hasattr(builtins, own)
        return name if own in self._names.imports else f"builtins.{own}" if builtin else ""

    def _kind(self, node: ast.AST) -> Kind:
        """Return the kind of an expression."""
        match node:
            case ast.Name():
                return self._kinds.get(node.id, "")
            case ast.Attribute(attr="T" | "mT" | "data" | "real" | "imag") | ast.Subscript():
                return self._kind(node.value)
            case ast.UnaryOp(op=ast.USub() | ast.Invert()):
                return self._kind(node.operand)
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return ""
            case ast.Compare() | ast.BinOp():
                kinds = {self._kind(part) for part in ast.iter_child_nodes(node)}
                masks = isinstance(node, ast.Compare) or not kinds & {"tensor", "maybe"}
                sure: Kind = "mask" if masks else "tensor"
                return sure if kinds & _SURE else "maybe" if "maybe" in kinds else ""
            case ast.Call():
                return self._result(node)
            case _:
                return ""

    def _result(self, node: ast.Call) -> Kind:
        name = self._dotted(node.func)
        package, _, last = name.rpartition(".")
        if package == "torch" and last in _MAKING:  # on the host, but for a device
            placed = any(k.arg == "device" for k in node.keywords) and not _is_to_host(node)
            return "tensor" if placed else ""
        known = package in ("torch", "torch.nn.functional")
        if not name and isinstance(node.func, ast.Attribute):
            last, kind = node.func.attr, self._kind(node.func.value)
            known = kind in _SURE or (kind == "maybe" and last != "to")
        pair = last in ("max", "min") and (len(node.args) == 1 + bool(name) or node.keywords)
        gives = last in _GIVE or last.endswith("_") or package == "torch.nn.functional"
        if not known or not gives or pair or (last == "to" and _is_to_host(node)):
            return ""
        return "mask" if last in _MASKS else "tensor"

    def named(self) -> Iterator[tuple[Function, tuple[str, ...]]]:
        """Return the functions of the file that this one names, with the way there."""
        name = getattr(self._function.node, "name", "<lambda>")
        for node in self._nodes:
            called = None
            if isinstance(node, ast.Name) and node.id not in self._kinds:
                called = self._names.functions.get(node.id)
            elif isinstance(node, ast.Attribute) and text_of(node):
                called = self._function.methods.get(node.attr)
            if called is not None and isinstance(node, ast.expr):
                yield called, (*self._way, f"{self._names.file}:{node.lineno} in {name}")

    def find(self) -> list[Finding]:
        """Return the faults."""
        for node in self._nodes:
            match node:
                case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                    self._truth(node.test)
                case ast.UnaryOp(op=ast.Not()):
                    self._truth(node.operand)
                case ast.BoolOp(values=[*asked, _]) | ast.comprehension(ifs=asked):
                    for part in asked:
                        self._truth(part)
                case ast.Subscript(ctx=ast.Load(), value=value, slice=index):
                    for part in getattr(index, "elts", [index]):
                        kind = self._kind(part) if self._kind(value) in _ANY else ""
                        if kind == "mask" or (kind == "maybe" and isinstance(part, ast.Compare)):
                            what = "an index by a mask gives as many rows as the mask has True"
                            self._report("OL102", node, what)
                case ast.JoinedStr():
                    parts = [part for part in node.values if isinstance(part, ast.FormattedValue)]
                    if any(self._kind(part.value) in _SURE for part in parts):
                        self._report("OL101", node, "a tensor is formatted, which reads it")
                case ast.Assign(targets=[target], value=value):
                    moved = isinstance(value, ast.BinOp) and text_of(target) == text_of(value.left)
                    self._store(target, value, moved)
                case ast.AugAssign():
                    self._store(node.target, node.value, True)
                case ast.Call():
                    self._call(node)
                case _:
                    pass
        return self._found

    def _truth(self, node: ast.expr) -> None:
        asked = node.values[-1] if isinstance(node, ast.BoolOp) else node
        if self._kind(asked) in _SURE:
            self._report("OL101", asked, "Python asks for the truth of a tensor")

    def _store(self, target: ast.expr, value: ast.expr, moved: bool) -> None:
        name = text_of(target)
        shared = name in self._shared and name not in self._names.local
        outlasts = shared or not isinstance(target, ast.Name)
        begins = rf"\b{re.escape(name)}(: \w+)? = -?\d"
        if moved and outlasts and name and re.search(begins, self._names.text):
            what = f"`{name}` is counted in the capture only"
            self._report(self._shared.get(name, "OL501"), target, what)
        elif outlasts and getattr(getattr(value, "func", None), "attr", "") == "data_ptr":
            self._report("OL510", target, "the address of a tensor is kept")

    def _call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        package, _, last = name.rpartition(".")
        kinds: list[Kind] = [self._kind(argument) for argument in node.args]
        for pattern, (code, what) in _FUNCTIONS.items() if package else ():
            if re.fullmatch(pattern, name):
                self._report(code, node, what.format(name))
        if package in ("builtins", "numpy") and last in (*_READING, "array", "asarray"):
            if _SURE.intersection(kinds):
                self._report("OL101", node, f"`{last}` of a tensor reads it on the host")
            elif last == "print":
                self._report("OL513", node, "`print` runs in the capture only")
        elif package == "torch" and kinds:
            self._operation(node, last, kinds[0])
        elif not name and isinstance(node.func, ast.Attribute):
            on, last = text_of(node.func.value), node.func.attr
            if last in _GROWING and on and on not in self._names.local:
                self._report("OL309", node, f"`{on}.{last}` runs in the capture only")
            self._operation(node, last, self._kind(node.func.value))

    def _operation(self, node: ast.Call, name: str, first: Kind) -> None:
        """Look at a function or method of torch: its first argument is of a kind."""
        if first not in _ANY:
            return
        if name in _METHODS:
            code, what = _METHODS[name]
            self._report(code, node, what.format(name))
        elif name == "to" and _is_to_host(node):
            self._report("OL103", node, "`.to()` copies a tensor to the host")
        elif name == "where" and len(node.args) == 1 and not node.keywords:
            self._report("OL102", node, "the result of `where` is as large as the data says")

    def _report(self, code: str, node: ast.expr, what: str) -> None:
        line, before = node.lineno, node.col_offset
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.lineno != func.end_lineno:
            line = func.end_lineno or line  # there the interpreter runs a method
            before = (func.end_col_offset or 0) - len(func.attr)
        text = self._names.lines[line - 1]
        column = len(text.encode()[:before].decode(errors="ignore")) + 1  # it counts bytes
        spot = Spot(self._names.file, line, column, text.strip(), self._way)
        self._found.append(spot.finding(code, what, None, "source"))


def _is_aside(test: ast.expr) -> bool:
    """Return whether a condition asks for another way to run than in a capture."""
    asked = {getattr(part, "attr", "") for part in walk(test)}
    return not asked.isdisjoint({"is_scripting", "is_tracing", "is_current_stream_capturing"})


def _is_to_host(node: ast.Call) -> bool:
    """Return whether a call of `to` names the host."""
    values = [*node.args, *(k.value for k in node.keywords)]
    values += [part for value in values for part in getattr(value, "args", ())]  # torch.device
    return any(isinstance(v, ast.Constant) and str(v.value).startswith("cpu") for v in values)
