"""The contract in one function: `graph(f)(*args)` is `f(*args)`.

A *world* is a function that builds a callable and the arguments of its n-th call, equal each time
that it is built. `drop_in` builds two, runs one eagerly and one graphed, and compares everything
that a caller can see: results, arguments, and at the end every result that was ever returned.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_accelerators = pytest.mark.parametrize("device", ["tape", CUDA], indirect=True)
on_cpu_and_cuda = pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)
on_cuda = pytest.mark.parametrize("device", [CUDA], indirect=True)

Arguments = Callable[[int], tuple[Any, ...]]
Rand = Callable[..., Tensor]
"""`rand(seed, *shape, dtype=)`: see the fixture."""
World = Callable[[], tuple[Callable[..., Any], Arguments]]


def random_tensor(
    seed: int,
    *shape: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values that depend on the seed, the shape and the dtype alone, made on the host."""
    generator = torch.Generator("cpu").manual_seed(1000 + seed)  # whatever the default device
    if dtype == torch.bool:
        t = torch.rand(shape, generator=generator, device="cpu") > 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        full = torch.complex64 if dtype.is_complex else torch.float32
        t = torch.randn(shape, generator=generator, dtype=full, device="cpu").to(dtype)
    else:
        t = torch.randint(0, 7, shape, generator=generator, device="cpu").to(dtype)
    return t.to(device)


def bits(t: Tensor) -> Tensor:
    """The tensor's values as bytes on the host; equal for equal bits, NaN and -0.0 included."""
    with torch.no_grad():  # half the time of a `detach` on the emulated device
        host = t.cpu().resolve_conj().resolve_neg()
        # A dimension of one element may have any stride, and view(uint8) minds.
        return torch.empty(host.numel(), dtype=host.dtype).copy_(host.reshape(-1)).view(torch.uint8)


def describe(t: Tensor) -> dict[str, object]:
    """What a caller can ask of a tensor besides its values."""
    return {
        "type": type(t),
        "dtype": t.dtype,
        "shape": tuple(t.shape),
        "stride": t.stride() if t.layout == torch.strided else t.layout,
        "device": t.device,
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
    }


def assert_same(got: Any, expected: Any, at: str = "result") -> None:
    """Equal structure, types, constants and tensors, bit for bit."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{at}: {got!r} is not a tensor"
        assert describe(got) == describe(expected), at
        if hasattr(type(expected), "__tensor_flatten__"):
            _assert_same_parts(got, expected, at)
            return
        if expected.layout != torch.strided:
            got, expected = got.to_dense(), expected.to_dense()
        a, b = bits(got), bits(expected)
        assert torch.equal(a, b), f"{at}: {got.cpu()} is not {expected.cpu()}"
        return
    assert type(got) is type(expected), f"{at}: {type(got)} is not {type(expected)}"
    if isinstance(expected, nn.Module):
        assert_same(dict(got.state_dict()), dict(expected.state_dict()), at)
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), at
        for key in expected:
            assert_same(got[key], expected[key], f"{at}[{key!r}]")
        assert_same(getattr(got, "__dict__", None), getattr(expected, "__dict__", None), at)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), at
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same(a, b, f"{at}[{i}]")
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            assert_same(
                getattr(got, field.name), getattr(expected, field.name), f"{at}.{field.name}"
            )
    elif isinstance(expected, float):
        assert got.hex() == expected.hex() if expected == expected else got != got, at
    elif isinstance(expected, (int, str, complex, bytes, type(None), torch.dtype, torch.device)):
        assert got == expected, at


def _assert_same_parts(got: Any, expected: Any, at: str) -> None:
    """Equal tensors inside of one that is made of several."""
    names, context = expected.__tensor_flatten__()
    assert got.__tensor_flatten__() == (names, context), at
    for name in names:
        assert_same(getattr(got, name), getattr(expected, name), f"{at}.{name}")


class Runs:
    """Counts how often Python runs, in an iterator, where no replay puts a number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def add(self) -> None:
        next(self._numbers)

    @property
    def count(self) -> int:
        return int(repr(self._numbers).removeprefix("count(").removesuffix(")"))


def replays(fast: Any) -> int:
    return sum(recording.replays for recording in fast.recordings)


def refused(fast: Any, *args: Any, match: str | None = None) -> ol.CaptureError:
    """The error of the call after one that warms up, or two."""
    fast(*args)
    with pytest.raises(ol.CaptureError, match=match) as caught:  # noqa: PT012
        for _ in range(2):
            fast(*args)
    return caught.value


def alike(fast: Any, eager: Any, rand: Rand, *shape: int, calls: int = 5) -> None:
    """Without gradients, a call with random values is the same in both."""
    with torch.no_grad():
        for i in range(calls):
            assert_same(fast(rand(i, *shape)), eager(rand(i, *shape)), f"call {i}")


def gradients_alike(fast: Any, eager: Any, rand: Rand, *shape: int, calls: int = 5) -> None:
    """In training, a call with random values gives the same result, and that the same gradient."""
    for i in range(calls):
        found: list[Any] = []
        for f in (eager, fast):
            x = rand(i, *shape).requires_grad_()
            y = f(x)
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        assert_same(found[1], found[0], f"call {i}")


def compare(
    fast: Any,
    eager: Callable[..., Any],
    arguments: Arguments,
    calls: int = 8,
    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
) -> None:
    """Make the same calls of both, in turn, and compare the results."""
    for i in range(calls):
        with mode():
            assert_same(fast(*arguments(i)), eager(*arguments(i)), f"call {i}")


def follows(
    f: Callable[..., Any],
    arguments: Arguments,
    *changes: Callable[[], object],
    calls: int = 4,
    **options: Any,
) -> Any:
    """Graph a callable, compare it with itself before and after each change, and return it."""
    fast = ol.graph(f, warmup=1, **options)
    for change in (None, *changes):
        if change is not None:
            change()
        compare(fast, f, arguments, calls)
    return fast


def in_threads(*work: Callable[[], object]) -> None:
    """Run all at once, each in a thread of its own, and raise what the first to fail raised."""
    begin = threading.Barrier(len(work))

    def run(one: Callable[[], object]) -> None:
        begin.wait()
        one()

    with ThreadPoolExecutor(len(work)) as threads:
        for future in [threads.submit(run, one) for one in work]:
            future.result()


def drop_in(
    f: Callable[..., Any],
    arguments: Arguments,
    **options: Any,
) -> Any:
    """`drop_in_worlds` for a callable without state."""
    return drop_in_worlds(lambda: (f, arguments), **options)


def drop_in_worlds(
    world: World,
    *,
    calls: int = 5,
    warmup: int = 1,
    recordings: int | None = 1,
    min_replays: int | None = None,
    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    between: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> Any:
    """Run both worlds side by side, compare, and return the graphed callable.

    Args:
        world: builds the callable and the arguments of call i.
        recordings: how many must exist at the end; None for any number.
        min_replays: at least so many calls must have been replays; all but the warm-up of each
            recording by default.
        mode: the context in which every call runs.
        between: what happens in both worlds before call i, given the callable (the graphed one
            when it is the graphed world).
    """
    eager, eager_arguments = world()
    f, fast_arguments = world()
    fast = ol.graph(f, warmup=warmup, **options)
    kept: list[tuple[Any, Any]] = []
    for i in range(calls):
        if between is not None:
            between(i, eager)
            between(i, fast)
        expected_args, args = eager_arguments(i), fast_arguments(i)
        with mode():
            expected, got = eager(*expected_args), fast(*args)
        assert_same(got, expected, f"call {i}")
        assert_same(args, expected_args, f"call {i}, arguments")
        if isinstance(eager, nn.Module):
            assert_same(dict(fast.state_dict()), dict(eager.state_dict()), f"call {i}, state")
        kept.append((got, expected))
    for i, (got, expected) in enumerate(kept):
        if options.get("outputs") != "static":
            assert_same(got, expected, f"result of call {i}, after all calls")
    if recordings is not None:
        assert len(fast.recordings) == recordings, [r.why for r in fast.recordings]
    at_least = calls - warmup * len(fast.recordings) if min_replays is None else min_replays
    assert replays(fast) >= at_least, (replays(fast), at_least)
    return fast


def right_or_refused(world: World, *codes: str, calls: int = 4) -> str | None:
    """Both are the contract: every call right, or a CaptureError with one of the codes.

    Returns the code, or None where the callable was recorded.
    """
    refusal: ol.CaptureError | None = None
    try:
        drop_in_worlds(world, calls=calls)
    except ol.CaptureError as error:
        refusal = error
    assert refusal is None or refusal.code in codes, str(refusal)
    return None if refusal is None else refusal.code


def allocated(device: torch.device) -> int:
    """Bytes of device memory in use, garbage apart; 0 where the host does not count."""
    while gc.collect():  # what one collection finalizes is garbage of the next
        pass
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    if device.type == "tape":
        from onelaunch import testing

        return testing.memory_allocated()
    return 0
