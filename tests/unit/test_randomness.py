"""What a capture on a device with generators of its own sees of the host's random state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onelaunch.driver.seeding import seeded_once


class Seeded(Exception):
    pass


def nothing() -> None:
    """What a body that draws nothing repeats."""


@pytest.mark.parametrize("act", [lambda: torch.manual_seed(1), torch.seed], ids=["set", "any"])
def test_a_seeding_is_seen_each_time(act: Callable[[], object]) -> None:
    for _ in range(3):
        state = torch.get_rng_state()
        with pytest.raises(Seeded), seeded_once(Seeded, nothing):
            act()
        assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_told_from_seedings() -> None:
    def draw() -> None:
        torch.rand([])
        torch.randn(3)

    state = torch.get_rng_state()
    with seeded_once(Seeded, draw):
        draw()
    with pytest.raises(Seeded), seeded_once(Seeded, nothing):
        draw()
    assert torch.equal(torch.get_rng_state(), state)


def test_reading_the_seed_is_no_seeding() -> None:
    seed = torch.initial_seed()
    state = torch.get_rng_state()
    with seeded_once(Seeded, nothing):
        assert torch.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seeding_is_seen_under_any_default_device() -> None:
    """Even where it leaves the state as it was: a number of the host's is drawn before."""
    torch.manual_seed(1)
    with torch.device("meta"), pytest.raises(Seeded), seeded_once(Seeded, nothing):
        torch.manual_seed(1)
