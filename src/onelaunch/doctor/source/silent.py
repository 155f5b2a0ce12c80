"""The silent faults of a bare graph that the source alone proves."""

from __future__ import annotations

import ast

from onelaunch.doctor.source.program import Class
from onelaunch.doctor.source.results import flat
from onelaunch.doctor.source.scope import Rules, Scope, SourceCall
from onelaunch.doctor.source.torch_names import QUIET
from onelaunch.doctor.source.values import UNKNOWN, Value

_KEPT = ("list", "dict", "set")
_GROWING = frozenset(["append", "appendleft", "extend", "insert", "add", "update", "setdefault"])
_CLOCKS = frozenset(
    f"time.{name}{ns}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for ns in ("", "_ns")
) | frozenset(
    {
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
    }
)
_RANDOM = ("random.", "numpy.random.")
_NO_DRAW = frozenset(
    {
        "getstate",
        "get_state",
        "setstate",
        "set_state",
        "seed",
        "Random",
        "default_rng",
        "RandomState",
        "Generator",
    }
)


class Silent(Rules):
    """The rules of the codes OL501 to OL513, and OL309."""

    def call(self, at: Scope, call: SourceCall) -> None:
        if call.name is not None:
            self._function(at, call, call.name)
        elif call.on.kind in _KEPT and call.on.place and call.method in _GROWING:
            what = f"`{call.on.place}.{call.method}` runs in the capture only"
            at.report("OL309", call.node, what)
        elif call.on.kind == "rng":
            what = f"`.{call.method}()` draws on the host: a replay repeats the captured number"
            at.report("OL502", call.node, what)
        elif call.method == "requires_grad_" and self._lasts(at, call.on):
            at.report("OL509", call.node, "`requires_grad_` runs in the capture only")
        elif call.on.is_tensor:
            self._in_place(at, call)
        if any(value.address for value in call.args) and call.on.place and call.method in _GROWING:
            at.report("OL510", call.node, "the address of a tensor is kept")
        self._generator(at, call)

    def _function(self, at: Scope, call: SourceCall, name: str) -> None:
        last = name.rpartition(".")[2]
        if name in _CLOCKS:
            what = f"`{name}` is asked in the capture only: a replay repeats its answer"
            at.report("OL503", call.node, what)
        elif name.startswith(_RANDOM) and last not in _NO_DRAW:
            what = f"`{name}` draws on the host: a replay repeats the captured number"
            at.report("OL502", call.node, what)
        elif name == "builtins.print" and not any(v.is_tensor for v in flat(call.args)):
            at.report("OL513", call.node, "`print` runs in the capture only")
        elif name == "builtins.next" and any(v.kind == "iterator" and v.place for v in call.args):
            taken = f"next({call.args[0].place})"
            fix = f"take it before the call, and pass it: `fast(x, torch.tensor({taken}))`"
            at.report("OL501", call.node, f"`{taken}` runs in the capture only", fix)
        out = call.kwargs.get("out")
        if out is not None and out.given and at.entry:
            at.report("OL505", call.node, "an argument is written by `out=`")

    def _in_place(self, at: Scope, call: SourceCall) -> None:
        name = call.method or ""
        if not name.endswith("_") or name.endswith("__") or name in QUIET:
            return
        if call.on.given and at.entry:
            at.report("OL505", call.node, f"`.{name}()` writes an argument")
        moving = next((v.moving for v in flat(call.values) if v.moving), None)
        if moving:
            self._option(at, call.node, moving)

    def _option(self, at: Scope, node: ast.AST, name: str) -> None:
        what = f"`{name}` changes, and a replay updates by its captured value"
        at.report("OL508", node, what)

    def _generator(self, at: Scope, call: SourceCall) -> None:
        generator = call.kwargs.get("generator")
        if generator is None or generator.kind != "generator" or at.program.registers_generators:
            return
        what = f"`generator={generator.place or '...'}` is registered with no graph"
        at.report("OL511", call.node, what)

    def _lasts(self, at: Scope, value: Value) -> bool:
        """Return whether a change of what a value requires outlasts the call."""
        if value.kind in ("module", "instance"):
            return True
        return value.is_tensor and (value.place is not None or (value.given and at.entry))

    def name(self, at: Scope, node: ast.expr, value: Value) -> None:
        """See `Rules`: a number that changes is frozen."""
        own = isinstance(node, ast.Attribute)
        changed = value.moving
        if not changed or value.place != changed or not isinstance(node.ctx, ast.Load):  # pyright: ignore[reportAttributeAccessIssue]
            return
        if own:
            function = at.frame.function
            owner = function.owner if function is not None else None
            if owner is None or getattr(node.value, "id", "") != "self":
                return
            if self._counted(at, owner, changed.removeprefix("self.")):
                return
        elif any(changed in frame.globals for frame in at.frames):
            return
        at.report("OL504", node, f"`{changed}` changes, and a replay repeats its captured value")

    def _counted(self, at: Scope, owner: Class, name: str) -> bool:
        """Return whether a function under way assigns an attribute itself."""
        return bool(owner.assigned.get(name, set()) & at.methods_under_way())

    def contains(self, at: Scope, node: ast.Compare, value: Value, among: Value) -> None:
        """See `Rules`: what is asked for a key before it is filled is a memo."""
        if among.place is not None:
            at.frame.asked.add(among.place)

    def compare(self, at: Scope, node: ast.Compare) -> None:
        """See `Rules`: what is kept of one call is compared with the next."""
        for part in (node.left, *node.comparators):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                at.frame.asked.add(f"{part.value.id}.{part.attr}")

    def store(self, at: Scope, target: ast.expr, value: Value, before: Value | None) -> None:
        kept = isinstance(target, ast.Attribute | ast.Subscript) or self._is_global(at, target)
        if value.address and kept:
            at.report("OL510", target, "the address of a tensor is kept")
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            self._flip(at, target)
        if before is None:
            self._assigned(at, target, value)
        elif before.is_tensor:
            self._written(at, target, value, before)
        elif before.kind == "number" and before.place and kept:
            self._counted_on(at, target, before.place)

    def _is_global(self, at: Scope, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and target.id in at.frame.globals

    def _flip(self, at: Scope, target: ast.Attribute) -> None:
        value = at.look_up(target.value.id) if isinstance(target.value, ast.Name) else None
        if value is None and isinstance(target.value, ast.Attribute):
            value = Value("tensor", place="self")  # of an attribute
        if value is not None and self._lasts(at, value):
            at.report("OL509", target, "`requires_grad` is set in the capture only")

    def _assigned(self, at: Scope, target: ast.expr, value: Value) -> None:
        """Check ``target = value``: a count is one that reads what it assigns."""
        name = None
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            name = f"{target.value.id}.{target.attr}"
        elif isinstance(target, ast.Name) and self._is_global(at, target):
            name = target.id
        if name is None:
            return
        if value.kind == "number" and value.moving == name:
            self._counted_on(at, target, name)
        elif value.shaped and name in at.frame.asked:
            at.report("OL507", target, f"`{name}` keeps a size, and is compared with the next")
        elif value.made and self._state(at, target):
            what = f"`{name}` is another tensor from now on, in the capture only"
            at.report("OL512", target, what)

    def _counted_on(self, at: Scope, target: ast.expr, name: str) -> None:
        """Report a number that a call moves on: of a global as such, else as a count."""
        own = isinstance(target, ast.Name) and target.id not in at.frame.nonlocals
        at.report("OL504" if own else "OL501", target, f"`{name}` is counted in the capture only")

    def _state(self, at: Scope, target: ast.expr) -> bool:
        """Return whether a target is a parameter or buffer of the object whose method it is."""
        function = at.frame.function
        owner = function.owner if function is not None else None
        if owner is None or not isinstance(target, ast.Attribute):
            return False
        if getattr(target.value, "id", "") != "self":
            return False
        attributes = owner.attributes or {}
        return attributes.get(target.attr, UNKNOWN).registered

    def _written(self, at: Scope, target: ast.expr, value: Value, before: Value) -> None:
        """Check ``target += value`` of a tensor."""
        if before.given and at.entry and not isinstance(target, ast.Subscript):
            at.report("OL505", target, "an argument is changed in place")
        if value.moving:
            self._option(at, target, value.moving)

    def set_item(self, at: Scope, target: ast.Subscript, into: Value, index: Value) -> None:
        if into.is_tensor and into.given and at.entry:
            at.report("OL505", target, "an argument is written")
        elif _is_option(target):
            at.report("OL508", target, f"`{ast.unparse(target)}` is set in the capture only")
        elif into.kind in _KEPT and into.place:
            if not index.shaped and into.place in at.frame.asked:
                return  # filled once, in the warm-up
            if index.shaped:
                what = f"`{into.place}` is filled by shape, in the capture only"
                at.report("OL507", target, what)
            else:
                at.report("OL501", target, f"`{into.place}` is filled in the capture only")

    def result(self, at: Scope, node: ast.Return, value: Value) -> None:
        """See `Rules`: what is handed back is memory that the next replay writes."""
        if not (at.entry and at.frame.root):
            return
        if any(part.is_tensor and part.given for part in flat([value])):
            at.report("OL506", node, "an argument, or a view of one, is returned")


def _is_option(target: ast.Subscript) -> bool:
    """Return whether a target is an option of an optimizer: ``optimizer.param_groups[0]["lr"]``."""
    named = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
    group = target.value.value if isinstance(target.value, ast.Subscript) else None
    return named and isinstance(group, ast.Attribute) and group.attr == "param_groups"
