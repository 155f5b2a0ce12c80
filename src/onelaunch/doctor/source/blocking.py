"""The code that blocks a capture, as far as the source alone proves it."""

from __future__ import annotations

import ast

from onelaunch.doctor.source.results import (
    flat,
    goes_to_device,
    goes_to_host,
    keyword,
)
from onelaunch.doctor.source.scope import Rules, Scope, SourceCall
from onelaunch.doctor.source.torch_names import RESIZING
from onelaunch.doctor.source.values import Value
from onelaunch.error_catalogue import WAIT

_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})
_CONVERSIONS = frozenset({"bool", "int", "float", "complex"})
_TEXT = frozenset({"print", "str", "repr", "format"})
_TRUTHS = frozenset({"any", "all", "sorted", "max", "min"})
_COMPARES = frozenset({"equal", "allclose", "is_nonzero"})
_SIZED_BY_DATA = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)
_SEEDS = frozenset(
    {
        "torch.manual_seed",
        "torch.seed",
        "torch.random.manual_seed",
        "torch.random.seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "torch.cuda.seed",
        "torch.cuda.seed_all",
    }
)
_WAITS = frozenset(
    {
        "torch.cuda.synchronize",
        "torch.accelerator.synchronize",
        "torch.tape.synchronize",
    }
)
_STREAM_WAITS = frozenset({"synchronize", "query", "elapsed_time"})
_ARRAYS = frozenset({"numpy.array", "numpy.asarray", "numpy.ascontiguousarray"})
_PACKED = "torch.nn.utils.rnn.pack_padded_sequence"
_CHOOSE = (
    "torch.where(condition, a, b), which computes both; where only one may run, decide before the "
    "call and pass a bool, of which each value gets a recording"
)
_WHOLE = "torch.where(mask, x, 0), where zeros in place of what is left out change nothing"
_CLASSES = "F.one_hot(x, num_classes=n)"
_SIZED = "torch.repeat_interleave(x, repeats, output_size=n)"
_BOUND = "x[i.view(1)] for one row; torch.where with torch.arange for several, at a fixed size"
_DRAWN = "a random number that the host draws is read in Python"
_DRAW_BEFORE = "draw before the call, and pass the number; or draw and decide on the device"
_DRAW = "draw on the device: `torch.randperm(n, device=x.device)`"


class Blocking(Rules):
    """The rules of the codes OL101 to OL109."""

    def truth(self, at: Scope, node: ast.expr, value: Value) -> None:
        """See `Rules`: an `if`, `while`, `assert`, `and`, `or`, `not`."""
        if value.kind == "tensor":
            at.report("OL101", node, "Python asks for the truth of a tensor", _CHOOSE)
        elif value.drawn:
            at.report("OL104", node, _DRAWN, _DRAW_BEFORE)

    def text(self, at: Scope, node: ast.AST, value: Value) -> None:
        if value.kind == "tensor":
            at.report("OL101", node, "a tensor is printed or formatted, which reads it")

    def contains(self, at: Scope, node: ast.Compare, value: Value, among: Value) -> None:
        """See `Rules`: `in` compares, and asks for the truth."""
        listed = among.kind in ("list", "tuple") and bool(among.parts)
        if among.kind == "tensor" or (value.kind == "tensor" and listed):
            at.report("OL101", node, "`in` asks for the truth of a tensor", _CHOOSE)

    def bound(self, at: Scope, node: ast.expr, value: Value) -> None:
        if value.kind == "tensor":
            at.report("OL101", node, "the bound of a slice is read on the host", _BOUND)

    def index(self, at: Scope, node: ast.Subscript, value: Value, index: Value) -> None:
        """See `Rules`: an index of bools gives as many rows as it has True."""
        if not isinstance(node.ctx, ast.Load) or value.kind != "tensor":
            return
        for part in index.parts if index.kind == "tuple" else (index,):
            if part.kind == "tensor" and part.mask:
                what = "an index by a mask gives as many rows as the mask has True"
                at.report("OL102", node, what, _WHOLE)
                return

    def call(self, at: Scope, call: SourceCall) -> None:
        if call.name is not None:
            self._function(at, call, call.name)
        elif call.on.kind == "tensor":
            self._method(at, call, call.method or "")
        elif call.on.drawn and goes_to_device(call, at.program.dotted):
            what = "random numbers of the host are copied to the device"
            at.report("OL103", call.node, what, _DRAW)
        elif call.on.drawn and call.method in _READS:
            at.report("OL104", call.node, _DRAWN, _DRAW_BEFORE)
        elif call.on.kind == "stream" and call.method in _STREAM_WAITS:
            what = f"`.{call.method}()` of a stream or event waits for the device"
            at.report("OL109", call.node, what, WAIT)

    def _function(self, at: Scope, call: SourceCall, name: str) -> None:
        last = name.rpartition(".")[2]
        first = call.args[0] if call.args else None
        if name in _SEEDS:
            at.report("OL106", call.node, f"`{last}` sets the random state")
        elif name in _WAITS:
            at.report("OL109", call.node, f"`{last}` waits for the device", WAIT)
        elif name.startswith("builtins."):
            self._builtin(at, call, last)
        elif first is None or first.kind != "tensor":
            return
        elif name in _ARRAYS:
            at.report("OL101", call.node, "an array made of a tensor reads it")
        elif name == _PACKED:
            what = "`pack_padded_sequence` reads the lengths on the host"
            at.report("OL102", call.node, what, "pad, and mask the result")
        elif name == "torch.nn.functional.one_hot":
            if len(call.args) == 1 and "num_classes" not in call.kwargs:
                what = "`one_hot` reads its argument to count the classes"
                at.report("OL101", call.node, what, _CLASSES)
        elif name.startswith("torch.") and "." not in name.removeprefix("torch."):
            self._operation(at, call, last, call.args)

    def _builtin(self, at: Scope, call: SourceCall, name: str) -> None:
        device = [value for value in call.args if value.kind == "tensor"]
        if name in _TEXT:
            for value in flat(call.args):
                if value.kind == "tensor":
                    at.report("OL101", call.node, f"`{name}` of a tensor reads it")
                    return
        elif name in _TRUTHS and call.args:
            parts = flat(call.args) if name in ("any", "all") else call.args
            iterated = call.args[0].kind == "iterator" and call.args[0].parts
            parts = [*parts, *(iterated or ())]
            if any(value.kind == "tensor" for value in parts):
                what = f"`{name}` of Python asks for the truth of a tensor"
                at.report("OL101", call.node, what, f"torch.{name}, or the tensor's `.{name}()`")
        elif name in _CONVERSIONS and any(value.drawn for value in call.args):
            at.report("OL104", call.node, _DRAWN, _DRAW_BEFORE)
        elif device and name in _CONVERSIONS:
            at.report("OL101", call.node, f"`{name}` of a tensor reads it on the host")
        elif device and name == "range":
            at.report("OL101", call.node, "`range` of a tensor reads it on the host")

    def _method(self, at: Scope, call: SourceCall, name: str) -> None:
        if name in _READS:
            at.report("OL101", call.node, f"`.{name}()` reads a tensor on the host")
        elif name == "cpu" or goes_to_host(call, at.program.dotted):
            at.report("OL103", call.node, f"`.{name}()` copies a tensor to the host")
        elif name in RESIZING and call.on.given:
            what = f"`.{name}()` changes the sizes or strides of an argument"
            at.report("OL107", call.node, what)
        else:
            self._operation(at, call, name, [call.on, *call.args])

    def _operation(self, at: Scope, call: SourceCall, name: str, args: list[Value]) -> None:
        """Check an operation, be it a function or a method."""
        if name in _COMPARES:
            at.report("OL101", call.node, f"`{name}` gives Python a bool, and reads for it", None)
        elif name in _SIZED_BY_DATA or (name == "where" and len(args) == 1 and not call.kwargs):
            at.report("OL102", call.node, f"the result of `{name}` is as large as the data says")
        elif name == "repeat_interleave" and keyword(call.node, "output_size") is None:
            if len(args) > 1 and args[1].kind == "tensor":
                what = "the result of `repeat_interleave` is as large as the repeats say"
                at.report("OL102", call.node, what, _SIZED)
        elif name == "arange" and any(value.kind == "tensor" for value in args):
            at.report("OL101", call.node, "`arange` reads its bound on the host")
