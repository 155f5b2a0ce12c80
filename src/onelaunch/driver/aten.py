"""ATen operations and the memory that they write, read off their schemas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from onelaunch.identity import id

T = TypeVar("T")


def imagined() -> bool:
    """Tell whether operations are on tensors without memory. DTensor runs such operations to learn
    how to split them: they are no work of the device."""
    return _mode_of(_FAKE) is not None


_distributed: Any = getattr(torch._C, "_distributed_c10d", None)
"""Torch's bindings of collectives; a build may lack them, and then has no collectives either."""
_mode_of = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class OfKind(dict[torch.device, bool]):
    """Device -> whether it is of a type. A device's `type` makes a text: 0.3 us."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, device: torch.device) -> bool:
        here = self[device] = device.type == self.kind
        return here


_KEY = torch._C.DispatchKey
_IMPLICIT = "CompositeImplicitAutograd"

# Results of these hold whatever the memory held: there is nothing to repeat.
_SETS_DATA = "aten::shallow_copy_data_"
"""`t.data = new` of compiled code, since torch 2.14; without the tag."""
_UNDEFINED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty_strided", "empty_like", "empty_permuted"),
        *("new_empty", "new_empty_strided"),
    )
)

# Written without the schema saying so: operation to (argument of `training`, what it writes).
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::rrelu_with_noise": (4, (1,)),
    "fsdp::all_gather_copy_in": (2, (1,)),  # if there is anything to copy
}


# Numbers that describe a tensor, not what is in its memory.
_DESCRIPTIONS = frozenset(
    {
        *("aten::is_same_size", "aten::is_set_to", "aten::is_pinned", "aten::result_type"),
        "aten::_has_same_storage_numel",
        *("aten::can_cast", "aten::_fused_sdp_choice", "aten::_nnpack_available"),
        *("aten::_debug_has_internal_overlap", "aten::_has_compatible_shallow_copy_type"),
    }
)


_DROPOUT_ARGUMENTS = ("dropout_p", "dropout", "train", "training")
"""Arguments without which a random operation draws nothing."""
_UNTAGGED = frozenset(
    f"aten::{name}"
    for name in ("_conj_physical", "celu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "selu")
)
"""Pointwise operations that torch 2.11 does not tag so, or not in place."""


@functools.cache
def is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Return whether each element of the result depends only on the elements at its place. Torch
    tags few operations in place: `gelu_` is as pointwise as `gelu`."""
    name, overload = func._schema.name.removesuffix("_"), func._overloadname
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    alike = getattr(packet, overload, func) if name.startswith("aten::") else func
    return name in _UNTAGGED or any(torch.Tag.pointwise in op.tags for op in (func, alike))


class Operator:
    """One ATen overload."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.func = func
        self.name = func.name()
        self.base: str = func._schema.name  # the name without the overload
        self.text = str(func)
        self.label = self.name.replace("::", ".").removeprefix("aten.").removesuffix(".default")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        dispatched = torch._C._dispatch_has_kernel(self.name)  # else it is TorchScript's alone
        whole = dispatched and (has_kernel(self.name, "CPU") or has_kernel(self.name, "CUDA"))
        self.composite = dispatched and has_kernel(self.name, _IMPLICIT) and not whole
        """True if it consists of other operations, which are recorded instead."""
        self._makes_views = dispatched and has_kernel(self.name, "ADInplaceOrView")
        self.describes = self.name in _DESCRIPTIONS or func.namespace == "prim"
        """True if its numbers are about metadata, so that they are no host read."""
        self.reshapes = torch.Tag.inplace_view in func.tags or self.name == _SETS_DATA
        """True if it gives the tensor itself other sizes, strides or memory (``t.resize_``)."""
        self.idle = self.reshapes or self.name in _UNDEFINED
        """True if there is nothing to repeat: metadata only, or memory left undefined."""
        self.random = torch.Tag.nondeterministic_seeded in func.tags  # see `draws`
        self._switches = [
            (i, a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)
            if a.name in _DROPOUT_ARGUMENTS
        ]
        self.lifts = self.base in ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")
        """True if it takes a tensor that Python filled without the dispatcher."""
        self.outs = [a.name for a in func._schema.arguments if a.is_out]
        self._writes = [
            (i, a.name)
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.collective = func.namespace == "c10d"  # gives something to wait for
        self.communicates = func.namespace in ("c10d", "_c10d_functional")
        self.writes = bool(self._writes) or self.collective or self.name in _UNDECLARED_WRITES

    def decomposed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite operation by its C++, for a mode to see its parts. In inference mode a
        mode gets it whole, as no autograd takes it apart. `decompose` prefers torch's references in
        Python, whose results differ in bits. Modes are called below the views' key, where a view
        does not require grad as eager's does. Some products choose their way by that, so this runs
        above the key. An operation with a kernel for that key (`chunk`, `narrow`) runs by this
        kernel, on tensors that are no views yet."""
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()
        if not self._makes_views:
            excluded = excluded.remove(_KEY.ADInplaceOrView)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return self.func._op_dk(_KEY.CompositeImplicitAutograd, *args, **kwargs)

    def draws(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call draws: attention without dropout, for one, does not."""
        return (
            self.random
            and kwargs.get("generator") is None
            and all(
                (args[i] if i < len(args) else kwargs.get(name, default)) not in (0, False)
                for i, name, default in self._switches
            )
        )

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """List the tensors among the arguments that the call writes."""
        targets = self.declared(args, kwargs)
        if self.collective and self.name.partition(".")[0].endswith("_"):
            # Their schemas declare no writes; each writes its first argument.
            targets += tensors(args[0])
        training, indices = _UNDECLARED_WRITES.get(self.name, (0, ()))
        if indices and len(args) > training and args[training]:
            targets += [args[i] for i in indices if args[i] is not None]
        return targets

    def declared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """List the tensors that the schema declares as written; their versions advance."""
        targets: list[Tensor] = []
        for i, name in self._writes:
            targets += tensors(args[i] if i < len(args) else kwargs.get(name))
        return targets


def group_of(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        kind: Any = value
        is_group = kind._type().qualified_name().endswith(".ProcessGroup")
        return _distributed.ProcessGroup.unbox(value) if is_group else None
    if not isinstance(value, str):
        return None
    try:
        return _distributed._resolve_process_group(value)
    except (RuntimeError, ValueError):  # another text, such as "sum"
        return None


_operators: dict[int, Operator] = {}
"""id of an overload, whose own hash is computed in Python each time -> facts about it."""


def operator(func: torch._ops.OpOverload) -> Operator:
    """Analyse an overload, once. 0.1 us."""
    op = _operators.get(id(func))
    if op is None:
        op = _operators[id(func)] = Operator(func)
    return op


def leaves(value: Any) -> Iterator[Any]:
    """Iterate over the arguments or results of an operation, lists opened."""
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """List the tensors among the arguments or results of an operation."""
    every: list[Tensor] = []
    _gather(value if type(value) is tuple else (value,), every)  # pyright: ignore
    return every


_NO_TENSORS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size}
)


def _gather(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Collect as `leaves` does, without nested generators: several times for each operation."""
    for value in values:
        if type(value) in _NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _gather(value, tensors)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, dict):
            _gather(value.values(), tensors)  # pyright: ignore[reportUnknownArgumentType]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    return change(value)


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy into `target`, also where its elements share memory by a stride of 0."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
