"""The names of captures and replays in traces: of torch.profiler, and in NVTX by `emit_nvtx`.

Each replay asks torch whether a profiler is on: a module's attribute, 9 ns. Torch calls nobody when
a profiler starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

profiler: Any = torch.autograd.profiler
"""Its `_is_profiler_enabled` is true while torch.profiler or `emit_nvtx` is at work."""
SHOWN = 3


def sizes(shapes: Sequence[Sequence[int]]) -> str:
    """Write the sizes of the first tensors: ``(8, 64), (8,)``."""
    texts = [str(tuple(shape)) for shape in shapes[:SHOWN]]
    return ", ".join(texts + ["..."] * (len(shapes) > SHOWN))


def named(text: str) -> AbstractContextManager[object]:
    """Return a context with a name in traces, if a profiler is on."""
    on = profiler._is_profiler_enabled
    return profiler.record_function(text) if on else contextlib.nullcontext()


def annotated(launch: Callable[..., None], text: str) -> Callable[..., None]:

    def launched(*args: Any) -> None:
        with profiler.record_function(text):
            launch(*args)

    return launched
