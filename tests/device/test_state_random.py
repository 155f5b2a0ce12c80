"""Table of state: random values and the position of the stream."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in_worlds, on_cpu_and_cuda, replays


def run_seeded(f: Any, arguments: Callable[[int], tuple[Any, ...]], device: torch.device) -> Any:
    torch.manual_seed(11)
    with torch.no_grad():
        results = [f(*arguments(i)) for i in range(6)]
        return results, torch.rand(4, device=device), torch.rand(4)


RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape, device=x.device),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "uniform_ input": lambda x: x.uniform_(),
    "randint": lambda x: torch.randint(0, 9, x.shape, device=x.device),
    "exponential": lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1),
    "several": lambda x: (torch.rand_like(x), torch.randn_like(x) + torch.rand_like(x)),
    "randperm": lambda x: torch.randperm(8, device=x.device),
    # As `wav2vec2` does for each layer, in evaluation too.
    "the host's, unused": lambda x: (torch.rand([]), torch.randn(3), x * 2)[2],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_and_position_equal_eager(
    device: torch.device, rand: Rand, name: str
) -> None:
    f = RANDOM[name]
    fast = ol.graph(f, warmup=2)
    expected = run_seeded(f, lambda i: (rand(i, 4, 5),), device)
    assert_same(run_seeded(fast, lambda i: (rand(i, 4, 5),), device), expected)
    first = replays(fast)
    assert first >= 3
    # Seeded again, all by replays now.
    assert_same(run_seeded(fast, lambda i: (rand(i, 4, 5),), device), expected)
    assert replays(fast) == first + 6
    assert len(fast.recordings) == 1


def test_draws_that_no_warm_up_has_shown(device: torch.device, rand: Rand) -> None:
    """The first attempt at a capture leaves the generator to other threads, and the next has it."""

    class Noise(torch.nn.Module):
        share = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x * 2, self.share)

    found: list[list[Tensor]] = []
    for graphed in (False, True):
        noise = Noise()
        call: Any = ol.graph(noise, warmup=1) if graphed else noise
        torch.manual_seed(3)
        with torch.no_grad():
            found.append([call(rand(0, 5))])
            noise.share = 0.5
            found[-1] += [call(rand(i, 5)) for i in range(6)]
            found[-1].append(torch.rand(2, device=device))
        if graphed:
            assert replays(call) > 3
    assert_same(found[1], found[0])


def test_dropout_differs_from_call_to_call(rand: Rand) -> None:
    fast = ol.graph(lambda x: torch.nn.functional.dropout(x, 0.5, True), warmup=1)
    x = rand(0, 64)
    with torch.no_grad():
        results = [fast(x).cpu() for _ in range(6)]
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.rand(x.shape, device=x.device, generator=generator)


@on_cpu_and_cuda
def test_a_generator_of_the_closure(device: torch.device, rand: Rand) -> None:
    """The default one stays as it is."""

    def world() -> Any:
        generator = torch.Generator(device).manual_seed(3)
        return lambda x: drawn(x, generator), lambda i: (rand(i, 4),)

    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    drop_in_worlds(world, calls=7)
    assert_same(torch.rand(3, device=device), expected)


def test_a_generator_of_the_host_is_none_of_a_device(device: torch.device, rand: Rand) -> None:
    class Sampler:
        generator = torch.Generator().manual_seed(3)

        def __call__(self, x: Tensor) -> Tensor:
            return x * (self.generator.initial_seed() + 1)

    drop_in_worlds(lambda: (Sampler(), lambda i: (rand(i, 4),)))


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@on_cpu_and_cuda
def test_a_generator_as_an_argument_is_right_or_eager(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(drawn, warmup=1)
    a, b, other, twin = (torch.Generator(device).manual_seed(seed) for seed in (3, 3, 4, 4))
    with torch.no_grad():
        for i in range(9):
            g, e = (other, twin) if i % 3 == 2 else (a, b)
            assert_same(fast(rand(i, 4), g), drawn(rand(i, 4), e))


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x + torch.rand_like(x)


SAVED = torch.Generator().manual_seed(99).get_state()


def sets_state(x: Tensor) -> Tensor:
    torch.set_rng_state(SAVED)
    return x + torch.rand_like(x)


def reseeds(x: Tensor) -> Tensor:
    torch.seed()
    return x + torch.rand_like(x)


def seeds_python(x: Tensor) -> Tensor:
    random.seed(3)
    return x * 2


PYTHONS = random.getstate()


def sets_pythons_state(x: Tensor) -> Tensor:
    random.setstate(PYTHONS)
    return x * 2


@pytest.mark.parametrize("f", [seeds, sets_state, reseeds, seeds_python, sets_pythons_state])
def test_random_state_changed_inside_is_refused(rand: Rand, f: Any) -> None:
    """The call before left Python's generator so: only the call of `seed` tells."""
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        state, pythons = torch.get_rng_state(), random.getstate()
        with pytest.raises(ol.CaptureError) as caught:
            fast(rand(1, 3))
        assert caught.value.code == "OL106"
        assert caught.value.where is not None
        assert "test_state_random.py" in caught.value.where
        if f in (seeds_python, sets_pythons_state):
            assert "random.s" in caught.value.where
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == pythons


@on_cpu_and_cuda
def test_a_generator_of_the_closure_seeded_inside_is_refused(
    device: torch.device, rand: Rand
) -> None:
    generator = torch.Generator(device)

    def f(x: Tensor) -> Tensor:
        generator.manual_seed(2)
        return drawn(x, generator)

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        state = generator.get_state()
        with pytest.raises(ol.CaptureError, match="OL106"):
            fast(rand(1, 3))
        assert torch.equal(generator.get_state(), state)


def test_seeding_around_the_call(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(lambda x: x + torch.rand_like(x), warmup=1)
    with torch.no_grad():
        for i in range(6):
            torch.manual_seed(i)
            expected = rand(i, 3) + torch.rand_like(rand(i, 3))
            torch.manual_seed(i)
            assert_same(fast(rand(i, 3)), expected)
    assert replays(fast) > 0


def test_a_failed_capture_leaves_the_random_state(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x + torch.rand_like(x)
        return y * y.sum().item()

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        torch.manual_seed(5)
        expected = torch.rand(3, device=device)
        torch.manual_seed(5)
        with pytest.raises(ol.CaptureError):
            fast(rand(1, 3))
        assert_same(torch.rand(3, device=device), expected)
