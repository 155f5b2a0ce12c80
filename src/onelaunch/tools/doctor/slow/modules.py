"""The module that runs, its path from the callable, and its mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from onelaunch.call import tree
from onelaunch.tools.bench.workload import Workload, parts


class Modules:
    """The modules behind a callable, followed while they run.

    Torch's hooks of all modules follow them; they see those of other threads too, which do not
    count.

    Args:
        called: is told of each module that begins to run.

    Attributes:
        any_training: whether a module ran in train mode.
        any_eval: whether one ran in eval mode.
        graded: whether an outermost module gave a result that requires grad.
    """

    def __init__(self, workload: Workload, called: Callable[[nn.Module], object]) -> None:
        self._called = called
        self.any_training = self.any_eval = self.graded = False
        self._running: list[nn.Module] = []
        self._roots = [part for part in parts(workload.fn) if isinstance(part, nn.Module)]
        self._paths = {
            id(module): path or type(module).__name__
            for root in reversed(self._roots)
            for path, module in root.named_modules()
        }
        self._thread = threading.get_ident()

    @contextmanager
    def followed(self) -> Generator[None]:
        """Follow the modules that run."""
        begin = hooks.register_module_forward_pre_hook(self._begin)
        end = hooks.register_module_forward_hook(self._end, always_call=True)
        try:
            yield
        finally:
            begin.remove()
            end.remove()

    @property
    def current(self) -> nn.Module | None:
        """The innermost module that runs."""
        return self._running[-1] if self._running else None

    @property
    def path(self) -> str:
        """The path of the innermost module that runs and has one; empty outside."""
        for module in reversed(self._running):
            path = self._paths.get(id(module))
            if path is not None:
                return path
        return ""

    def owned(self) -> Iterator[tuple[Tensor, str]]:
        """List the parameters and buffers with the paths of their modules; lazy ones have no
        memory yet."""
        for root in self._roots:
            for module in root.modules():
                path = self._paths[id(module)]
                for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if not is_lazy(t):
                        yield t, path

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(module)
            self.any_training |= module.training
            self.any_eval |= not module.training
            self._called(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or module not in self._running:
            return
        while self._running.pop() is not module:
            pass
        if not self._running:
            self.graded |= requires_grad(output)


def requires_grad(value: Any) -> bool:
    """Return whether any tensor in a result requires grad."""
    return any(t.requires_grad for t in tree.flatten(value).tensors)


def training_only(module: nn.Module) -> str | None:
    """Describe the work of a module that train mode adds; None in eval mode, or for none."""
    if not module.training:
        return None
    match module:
        case _DropoutNd() if module.p > 0:
            return "drops values"
        case nn.RReLU():
            return "draws its slopes"
        case _BatchNorm() | _InstanceNorm() if module.running_mean is not None:
            return "takes the statistics of the batch and changes the running ones"
        case nn.RNNBase() if module.dropout > 0 and module.num_layers > 1:
            return "drops values"
        case nn.MultiheadAttention() if module.dropout > 0:
            return "drops values"
        case _:
            return None
