"""Random state that a callable saves and sets again, to draw the same numbers twice.

Checkpointing does so, and `torch.random.fork_rng`. What it saves in a capture is no state of any
replay, so that torch's functions for it are replaced meanwhile: by one that notes the place in the
stream of random numbers, and one that has each replay go back there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onelaunch.driver.backing import NAME
from onelaunch.driver.randomness import unwatched
from onelaunch.driver.recorder import Recorder

UNKNOWN = "a random state is set that was not saved in the call"


@contextmanager
def substituted(
    module: Any,
    here: Callable[..., bool],
    save: Callable[[], Tensor],
    restore: Callable[[Tensor], None],
) -> Generator[None]:
    """Have ``module.get_rng_state`` and ``module.set_rng_state`` be `save` and `restore`, where
    ``here(device)``. To be used by one thread at a time."""
    names = "get_rng_state", "set_rng_state"
    own = {name: vars(module)[name] for name in names if name in vars(module)}
    really_get, really_set = (getattr(module, name) for name in names)

    def get_rng_state(*device: Any, **keywords: Any) -> Tensor:
        if not here(*device, **keywords):
            return really_get(*device, **keywords)
        with unwatched():
            return save()

    def set_rng_state(new_state: Tensor, *device: Any, **keywords: Any) -> None:
        if not here(*device, **keywords):
            really_set(new_state, *device, **keywords)
            return
        with unwatched():
            restore(new_state)

    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(module, name, own[name])
            else:
                delattr(module, name)


class TapeRewind:
    """See `driver.Rewind`. Each replay saves its states where the capture saved them."""

    done = True
    """See `Rewind.done`."""

    def __init__(self, device: torch.device, after: TapeRewind | None = None) -> None:
        self._modules = [torch, *([getattr(torch, NAME)] if device.type == NAME else [])]
        self._earlier = [] if after is None else after.states
        self.states: list[Tensor] = []
        """Those that were saved."""

    @property
    def used(self) -> bool:
        """See `Rewind.used`."""
        return bool(self.states)

    @contextmanager
    def capturing(self, recorder: Recorder) -> Generator[None]:
        """While a body runs under `recorder`."""
        self.states = []
        generator = torch.default_generator  # which serves the emulated device too

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
                raise recorder.refuse("OL106", UNKNOWN)
            generator.set_state(state)
            recorder.random.settle()
            recorder.steps.append(partial(generator.set_state, state))

        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(substituted(module, here, save, restore))
            yield
