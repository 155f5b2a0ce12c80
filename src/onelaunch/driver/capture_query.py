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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident

import torch

from onelaunch.driver.substitutes import SharedSubstitutes
from onelaunch.source import PACKAGE, TORCH

_TRUTHFUL = (TORCH, os.path.join(PACKAGE, "driver", ""))
"""Code that gets the true answer. After a false yes an optimizer that cannot be captured would
refuse to step, and collectives would rely on a capture."""


@dataclass(slots=True, eq=False)
class CaptureAnswer:
    """The answer that the callable of one signature gets."""

    answer: bool = False
    asked: bool = False  # True once it asked, in a warm-up or capture
    left: Callable[[], object] | None = None
    """A weak reference to the contents of the state that the last warm-up left."""

    def in_force(self) -> AbstractContextManager[None]:
        """Answer for as long as the callable runs in this thread."""
        return _answers.needed((get_ident(), self))

    def switch_to_yes(self) -> bool:
        """Give the other answer from now on, after a refusal; False where there is no other."""
        if self.answer or not self.asked:
            return False
        self.answer = True
        return True


def _answer() -> bool:
    ident = get_ident()
    mine = next((asking for thread, asking in _answers.active if thread == ident), None)
    asker = sys._getframe(2).f_code.co_filename  # past `is_current_stream_capturing`
    if mine is None or asker.startswith(_TRUTHFUL):
        return bool(_answers.own[_ASKED]())
    mine.asked = True
    return mine.answer


_ASKED = "_cuda_isCurrentStreamCapturing"
_answers = SharedSubstitutes(torch.cuda.graphs, **{_ASKED: _answer})
