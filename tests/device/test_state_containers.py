"""Containers of tensors that each call replaces as a whole, such as the state of an LSTM."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

Named = collections.namedtuple("Named", "h c")


@dataclasses.dataclass
class Record:
    h: Tensor
    c: Tensor


BUILDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda h, c: (h, c),
    "list": lambda h, c: [h, c],
    "dict": lambda h, c: {"h": h, "c": c},
    "named": Named,
    "dataclass": Record,
    "nested": lambda h, c: ((h,), {"c": [c]}),
    "with a number": lambda h, c: (h, c, 7, None),
}


def parts(state: Any) -> tuple[Tensor, Tensor]:
    if isinstance(state, dict):
        return state["h"], state["c"]
    if isinstance(state, Record):
        return state.h, state.c
    if isinstance(state[0], tuple):
        return state[0][0], state[1]["c"][0]
    return state[0], state[1]


class Recurrent(nn.Module):
    """An LSTM with a state of its own, made at its first call."""

    def __init__(self, build: str) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)
        self.build = build
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            zeros = x.new_zeros(x.shape[0], 5)
            self.state = BUILDS[self.build](zeros, zeros)
        self.state = BUILDS[self.build](*self.cell(x, parts(self.state)))
        return parts(self.state)[0] * 2


def pair_of(build: str, device: torch.device) -> tuple[Recurrent, Recurrent]:
    torch.manual_seed(0)
    model, eager = Recurrent(build).to(device), Recurrent(build).to(device)
    eager.load_state_dict(model.state_dict())
    return model, eager


def same_states(one: Recurrent, other: Recurrent) -> None:
    assert type(one.state) is type(other.state)
    if one.state is not None:
        assert_same(parts(one.state), parts(other.state))


@pytest.mark.parametrize("build", BUILDS)
def test_a_state_in_a_container(build: str, device: torch.device, rand: Rand) -> None:
    """It is reset, saved and put back by the caller, and held on to; batches have two sizes."""
    model, eager = pair_of(build, device)
    fast, saved, held = ol.graph(model), {}, list[tuple[Any, Tensor]]()
    with torch.no_grad():
        for i in range(30):
            n = 3 if i < 20 else 2
            for m in (model, eager):
                if i in (9, 20):
                    m.state = None
                if i == 12:
                    saved[m] = m.state
                if i == 16:
                    m.state = saved[m]
            assert_same(fast(rand(i, n, 4)), eager(rand(i, n, 4)))
            same_states(model, eager)
            held.append((model.state, parts(model.state)[0].clone()))
    for state, h in held:
        assert_same(parts(state)[0], h)  # no later call wrote to it
    assert len({id(state) for state, _ in held}) == len(held)
    assert replays(fast) >= 18
    assert len(fast.recordings) <= 3


@pytest.mark.parametrize("build", ["tuple", "dict"])
def test_compiled(build: str, device: torch.device, rand: Rand) -> None:
    """What the new container holds is no state that the call made for the first time."""
    model, eager = pair_of(build, device)
    fast = ol.graph(model, compile=True)
    with torch.no_grad():
        for i in range(10):
            torch.testing.assert_close(fast(rand(i, 3, 4)), eager(rand(i, 3, 4)))
            torch.testing.assert_close(parts(model.state), parts(eager.state))
    assert replays(fast) >= 5


def test_states_of_agents_that_take_turns(device: torch.device, rand: Rand) -> None:
    model, eager = pair_of("tuple", device)
    fast = ol.graph(model)
    states: dict[Recurrent, list[Any]] = {model: [None, None], eager: [None, None]}
    with torch.no_grad():
        for i in range(24):
            for m, call in ((model, fast), (eager, eager)):
                m.state = states[m][i % 2]
                result = call(rand(i, 3, 4))
                states[m][i % 2] = m.state
                states.setdefault(m, []).append(result)
            assert_same(states[model].pop(), states[eager].pop())
    assert replays(fast) >= 16


def test_one_tensor_twice_in_it(device: torch.device, rand: Rand) -> None:
    """As at first, when both are the same zeros; later they are two tensors."""
    weight = rand(99, 4, 4)
    ours: dict[str, Any] = {"state": (rand(0, 3, 4),) * 2}
    eagers: dict[str, Any] = {"state": (rand(0, 3, 4),) * 2}

    def step(x: Tensor, of: dict[str, Any]) -> Tensor:
        a, b = of["state"]
        of["state"] = (a @ weight).tanh() + x, b + 1
        return a + b

    fast = ol.graph(lambda x: step(x, ours))
    with torch.no_grad():
        for i in range(20):
            if i in (7, 13):
                ours["state"], eagers["state"] = (rand(i, 3, 4),) * 2, (rand(i, 3, 4),) * 2
            x = rand(100 + i, 3, 4)
            assert_same(fast(x), step(x, eagers))
            assert_same(ours["state"], eagers["state"])
    assert replays(fast) >= 8


def test_its_build_changes(device: torch.device, rand: Rand) -> None:
    """More tensors, another class, another number in it."""
    states: list[Callable[[Tensor], Any]] = [
        lambda t: (t, t + 1),
        lambda t: [t, t + 1],
        lambda t: (t, t + 1, t + 2),
        lambda t: {"a": t, "k": 2},
        lambda t: {"a": t, "k": 3},
    ]

    def step(x: Tensor, of: dict[str, Any]) -> Tensor:
        state = of["state"]
        if isinstance(state, dict):
            of["state"] = {"a": state["a"] * state["k"] + x, "k": state["k"]}
            return state["a"] * 1
        of["state"] = type(state)(t * 0.5 + x for t in state)
        return sum(state[1:], state[0])

    ours, eagers = dict[str, Any](), dict[str, Any]()
    fast = ol.graph(lambda x: step(x, ours))
    with torch.no_grad():
        for i in range(60):
            if i % 6 == 0:
                build = states[i // 6 % len(states)]
                ours["state"], eagers["state"] = build(rand(i, 3)), build(rand(i, 3))
            x = rand(100 + i, 3)
            assert_same(fast(x), step(x, eagers))
            assert_same(ours["state"], eagers["state"])
    assert replays(fast) >= 20


def test_two_places_of_one_container(device: torch.device, rand: Rand) -> None:
    """A callable that reads the old one elsewhere gets the old one."""

    class Agent:
        def __init__(self) -> None:
            self.now: Any = (rand(0, 3), rand(1, 3))
            self.before: Any = self.now

        def step(self, x: Tensor) -> Tensor:
            old, self.before = self.before, self.now
            self.now = (self.now[0] + x, self.now[1] * 2 - x)
            return old[0] + self.now[1] + self.before[1]

    one, other = Agent(), Agent()
    fast = ol.graph(one.step)
    with torch.no_grad():
        for i in range(20):
            x = rand(10 + i, 3)
            assert_same(fast(x), other.step(x))
            assert_same([one.now, one.before], [other.now, other.before])
            assert (one.before is one.now) == (other.before is other.now)


def test_a_training_step_over_a_detached_state(device: torch.device, rand: Rand) -> None:
    """Truncated backpropagation: the state of the last batch, without its graph."""
    torch.manual_seed(0)
    found: list[list[Tensor]] = []
    for graphed in (False, True):
        torch.manual_seed(1)
        cell, head = nn.LSTMCell(4, 5).to(device), nn.Linear(5, 1).to(device)
        weights = [*cell.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.05)
        of: dict[str, Any] = {"state": (rand(0, 3, 5) * 0, rand(1, 3, 5) * 0)}

        def step(x: Tensor, y: Tensor) -> Tensor:
            h, c = cell(x, of["state"])  # noqa: B023
            loss = (head(h) - y).square().mean()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            of["state"] = (h.detach(), c.detach())  # noqa: B023
            return loss.detach()

        call: Any = ol.graph(step) if graphed else step
        rows = [call(rand(2 * i, 3, 4), rand(2 * i + 1, 3, 1)) for i in range(12)]
        found.append([*rows, *weights, *of["state"]])
        if graphed:
            assert replays(call) >= 8
    torch.testing.assert_close(found[1], found[0])


def test_a_forward_and_a_backward_over_a_state(device: torch.device, rand: Rand) -> None:
    model, eager = pair_of("tuple", device)
    fast = ol.graph(model)
    for i in range(12):
        grads: list[list[Tensor | None]] = []
        for m, call in ((model, fast), (eager, eager)):
            if m.state is not None:
                m.state = tuple(t.detach() for t in m.state)
            m.zero_grad()
            call(rand(i, 3, 4)).square().sum().backward()
            grads.append([p.grad for p in m.parameters()])
        torch.testing.assert_close(grads[0], grads[1])
        torch.testing.assert_close(parts(model.state), parts(eager.state))


class Request:
    """What a request keeps from call to call, an argument of each."""

    def __init__(self, build: str, zeros: Tensor) -> None:
        self.state: Any = BUILDS[build](zeros, zeros + 1)


@pytest.mark.parametrize("build", BUILDS)
def test_requests_one_after_the_other(build: str, device: torch.device, rand: Rand) -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(4, 5).to(device)

    def step(x: Tensor, request: Request) -> Tensor:
        request.state = BUILDS[build](*cell(x, parts(request.state)))
        return parts(request.state)[0] * 2

    fast = ol.graph(step)
    with torch.no_grad():
        for number in range(5):
            zeros = rand(number, 3, 5) * 0
            mine, theirs = Request(build, zeros), Request(build, zeros)
            for i in range(8):
                x = rand(10 * number + i, 3, 4)
                assert_same(fast(x, mine), step(x, theirs))
                assert_same(parts(mine.state), parts(theirs.state))
                if i == 5:  # the caller reads it, and gives it another
                    mine.state = BUILDS[build](*(t * 2 for t in parts(mine.state)))
                    theirs.state = BUILDS[build](*(t * 2 for t in parts(theirs.state)))
    assert replays(fast) >= 8


def test_a_list_that_the_call_makes_anew_and_the_caller_extends(rand: Rand) -> None:
    """No tensor is in it at first, so that no replay stores it."""
    ours: dict[str, Any] = {"items": [1]}
    eagers: dict[str, Any] = {"items": [1]}

    def step(x: Tensor, of: dict[str, Any]) -> Tensor:
        of["items"] = [t * 0.5 + x if isinstance(t, Tensor) else t for t in of["items"]]
        return x + len(of["items"])

    fast = ol.graph(lambda x: step(x, ours), warmup=1)
    with torch.no_grad():
        for i in range(12):
            if i in (4, 9):
                for of in (ours, eagers):
                    of["items"].append(rand(50 + i, 3) if i == 4 else 7)
            assert_same(fast(rand(i, 3)), step(rand(i, 3), eagers))
            assert_same(ours["items"], eagers["items"])
    assert replays(fast) >= 5


def test_recordings_of_two_builds_in_turn(rand: Rand) -> None:
    """The guard of one is not the other's."""
    ours: dict[str, Any] = {"items": [1]}

    def step(x: Tensor) -> Tensor:
        ours["items"] = list(ours["items"])
        return x * len(ours["items"]) + ours["items"][-1]

    fast = ol.graph(step, warmup=1)
    with torch.no_grad():
        for i in range(16):
            ours["items"] = [[1], [1, 7]][i // 3 % 2]
            assert_same(fast(rand(i, 3)), rand(i, 3) * (1 + i // 3 % 2) + [1, 7][i // 3 % 2])
    assert replays(fast) >= 6


def test_a_container_that_is_written_before_it_is_replaced(rand: Rand) -> None:
    ours, eagers = ({"pair": [rand(0, 3), [rand(1, 3)], 0]} for _ in range(2))

    def step(x: Tensor, of: dict[str, Any]) -> Tensor:
        pair = of["pair"]
        pair[1][0] = x * 2
        of["pair"] = [pair[0] + x, [pair[1][0] * 0.5], 0]
        return pair[0] + pair[1][0]

    fast = ol.graph(lambda x: step(x, ours), warmup=1, on_refusal="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(12):
            assert_same(fast(rand(i, 3)), step(rand(i, 3), eagers))
            assert_same(ours["pair"], eagers["pair"])
