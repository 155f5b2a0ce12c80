"""Where a captured forward meets the autograd of its caller.

During the capture, every tensor of the callable's state has a stand-in: a leaf over the same memory
with a version counter of its own. So the captured autograd graph ends at leaves that nobody else
knows. No AccumulateGrad node of a real parameter is in it (one may live on another stream), and no
hook of a real parameter runs inside; both are the business of the caller's own backward. And an
optimizer that steps does not invalidate the graph, which serves every replay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from onelaunch.call.dtensor import is_wrapped
from onelaunch.driver.protocol import Driver
from onelaunch.driver.refusals import refuse
from onelaunch.driver.select import recordable
from onelaunch.errors import CaptureError
from onelaunch.state.slots import Slot, gradient_of
from onelaunch.state.walk import StateWalk
from onelaunch.unwinding import FunctionMode
from onelaunch.watch.observer import Observer

MODIFIED = "has been modified by an inplace operation"
"""What torch says of a saved tensor that was changed."""

Node = Any
"""A node of an autograd graph; torch has no public type for all of them."""

AccumulateGrad: Any = getattr(torch._C, "_functions").AccumulateGrad  # noqa: B009
"""The node of a leaf. A custom function's may have a `variable` too."""

VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice"),
        *("SplitWithSizes", "Split", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeView"),
        *("Unsqueeze", "View"),
    )
    for number in range(4)
)
"""Nodes of views that `as_strided` of the same memory stands for, gradient included."""


class ProxyLeaves:
    """The stand-ins of one capture; in the slots while the context is active.

    Args:
        before: what the callable reaches.
        device: of the recording; tensors elsewhere keep their places.
        but: slots that are inputs of the recording already.
    """

    def __init__(self, before: StateWalk, device: torch.device, but: Sequence[Slot]) -> None:
        inputs = {slot.id for slot in but}
        self._of: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        self._slots: list[tuple[Slot, object, object]] = []
        for slot, t in before.tensors():
            if slot.id in inputs or slot.key is gradient_of or t.device.type != device.type:
                continue
            if t.is_inference() or not recordable(t):
                continue
            if id(t) not in self._of:
                proxy = proxy_for(t)
                self._of[id(t)] = proxy
                self._real[id(proxy)] = t
            if isinstance(slot.holder, tuple):
                self._replace_tuple(slot)
            else:
                self._slots.append((slot, t, self._of[id(t)]))
        self._replace_references(before)

    def _replace_references(self, before: StateWalk) -> None:
        """Weak references follow: `nn.RNN` compares its parameters with those that it keeps, and
        makes its list of weights anew where they differ."""
        for slot, value in before.held.values():
            if isinstance(value, weakref.ReferenceType) and not isinstance(slot.holder, tuple):
                proxy = self._of.get(id(cast(Any, value)()))
                if proxy is not None:
                    self._slots.append((slot, value, weakref.ref(proxy)))

    def _replace_tuple(self, slot: Slot) -> None:
        """Have a tuple of stand-ins take the place of the tuple that holds this slot."""
        way, items = slot.via, cast(tuple[object, ...], slot.holder)
        if way is None or way.read() is not items or isinstance(way.holder, tuple):
            return
        index = next((i for i, entry in enumerate(self._slots) if entry[1] is items), None)
        now = list(cast(Any, items if index is None else self._slots.pop(index)[2]))
        now[slot.key] = self._of[id(items[slot.key])]
        replaced = tuple(now) if type(items) is tuple else cast(Any, type(items))(*now)
        self._slots.append((way, items, replaced))

    def __enter__(self) -> ProxyLeaves:
        for slot, _, proxy in self._slots:
            slot.write(proxy)
        return self

    def __exit__(self, *_: object) -> None:
        for slot, real, proxy in self._slots:
            if slot.read() is proxy:
                slot.write(real)

    def real(self, t: Tensor) -> Tensor:
        """The tensor that `t` stands for, or `t` itself."""
        return self._real.get(id(t), t)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(stand-in, tensor), each tensor once."""
        for proxy in self._of.values():
            yield proxy, self._real[id(proxy)]

    def settle(self, observer: Observer) -> None:
        """Name the tensors themselves in what was observed."""
        for storage, tensors in observer.external.items():
            observer.external[storage] = [self.real(t) for t in tensors]
        for storage, t in observer.written.items():
            observer.written[storage] = self.real(t)

    def accumulated(self) -> bool:
        """Whether a backward ran inside and left gradients on stand-ins."""
        return any(
            proxy.is_leaf and proxy.grad is not (real.grad if real.is_leaf else None)
            for proxy, real in self.pairs()
        )


def proxy_for(t: Tensor) -> Tensor:
    """A leaf over the memory of `t`, with a version counter of its own."""
    with torch.no_grad():
        alias = t.data
    if isinstance(t, nn.Parameter):
        alias = nn.Parameter(alias, t.requires_grad)
    elif t.requires_grad:
        alias.requires_grad_()
    if t.is_leaf and t.grad is not None:
        alias.grad = t.grad
    for name, value in vars(t).items():  # marks that libraries leave on parameters
        setattr(alias, name, value)
    return alias


_HOOKS = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    Tensor.retain_grad: "retain_grad",
}


class NoHooks(FunctionMode):
    """Refuses hooks on the tensors of a captured graph: Python that no replay would run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOOKS:
            raise refuse("OL112", f"`{_HOOKS[func]}` on a tensor of the captured forward")
        return func(*args, **(kwargs or {}))


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse backward hooks of submodules, by name: they are Python of every backward."""
    everywhere: Any = nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        raise CaptureError("OL112", "every module has a backward hook")
    for name, module in modules:
        state = module.__dict__
        if state.get("_backward_hooks") or state.get("_backward_pre_hooks"):
            what = f"`{name}` ({type(module).__name__}) has a backward hook"
            raise CaptureError("OL112", what)


DENSE = "gradients that are dense: `sparse=False`"


class CapturedGraph:
    """The autograd graph of a captured forward, node by node.

    Args:
        outputs: the tensors where it begins.
        inputs: tensors where it ends, if they are no leaves.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
        self.packs = False
        """Whether hooks of the callable's (checkpointing) hold what some node saved."""
        self.spoiled = False
        """Whether the callable wrote over what some node saved."""
        self.nodes: list[Node] = []
        self.leaves: list[Tensor] = []
        seen: set[Node] = {t.grad_fn for t in inputs}
        stack: list[Node] = []
        for t in outputs:
            if t.grad_fn is None:
                self.leaves.append(t)  # a leaf is returned as it is
            else:
                stack.append(t.grad_fn)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, AccumulateGrad):
                self.leaves.append(node.variable)
                continue
            self.nodes.append(node)
            stack.extend(following for following, _ in node.next_functions if following is not None)

    def saved(self) -> list[Tensor] | None:
        """The tensors that the backward will read, or None where a node does not tell.

        Without what was packed by hooks: to unpack it may run a part of the forward, and eager does
        not look whether it has changed. And without what the callable wrote over itself: a backward
        that comes there raises, whatever happens in between.
        """
        found: list[Tensor] = []
        for node in self.nodes:
            custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            if not custom and "CppNode" in node.name():
                return None
            for name in ["saved_tensors"] if custom else _saved_names(type(node)):
                if not self._packed(node, name):
                    found += [t for t in self._read(node, name) if isinstance(t, Tensor)]
        return found

    def refuse_unfit(self) -> None:
        """Refuse embeddings under ``sparse=True``, whose gradient is no memory with strides, and
        checkpoints whose backward hands parameters their gradients itself."""
        for node in self.nodes:
            if node.name() == "CheckpointFunctionBackward":
                raise refuse("OL116", "checkpoint(..., use_reentrant=True)")
            if getattr(node, "_saved_sparse", False) and node.next_functions[0][0] is not None:
                name = node.name().partition("Backward")[0]
                what = f"{name} under `sparse=True` gives gradients of layout torch.sparse_coo"
                raise refuse("OL109", what, fix=DENSE)

    def groups(self, outputs: Sequence[Tensor]) -> list[list[int]]:
        """The outputs by position, those together whose graphs have nodes in common."""
        above: dict[Node, Node] = {node: node for node in self.nodes}

        def top(node: Node) -> Node:
            while above[node] is not node:
                above[node] = node = above[above[node]]
            return node

        for node in self.nodes:
            for following, _ in node.next_functions:
                if following in above:
                    above[top(following)] = top(node)
        found: dict[Node, list[int]] = {}
        for place, t in enumerate(outputs):
            found.setdefault(place if t.grad_fn is None else top(t.grad_fn), []).append(place)
        return list(found.values())

    def _read(self, node: Node, name: str) -> Sequence[object]:
        """What a node saved under this name."""
        try:
            value = getattr(node, name)
        except RuntimeError as error:
            if MODIFIED not in str(error):
                raise
            self.spoiled = True
            return ()
        return cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,)

    def _packed(self, node: Node, name: str) -> bool:
        packed = is_packed(node, name)
        self.packs |= packed
        return packed

    def held(self) -> set[int]:
        """The ids of Python objects that belong to the graph: contexts of custom functions, and
        what checkpointed parts will be run with again."""
        found: set[int] = set()
        for node in self.nodes:
            custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            if custom:
                inside = vars(node)
                found |= {id(node), id(inside), *(id(value) for value in inside.values())}
            for name in ["saved_tensors"] if custom else _saved_names(type(node)):
                for hook in _unpack_hooks(node, name):
                    _add_behind(hook, found)
        return found


def _add_behind(value: object, found: set[int]) -> None:
    """What a checkpointed part's function and arguments lead to, but for objects of others."""
    if id(value) in found:
        return
    inside: Iterable[object] = ()
    if isinstance(value, dict):
        inside = cast(dict[object, object], value).values()
    elif isinstance(value, list | tuple):
        inside = cast(Sequence[object], value)
    elif isinstance(value, partial):
        inside = (value.args, value.keywords)
    elif isinstance(value, CellType):
        with contextlib.suppress(ValueError):  # it is empty
            inside = (value.cell_contents,)
    elif isinstance(value, FunctionType):
        inside = value.__closure__ or ()
    elif isinstance(value, Tensor):
        inside = (value.grad_fn,)
    elif isinstance(value, _FRAMES):
        inside = (vars(value),)
    else:
        return
    found.add(id(value))
    for part in inside:
        _add_behind(part, found)


_FRAMES = (checkpoint._CheckpointFrame, torch.autograd.function.BackwardCFunction)


def is_packed(node: Node, name: str) -> bool:
    """Whether hooks (`saved_tensors_hooks`, as checkpointing uses them) hold what a node saved
    under this name. To read it would run them: a checkpointed part once more, BatchNorm and all."""
    return any(True for _ in _unpack_hooks(node, name))


def _unpack_hooks(node: Node, name: str) -> Iterator[object]:
    raw = getattr(node, f"_raw{name}" if name.startswith("_") else f"_raw_{name}", None)
    for entry in cast(tuple[Any, ...], raw if isinstance(raw, tuple) else (raw,)):
        hook = getattr(entry, "unpack_hook", None)
        if hook is not None:
            yield hook


_names: dict[type, list[str]] = {}


def _saved_names(kind: type) -> list[str]:
    if kind not in _names:
        _names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
    return _names[kind]


def is_pure_view(t: Tensor) -> bool:
    """Whether autograd made `t` from a leaf by views alone, so that `as_strided` says the same."""
    node: Node = t.grad_fn
    while node is not None and not isinstance(node, AccumulateGrad):
        if node.name() not in VIEWS:
            return False
        node = node.next_functions[0][0]
    return True


def own_memory(t: Tensor, observer: Observer, driver: Driver, taken: set[int]) -> Tensor:
    """`t`, or a copy where its memory is not its own: a gradient passed on, or given twice."""
    if t.layout is not torch.strided or is_wrapped(t):
        return t.clone()
    storage = driver.storage(t)
    if t.numel() and (not observer.made(t) or storage in taken):
        t = t.clone()
        storage = driver.storage(t)
    taken.add(storage)
    return t


def keep_graph() -> bool:
    """Whether the backward that runs in this thread was asked to retain its graph."""
    return _keep_graph()


_keep_graph: Callable[[], bool] = getattr(
    cast(Any, torch._C)._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
