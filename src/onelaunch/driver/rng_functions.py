"""`get_rng_state` and `set_rng_state` of torch, replaced while a capture runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from onelaunch.call_events import unwatched

UNKNOWN = "a random state is set that was not saved in the call"


class _Substitute(NamedTuple):
    """The functions that a capture has in place of torch's; see `substituted`."""

    here: Callable[..., bool]
    save: Callable[[], Tensor]
    restore: Callable[[Tensor], None]


class _Substituted:
    """The functions of a module, while any capture replaces them."""

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
    """Replace ``module.get_rng_state`` and ``module.set_rng_state`` by `save` and `restore`, where
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
