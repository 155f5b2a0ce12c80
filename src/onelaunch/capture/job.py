"""A callable and how a call of it is to be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onelaunch.capture.callee import Callee
from onelaunch.capture.numbers import Following
from onelaunch.driver.capture_query import CaptureAnswer
from onelaunch.driver.protocol import DevicePool, Driver, InPlace
from onelaunch.driver.schedule import Parallel
from onelaunch.driver.seeding import SEEDING
from onelaunch.errors import CaptureError
from onelaunch.sizes.dims import SizeLink, Varying
from onelaunch.source import argument_changed_at, line_of, loaded_at, user_line
from onelaunch.state.brought import Brought
from onelaunch.state.snapshot import ReachableState
from onelaunch.watch.compiled_accesses import CompiledAccesses
from onelaunch.watch.ledger import Ledger

if TYPE_CHECKING:
    from onelaunch.capture.forward import Forward


class NeedsTheCaller(CaptureError):
    """The refusal of a capture beside calls: it would put stand-ins into state that they read."""

    def __init__(self, what: str) -> None:
        super().__init__("OL109", f"it is captured in the thread of a call: {what}")


@dataclass(slots=True, eq=False)
class CaptureJob:
    """A callable and how a call of it is to be captured.

    Attributes:
        pool: the device pool of the recording's memory.
        apart: makes a device pool that no other recording uses.
        callee: the callable, and the reads of past runs.
        reached: the state that it reaches.
        static_outputs: whether results stay in the recording's memory.
        in_place: the memory of the caller that kernels are to reach, where they can; None: none.
        asking: the answer to a callable that asks whether it is being captured.
        earlier: the operations of the run before, to compare with.
        differed_in_a_row: the captures in a row that differed; None: differences are not refused.
        shrinks: whether state that grows was seen to be small again.
        accesses: the reads and writes of an eager run, for code whose operations cannot be
            watched.
        forward: the autograd side of the capture, if the results require grad.
        given: the callable and the device -> the callable as the capture runs it.
        varying: argument index -> how an argument that may be smaller in a call varies.
        follows: for each tensor of the result, the dimensions that follow sizes of arguments.
        following: numbers that the caller was seen to vary, or the callable to move on, without
            constants.
        brought: state that the caller replaces between calls, which becomes inputs.
        parallel: see `Driver.capture`.
        draws: whether a run has drawn from the device's default generator.
    """

    driver: Driver
    device: torch.device
    pool: DevicePool
    apart: Callable[[], DevicePool]
    callee: Callee
    reached: ReachableState
    static_outputs: bool
    in_place: InPlace | None
    asking: CaptureAnswer
    earlier: Ledger | None
    differed_in_a_row: int | None
    shrinks: bool
    accesses: CompiledAccesses | None
    forward: Forward | None
    given: Callable[[Callable[..., Any], torch.device], Callable[..., Any]]
    varying: Mapping[int, Varying]
    follows: Sequence[tuple[SizeLink, ...]]
    following: Following
    brought: tuple[Brought, ...]
    parallel: Parallel
    draws: bool

    def line(self, code: str = "") -> str | None:
        """Return the place of a refusal without a line. It is the line that does such things, else
        the beginning of the callable. If the code is torch's, it is the line that calls it."""
        place = loaded_at(self.callee.codes, "checkpoint") if code == "OL116" else None
        if code == "OL105":
            place = argument_changed_at(self.callee.fn)
        place = place or line_of(self.callee.fn, SEEDING if code == "OL106" else None)
        return str(place) if place else user_line()
