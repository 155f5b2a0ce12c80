"""The host's default generator in a capture on a device with generators of its own.

A run may seed it by `torch.cuda.manual_seed_all`, save and set its state, and draw from it. Other
threads draw meanwhile, so that no comparison of states tells what the run did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from onelaunch.driver.dispatch import no_functions
from onelaunch.driver.protocol import Driver
from onelaunch.driver.refusals import error_here
from onelaunch.driver.seeding import is_tracing
from onelaunch.driver.substitutes import UNKNOWN, replaced, substituted
from onelaunch.errors import CaptureError

_SEEDED = "`torch.manual_seed`, or the like, in a capture"
_ELSEWHERE = "the host's random state is set to a place that the run's draws have left"


class HostDraws(Protocol):
    """The draws of a run from the host's default generator; see `Admission`."""

    draws: list[Callable[[], object]]
    host_state: Tensor | None


class HostGenerator:
    """The use of the host's default generator by one run, on the driver's device. `note`: notes a
    refusal, which the callable may catch. `line`: gives the line for a refusal by its code, after
    the run."""

    def __init__(
        self,
        driver: Driver,
        drawn: HostDraws,
        note: Callable[[CaptureError], CaptureError],
        line: Callable[[str], str | None],
    ) -> None:
        self._driver, self._drawn, self._note, self._line = driver, drawn, note, line
        self._thread = get_ident()
        self._saved: list[tuple[Tensor, int]] = []
        self._place: int | None = None
        """The number of draws before the state that was set; None where all of them count."""

    @contextmanager
    def watched(self) -> Generator[None]:
        """Refuse what the run does to it, but for draws, which are taken back at the end. A state
        that the run has saved is not set in truth: the draws alone move the generator."""
        try:
            # `watching_seeds` misses it, as Dynamo turns the interpreter's hooks off around it.
            seeds = partial(self._seed_all, torch.cuda.manual_seed_all)
            states = substituted(torch, self._here, self._save, self._restore)
            with replaced(torch.cuda, manual_seed_all=seeds), states:
                yield
            if self._reached() != len(self._drawn.draws):
                raise CaptureError("OL106", _ELSEWHERE, where=self._line("OL106"))
        finally:
            if self._drawn.host_state is not None:
                put_back(self._drawn.host_state, self._drawn.draws)

    def _seed_all(self, own: Callable[[int], None], seed: int) -> None:
        """Refuse `torch.cuda.manual_seed_all`, which `torch.manual_seed` calls under any name that
        it is known by."""
        if self._here() and not is_tracing(sys._getframe(1)):
            raise self._note(error_here("OL106", _SEEDED))
        own(seed)

    def _here(self, *_: object, **__: object) -> bool:
        """Tell whether it is the run that calls: its thread, or autograd's."""
        return get_ident() == self._thread or self._driver.capturing()

    def _reached(self) -> int:
        """Return the number of draws before the present state."""
        return len(self._drawn.draws) if self._place is None else self._place

    def _save(self) -> Tensor:
        state = torch.default_generator.get_state()
        self._saved.append((state, self._reached()))
        return state

    def _restore(self, state: Tensor) -> None:
        place = next((place for saved, place in self._saved if saved is state), None)
        if place is None:
            raise self._note(error_here("OL106", UNKNOWN))
        self._place = None if place == len(self._drawn.draws) else place


def put_back(first: Tensor, draws: Sequence[Callable[[], object]]) -> None:
    """Put the host's default generator back to `first`, if these draws alone have moved it since.
    Else other threads would draw the same numbers again."""
    now, again = torch.default_generator.get_state(), torch.Generator()
    again.set_state(first)
    with no_functions():
        if all(_repeated(draw, again) for draw in draws) and torch.equal(again.get_state(), now):
            torch.default_generator.set_state(first)


def _repeated(draw: Callable[[], object], generator: torch.Generator) -> bool:
    """Draw from another generator; return False if the operation takes none."""
    assert isinstance(draw, partial)
    op: Any = draw.func
    try:
        op.overloadpacket(*draw.args, **draw.keywords, generator=generator)
    except (TypeError, RuntimeError):
        return False
    return True
