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
    """A callable and how a call of it is to be captured."""

    driver: Driver
    device: torch.device
    pool: DevicePool  # of the recording's memory
    apart: Callable[[], DevicePool]  # makes a device pool that no other recording uses
    callee: Callee
    reached: ReachableState  # the state that the callable reaches
    static_outputs: bool  # whether results stay in the recording's memory
    in_place: InPlace | None  # the memory of the caller that kernels are to reach, where they can
    asking: CaptureAnswer
    earlier: Ledger | None  # the operations of the run before, to compare with
    differed_in_a_row: int | None  # captures that differed; None: differences are not refused
    shrinks: bool  # whether state that grows was seen to be small again
    accesses: CompiledAccesses | None
    """The reads and writes of an eager run, for code whose operations cannot be watched."""
    forward: Forward | None  # the autograd side of the capture, if the results require grad
    given: Callable[[Callable[..., Any], torch.device], Callable[..., Any]]
    """A function of the callable and the device: the callable as the capture runs it."""
    varying: Mapping[int, Varying]
    """Argument index -> how an argument that may be smaller in a call varies."""
    follows: Sequence[tuple[SizeLink, ...]]
    """Dimensions of each tensor of the result that follow sizes of arguments."""
    following: Following
    """Numbers that the caller was seen to vary, or the callable to move on, without constants."""
    brought: tuple[Brought, ...]  # state that the caller replaces between calls: inputs
    parallel: Parallel  # see `Driver.capture`
    draws: bool  # whether a run has drawn from the device's default generator

    def line(self, code: str = "") -> str | None:
        """Return the place of a refusal without a line. It is the line that does such things, else
        the beginning of the callable. If the code is torch's, it is the line that calls it."""
        place = loaded_at(self.callee.codes, "checkpoint") if code == "OL116" else None
        if code == "OL105":
            place = argument_changed_at(self.callee.fn)
        place = place or line_of(self.callee.fn, SEEDING if code == "OL106" else None)
        return str(place) if place else user_line()
