"""Random state that a callable saves and sets, on CUDA; see `Rewind`.

The kernels of a graph that draw read a seed and an offset of a generator, and add the numbers that
the capture drew before them. No capture can take a generator back. So numbers drawn after a set
come from another generator, which each launch puts at the place of the save. No capture tells this
place either, so it takes three. The first counts the places where a state is saved or set. The
second gives each stretch between them a generator of its own, and is launched without its nodes.
This moves every generator on by the numbers drawn from it. The third is the recording.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.driver.cuda import nodes
from onelaunch.driver.cuda.streams import bindings, device_index, random_order
from onelaunch.driver.substitutes import UNKNOWN, substituted
from onelaunch.errors import CaptureError
from onelaunch.source import user_frame


@dataclass(slots=True, eq=False)
class _Origin:
    """The state of the default generator at a recording's last launch."""

    seed: int = 0
    offset: int = 0


class _StreamPlace(NamedTuple):
    """A place in a stream of random numbers: a distance from an origin."""

    origin: _Origin
    distance: int


@dataclass(slots=True, eq=False)
class _Saved:
    """A state that a capture saved. The tensor handed out becomes a real state at each launch."""

    state: weakref.ref[Tensor]
    number: int  # its number among the changes of the capture
    place: _StreamPlace | None = None

    def write(self) -> bool:
        """Bring the tensor up to date; False if it is gone."""
        state, place = self.state(), self.place
        if state is None or place is None:
            return False
        words = (ctypes.c_uint64 * 2).from_address(state.data_ptr())
        words[:] = place.origin.seed, place.origin.offset + place.distance
        return True


_Change = Literal["save"] | int | _Saved
"""A change of the random state: a save, or a set. A number is a set to the state that the same
capture saved as its change of that number."""


@dataclass(eq=False)
class CudaRewind:
    """A `Rewind` by three captures; see the module. `after`: the rewind of a recording whose saved
    states may be set."""

    index: int
    after: CudaRewind | None = None
    done: bool = True
    saved: list[_Saved] = field(default_factory=list)
    _origin: _Origin = field(default_factory=_Origin)
    _stage: Literal["count", "measure", "record"] = "count"
    _changes: list[_Change] = field(default_factory=list)
    _expected: list[_Change] = field(default_factory=list)  # the changes of the capture before
    _draws: bool = False  # True if a capture may draw from the default generator
    _drawn: list[int] = field(default_factory=list)
    """Numbers drawn in each stretch, the first before any change."""
    _generators: dict[int, torch.Generator] = field(default_factory=dict)
    """Number of a change -> the generator to draw from after it."""
    _places: list[_StreamPlace] = field(default_factory=list)  # place at which each stretch begins
    _checked: bool = False
    _beyond: int = 0  # numbers by which the stream is further at the end than the default generator

    @property
    def used(self) -> bool:
        return bool(self._changes)

    # The capture.

    def registers(self, draws: bool) -> bool:
        """Tell whether the next capture is to have the default generator. Without draws all places
        are one, and nothing is measured, so that the first capture that `draws` begins anew."""
        if draws and not self._draws:
            self._draws, self._stage, self._expected = True, "count", []
        return self._draws

    def prepare(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the generators that a capture may draw from, before it."""
        self.saved, self._changes = [], []
        numbers = range(len(self._expected))
        if self._stage == "record":
            numbers = [n for n in numbers if self._expected[n] != "save" and self._drawn_after(n)]
        elif self._stage == "count":
            numbers = []
        device = torch.device("cuda", self.index)
        self._generators = {n: torch.Generator(device) for n in numbers}
        for generator in self._generators.values():
            graph.register_generator_state(generator)

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Replace torch's functions while a body runs, on the current stream."""
        default = torch.cuda.default_generators[self.index]
        stream = bindings._cuda_getCurrentRawStream(self.index)
        refused: list[CaptureError] = []

        def here(device: Any = "cuda") -> bool:
            index = device if isinstance(device, int) else device_index(torch.device(device))
            return index == self.index and stream == bindings._cuda_getCurrentRawStream(index)

        def change(what: _Change) -> None:
            number = len(self._changes)
            self._changes.append(what)
            generator = self._generators.get(number)
            if generator is not None:
                default.graphsafe_set_state(generator)

        def save() -> Tensor:
            with torch.inference_mode(False), _disable_current_modes():
                state = torch.empty(16, dtype=torch.uint8, device="cpu")
            # No state until the first launch: an offset is a multiple of 4.
            (ctypes.c_uint64 * 2).from_address(state.data_ptr())[:] = 0, 1
            self.saved.append(_Saved(weakref.ref(state), len(self._changes)))
            change("save")
            return state

        def restore(state: Tensor) -> None:
            for own in self.saved:
                if own.state() is state:
                    return change(own.number)
            for other in [] if self.after is None else self.after.saved:
                if other.state() is state:
                    return change(other)
            place = user_frame()
            refused.append(CaptureError("OL106", UNKNOWN, where=place))
            raise refused[0]

        home = default.graphsafe_get_state()
        host = torch.random.get_rng_state, torch.random.set_rng_state
        on_host = substituted(torch, here, *host)
        on_device = substituted(torch.cuda, here, save, restore)
        with on_host, on_device:
            try:
                yield
            finally:
                default.graphsafe_set_state(home)
            if refused:
                raise refused[0]  # the body caught it

    def finish(self, graph: torch.cuda.CUDAGraph, others: Sequence[torch.Generator]) -> None:
        """Evaluate a capture that saved or set state. The graph of the second loses its nodes.
        `others`: further generators that it draws from."""
        if self._stage != "count" and self._changes != self._expected:
            raise CaptureError("OL106", "random state is saved or set at other places each time")
        if self._stage == "count":
            self.done = False
            if not self._draws:
                self._place([0] * (len(self._changes) + 1))
        elif self._stage == "measure":
            self._measure(graph, others)
        else:
            self.done = True
            for saved in self.saved:
                saved.place = self._places[saved.number + 1]
        if not self.done:
            measures = self._stage == "count" and self._draws
            self._stage = "measure" if measures else "record"
            self._expected = self._changes

    def _measure(self, graph: torch.cuda.CUDAGraph, others: Sequence[torch.Generator]) -> None:
        for node in nodes.handles(graph.raw_cuda_graph()):
            nodes.destroy(node)
        graph.instantiate()
        default = torch.cuda.default_generators[self.index]
        own = [default, *self._generators.values()]
        with random_order(self.index).launch(bindings._cuda_getCurrentRawStream(self.index)):
            before = [g.get_offset() for g in (*own, *others)]
            try:
                super(torch.cuda.CUDAGraph, graph).replay()
                drawn = [g.get_offset() - b for g, b in zip(own, before, strict=False)]
            finally:
                for generator, offset in zip((*own, *others), before, strict=True):
                    generator.set_offset(offset)
        self._place(drawn)

    def _place(self, amounts: list[int]) -> None:
        """Find the places where the stretches begin, by the numbers drawn in each."""
        self._drawn = amounts
        place = _StreamPlace(self._origin, 0)
        self._places = [place]
        for change, drawn in zip(self._changes, self._drawn, strict=False):
            if change == "save":
                place = _StreamPlace(place.origin, place.distance + drawn)
            else:
                at = change.place if isinstance(change, _Saved) else self._places[change + 1]
                assert at is not None
                place = at
            self._places.append(place)
        if place.origin is not self._origin:
            raise CaptureError("OL106", "the random state of an earlier call is left set")
        self._beyond = place.distance + self._drawn[-1] - self._drawn_after(-1)

    def _drawn_after(self, number: int) -> int:
        """Count the numbers drawn after a change, until the next that sets a state."""
        changes = self._expected
        following = range(number + 1, len(changes))
        stop = next((n for n in following if changes[n] != "save"), len(changes))
        return sum(self._drawn[number + 1 : stop + 1])

    # Launches.

    def launch(self, replay: Callable[[], None]) -> bool:
        """Replay, with every generator where its numbers begin. True if the graph needs that."""
        default = torch.cuda.default_generators[self.index]
        origin = self._origin
        origin.seed, origin.offset = default.initial_seed(), default.get_offset()
        for number, generator in self._generators.items():
            place = self._places[number + 1]
            if generator.initial_seed() != place.origin.seed:
                generator.manual_seed(place.origin.seed)
            generator.set_offset(place.origin.offset + place.distance)
        kept = [saved.write() for saved in self.saved]
        own = [default, *self._generators.values()]
        before = [] if self._checked else [g.get_offset() for g in own]
        replay()
        if self._beyond:
            default.set_offset(default.get_offset() + self._beyond)
        if not self._checked:
            self._check(own, before)
        return bool(self._generators or self._beyond) or any(kept)

    def _check(self, own: Sequence[torch.Generator], before: Sequence[int]) -> None:
        """Check after the first launch that it drew as much as was measured."""
        self._checked = True
        drawn, *others = [g.get_offset() - b for g, b in zip(own, before, strict=True)]
        expected = list(map(self._drawn_after, self._generators))
        # Another thread may have drawn from the default one meanwhile.
        if drawn < self._drawn_after(-1) + self._beyond or others != expected:
            what = "random numbers are drawn otherwise each time that the callable is captured"
            raise CaptureError("OL106", what)
