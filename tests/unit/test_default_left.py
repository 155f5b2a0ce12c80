"""The default generator while a capture that draws nothing begins, over a model of torch 2.11."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onelaunch.driver.cuda import capture as capturing
from onelaunch.driver.cuda import generators as module
from onelaunch.driver.cuda.capture import CudaRecorder
from onelaunch.driver.refusals import DrawsAfterAll
from onelaunch.errors import CaptureError


class State:
    """`CUDAGeneratorState`."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset, self.capturing = seed, offset, False


class FakeGenerator:
    """`CUDAGeneratorImpl`; other threads run before each of its methods."""

    def __init__(self, state: State, others: Callable[[], None]) -> None:
        self.state, self._others = state, others

    def initial_seed(self) -> int:
        self._others()
        return self.state.seed

    def manual_seed(self, seed: int) -> None:
        self._others()
        self.state.seed, self.state.offset = seed, 0

    def get_offset(self) -> int:
        self._others()
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        self._others()
        self.state.offset = offset

    def clone_state(self) -> FakeGenerator:
        self._others()
        return FakeGenerator(State(self.state.seed, self.state.offset), self._others)

    def graphsafe_get_state(self) -> FakeGenerator:
        self._others()
        return FakeGenerator(self.state, self._others)

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self._others()
        self.state = other.state


class World:
    """A device with its default generator, and threads that draw from it eagerly.

    Args:
        at: the steps at which another thread draws.
        act: what it does, if it does not draw.
    """

    index = 0

    def __init__(self, at: set[int], act: Callable[[World], None] | None = None) -> None:
        self.default = FakeGenerator(State(7, 100), self.others)
        self.own = self.default.state
        self.at, self.act, self.step = at, act or World.draw, 0
        self.drawn: list[tuple[int, int]] = []
        self.registered: State | None = None
        self.guard = contextlib.nullcontext()
        self.listed = self.open = lambda: None

    def others(self) -> None:
        self.step += 1
        if self.step in self.at:
            self.act(self)

    def draw(self) -> None:
        state = self.default.state
        if state.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.drawn.append((state.seed, state.offset))
        state.offset += 4

    def seed(self) -> None:
        self.default.state.seed, self.default.state.offset = 9, 0

    def capture_begin(self, **_: Any) -> None:
        """As `CUDAGraph`: the operations come between what it does."""
        self.others()
        self.registered = state = self.default.state
        made = torch.empty(1)
        state.capturing = True
        made.fill_(state.seed)


def begin(monkeypatch: pytest.MonkeyPatch, world: World, draws: bool = False) -> None:
    cuda = SimpleNamespace(
        default_generators=[world.default], is_current_stream_capturing=lambda: False
    )
    faked = SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode)
    monkeypatch.setattr(module, "torch", faked)
    monkeypatch.setattr(module, "SHARED", True)
    graph: Any = world
    pool: Any = world
    stream: Any = world
    capturing._begin(graph, pool, stream, (), draws)


def steps(monkeypatch: pytest.MonkeyPatch) -> int:
    world = World(set())
    begin(monkeypatch, world)
    return world.step


def test_the_graph_gets_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())
    begin(monkeypatch, world)
    assert world.default.state is world.own
    assert world.registered is not world.own
    assert not world.own.capturing
    world.draw()
    assert world.drawn == [(7, 100)]


def test_the_graph_of_what_draws_gets_the_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())
    begin(monkeypatch, world, draws=True)
    assert world.registered is world.default.state is world.own


def test_another_thread_draws_at_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number comes twice or is lost, and none is drawn from a state under capture."""
    count = steps(monkeypatch)
    assert count > 8
    for at in range(1, count + 3):
        world = World({at})
        begin(monkeypatch, world)
        assert world.default.state is world.own
        world.draw()
        world.draw()
        assert world.drawn == [(7, 100 + 4 * i) for i in range(len(world.drawn))], at
        assert len(world.drawn) == 2 + (at <= world.step), at


def test_another_thread_seeds_while_a_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())

    def begins(**_: Any) -> None:
        world.seed()
        world.draw()
        World.capture_begin(world)

    monkeypatch.setattr(world, "capture_begin", begins)
    begin(monkeypatch, world)
    world.draw()
    assert world.default.state is world.own
    assert world.drawn == [(9, 0), (9, 4)]


def test_an_interrupt_as_a_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes once the graph has the state: torch would end the process with a graph that is
    registered by half."""
    left: list[str] = []
    monkeypatch.setattr(capturing, "_is_capturing", lambda stream: stream.registered)
    for name in ("_recover", "_forget"):
        monkeypatch.setattr(capturing, name, lambda *given, name=name: left.append(name))

    def interrupt(world: World) -> None:
        raise KeyboardInterrupt

    for at in range(1, steps(monkeypatch) + 1):
        world = World({at}, interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin(monkeypatch, world)
        assert world.default.state is world.own
        assert world.registered is None or world.registered.capturing
    assert set(left) == {"_recover", "_forget"}


def test_a_capture_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(set())

    def fails(**_: Any) -> None:
        raise RuntimeError("no")

    left: list[bool] = []
    monkeypatch.setattr(world, "capture_begin", fails)
    monkeypatch.setattr(capturing, "_forget", lambda begun: left.append(begun.draws))
    with pytest.raises(RuntimeError, match="no"):
        begin(monkeypatch, world)
    assert left == [False]
    assert world.default.state is world.own


@pytest.mark.parametrize("draws", [False, True])
def test_a_draw_that_torch_refuses(draws: bool) -> None:
    """A further attempt has the generator; where it had, the device's refusal stays."""
    message = "Attempt to increase offset for a CUDA generator not in capture mode."

    def body(recorder: CudaRecorder) -> None:
        raise RuntimeError(message)

    none: Any = None
    with pytest.raises(CaptureError) as caught:
        capturing._run(body, CudaRecorder(none, draws=draws), none, none)
    assert isinstance(caught.value, DrawsAfterAll) is not draws
