"""The answer to a callable that asks whether it is being captured.

Some take another way then: transformers makes an attention mask that a call does without, so that
another kernel runs, which draws other numbers. A graphed callable does the same as in a call, so
the answer is no. If this way reads on the host, which a capture refuses, the other way may not.
Runs of both are then compared and rolled back, and a capture with the answer yes follows. On a
machine without CUDA the answers are the same.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.source import PACKAGE, TORCH

_graphs: Any = torch.cuda.graphs
_TRUTHFUL = (TORCH, os.path.join(PACKAGE, "driver", ""))
"""Code that gets the true answer. After a false yes an optimizer that cannot be captured would
refuse to step, and collectives would rely on a capture."""
_lock = threading.Lock()
_active: list[tuple[int, CaptureAnswer]] = []
_truth: Any = None


@dataclass(slots=True, eq=False)
class CaptureAnswer:
    """The answer that the callable of one signature gets."""

    answer: bool = False
    asked: bool = False  # True once it asked, in a warm-up or capture
    left: Callable[[], object] | None = None
    """A weak reference to the contents of the state that the last warm-up left."""

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Answer for as long as the callable runs in this thread."""
        global _truth
        entry = (threading.get_ident(), self)
        try:
            with _lock:
                if not _active:
                    _truth = _graphs._cuda_isCurrentStreamCapturing
                    _graphs._cuda_isCurrentStreamCapturing = _answer
                _active.append(entry)
            yield
        finally:
            with _lock:
                if entry in _active:  # a Ctrl-C may come first
                    _active.remove(entry)
                if not _active and _truth is not None:
                    _graphs._cuda_isCurrentStreamCapturing = _truth

    def switch_to_yes(self) -> bool:
        """Give the other answer from now on, after a refusal; False where there is no other."""
        if self.answer or not self.asked:
            return False
        self.answer = True
        return True


def _answer() -> bool:
    ident = threading.get_ident()
    mine = next((asking for thread, asking in reversed(_active) if thread == ident), None)
    asker = sys._getframe(2).f_code.co_filename  # past `is_current_stream_capturing`
    if mine is None or asker.startswith(_TRUTHFUL):
        return bool(_truth())
    mine.asked = True
    return mine.answer
