"""Kernels of Triton's that Inductor's code launches, which no dispatcher sees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from onelaunch.driver.substitutes import replaced

_READ = ("in_ptr", "arg_")
"""Prefixes of Inductor's names for what a kernel only reads; `arg_` in its templates."""
_WRITTEN = ("out_ptr", "in_out_ptr", "ws_ptr")


class Launched:
    """A launch of a kernel, to be called. `reads`: tensors that it only reads. `writes`: all other
    tensors among its arguments."""

    def __init__(self, launch: Callable[[], Any], kernel: Any, args: Sequence[Any]) -> None:
        self._launch = launch
        self.name = str(kernel.fn.__name__)
        self.reads: list[Tensor] = []
        self.writes: list[Tensor] = []
        names = kernel.fn.arg_names
        named = [(n, t) for n, t in zip(names, args, strict=False) if isinstance(t, Tensor)]
        readable = all(name.startswith((*_READ, *_WRITTEN)) for name, _ in named)
        for name, t in named:
            reads = readable and name.startswith(_READ) and name not in kernel.mutated_arg_names
            (self.reads if reads else self.writes).append(t)

    def __call__(self) -> Any:
        return self._launch()


@contextmanager
def watching_launches(launched: Callable[[Launched], Any]) -> Generator[None]:
    """Pass this thread's launches to `launched`, which calls them; one thread at a time."""
    module: Any = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if module is None:
        yield
        return
    kind, ident = module.CachingAutotuner, get_ident()
    own = kind.run

    def run(kernel: Any, *args: Any, **keywords: Any) -> Any:
        def launch() -> Any:
            return own(kernel, *args, **keywords)

        if get_ident() != ident:
            return launch()
        return launched(Launched(launch, kernel, args))

    with replaced(kind, run=run):
        yield
