"""Walks over autograd graphs: their nodes, saved tensors, freed graphs, and views."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from onelaunch.errors import CaptureError

MODIFIED = "has been modified by an inplace operation"
"""Torch's words for a saved tensor that was changed."""
AGAIN = "Trying to backward through the graph a second time"
"""Torch's words for a saved tensor that was freed."""
DENSE = "gradients that are dense: `sparse=False`"

_FREED_INSIDE = (
    f"{AGAIN} (or directly access saved tensors after they have already been freed). The "
    "callable that returned this tensor ran the backward itself, in the same launch. To run it "
    "again, return the tensor without calling backward inside."
)

_C: Any = torch._C
packing_hooks: Callable[[bool], object] = _C._autograd._top_saved_tensors_default_hooks
"""A reader of the hooks that pack saved tensors."""

Node = Any  # a node of an autograd graph; torch has no public type for all of them

AccumulateGrad: Any = _C._functions.AccumulateGrad
"""The type of a leaf's node. A custom function's node may have a `variable` too."""

_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Alias", "AsStrided", "Conj", "Diagonal", "Expand", "NegView", "Permute", "ReshapeAlias"),
        *("Select", "Slice", "SplitWithSizes", "Split", "Squeeze", "T", "Transpose", "Unbind"),
        *("Unfold", "UnsafeView", "Unsqueeze", "View", "ViewAsComplex", "ViewAsReal"),
    )
    for number in range(4)
)
"""Nodes of views that `replay.launch.viewer` makes of the same memory, with the same gradient."""


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


class CapturedGraph:
    """The nodes and leaves of a captured forward's autograd graph. `outputs`: the tensors where it
    begins. `inputs`: tensors where it ends before any leaf."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
        self.packs = False
        """True if hooks of the callable (checkpointing) hold saved tensors of a node."""
        self.spoiled = False  # True if the callable wrote over a saved tensor
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
            stack.extend(_next(node))

    def saved(self) -> list[Tensor] | None:
        """Return the tensors that the backward will read; None if a node does not list its own.
        Tensors packed by hooks are left out: unpacking may run a part of the forward, and eager
        does not check them for changes. Overwritten tensors are left out too: a backward that reads
        them raises in any case."""
        tensors: list[Tensor] = []
        for node in self.nodes:
            if not isinstance(node, BackwardCFunction) and "CppNode" in node.name():
                return None
            for name in _saved_names(node):
                packed = _is_packed(node, name)
                self.packs |= packed
                if not packed:
                    tensors += [t for t in self._read(node, name) if isinstance(t, Tensor)]
        return tensors

    def refuse_unfit(self) -> None:
        """Refuse sparse embeddings and reentrant checkpoints. Gradients of the first have no
        strides; backwards of the second accumulate into parameters."""
        for node in self.nodes:
            if node.name() == "CheckpointFunctionBackward":
                raise CaptureError("OL116", "checkpoint(..., use_reentrant=True)")
            if getattr(node, "_saved_sparse", False) and node.next_functions[0][0] is not None:
                name = node.name().partition("Backward")[0]
                what = f"{name} under `sparse=True` gives gradients of layout torch.sparse_coo"
                raise CaptureError("OL109", what, fix=DENSE)

    def groups(self, outputs: Sequence[Tensor]) -> list[list[int]]:
        """Return the outputs, by position, in groups whose graphs have nodes in common."""
        parent: dict[Node, Node] = {node: node for node in self.nodes}

        def root(node: Node) -> Node:
            while parent[node] is not node:
                parent[node] = node = parent[parent[node]]
            return node

        for node in self.nodes:
            for following, _ in node.next_functions:
                if following in parent:
                    parent[root(following)] = root(node)
        members: dict[Node, list[int]] = {}
        for place, t in enumerate(outputs):
            members.setdefault(place if t.grad_fn is None else root(t.grad_fn), []).append(place)
        return list(members.values())

    def _read(self, node: Node, name: str) -> Sequence[object]:
        try:
            value = getattr(node, name)
        except RuntimeError as error:
            if MODIFIED not in str(error):
                raise
            self.spoiled = True
            return ()
        return cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,)

    def kept(self) -> list[Tensor]:
        """Return the tensors on contexts of custom functions, except saved ones. AOTAutograd keeps
        lists of them there."""
        values = [
            v for n in self.nodes if isinstance(n, BackwardCFunction) for v in vars(n).values()
        ]
        parts = [cast(Sequence[object], v) if isinstance(v, list | tuple) else (v,) for v in values]
        return [t for part in parts for t in part if isinstance(t, Tensor)]

    def held(self) -> set[int]:
        """Return the ids of Python objects that belong to the graph. These are contexts of custom
        functions, and the arguments of checkpointed parts."""
        ids: set[int] = set()
        for node in self.nodes:
            if isinstance(node, BackwardCFunction):
                inside = vars(node)
                ids |= {id(node), id(inside), *(id(value) for value in inside.values())}
            for name in _saved_names(node):
                for hook in _unpack_hooks(node, name):
                    _add_held(hook, ids)
        return ids


def _add_held(value: object, held: set[int]) -> None:
    """Add the ids of objects that a checkpointed part's function and arguments hold."""
    if id(value) in held:
        return
    inside: Iterable[object] = ()
    if isinstance(value, dict):
        inside = cast(dict[object, object], value).values()
    elif isinstance(value, list | tuple):
        inside = cast(Sequence[object], value)
    elif isinstance(value, functools.partial):
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
    held.add(id(value))
    for part in inside:
        _add_held(part, held)


_FRAMES = (checkpoint._CheckpointFrame, BackwardCFunction)


def _is_packed(node: Node, name: str) -> bool:
    """Return whether hooks (`saved_tensors_hooks`, as checkpointing uses) hold a saved tensor.
    Reading it would run them: a checkpointed part once more, with its BatchNorm."""
    return any(True for _ in _unpack_hooks(node, name))


def _unpack_hooks(node: Node, name: str) -> Iterator[object]:
    raw = getattr(node, f"_raw{name}" if name.startswith("_") else f"_raw_{name}", None)
    for entry in cast(tuple[Any, ...], raw if isinstance(raw, tuple) else (raw,)):
        hook = getattr(entry, "unpack_hook", None)
        if hook is not None:
            yield hook


@functools.cache
def _names_of(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _saved_names(node: Node) -> list[str]:
    return ["saved_tensors"] if isinstance(node, BackwardCFunction) else _names_of(type(node))


def is_freed(t: Tensor) -> bool:
    """Return whether a backward over `t` would raise: an earlier one has freed its graph. The
    nearest nodes to `t` with saved tensors decide. A graph that saved none (sums and means of
    parameters) is never freed: eager may run it again."""
    level: list[Node] = [] if t.grad_fn is None else [t.grad_fn]
    seen = set(level)
    while level:
        verdicts = [freed for node in level for freed in _freed(node)]
        if verdicts:
            return any(verdicts)
        level = list({n: None for node in level for n in _next(node) if n not in seen})
        seen.update(level)
    return False


def mark_freed(t: Tensor) -> Tensor:
    """Return a tensor over the memory of `t` whose graph counts as freed. 1 us. It requires grad,
    and a backward over it raises, as over the loss of a training step in eager. `t`: a fresh leaf;
    not to be used afterwards."""
    return _C._functions.DelayedError(_FREED_INSIDE, 1)(t.requires_grad_())


def packing() -> bool:
    """Return whether the caller's hooks pack saved tensors: `save_on_cpu`, or `checkpoint` around a
    graphed module. A replay saves nothing, so the call runs eagerly."""
    return torch.is_grad_enabled() and packing_hooks(True) is not None


def _freed(node: Node) -> Iterator[bool]:
    """Yield for each saved tensor of a node whether it was freed."""
    for name in _saved_names(node):
        try:
            if _is_packed(node, name):
                yield False  # a freed one has no hook any more
                return
            value = getattr(node, name)
        except RuntimeError as error:
            yield AGAIN in str(error)  # any other error is for a backward to tell
            return
        values = cast(tuple[object, ...], value if isinstance(value, tuple) else (value,))
        if any(isinstance(v, Tensor) for v in values):
            yield False
            return


def _behind_views(t: Tensor, ends: Container[Node] = ()) -> Node:
    """Return the first node behind a tensor that is in `ends`, or is not a view's; or None. A view
    made under `no_grad` ends the graph, as autograd knows nothing beyond it."""
    node: Node = t.grad_fn
    while node is not None and node not in ends and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node


def viewed(t: Tensor) -> Tensor | None:
    """Return the base that autograd knows for a view, or None. The base must be a leaf, unless `t`
    has no graph."""
    if t.grad_fn is None:
        return t._base
    node: Any = _behind_views(t)
    return node.variable if isinstance(node, AccumulateGrad) else None


def is_one_of_several(t: Tensor) -> bool:
    """Return whether `t` is of several views of one operation, which nobody may write."""
    node: Node = t.grad_fn
    while node is not None and node.name() in _VIEWS:
        if node.name().startswith(("Split", "Unbind")):
            return True
        node = node.next_functions[0][0]
    return False


def is_pure_view(t: Tensor, ends: Container[Node] = ()) -> bool:
    """Return whether autograd made `t` by views alone, which `as_strided` can replace. `ends`:
    nodes of tensors, besides leaves, that `t` may be or view."""
    node = _behind_views(t, ends)
    if node is None:
        return t.grad_fn is None
    return node in ends or isinstance(node, AccumulateGrad)
