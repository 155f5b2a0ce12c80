"""`CudaRewind` against eager, over a model of torch's CUDA generators."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onelaunch.driver.cuda import graph
from onelaunch.driver.cuda import rewind as module
from onelaunch.driver.cuda.rewind import CudaRewind
from onelaunch.driver.refusals import DrawsAfterAll, drawn_after_all
from onelaunch.driver.substitutes import substituted


class State:
    """`CUDAGeneratorState` of torch 2.11."""

    def __init__(self) -> None:
        self.seed, self.offset, self.inside = 67280421310721, 0, 0
        self.filled = 0, 0  # what the kernels of graphs read


class FakeGenerator:
    def __init__(self, device: Any = None) -> None:
        self.state = State()

    def initial_seed(self) -> int:
        return self.state.seed

    def get_offset(self) -> int:
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        assert offset >= 0
        self.state.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.state.seed, self.state.offset = seed, 0

    def graphsafe_get_state(self) -> FakeGenerator:
        made = FakeGenerator()
        made.state = self.state
        return made

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.state = other.state


class _Base:
    def __init__(self) -> None:
        self.states: dict[State, int] = {}
        self.kernels: list[tuple[State, int]] = []

    def register_generator_state(self, generator: FakeGenerator) -> None:
        self.states[generator.state] = 0

    def replay(self) -> None:
        for state, increment in self.states.items():
            if increment:
                state.filled = state.seed, state.offset
                state.offset += increment

    def instantiate(self) -> None: ...

    def raw_cuda_graph(self) -> int:
        return 0

    def run(self) -> list[tuple[int, int]]:
        """What the kernels draw."""
        return [(s.filled[0], s.filled[1] + at) for s, at in self.kernels]


class FakeGraph(_Base):
    """`torch.cuda.CUDAGraph`."""


class Device:
    """A device with its generator, on which programs run eagerly or are captured."""

    def __init__(self) -> None:
        self.default = FakeGenerator()
        self.capturing: FakeGraph | None = None
        self.captures = 0
        self.drawn: list[tuple[int, int]] = []
        self.torch = SimpleNamespace(
            device=torch.device,
            empty=torch.empty,
            uint8=torch.uint8,
            inference_mode=torch.inference_mode,
            Generator=FakeGenerator,
            get_rng_state=torch.get_rng_state,
            set_rng_state=torch.set_rng_state,
            cuda=SimpleNamespace(
                default_generators=[self.default],
                CUDAGraph=FakeGraph,
                get_rng_state=self.eager_save,
                set_rng_state=self.eager_set,
            ),
            random=torch.random,
        )

    def eager_save(self, device: Any = "cuda") -> torch.Tensor:
        state = torch.empty(2, dtype=torch.int64)
        state[0], state[1] = self.default.state.seed, self.default.state.offset
        return state.view(torch.uint8)

    def eager_set(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        seed, offset = new_state.view(torch.int64).tolist()
        self.default.state.seed = seed
        self.default.set_offset(offset)

    def draw(self, n: int) -> None:
        amount = n + 1
        state = self.default.state
        if self.capturing is not None:
            if state not in self.capturing.states:
                raise drawn_after_all(None)
            self.capturing.kernels.append((state, state.inside))
            state.inside += 4 * amount
        else:
            self.drawn.append((state.seed, state.offset))
            state.offset += 4 * amount

    def capture(self, body: Callable[[], None], rewind: CudaRewind, draws: bool) -> FakeGraph:
        """As `record` and `CudaDriver.capture` do."""
        made = FakeGraph()
        registered = rewind.registers(draws)
        rewind.prepare(made)  # type: ignore[arg-type]
        home = self.default.state
        made.states[home if registered else State()] = 0
        for state in made.states:
            state.inside, state.filled = 0, (state.seed, 0)
        self.capturing = made
        try:
            with rewind.capturing():
                body()
        finally:
            self.capturing = None
        assert self.default.state is home
        for state in made.states:
            made.states[state] = state.inside
        if rewind.used:
            rewind.finish(made, ())  # type: ignore[arg-type]
        return made

    def recorded(self, body: Callable[[], None], after: CudaRewind | None = None) -> Recording:
        rewind, draws = CudaRewind(0, after), False
        self.captures = 0
        for _ in range(6):
            self.captures += 1
            try:
                made = self.capture(body, rewind, draws)
            except DrawsAfterAll:
                assert not draws
                draws = True
                continue
            if rewind.done:
                return Recording(self, made, rewind, draws)
        raise AssertionError("captured without end")


class Recording:
    """A graph with `graph._bind`'s choice between the two ways to launch it."""

    def __init__(self, device: Device, made: FakeGraph, rewind: CudaRewind, draws: bool) -> None:
        self.device, self.graph, self.rewind = device, made, rewind
        used = rewind if rewind.used else None
        self.replay = graph._random_replay(made, 0, (), used)  # type: ignore[arg-type]
        self.random: bool | None = None if draws or used else False

    def launch(self) -> None:
        if self.random is not False:
            self.random = self.replay(0, self.random)
        self.device.drawn += self.graph.run()


@contextmanager
def model() -> Generator[Device]:
    device = Device()

    @contextmanager
    def launch(raw: int) -> Generator[None]:
        yield

    order = SimpleNamespace(launch=launch, lock=threading.RLock(), last=0, marked=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", device.torch)
        patch.setattr(graph, "torch", device.torch)
        patch.setattr(module, "bindings", SimpleNamespace(_cuda_getCurrentRawStream=lambda i: 0))
        patch.setattr(module, "random_order", lambda i: order)
        patch.setattr(graph, "random_order", lambda i: order)
        patch.setattr(module, "device_index", lambda d: d.index or 0)
        patch.setattr(module, "nodes", SimpleNamespace(handles=lambda g: [], destroy=None))
        yield device


Op = tuple[str, int]
ops: st.SearchStrategy[list[Op]] = st.lists(
    st.tuples(st.sampled_from(["draw", "save", "set", "drop"]), st.integers(0, 3)), max_size=12
)


def run(device: Device, program: list[Op], saved: list[Any]) -> None:
    """Runs `program`, which sets states that it saved itself."""
    cuda = device.torch.cuda
    for what, n in program:
        if what == "draw":
            device.draw(n)
        elif what == "save":
            saved.append(cuda.get_rng_state())
        elif what == "set" and saved:
            cuda.set_rng_state(saved[n % len(saved)])
        elif what == "drop" and saved:
            del saved[n % len(saved)]


between = st.lists(st.tuples(st.sampled_from(["draw", "seed"]), st.integers(0, 5)), max_size=2)


def disturb(device: Device, things: list[Op]) -> None:
    for what, n in things:
        if what == "draw":
            device.draw(n)
        else:
            device.default.manual_seed(n)


@settings(deadline=None, max_examples=200)
@given(ops, st.lists(between, min_size=2, max_size=5))
@example([("save", 0), ("draw", 1), ("set", 0)], [[("seed", 1)], [("seed", 2)]])
def test_one_recording(program: list[Op], calls: list[list[Op]]) -> None:
    with model() as device:
        eager = Device()
        fast = device.recorded(lambda: run(device, program, []))
        for things in calls:
            disturb(device, things)
            disturb(eager, things)
            fast.launch()
            run(eager, program, [])
            assert device.drawn == eager.drawn
            assert device.default.state.offset == eager.default.state.offset
            assert device.default.state.seed == eager.default.state.seed


@pytest.mark.parametrize("kind", ["nothing", "draws", "own generator", "saved states"])
def test_what_draws_nothing_is_launched_without_a_generator(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked: list[bool | None] = []

    def random_replay(*_: Any) -> Callable[[int, bool | None], bool]:
        return lambda stream, random: bool(asked.append(random))

    with model() as device:
        order = SimpleNamespace(lock=threading.RLock(), last=0, marked=False)
        pool: Any = SimpleNamespace(index=0, order=order, ranges=None, guard=order.lock)
        made: Any = SimpleNamespace(graph=FakeGraph(), inputs=[], outputs=[], draws=kind == "draws")
        monkeypatch.setattr(graph, "_random_replay", random_replay)
        monkeypatch.setattr(graph, "_plain_replay", lambda made, index: lambda stream: None)
        monkeypatch.setattr(graph, "bindings", module.bindings)
        generators: Any = [FakeGenerator()] if kind == "own generator" else []
        rewind = CudaRewind(0) if kind == "saved states" else None
        launch, _ = graph._bind(made, pool, graph.Wiring(), generators, rewind)
        at = device.default.state.offset
        for _ in range(2):
            launch((), ())
        assert asked == ([] if kind == "nothing" else [None])
        assert device.default.state.offset == at


def test_without_draws_nothing_is_measured() -> None:
    with model() as device:
        fast = device.recorded(lambda: run(device, [("save", 0), ("set", 0)], []))
        assert device.captures == 2
        device.draw(1)
        at = device.default.state.offset
        fast.launch()
        assert device.default.state.offset == at


def test_draws_that_begin_in_a_later_capture() -> None:
    programs: list[list[Op]] = [
        [("save", 0), ("set", 0)],
        [("save", 0), ("draw", 1), ("set", 0), ("draw", 2)],
    ]
    with model() as device:
        eager = Device()
        attempts = itertools.count()
        fast = device.recorded(lambda: run(device, programs[min(next(attempts), 1)], []))
        assert device.captures == 5
        for _ in range(2):
            fast.launch()
            run(eager, programs[1], [])
            assert device.drawn == eager.drawn
            assert device.default.state.offset == eager.default.state.offset


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_forward_and_its_backwards(data: st.DataObject) -> None:
    """A backward sets states of its forward, and puts its own back (`fork_rng`)."""
    forward = data.draw(ops, "forward")
    sets = data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.lists(ops, min_size=1, max_size=2)), max_size=3),
        "backward",
    )
    calls = data.draw(
        st.lists(st.tuples(between, between, st.integers(0, 2)), min_size=1, max_size=4), "calls"
    )

    kept = [op for op in forward if op[0] != "drop"]

    def forward_of(device: Device, states: list[Any]) -> None:
        states.clear()
        run(device, kept, states)

    def backward_of(device: Device, states: list[Any]) -> Callable[[], None]:
        def backward() -> None:
            cuda = device.torch.cuda
            for n, programs in sets:
                home = cuda.get_rng_state()
                for i, program in enumerate(programs):
                    if states and i < 1:
                        cuda.set_rng_state(states[n % len(states)])
                    run(device, program, [])
                cuda.set_rng_state(home)
                if n % 2:
                    device.draw(n)

        return backward

    with model() as device:
        eager = Device()
        fast_states: list[Any] = []
        slow_states: list[Any] = []
        fast = device.recorded(lambda: forward_of(device, fast_states))
        fast_backward, slow_backward = None, backward_of(eager, slow_states)
        for first, second, times in calls:
            disturb(device, first), disturb(eager, first)
            fast.launch()
            forward_of(eager, slow_states)
            for _ in range(times):
                disturb(device, second), disturb(eager, second)
                if fast_backward is None:
                    fast_backward = device.recorded(backward_of(device, fast_states), fast.rewind)
                fast_backward.launch()
                slow_backward()
            assert device.drawn == eager.drawn
            assert device.default.state.offset == eager.default.state.offset
            assert device.default.state.seed == eager.default.state.seed
            for a, b in zip(fast_states, slow_states, strict=True):
                assert torch.equal(a, b)


def test_captures_of_two_drivers_may_end_in_any_order() -> None:
    own = torch.get_rng_state
    states = [torch.zeros(1), torch.ones(1)]
    here = [True, False]
    contexts = [
        substituted(torch, lambda i=i: here[i], lambda i=i: states[i], lambda _: None)
        for i in range(2)
    ]
    for context in contexts:
        context.__enter__()
    assert torch.get_rng_state() is states[0]
    here[:] = False, True
    assert torch.get_rng_state() is states[1]
    contexts[0].__exit__(None, None, None)
    assert torch.get_rng_state() is states[1]
    here[:] = False, False
    assert torch.equal(torch.get_rng_state(), own())
    contexts[1].__exit__(None, None, None)
    assert torch.get_rng_state is own
