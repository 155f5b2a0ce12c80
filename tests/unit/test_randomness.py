"""What a capture on a device with generators of its own makes of the host's random state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, manual_seed
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.driver.aten import operator
from onelaunch.driver.host_generator import watching_host_generator
from onelaunch.errors import CaptureError


class Admitting(TorchDispatchMode):
    """Notes draws as `Admission` does."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Callable[[], object]] = []
        self.host_state: Tensor | None = None
        self.noted: list[CaptureError] = []

    def note(self, error: CaptureError) -> CaptureError:
        self.noted.append(error)
        return error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator(func).random:
            if self.host_state is None:
                self.host_state = torch.default_generator.get_state()
            self.draws.append(partial(func, *args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def run() -> Generator[Admitting]:
    driver: Any = SimpleNamespace(capturing=lambda: False)
    admitting = Admitting()
    watched = watching_host_generator(driver, admitting, admitting.note, lambda code: "a line")
    with watched, admitting:
        yield admitting


def in_a_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "act",
    [
        lambda: torch.manual_seed(1),
        lambda: manual_seed(1),
        lambda: torch.random.manual_seed(1),
        lambda: torch.cuda.manual_seed_all(1),
    ],
    ids=["torch", "imported", "module", "cuda"],
)
def test_a_seeding_is_refused_each_time(act: Callable[[], object]) -> None:
    """Even where it would leave the state as it is."""
    torch.manual_seed(1)
    own = torch.cuda.manual_seed_all
    for _ in range(3):
        state = torch.get_rng_state()
        with pytest.raises(CaptureError) as caught, run() as noted:
            act()
        assert caught.value.code == "OL106"
        assert "test_randomness.py" in str(caught.value.where)
        assert caught.value in noted.noted
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.cuda.manual_seed_all is own


def test_another_thread_may_seed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with run() as noted:
        in_a_thread(partial(torch.manual_seed, 1))
    assert not noted.noted
    assert torch.equal(torch.rand(3), expected)


def draw() -> None:
    torch.rand([])
    torch.randn(3)
    torch.empty(3).normal_()
    torch.bernoulli(torch.full((3,), 0.5))
    torch.randperm(4)


def test_draws_are_taken_back() -> None:
    state = torch.get_rng_state()
    with run() as noted:
        draw()
    assert len(noted.draws) == 5
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_of_a_run_that_fails_are_taken_back() -> None:
    def fail() -> None:
        draw()
        raise KeyError

    state = torch.get_rng_state()
    with pytest.raises(KeyError), run():
        fail()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draws", [False, True])
def test_draws_of_another_thread_stay(draws: bool) -> None:
    torch.manual_seed(3)
    with run():
        if draws:
            torch.rand(3)
        in_a_thread(draw)
    left = torch.get_rng_state()
    torch.manual_seed(3)
    if draws:
        torch.rand(3)
    draw()
    assert torch.equal(torch.get_rng_state(), left)


def test_reading_the_seed_is_no_seeding() -> None:
    seed, state = torch.initial_seed(), torch.get_rng_state()
    with run():
        assert torch.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fork_that_draws_nothing_is_no_seeding() -> None:
    """As a checkpoint makes it. Another thread draws in it, and keeps its numbers."""
    torch.manual_seed(3)
    with run():
        first = torch.get_rng_state()
        torch.rand(2)
        with torch.random.fork_rng([]):
            in_a_thread(draw)
        with torch.random.fork_rng([]):
            torch.set_rng_state(first)
    left = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(2)
    draw()
    assert torch.equal(torch.get_rng_state(), left)


def goes_back() -> None:
    first = torch.get_rng_state()
    torch.rand(2)
    torch.set_rng_state(first)


def draws_in_a_fork() -> None:
    with torch.random.fork_rng([]):
        torch.rand(2)


def draws_again() -> None:
    first = torch.get_rng_state()
    torch.rand(2)
    with torch.random.fork_rng([]):
        torch.set_rng_state(first)
        torch.rand(2)


@pytest.mark.parametrize("act", [goes_back, draws_in_a_fork, draws_again])
def test_a_state_that_draws_have_left_is_refused(act: Callable[[], None]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"OL106.*have left"), run():
        act()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_of_before_is_refused() -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="not saved in the call"), run():
        torch.set_rng_state(state)


def test_draws_under_any_default_device() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"), run() as noted:
        torch.rand(3, device="cpu")
    assert noted.draws
    assert torch.equal(torch.get_rng_state(), state)
