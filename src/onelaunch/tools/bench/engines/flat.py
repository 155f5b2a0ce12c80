"""A callable as a module that takes tensors and returns tensors, which is what exporters take.

`FlatModule` and its functions use torch alone, as the code of an engine contains their text.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onelaunch.tools.bench.engines.engine import Built, Mode, snippet, warm
from onelaunch.tools.bench.workload import Workload


class FlatModule(nn.Module):
    """A callable that takes the tensors of its arguments, and returns a tuple of its results'.

    Numbers, containers and all else in the arguments and results stay as in the example.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        super().__init__()
        self.training = False  # of this module alone; the callable's stays
        self.model = model
        self.given = copy.copy(args), copy.copy(kwargs)
        self.returned = model(*args, **kwargs)
        self.plain = not kwargs and all(isinstance(arg, Tensor) for arg in args)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = with_tensors(self.given, iter(tensors))
        return tuple(tensors_of(self.model(*args, **kwargs)))

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """List the tensors of the arguments of a call."""
        return list(args) if self.plain else tensors_of((args, kwargs))

    def give(self, tensors: list[Tensor]) -> Any:
        """Put the tensors of a result into the containers that the callable returns."""
        if isinstance(self.returned, Tensor):
            return tensors[0]
        return with_tensors(self.returned, iter(tensors))


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors in containers and dataclasses."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """Copy containers and dataclasses with other tensors in place of theirs."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(tensors)
        if not dataclasses.is_dataclass(leaf):
            return leaf
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            changed = with_tensors(getattr(leaf, field.name), tensors)
            object.__setattr__(made, field.name, changed)
        return made

    return pytree.tree_map(change, tree)


@dataclass(frozen=True)
class Exported:
    """An engine that works on the exported program.

    Attributes:
        recipe: makes it of a callable and its arguments; its text is the engine's code.
        lacks: says why it cannot run on a device, or None if it can.
        others: functions that the recipe uses, besides those of this file.
        imports: the imports for them.
        notes, outside: as in `Built`.
    """

    name: str
    title: str
    recipe: Callable[..., Callable[..., Any]]
    lacks: Callable[[torch.device], str | None]
    others: tuple[Callable[..., Any], ...] = ()
    imports: str = ""
    notes: tuple[str, ...] = ()
    outside: bool = True
    mode: Mode = "no_grad"

    def missing(self, device: torch.device) -> str | None:
        return self.lacks(device)

    def build(self, workload: Workload) -> Built:
        fast = self.recipe(workload.fn, workload.args, workload.kwargs)
        warm(fast, workload)
        return Built(fast, notes=lambda: [*self.notes], outside=self.outside)

    def code(self, workload: Workload) -> str:
        parts = (FlatModule, tensors_of, with_tensors, *self.others, self.recipe)
        given = f"model, {workload.args_text}, {workload.kwargs_text}"
        return snippet(
            f"y = fast({workload.call_text})",
            f"fast = {self.recipe.__name__}({given})",
            f"{self.imports}{_IMPORTS}\n\n" + "\n\n".join(map(inspect.getsource, parts)),
        )


_IMPORTS = """\
import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
"""
