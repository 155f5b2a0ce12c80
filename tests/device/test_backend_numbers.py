"""Numbers that change from call to call, through the backend of `torch.compile`.

A counter in a dict, a closure or an object, and an argument: from its second value on Dynamo passes
an integer as a symbol, a float as a host tensor. One recording reads it at each call.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.dynamo.backend import regions

from .drop_in import on_accelerators
from .regions import F, compiled, recordings, replays, same_calls
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")
CALLS = 12


def in_a_dict(step: float) -> Callable[[], float]:
    state: dict[str, Any] = {"n": step - step}

    def count() -> float:
        state["n"] += step
        return state["n"]

    return count


def in_a_list(step: float) -> Callable[[], float]:
    state = [step - step]

    def count() -> float:
        state[0] += step
        return state[0]

    return count


def in_a_closure(step: float) -> Callable[[], float]:
    n = step - step

    def count() -> float:
        nonlocal n
        n += step
        return n

    return count


def in_an_object(step: float) -> Callable[[], float]:
    state = SimpleNamespace(n=step - step)

    def count() -> float:
        state.n += step
        return state.n

    return count


@on_accelerators
@pytest.mark.parametrize("step", [1, 0.25])
@pytest.mark.parametrize("counter", [in_a_dict, in_a_list, in_a_closure, in_an_object])
def test_counters(device: torch.device, rand: Rand, counter: Any, step: float) -> None:
    """The number is used, returned, and computed with on the host."""

    def make() -> F:
        count = counter(step)

        def f(x: Tensor) -> Any:
            n = count()
            return x * n, x / (1 - 0.5**n), n

        return f

    with torch.no_grad():
        same_calls(make(), compiled(make()), lambda i: (rand(i, 2, 4),), calls=CALLS)
    assert len(recordings()) == 1
    assert replays() == CALLS - 4


def written(x: Tensor, n: float) -> Tensor:
    y = x.clone()
    y[0] = n
    return y.mul_(n)


PROGRAMS: dict[str, F] = {
    "arithmetic": lambda x, n: (x * n + n) / (x.abs() + n) - n,
    "a power": lambda x, n: 2.0 ** (x * n).clamp(-4, 4),
    "comparisons": lambda x, n: torch.where(x > n, x, n) * (x != n),
    "a mask": lambda x, n: x.masked_fill(x > 1, n),
    "new tensors": lambda x, n: x + torch.full((4,), n, device=x.device) + torch.full_like(x, n),
    "half": lambda x, n: (n - x.half() * n).float(),
    "bfloat16": lambda x, n: (x.bfloat16() / n).float(),
    "integers": lambda x, n: x.int() * n,
    "one element": lambda x, n: x.sum() * n,
    "memory": written,
    "the host alone": lambda x, n: (x + 1, n * 2, 3 - n),
    "a branch": lambda x, n: x * n if n > 2 else x + n,
    "twice": lambda x, n: (x * n).sin() + (x * (n + 1)) * n,
}


@on_accelerators
@pytest.mark.parametrize("step", [1, 0.25])
@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments(device: torch.device, rand: Rand, name: str, step: float) -> None:
    f = PROGRAMS[name]
    fast = compiled(f)
    # Inductor's kernels round a quotient of bfloat16 once, where all is float32 again.
    inexact = {"rtol": 2**-8, "atol": 0.0} if name == "bfloat16" and device.type == "cuda" else {}
    with torch.no_grad():
        same_calls(f, fast, lambda i: (rand(i, 2, 4), step * (i + 1)), calls=CALLS, **inexact)
    assert len(recordings()) <= (2 if name == "a branch" else 1)
    assert replays() >= CALLS - 8


FRACTIONS: dict[str, F] = {
    "sum": lambda x, n: (x + n, n + x, x - n, n - x),
    "product": lambda x, n: (x * n, n * x),
    "quotient": lambda x, n: (x / n, x.true_divide(n), torch.div(x, n)),
    "inverse": lambda x, n: (n / x,),
    "power": lambda x, n: (n**x,),
    "an argument": lambda x, n: (x.div_(n), operator.itruediv(x, n), x.mul_(n)),
    "comparisons": lambda x, n: (x < n, n >= x, x == n),
    "methods": lambda x, n: (x.__eq__(n), x.__ge__(n), x.__rmul__(n), x.__rtruediv__(n)),
}


@on_accelerators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FRACTIONS)
def test_fractions_to_the_last_bit(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Eager's kernels round a number, and what they compute of it, in their own way."""
    f, random = FRACTIONS[name], torch.Generator().manual_seed(0)
    fast = compiled(f, codegen="eager")
    with torch.no_grad():
        for i in range(CALLS):
            x = torch.randn(500, generator=random).to(device, dtype)
            n, y = 0.37 + 1.7 * i, x.clone()
            for got, expected in zip(fast(y, n), f(x, n), strict=True):
                if device.type == "cuda" or dtype.itemsize >= 4 or name != "sum":
                    assert torch.equal(got, expected), n
                else:  # the CPU's kernel of a sum rounds the number
                    torch.testing.assert_close(got, expected, rtol=0, atol=n / 64)
            assert torch.equal(x, y)
    assert replays() >= CALLS - 4


NEEDED: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "a bound": lambda x, a, b: x.clamp(max=a * b),
    "a factor": lambda x, a, b: torch.add(x, x, alpha=-a * b) * a,
    "an index": lambda x, a, b: x[int(a * b) % 4] * b,
    "a size": lambda x, a, b: x.new_ones(int(a) + int(b)) * a,
}


@on_accelerators
@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("of", [int, float])
def test_a_value_of_two_numbers_that_the_graph_needs(
    device: torch.device, rand: Rand, name: str, of: type
) -> None:
    """It is computed of neither alone."""
    f = NEEDED[name]
    fast = compiled(f, codegen="eager")
    with torch.no_grad():
        for i in range(6):
            x, a, b = rand(i, 8), of(i + 1), of(2 * i + 1)
            assert torch.equal(fast(x, a, b), f(x, a, b)), i


@on_accelerators
@pytest.mark.parametrize("exponents", [(2, 3, 4, 5, 2), (3.0, 2.0, 0.5, -0.5, 1.5, -1.0)])
def test_exponents(device: torch.device, rand: Rand, exponents: Sequence[float]) -> None:
    """Torch has kernels of their own for squares, roots and the like, so that a tensor with the
    number is no exponent like it."""
    fast = compiled(lambda x, n: x.abs() ** n, codegen="eager")
    with torch.no_grad():
        for i, n in enumerate(exponents):
            x = rand(i, 64)
            assert torch.equal(fast(x, n), x.abs() ** n), n


@on_accelerators
def test_a_negative_exponent_of_integers_raises(device: torch.device, rand: Rand) -> None:
    fast = compiled(lambda x, n: x**n, codegen="eager")
    x = torch.arange(1, 5, device=device)
    for n in (2, 3, 4, 5):
        assert torch.equal(fast(x, n), x**n)
    with pytest.raises(RuntimeError, match="negative integer powers"):
        fast(x, -1)


@on_accelerators
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_a_quotient_of_integers(device: torch.device, rand: Rand, dtype: torch.dtype) -> None:
    """By a number that its dtype does not hold."""
    x = torch.tensor([100, 50], dtype=dtype, device=device)
    fast = compiled(lambda x, n: x / n, codegen="eager")
    for n in (2, 3, 4, 300, -5, 2**33 + 7):
        assert torch.equal(fast(x, n), x / n), n
    assert replays() > 0


FILLS: dict[str, F] = {
    "fill_": lambda x, n: x.clone().fill_(n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "an item": lambda x, n: operator.setitem(y := x.clone(), 0, n) or y,
    "full": lambda x, n: torch.full((4,), n, dtype=x.dtype, device=x.device) + x,
    "full_like": lambda x, n: torch.full_like(x, n) + x,
}
VALUES: list[tuple[torch.dtype, Sequence[float]]] = [
    (torch.uint8, (1, 2, 3, 4, -1, 300)),
    (torch.int64, (1, 2, 3, 4, 2**40)),
    (torch.int64, (1.5, 2.5, 3.5, 4.5, math.inf)),
    (torch.float32, (1.5, 2.5, 3.5, 4.5, math.inf, 1e300)),
    (torch.float16, (1.5, 2.5, 3.5, 4.5, -math.inf, 7e4)),
]


@on_accelerators
@pytest.mark.parametrize(("dtype", "values"), VALUES)
@pytest.mark.parametrize("name", FILLS)
def test_a_number_that_a_tensor_cannot_hold(
    device: torch.device, name: str, dtype: torch.dtype, values: Sequence[float]
) -> None:
    f, x = FILLS[name], torch.ones(4, device=device).to(dtype)
    fast = compiled(f, codegen="eager")
    for n in values:
        try:
            expected = f(x, n)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="without overflow"):
                fast(x, n)
        else:
            assert torch.equal(fast(x, n), expected), n


@on_accelerators
def test_a_number_beside_an_operator_that_is_refused(device: torch.device, rand: Rand) -> None:
    """It is no reason: a recording has it on the device."""
    # The value of another dtype is read on the host.
    f: F = lambda x, n: x.masked_fill(x > 0, x.double().sum()) * n  # noqa: E731
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312.*`masked_fill`") as warned:
        same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 2, 4), i))
    assert "copies" not in str(warned[0].message)


@on_accelerators
def test_inside_of_vmap(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, a: float) -> Tensor:
        return torch.func.vmap(lambda t: (t * a).sin())(x) * a

    fast = compiled(f, codegen="eager")
    with torch.no_grad():
        for i in range(6):
            x = rand(i, 3, 4)
            assert torch.equal(fast(x, 0.1 * i + 0.1), f(x, 0.1 * i + 0.1))


@on_accelerators
def test_results_are_of_the_same_kind(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, n: int, t: float) -> tuple[Any, ...]:
        return x * n, n + 1, t * 2, x + t

    fast = compiled(f)
    with torch.no_grad():
        for i in range(8):
            got = fast(rand(i, 4), i, i / 4)
            assert isinstance(got[0], Tensor)
            assert [type(value) for value in got[1:3]] == [int, float]
            assert got[1:3] == (i + 1, i / 2)


@on_accelerators
def test_gradients(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, n: int, t: float) -> Tensor:
        return (x * n) ** 2 / (t + 1) - n

    fast = compiled(f)
    for i in range(12):
        x, y = rand(i, 2, 4).requires_grad_(), rand(i, 2, 4).requires_grad_()
        f(x, i, i / 4).sum().backward()
        fast(y, i, i / 4).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
    assert len(recordings()) == 1
    assert replays() >= 8


@on_accelerators
@pytest.mark.parametrize("step", [1, 0.25])
def test_with_buckets(device: torch.device, rand: Rand, step: float) -> None:
    """Sizes and numbers vary together: a recording for each bucket."""

    def f(x: Tensor, n: float) -> Tensor:
        return (x * n).relu() + n

    fast = compiled(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    sizes = (5, 3, 7, 2, 6, 8)
    with torch.no_grad():
        same_calls(f, fast, lambda i: (rand(i, sizes[i % 6], 4), step * (i + 1)), calls=CALLS)
    assert len(recordings()) == 2
    assert replays() >= CALLS - 9


@on_accelerators
def test_around_a_part_on_the_host(device: torch.device, rand: Rand) -> None:
    """Each part gets what it takes of the number."""

    def f(x: Tensor, n: float) -> Tensor:
        y = (x * n).cpu().sin().to(x.device)
        return y + math.pi * n

    fast = compiled(f)
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312"):
        same_calls(f, fast, lambda i: (rand(i, 2, 4), 0.25 * (i + 1)), calls=CALLS)
    assert len(recordings()) == 2
    assert replays() >= 2 * (CALLS - 4)


@on_accelerators
@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x[:, : n % 3 + 1] * 2,
        lambda x, n: x.add(x, alpha=n),
        lambda x, n: x + torch.arange(n % 3 + 1, device=x.device).sum(),
    ],
    ids=["a place", "a factor of the kernel", "a size"],
)
def test_what_needs_the_value_has_a_bound(device: torch.device, rand: Rand, f: F) -> None:
    """A recording for each value that comes often enough, and one warning beyond the bound."""
    fast = compiled(f, max_recordings=2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(f, fast, lambda i: (rand(i, 2, 4), i // 4 + 1), calls=6 * 4)
    assert {str(w.message)[1:6] for w in caught if w.category is ol.GraphWarning} <= {"OL301"}
    assert all(len(graphed.recordings) <= 2 for graphed in regions.graphs())
    assert replays() >= 1
