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


@contextmanager
def watching_host_generator(
    driver: Driver,
    drawn: HostDraws,
    note: Callable[[CaptureError], CaptureError],
    line: Callable[[str], str | None],
) -> Generator[None]:
    """Refuse what a run does to the host's default generator, but for draws, which are taken back
    at the end. A state that the run has saved is not set in truth: the draws alone move the
    generator. `note`: notes a refusal, which the callable may catch. `line`: gives the line for a
    refusal by its code, after the run."""
    thread, seed_all = get_ident(), torch.cuda.manual_seed_all
    saved: list[tuple[Tensor, int]] = []
    place: int | None = (
        None  # the draws before the state that was set; None where all of them count
    )

    def here(*_: object, **__: object) -> bool:
        return get_ident() == thread or driver.capturing()  # the run's thread, or autograd's

    def reached() -> int:
        return len(drawn.draws) if place is None else place

    def save() -> Tensor:
        state = torch.default_generator.get_state()
        saved.append((state, reached()))
        return state

    def restore(state: Tensor) -> None:
        nonlocal place
        where = next((at for one, at in saved if one is state), None)
        if where is None:
            raise note(error_here("OL106", UNKNOWN))
        place = None if where == len(drawn.draws) else where

    def manual_seed_all(seed: int) -> None:
        # `torch.manual_seed` calls it under any name that it is known by, and `watching_seeds`
        # misses that, as Dynamo turns the interpreter's hooks off around it.
        if here() and not is_tracing(sys._getframe(1)):
            raise note(error_here("OL106", _SEEDED))
        seed_all(seed)

    states = substituted(torch, here, save, restore)
    try:
        with replaced(torch.cuda, manual_seed_all=manual_seed_all), states:
            yield
        if reached() != len(drawn.draws):
            raise CaptureError("OL106", _ELSEWHERE, where=line("OL106"))
    finally:
        if drawn.host_state is not None:
            put_back(drawn.host_state, drawn.draws)


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
