"""Random state that a callable saves and sets again, to draw the same numbers twice.

Checkpointing does so, and `torch.random.fork_rng`. What it saves in a capture is no state of any
replay, so that torch's functions for it are replaced meanwhile: by one that notes the place in the
stream of random numbers, and one that has each replay go back there.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onelaunch.driver.protocol import Rewind
from onelaunch.driver.substitutes import UNKNOWN, substituted
from onelaunch.testing.recorder import TapeRecorder


class TapeRewind:
    """Random states that each replay saves where the capture saved them; see `Rewind`.

    Args:
        after: the `TapeRewind` of a recording whose saved states may be set here too.
    """

    done = True

    def __init__(self, after: Rewind | None = None) -> None:
        assert after is None or isinstance(after, TapeRewind)
        self._earlier = [] if after is None else after.states
        self.states: list[Tensor] = []
        """The states that were saved."""

    @property
    def used(self) -> bool:
        return bool(self.states)

    @contextmanager
    def capturing(self, recorder: TapeRecorder) -> Generator[None]:
        """Replace torch's functions while a body runs under `recorder`."""
        self.states = []
        generator = torch.default_generator

        def here(*_: Any, **__: Any) -> bool:
            return recorder in _get_current_dispatch_mode_stack()

        def save() -> Tensor:
            with torch.inference_mode(False):
                state = generator.get_state()
            self.states.append(state)
            recorder.steps.append(lambda: state.copy_(generator.get_state()))
            return state

        def restore(state: Tensor) -> None:
            if not any(state is known for known in (*self.states, *self._earlier)):
                raise recorder.note_refusal("OL106", UNKNOWN)
            generator.set_state(state)
            recorder.random.accept()
            recorder.steps.append(partial(generator.set_state, state))

        with substituted(torch, here, save, restore):  # which `torch.tape` calls too
            yield
