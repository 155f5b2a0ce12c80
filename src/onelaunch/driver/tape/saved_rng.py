"""Random state that a callable saves and sets again, to draw the same numbers twice.

Checkpointing does so, and `torch.random.fork_rng`. What it saves in a capture is no state of any
replay, so that torch's functions for it are replaced meanwhile: by one that notes the place in the
stream of random numbers, and one that has each replay go back there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onelaunch.driver.emulated.storage import NAME
from onelaunch.driver.random_state import unwatched
from onelaunch.driver.tape.recorder import Recorder

UNKNOWN = "a random state is set that was not saved in the call"


class _Substitute(NamedTuple):
    """See `substituted`."""

    here: Callable[..., bool]
    save: Callable[[], Tensor]
    restore: Callable[[Tensor], None]


class _Substituted:
    """The functions of one module, while any capture has something in their place."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = {name: vars(module)[name] for name in _NAMES if name in vars(module)}
        self._get, self._set = (getattr(module, name) for name in _NAMES)
        self.active: list[_Substitute] = []
        for name, function in zip(_NAMES, (self._get_rng_state, self._set_rng_state), strict=True):
            setattr(module, name, function)

    def put_back(self) -> None:
        for name in _NAMES:
            if name in self._own:
                setattr(self._module, name, self._own[name])
            else:
                delattr(self._module, name)

    def _get_rng_state(self, *device: Any, **keywords: Any) -> Tensor:
        for substitute in self.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.save()
        return self._get(*device, **keywords)

    def _set_rng_state(self, new_state: Tensor, *device: Any, **keywords: Any) -> None:
        for substitute in self.active:
            if substitute.here(*device, **keywords):
                with unwatched():
                    return substitute.restore(new_state)
        return self._set(new_state, *device, **keywords)


_NAMES = "get_rng_state", "set_rng_state"
_lock = threading.Lock()
_substituted: dict[int, _Substituted] = {}


@contextmanager
def substituted(
    module: Any,
    here: Callable[..., bool],
    save: Callable[[], Tensor],
    restore: Callable[[Tensor], None],
) -> Generator[None]:
    """Have ``module.get_rng_state`` and ``module.set_rng_state`` be `save` and `restore`, where
    ``here(device)``. Two drivers may capture at once, each in a thread."""
    substitute = _Substitute(here, save, restore)
    with _lock:
        if id(module) not in _substituted:
            _substituted[id(module)] = _Substituted(module)
        all_of_it = _substituted[id(module)]
        all_of_it.active = [substitute, *all_of_it.active]
    try:
        yield
    finally:
        with _lock:
            all_of_it.active = [one for one in all_of_it.active if one is not substitute]
            if not all_of_it.active:
                _substituted.pop(id(module)).put_back()


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
