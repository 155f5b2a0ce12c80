"""The results of library functions and methods, by their names."""

from __future__ import annotations

import ast
from collections.abc import Callable

from onelaunch.doctor.source.scope import SourceCall
from onelaunch.doctor.source.torch_names import (
    DRAWING,
    FACTORIES,
    FUNCTIONS,
    LINALG,
    MASKS,
    METHODS,
    ORDERED,
    PAIRS,
    PIECES,
    SEVERAL,
    TELLING,
    VIEWS,
    has_weights,
    is_layer,
)
from onelaunch.doctor.source.values import (
    HOST,
    NUMBER,
    PLAIN,
    TENSOR,
    UNKNOWN,
    Value,
    computed,
    element,
)

Dotted = Callable[[ast.expr], str | None]
STREAMS = frozenset(
    f"torch.{part}{name}"
    for part in ("", "cuda.", "tape.")
    for name in ("Event", "Stream", "current_stream", "default_stream")
) | {"torch.accelerator.current_stream"}
RNGS = frozenset({"random.Random", "numpy.random.default_rng", "numpy.random.RandomState"})
_ITERATORS = frozenset({"itertools.count", "itertools.cycle", "builtins.iter"})
_CONTAINERS: dict[str, Value] = {
    "collections.deque": Value("list"),
    "collections.defaultdict": Value("dict"),
    "collections.OrderedDict": Value("dict"),
    "collections.Counter": Value("dict"),
}
_KEEP_MASK = frozenset(
    (
        *("clone", "contiguous", "flatten", "flip", "gather", "index_select", "masked_fill"),
        *("repeat", "reshape", "roll", "to"),
    )
)
_SIZES = frozenset(["dim", "ndimension", "numel", "nelement", "size", "stride", "element_size"])
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "MultiheadAttention"})


def is_host(node: ast.expr | None, dotted: Dotted) -> bool:
    """Return whether an expression names the CPU: ``"cpu"`` or ``torch.device("cpu")``."""
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.device" and node.args:
        node = node.args[0]
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value == "cpu"


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """Return the expression that a call gives for a keyword."""
    return next((k.value for k in node.keywords if k.arg == name), None)


def flat(values: list[Value]) -> list[Value]:
    """Return values, with the parts of lists and tuples in their place."""
    return [part for v in values for part in (v.parts if v.kind in ("list", "tuple") else (v,))]


def combined(values: list[Value]) -> Value:
    """Return the result of an operation of torch: on the device, if one of the values surely is."""
    parts = flat(values)
    moving = next((v.moving for v in parts if v.moving), None)
    if any(v.kind == "tensor" for v in parts):
        return TENSOR._replace(moving=moving, made=True)
    return HOST._replace(drawn=any(v.drawn for v in parts))


def of_library(call: SourceCall, dotted: Dotted) -> Value:
    """Return what a function of a library gives."""
    name = call.name or ""
    if "out" in call.kwargs:
        return call.kwargs["out"]
    if name.startswith("torch."):
        return _of_torch(name.removeprefix("torch."), call, dotted)
    if name.startswith("builtins."):
        return _of_python(name.removeprefix("builtins."), call.args)
    if name.startswith("math."):
        return computed(call.args) if all(v.is_plain for v in call.args) else NUMBER
    if name in RNGS:
        return Value("rng")
    if name in _ITERATORS:
        return Value("iterator")
    return _CONTAINERS.get(name, UNKNOWN)


def _of_python(name: str, args: list[Value]) -> Value:
    first = args[0] if args else UNKNOWN
    if name == "len":
        return NUMBER._replace(shaped=first.is_tensor or first.shaped)
    if name in ("int", "float", "bool", "round", "ord", "hash"):
        return NUMBER._replace(shaped=first.shaped, moving=first.moving, address=first.address)
    if name in ("isinstance", "hasattr", "callable", "issubclass", "id"):
        return NUMBER
    if name in ("str", "repr", "format"):
        return PLAIN._replace(shaped=first.shaped)
    if name == "range":
        return Value("iterator", parts=(NUMBER,))
    if name == "enumerate":
        return Value("iterator", parts=(Value("tuple", parts=(NUMBER, element(first))),))
    if name == "zip":
        return Value("iterator", parts=(Value("tuple", parts=tuple(map(element, args))),))
    if name in ("list", "tuple", "sorted", "reversed", "set"):
        parts = (element(first),) if args else ()
        return Value("set" if name == "set" else "list", parts=parts, shaped=first.shaped)
    if name == "dict":
        return Value("dict")
    if name in ("max", "min"):
        return computed(args) if len(args) > 1 else element(first)
    if name == "sum":
        return computed([element(first)])
    return first if name == "abs" else UNKNOWN


def _of_torch(name: str, call: SourceCall, dotted: Dotted) -> Value:
    part, _, last = name.rpartition(".")
    if f"torch.{name}" in STREAMS:
        return Value("stream")
    if name == "Generator":
        return Value("generator")
    if part == "nn":
        return _of_nn(last, call.args)
    if part == "nn.functional":
        if last in SEVERAL or last.endswith("_with_indices") or "return_indices" in call.kwargs:
            return UNKNOWN
        return combined(call.values)
    if part == "linalg":
        return combined(call.values) if last in LINALG else UNKNOWN
    if part in ("fft", "special"):
        return combined(call.values)
    return _of_torch_itself(name, call, dotted) if not part else UNKNOWN


def _of_torch_itself(name: str, call: SourceCall, dotted: Dotted) -> Value:
    device = keyword(call.node, "device")
    elsewhere = is_host(device, dotted)
    mask = dotted(keyword(call.node, "dtype") or call.node.func) == "torch.bool"
    if name in FACTORIES:
        if elsewhere:
            return HOST._replace(mask=mask, drawn=name in DRAWING)
        taken = [v for v in flat(call.args) if v.is_tensor]
        if taken and device is None and name in ("tensor", "normal"):
            return combined(taken)
        placed = device is not None and call.kwargs["device"].kind != "number"
        kind = "tensor" if placed and not _is_none(device) else "host"
        drawn = name in DRAWING and kind == "host"
        return Value(kind, mask=mask, drawn=drawn)
    if name == "where":
        if len(call.args) == 1 and not call.kwargs:
            return Value("list", parts=(combined(call.args),))
        return combined(call.values)._replace(mask=all(v.mask for v in call.args[1:3]))
    found = _several(name, call.values, call)
    if found is not None:
        return HOST if elsewhere and found.is_tensor else found
    if name in MASKS:
        return combined(call.values)._replace(mask=True)
    if name in FUNCTIONS:
        result = combined(call.values)
        return HOST if elsewhere else result._replace(mask=mask)
    if name in ("numel",):
        return NUMBER._replace(shaped=True)
    if name == "Size":
        return PLAIN._replace(shaped=True)
    return PLAIN if name in ("device", "finfo", "iinfo") or name.startswith("is_") else UNKNOWN


def _several(name: str, values: list[Value], call: SourceCall) -> Value | None:
    """Return what gives more than one tensor, or sometimes."""
    one = combined(values)
    if name in PIECES:
        given = name != "tensor_split" and bool(values) and values[0].given
        return Value(
            "list", parts=(one._replace(given=given, mask=bool(values) and values[0].mask),)
        )
    if name in PAIRS:
        return Value("tuple", parts=(one, one))
    if name in ORDERED:
        rest = values[1:]
        if "dim" in call.kwargs or any(v.kind == "number" for v in rest):
            return Value("tuple", parts=(one, one))
        return one if all(v.is_tensor for v in rest) else UNKNOWN
    if name == "nonzero":
        return one if "as_tuple" not in call.kwargs else Value("list", parts=(one,))
    if name == "unique":
        return one if len(values) == 1 else UNKNOWN
    return None


def _of_nn(name: str, args: list[Value]) -> Value:
    if name in ("Parameter", "Buffer"):
        return TENSOR._replace(registered=True)
    if name == "Sequential":
        layers = all(a.kind == "module" and is_layer(str(a.target)) for a in args)
        return Value("module", target="Identity" if layers and args else name)
    return Value("module", target=name) if name[:1].isupper() else UNKNOWN


def of_layer(name: str, args: list[Value]) -> Value:
    """Return what a module of torch gives for arguments."""
    if has_weights(name):
        return combined([TENSOR, *args])  # where its weights are
    if is_layer(name):
        return combined(args)
    if name in _RECURRENT:
        return Value("tuple", parts=(combined(args), UNKNOWN))
    return UNKNOWN


def of_method(call: SourceCall, dotted: Dotted) -> Value:
    """Return what a method of a tensor gives, or of what may be one."""
    on, name = call.on, call.method or ""
    if name in _SIZES:
        whole = name in ("size", "stride") and not call.values
        return PLAIN if whole else NUMBER._replace(shaped=True)
    if not on.is_tensor:
        return combined([TENSOR]) if name in TELLING & METHODS else UNKNOWN
    if name in ("to", "cpu", "cuda", "type"):
        return _moved(call, dotted)
    if name in VIEWS:
        return on._replace(place=None, registered=False, given=on.given and name != "detach")
    if name in MASKS:
        return combined([on, *call.values])._replace(mask=True)
    found = _several(name, [on, *call.values], call)
    if found is not None:
        return found
    if name in METHODS:
        if name.startswith("new_"):
            placed = call.node and is_host(keyword(call.node, "device"), dotted)
            return HOST if placed else on._replace(given=False, mask=False, place=None)
        mask = on.mask and name in _KEEP_MASK
        return combined([on, *call.values])._replace(mask=mask)
    if name.endswith("_") and not name.endswith("__"):
        return on
    return _read(name)


def _read(name: str) -> Value:
    if name == "item":
        return NUMBER
    if name == "tolist":
        return Value("list", parts=(NUMBER,))
    if name == "data_ptr":
        return NUMBER._replace(address=True)
    plain = name in ("is_contiguous", "get_device", "backward", "is_floating_point", "is_complex")
    return PLAIN if plain else UNKNOWN


def _moved(call: SourceCall, dotted: Dotted) -> Value:
    on = call.on._replace(given=False, place=None)
    if call.method == "cpu" or goes_to_host(call, dotted):
        return HOST._replace(mask=on.mask)
    names = [dotted(argument) or "" for argument in call.node.args]
    dtype = keyword(call.node, "dtype")
    if "torch.bool" in (*names, dtype and dotted(dtype)):
        return on._replace(mask=True)
    if names and any(name.startswith("torch.") for name in names):
        return on._replace(mask=False)
    if call.method == "cuda" or goes_to_device(call, dotted):
        return TENSOR._replace(mask=on.mask)
    return on if call.method != "type" else on._replace(mask=False)


def goes_to_host(call: SourceCall, dotted: Dotted) -> bool:
    """Return whether `.to` names the CPU."""
    if call.method != "to":
        return False
    first = call.node.args[0] if call.node.args else keyword(call.node, "device")
    return is_host(first, dotted)


def goes_to_device(call: SourceCall, dotted: Dotted) -> bool:
    """Return whether `.to` surely names a device that is not the CPU, or that of a tensor."""
    if call.method == "cuda":
        return True
    first = call.node.args[0] if call.node.args else keyword(call.node, "device")
    if call.method != "to" or first is None or is_host(first, dotted):
        return False
    if isinstance(first, ast.Constant):
        return isinstance(first.value, str)
    if isinstance(first, ast.Attribute):
        return first.attr == "device"
    return bool(call.args) and call.args[0].kind == "tensor"


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)
