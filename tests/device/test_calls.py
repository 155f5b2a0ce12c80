"""The contract's table of calls: which call fits which recording, and what is refused.

A callable that asks Python for a constant or a mode and computes with it shows a wrong replay in
its result, whatever the device's kernels make of the mode.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    assert_same,
    drop_in,
    drop_in_worlds,
    on_accelerators,
    on_cpu_and_cuda,
    random_tensor,
    replays,
    right_or_refused,
)

Rand = Callable[..., Tensor]


# Outputs.


def test_fresh_outputs_are_kept(rand: Rand) -> None:
    drop_in(lambda x: (x * 2, x.sum()), lambda i: (rand(i, 4, 3),), calls=8)


def test_static_outputs_are_the_same_memory_each_call(rand: Rand) -> None:
    fast = drop_in(lambda x: x * 2 + 1, lambda i: (rand(i, 4, 3),), outputs="static")
    with torch.no_grad():
        first, second = fast(rand(0, 4, 3)), fast(rand(1, 4, 3))
    assert first.data_ptr() == second.data_ptr()
    assert_same(second, rand(1, 4, 3) * 2 + 1)
    assert_same(first, second)


def test_the_default_warmup_is_three_calls(rand: Rand) -> None:
    ran: list[int] = []

    def f(x: Tensor) -> Tensor:
        ran.append(1)
        return x + 1

    fast = ol.graph(f)
    with torch.no_grad():
        for i in range(3):
            assert_same(fast(rand(i, 2)), rand(i, 2) + 1)
            assert len(ran) == i + 1
            assert len(fast.recordings) == 0
        assert_same(fast(rand(3, 2)), rand(3, 2) + 1)
        assert len(fast.recordings) == 1
        after = len(ran)
        for i in range(5):
            assert_same(fast(rand(i, 2)), rand(i, 2) + 1)
    assert len(ran) == after, "a replay ran the callable"
    assert fast.recordings[0].replays >= 5


# What fits: tensors.


def alternate(
    rand: Rand, f: Callable[..., Any], first: Callable[[int], Any], second: Callable[[int], Any]
) -> Any:
    """Two signatures in turn: two recordings, each replayed."""
    fast = drop_in(
        f, lambda i: (first(i) if i % 2 else second(i),), calls=8, recordings=2, min_replays=4
    )
    assert all(r.replays > 0 for r in fast.recordings)
    return fast


def test_shape(rand: Rand) -> None:
    alternate(
        rand, lambda x: x.sum(0) * x.shape[0], lambda i: rand(i, 4, 3), lambda i: rand(i, 5, 3)
    )


def test_rank(rand: Rand) -> None:
    alternate(rand, lambda x: x * x.dim(), lambda i: rand(i, 4), lambda i: rand(i, 1, 4))


def test_broadcastable_shape(rand: Rand) -> None:
    alternate(rand, lambda x: x + 1, lambda i: rand(i, 4, 3), lambda i: rand(i, 1, 3))


def test_dtype(rand: Rand) -> None:
    alternate(
        rand,
        lambda x: x * 3,
        lambda i: rand(i, 4, dtype=torch.float32),
        lambda i: rand(i, 4, dtype=torch.float64),
    )


def test_stride(rand: Rand) -> None:
    alternate(rand, lambda x: x.exp(), lambda i: rand(i, 4, 4), lambda i: rand(i, 4, 4).t())


def test_storage_offset_alone_changes_nothing_in_the_result(rand: Rand) -> None:
    drop_in(
        lambda x: x * 2,
        lambda i: (rand(i, 9)[1:] if i % 2 else rand(i, 8),),
        calls=6,
        recordings=None,
        min_replays=2,
    )


@on_accelerators
def test_device_of_an_argument(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.device.type == "cpu" else x * 3

    drop_in(
        f,
        lambda i: (rand(i, 4) if i % 2 else random_tensor(i, 4),),
        calls=8,
        recordings=None,
        min_replays=2,
    )


def test_requires_grad_of_an_argument(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * (2 if x.requires_grad else 3)

    alternate(rand, f, lambda i: rand(i, 4).requires_grad_(), lambda i: rand(i, 4))


def test_conj_bit(rand: Rand) -> None:
    alternate(
        rand,
        lambda x: x * 2,
        lambda i: rand(i, 4, dtype=torch.complex64).conj(),
        lambda i: rand(i, 4, dtype=torch.complex64),
    )


def test_neg_bit(rand: Rand) -> None:
    alternate(
        rand,
        lambda x: x * 2,
        lambda i: torch._neg_view(rand(i, 4)),
        lambda i: rand(i, 4),
    )


def test_inference_bit(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * (2 if x.is_inference() else 3)

    def inference_tensor(i: int) -> Tensor:
        with torch.inference_mode():
            return rand(i, 4)

    alternate(rand, f, inference_tensor, lambda i: rand(i, 4))


def test_same_tensor_twice_and_two_tensors(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = rand(i, 4)
        return (x, x) if i % 2 else (x, rand(i, 4))

    drop_in(f, arguments, calls=8, recordings=2, min_replays=4)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_overlap_of_arguments(rand: Rand, shift: int) -> None:
    """Windows of one storage that overlap more or less, and one that does not."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y.add_(1) + 0

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        base = rand(i, 16)
        offset = shift if i % 2 else 8
        return base[:8], base[offset : offset + 8]

    drop_in(f, arguments, calls=8, recordings=None, min_replays=2)


def test_an_argument_that_overlaps_memory_read_by_address(rand: Rand) -> None:
    def world() -> Any:
        model = nn.Linear(4, 4, bias=False).to(rand(0, 1).device)
        with torch.no_grad():
            model.weight.copy_(rand(99, 4, 4))

        def f(x: Tensor) -> Tensor:
            x.mul_(2)
            return model.weight @ torch.ones_like(x)

        def arguments(i: int) -> tuple[Tensor]:
            return (model.weight.data if i % 2 else rand(i, 4, 4),)

        return f, arguments

    drop_in_worlds(world, calls=8, recordings=None, min_replays=2)


def test_structure(rand: Rand) -> None:
    def f(tree: Any) -> Tensor:
        values = tree.values() if isinstance(tree, dict) else tree
        out = torch.zeros_like(next(iter(values)))
        for k, v in enumerate(values):
            out = out + v * (k + 1)
        return out * (2 if isinstance(tree, list) else 3)

    def arguments(i: int) -> tuple[Any]:
        a, b = rand(i, 3), rand(100 + i, 3)
        return ([[a, b], (a, b), {"a": a, "b": b}, {"b": b, "a": a}, [a, b, a]][i % 5],)

    drop_in(f, arguments, calls=15, recordings=5, min_replays=5)


def test_position_keyword_and_default(rand: Rand) -> None:
    def f(x: Tensor, scale: float = 2.0, *more: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x * scale
        for m in more:
            y = y + m
        return y if bias is None else y + bias

    fast = ol.graph(f, warmup=1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in range(3):
        for i in range(3):
            x, b = rand(i, 3), rand(10 + i, 3)
            calls += [
                ((x,), {}),
                ((x, 3.0), {}),
                ((x,), {"scale": 3.0}),
                ((), {"x": x, "bias": b}),
                ((), {"bias": b, "x": x}),
                ((x, 1.0, b), {}),
                ((x, 1.0, b, x), {"bias": x}),
            ]
    with torch.no_grad():
        for args, kwargs in calls:
            assert_same(fast(*args, **kwargs), f(*args, **kwargs))
    assert replays(fast) >= len(calls) // 2


def test_wrong_arguments_raise_what_the_callable_raises(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
        with pytest.raises(TypeError, match=r"f\(\) missing 1 required positional argument: 'x'"):
            fast()
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            fast(rand(0, 3), rand(1, 3))
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            fast(rand(0, 3), y=1)
        assert_same(fast(rand(5, 3)), rand(5, 3) + 1)


# What fits: constants.


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Point = collections.namedtuple("Point", "x y")


def as_number(c: Any) -> float:
    """A different number for each constant below."""
    if isinstance(c, bool):
        return 11.0 + c
    if isinstance(c, float):
        return 25.0 if c != c else math.copysign(1.0, c) * (abs(c) + 5)
    return float(sum(ord(ch) * (k + 1) for k, ch in enumerate(f"{type(c).__name__}:{c!r}")) % 8191)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (2, 3),
        (2, 2.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (1.0, math.nan),
        (math.inf, -math.inf),
        (1.0, 1.0 + 2**-52),
        (2**70, 2**70 + 1),
        (1.0, 1 + 0j),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ("mean", "sum"),
        ("a", b"a"),
        (None, 0),
        (None, False),
        ((), None),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2.0)),
        ({"k": 1}, {"k": True}),
        (Point(1, 2), (1, 2)),
        (slice(0, 2), slice(0, 3)),
        (slice(0, 2), slice(0, 2.0)),
        (Color.RED, Color.BLUE),
        (torch.float16, torch.float32),
        (torch.Size([1, 2]), (1, 2)),
        (torch.device("cpu"), torch.device("meta")),
        (torch.channels_last, torch.contiguous_format),
        (int, float),
        (..., None),
    ],
    ids=repr,
)
def test_constants_by_type_and_bits(rand: Rand, a: Any, b: Any) -> None:
    def f(x: Tensor, c: Any) -> Tensor:
        return x * as_number(c)

    fast = drop_in(
        f,
        lambda i: (rand(i, 3), b if i % 2 else a),
        calls=8,
        recordings=2,
        min_replays=4,
    )
    assert all(r.replays > 0 for r in fast.recordings)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (range(3), range(4)),
        (frozenset({1}), frozenset({2})),
        (math.sin, math.cos),
        (np.float32(2.0), np.float64(2.0)),
        (np.arange(3), np.arange(4)),
    ],
    ids=lambda c: type(c).__name__,
)
def test_other_constants_are_told_apart_or_run_eagerly(rand: Rand, a: Any, b: Any) -> None:
    fast = ol.graph(lambda x, c: x * as_number(c), warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(8):
            c = b if i % 2 else a
            assert_same(fast(rand(i, 3), c), rand(i, 3) * as_number(c))


def test_nan_fits_nan(rand: Rand) -> None:
    drop_in(lambda x, c: x * c, lambda i: (rand(i, 3), float("nan")), recordings=1)


def test_equal_strings_and_tuples_fit_by_value(rand: Rand) -> None:
    def f(x: Tensor, how: str, size: tuple[int, ...]) -> Tensor:
        return x.reshape(size).sum() if how == "sum" else x.reshape(size)

    drop_in(f, lambda i: (rand(i, 6), "".join(["s", "um"]), tuple([2, 3])), recordings=1)


def test_a_mutable_constant_changed_by_the_caller(rand: Rand) -> None:
    sizes: list[int] = [2]

    def f(x: Tensor, sizes: list[int]) -> Tensor:
        return x * sizes[0]

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(8):
            sizes[0] = 2 + i // 4
            assert_same(fast(rand(i, 3), sizes), rand(i, 3) * sizes[0])
    assert replays(fast) >= 4


def test_an_object_that_cannot_be_compared_runs_eagerly_and_warns_once(rand: Rand) -> None:
    class Config:
        scale = 2.0

    config = Config()

    def f(x: Tensor, config: Config) -> Tensor:
        return x * config.scale

    fast = ol.graph(f, warmup=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            config.scale = 2.0 + i
            assert_same(fast(rand(i, 3), config), rand(i, 3) * config.scale)
    ours = [w for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1
    assert "OL302" in str(ours[0].message)
    assert "config" in str(ours[0].message) or "args[1]" in str(ours[0].message)
    assert len(fast.recordings) == 0


def test_generators_of_values_are_not_consumed(rand: Rand) -> None:
    def f(x: Tensor, numbers: Iterator[int]) -> Tensor:
        return x * next(numbers)

    fast = ol.graph(f, warmup=1)
    numbers = iter(range(1, 10))
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL302"):
        for i in range(5):
            assert_same(fast(rand(i, 3), numbers), rand(i, 3) * (i + 1))


# What fits: modes.


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def attribute(owner: Any, name: str, value: Any) -> Any:
    return setting(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


def sdpa_state() -> tuple[bool, ...]:
    b = torch.backends.cuda
    return (
        b.flash_sdp_enabled(),
        b.mem_efficient_sdp_enabled(),
        b.math_sdp_enabled(),
        b.cudnn_sdp_enabled(),
    )


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "matmul precision": (
        lambda: setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ),
        torch.get_float32_matmul_precision,
    ),
    "matmul tf32": (
        lambda: attribute(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "fp16 reduction": (
        lambda: attribute(
            torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
        ),
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
    "bf16 reduction": (
        lambda: attribute(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
        ),
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "cudnn tf32": (
        lambda: attribute(torch.backends.cudnn, "allow_tf32", False),
        lambda: torch.backends.cudnn.allow_tf32,
    ),
    "cudnn benchmark": (
        lambda: attribute(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "cudnn deterministic": (
        lambda: attribute(torch.backends.cudnn, "deterministic", True),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "cudnn enabled": (
        lambda: attribute(torch.backends.cudnn, "enabled", False),
        lambda: torch.backends.cudnn.enabled,
    ),
    "deterministic": (
        lambda: setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        torch.are_deterministic_algorithms_enabled,
    ),
    "default dtype": (
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        torch.get_default_dtype,
    ),
    "default device": (lambda: torch.device("meta"), lambda: str(torch.get_default_device())),
    "sdpa backends": (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        sdpa_state,
    ),
    "cpu autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "cuda autocast": (
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: torch.is_autocast_enabled("cuda"),
    ),
}


def _without_a_gpu(name: str) -> bool:
    return name == "cuda autocast" and not torch.cuda.is_available()


@pytest.mark.parametrize("name", MODES)
def test_modes(rand: Rand, name: str) -> None:
    if _without_a_gpu(name):
        # torch itself disables CUDA autocast (with a warning) where there is no CUDA.
        pytest.skip("no GPU")
    context, read = MODES[name]
    plain = read()

    def f(x: Tensor) -> Tensor:
        return x * (2 if read() == plain else 3)

    fast = ol.graph(f, warmup=1)
    for i in range(8):
        # Made outside the mode, so that the mode is all that differs.
        x, expected = rand(i, 3), rand(i, 3) * (3 if i % 2 else 2)
        with torch.no_grad(), context() if i % 2 else contextlib.nullcontext():
            got = fast(x)
        assert torch.equal(got.cpu(), expected.cpu()), f"call {i}"
        assert got.is_inference() == (name == "inference" and i % 2 == 1)
    assert len(fast.recordings) == 2
    assert all(r.replays > 0 for r in fast.recordings)


@on_cpu_and_cuda
def test_autocast_dtype(device: torch.device, rand: Rand) -> None:
    weight = rand(50, 4, 4)
    dtypes = [None, torch.bfloat16, torch.float16]

    def f(x: Tensor) -> Tensor:
        return x @ weight

    fast = ol.graph(f, warmup=1)
    for i in range(12):
        dtype = dtypes[i % 3]
        cast = (
            torch.autocast(device.type, dtype=dtype)
            if dtype is not None
            else contextlib.nullcontext()
        )
        with torch.no_grad(), cast:
            expected, got = f(rand(i, 4, 4)), fast(rand(i, 4, 4))
        assert got.dtype == (dtype or torch.float32)
        assert_same(got, expected)
    assert len(fast.recordings) == 3
    assert all(r.replays > 0 for r in fast.recordings)


@on_cpu_and_cuda
def test_autocast_cache_flag(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * (2 if torch.is_autocast_cache_enabled() else 3)

    fast = ol.graph(f, warmup=1)
    for i in range(8):
        x = rand(i, 3)
        with (
            torch.no_grad(),
            torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=bool(i % 2)),
        ):
            assert_same(fast(x), x * (2 if i % 2 else 3))
    assert replays(fast) >= 4


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * (2 if self.training else 3)


def seeded(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model = build()
    torch.set_rng_state(state)
    return model.to(device)


@pytest.mark.parametrize("which", ["", "inner", "inner.1.0", "inner.1.1"])
def test_train_and_eval_of_every_submodule(device: torch.device, rand: Rand, which: str) -> None:
    def world() -> Any:
        return seeded(Nested, device), lambda i: (rand(i, 5, 4),)

    def between(i: int, model: nn.Module) -> None:
        model.get_submodule(which).train(i % 2 == 0)

    # BatchNorm's own mode matters; Tanh's does not, and may or may not split the signature.
    drop_in_worlds(world, calls=8, recordings=None, min_replays=3, between=between)


def test_train_and_eval_of_a_module_in_a_closure(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        model = seeded(Nested, device)
        calls = iter(range(100))

        def f(x: Tensor) -> Tensor:
            return model(x)

        def arguments(i: int) -> tuple[Tensor]:
            model.inner[1][0].train(next(calls) % 2 == 0)
            return (rand(i, 5, 4),)

        return f, arguments

    drop_in_worlds(world, calls=8, recordings=None, min_replays=3)


# Too many signatures.


def test_max_recordings_warns_once_and_names_the_argument(rand: Rand) -> None:
    def f(x: Tensor, scale: int) -> Tensor:
        return x * scale

    fast = ol.graph(f, warmup=1, max_recordings=2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(20):
            assert_same(fast(rand(i, 3), i % 5), rand(i, 3) * (i % 5))
        assert len(fast.recordings) == 2
        before = [r.replays for r in fast.recordings]
        assert_same(fast(rand(1, 3), 0), rand(1, 3) * 0)
    ours = [w for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1, [str(w.message) for w in ours]
    message = str(ours[0].message)
    assert "OL301" in message
    assert "scale" in message or "args[1]" in message
    assert "args[0]" not in message
    assert sum(r.replays for r in fast.recordings) == sum(before) + 1


def test_max_recordings_names_the_dimension_that_varies(rand: Rand) -> None:
    fast = ol.graph(lambda x, y: x * 2 + y.sum(), warmup=1, max_recordings=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            n = 2 + i // 2
            assert_same(fast(rand(i, n, 3), rand(i, 2)), rand(i, n, 3) * 2 + rand(i, 2).sum())
    ours = [str(w.message) for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1
    assert "x" in ours[0] or "args[0]" in ours[0]


def test_max_recordings_counts_each_callable_on_its_own(rand: Rand) -> None:
    first = ol.graph(lambda x: x + 1, warmup=1, max_recordings=1)
    second = ol.graph(lambda x: x + 2, warmup=1, max_recordings=1)
    with torch.no_grad():
        for i in range(4):
            assert_same(first(rand(i, 3)), rand(i, 3) + 1)
            assert_same(second(rand(i, 4)), rand(i, 4) + 2)
    assert len(first.recordings) == len(second.recordings) == 1


def test_on_mismatch_error_names_the_argument(rand: Rand) -> None:
    def decode(x: Tensor, scale: float) -> Tensor:
        return x * scale

    fast = ol.graph(decode, warmup=1, on_mismatch="error")
    with torch.no_grad():
        for i in range(4):
            assert_same(fast(rand(i, 8, 4), 2.0), rand(i, 8, 4) * 2)
        with pytest.raises(ol.ReplayError) as caught:
            fast(rand(0, 9, 4), 2.0)
        error = caught.value
        assert error.code == "OL201"
        assert "decode" in str(error)
        assert "8" in str(error) and "9" in str(error)
        assert error.where is not None and ("x" in error.where or "args[0]" in error.where)
        with pytest.raises(ol.ReplayError) as caught:
            fast(rand(0, 8, 4), 3.0)
        assert caught.value.where is not None
        assert "scale" in caught.value.where or "args[1]" in caught.value.where
        assert_same(fast(rand(9, 8, 4), 2.0), rand(9, 8, 4) * 2)
    assert len(fast.recordings) == 1


def test_on_mismatch_error_sees_modes(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1, on_mismatch="error")
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    with torch.inference_mode(), pytest.raises(ol.ReplayError, match="inference"):
        fast(rand(0, 3))


# Inlined calls.


class Tagged(Tensor):
    pass


class Counted:
    """A recorded callable, and how often its Python ran since."""

    def __init__(self, rand: Rand) -> None:
        self.ran = 0
        self.fast = ol.graph(self.f, warmup=1)
        with torch.no_grad():
            for i in range(3):
                self.fast(rand(i, 3))
        assert replays(self.fast) > 0
        self.ran = 0
        self.recordings = len(self.fast.recordings)

    def f(self, x: Tensor) -> Tensor:
        self.ran += 1
        return x.sin() * 2

    def check_inlined(self) -> None:
        assert self.ran > 0, "the callable itself did not run"
        assert len(self.fast.recordings) == self.recordings


def test_subclass(rand: Rand) -> None:
    counted = Counted(rand)
    with torch.no_grad():
        for i in range(4):
            x = rand(i, 3)
            expected, got = counted.f(x.as_subclass(Tagged)), counted.fast(x.as_subclass(Tagged))
            assert type(got) is Tagged
            assert_same(got, expected)
        counted.check_inlined()
        assert_same(counted.fast(rand(9, 3)), rand(9, 3).sin() * 2)


def test_subclass_inside_a_container(rand: Rand) -> None:
    fast = ol.graph(lambda d: d["x"] * 2, warmup=1)
    with torch.no_grad():
        for i in range(4):
            assert type(fast({"x": rand(i, 3).as_subclass(Tagged)})) is Tagged
    assert len(fast.recordings) == 0


def test_parameter_as_an_argument(rand: Rand) -> None:
    p = nn.Parameter(rand(0, 3))
    drop_in(lambda x, p: x * p, lambda i: (rand(i, 3), p))


def test_vmap(rand: Rand) -> None:
    counted = Counted(rand)
    with torch.no_grad():
        for i in range(3):
            x = rand(i, 5, 3)
            assert_same(torch.vmap(counted.fast)(x), x.sin() * 2)
    counted.check_inlined()


@on_cpu_and_cuda
def test_functorch_grad_and_jvp(device: torch.device, rand: Rand) -> None:
    counted = Counted(rand)
    for i in range(3):
        x = rand(i, 3)
        assert_same(
            torch.func.grad(lambda x: counted.fast(x).sum())(x),
            torch.func.grad(lambda x: counted.f(x).sum())(x),
        )
        assert_same(
            torch.func.jvp(counted.fast, (x,), (torch.ones_like(x),)),
            torch.func.jvp(counted.f, (x,), (torch.ones_like(x),)),
        )
    counted.check_inlined()


@on_cpu_and_cuda
def test_dual_numbers(device: torch.device, rand: Rand) -> None:
    import torch.autograd.forward_ad as fwd

    counted = Counted(rand)
    with fwd.dual_level():
        for i in range(3):
            x = fwd.make_dual(rand(i, 3), torch.ones_like(rand(i, 3)))
            primal, tangent = fwd.unpack_dual(counted.fast(x))
            expected_primal, expected_tangent = fwd.unpack_dual(counted.f(x))
            assert_same(primal, expected_primal)
            assert tangent is not None and expected_tangent is not None
            assert_same(tangent, expected_tangent)
    counted.check_inlined()


@on_cpu_and_cuda
def test_fake_tensors(device: torch.device, rand: Rand) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    counted = Counted(rand)
    mode = FakeTensorMode()
    x = mode.from_tensor(rand(0, 3))
    with torch.no_grad():
        for _ in range(3):
            assert isinstance(counted.fast(x), FakeTensor)
        with mode:
            for _ in range(3):
                assert isinstance(counted.fast(torch.empty(3, device=device)), FakeTensor)
    counted.check_inlined()


def test_anomaly_mode(rand: Rand) -> None:
    counted = Counted(rand)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            for i in range(3):
                assert_same(counted.fast(rand(i, 3)), rand(i, 3).sin() * 2)
    counted.check_inlined()


def test_dispatch_mode(rand: Rand) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ops.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    counted = Counted(rand)
    for i in range(3):
        x = rand(i, 3)
        with torch.no_grad(), Seen() as seen:
            got = counted.fast(x)
        assert_same(got, x.sin() * 2)
        assert "aten::sin" in seen.ops
    counted.check_inlined()


def test_function_mode(rand: Rand) -> None:
    from torch.overrides import TorchFunctionMode

    class CosForSin(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is Tensor.sin:
                func = Tensor.cos
            return func(*args, **(kwargs or {}))

    counted = Counted(rand)
    for i in range(4):
        x = rand(i, 3)
        with torch.no_grad(), CosForSin():
            got = counted.fast(x)
        assert_same(got, x.cos() * 2)
    with torch.no_grad():
        assert_same(counted.fast(rand(0, 3)), rand(0, 3).sin() * 2)


@on_cpu_and_cuda
def test_torch_compile_traces_through(device: torch.device, rand: Rand) -> None:
    counted = Counted(rand)
    compiled = torch.compile(lambda x: counted.fast(x) + 1, backend="eager")
    with torch.no_grad():
        for i in range(4):
            assert_same(compiled(rand(i, 3)), rand(i, 3).sin() * 2 + 1)
    torch._dynamo.reset()


@on_cpu_and_cuda
def test_make_fx_traces_through(device: torch.device, rand: Rand) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    counted = Counted(rand)
    with torch.no_grad():
        traced = make_fx(counted.fast)(rand(0, 3))
        assert "sin" in traced.code
        for i in range(3):
            assert_same(traced(rand(i, 3)), rand(i, 3).sin() * 2)
    counted.check_inlined()


def test_inside_another_capture(rand: Rand) -> None:
    """The inner callable belongs to the outer recording, whether it was recorded before or not."""
    counted = Counted(rand)
    cold = ol.graph(lambda x: x.exp(), warmup=1)

    def outer(x: Tensor) -> Tensor:
        return counted.fast(x) + cold(x * 0.5)

    outer_fast = ol.graph(outer, warmup=2)
    with torch.no_grad():
        for i in range(8):
            assert_same(outer_fast(rand(i, 3)), (rand(i, 3).sin() * 2) + (rand(i, 3) * 0.5).exp())
        assert outer_fast.recordings[0].replays >= 5
        counted.fast.reset()
        cold.reset()
        for i in range(4):
            assert_same(outer_fast(rand(i, 3)), (rand(i, 3).sin() * 2) + (rand(i, 3) * 0.5).exp())


# Tensors of the host.


@on_accelerators
def test_a_host_scalar_argument_is_read_at_each_call(rand: Rand) -> None:
    drop_in(lambda x, s: x * s + s, lambda i: (rand(i, 3), torch.tensor(float(i))))


@on_accelerators
def test_a_host_scalar_argument_of_each_dtype(rand: Rand) -> None:
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
        drop_in(lambda x, s: x + s, lambda i, d=dtype: (rand(i, 3), torch.tensor(i % 3, dtype=d)))


@on_accelerators
def test_a_host_tensor_in_a_device_computation_is_refused_with_its_line(rand: Rand) -> None:
    offset = torch.tensor(2.0)

    def f(x: Tensor) -> Tensor:
        return x * offset  # the line

    check_refused(f, (rand(0, 3),), "OL104", "return x * offset  # the line")


@on_accelerators
def test_a_host_buffer_of_a_module_is_refused(device: torch.device, rand: Rand) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device=device))
            self.scale = torch.tensor(3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * self.scale  # the line

    check_refused(Scaled(), (rand(0, 3),), "OL104", "self.weight * x * self.scale  # the line")


@on_accelerators
def test_a_copy_from_the_host_is_refused(device: torch.device, rand: Rand) -> None:
    table = torch.arange(3.0)

    def f(x: Tensor) -> Tensor:
        return x + table.to(x.device)  # the line

    check_refused(f, (rand(0, 3),), "OL103", "table.to(x.device)  # the line")


@on_accelerators
def test_a_host_argument_copied_to_the_device_is_refused(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, ids: Tensor) -> Tensor:
        return x + ids.to(x.device)  # the line

    check_refused(f, (rand(0, 3), torch.arange(3.0)), "OL103", "ids.to(x.device)  # the line")


@on_accelerators
def test_a_host_tensor_that_stays_on_the_host_is_never_frozen(rand: Rand) -> None:
    host = torch.zeros(3)

    def world() -> Any:
        return lambda x, h: (x * 2, h * 2), lambda i: (rand(i, 3), host + i)

    right_or_refused(world, "OL103", "OL104", "OL108")


@on_accelerators
def test_a_host_tensor_written_inside_is_refused(rand: Rand) -> None:
    def world() -> Any:
        counter = torch.zeros(3)

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            counter.add_(1)
            return x * 2, counter

        return f, lambda i: (rand(i, 3),)

    assert right_or_refused(world, "OL103", "OL104", "OL108") is not None


# Host reads, and shapes that depend on data.


def line_of(needle: str) -> int:
    with open(__file__, encoding="utf-8") as source:
        return 1 + next(
            n for n, text in enumerate(source) if needle in text and "needle" not in text
        )


def check_refused(f: Any, args: tuple[Any, ...], code: str, source: str) -> None:
    """Refused at the capturing call, with file, line and source; nothing is different after."""
    expected = f(*args) if not isinstance(f, nn.Module) else None
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(*args)
        rng = torch.get_rng_state()
        with pytest.raises(ol.CaptureError) as caught:
            fast(*args)
        assert torch.equal(torch.get_rng_state(), rng)
        error = caught.value
        assert error.code == code, str(error)
        assert error.where is not None
        assert "test_calls.py" in error.where
        assert source.strip() in error.where, error.where
        with pytest.raises(ol.CaptureError):
            fast(*args)
        assert len(fast.recordings) == 0
        # Eager work and another capture go on.
        device = args[0].device
        other = ol.graph(lambda x: x + 1, warmup=1)
        for i in range(3):
            x = random_tensor(i, 3, device=device)
            assert_same(other(x), x + 1)
        assert replays(other) > 0
        if expected is not None:
            assert_same(f(*args), expected)


def item(x: Tensor) -> Tensor:
    return x * x[0].item()  # item


def as_float(x: Tensor) -> Tensor:
    return x * float(x[0])  # float


def as_int(x: Tensor) -> Tensor:
    return x[: int(x.abs().sum()) % 2 + 1]  # int


def as_index(x: Tensor) -> Tensor:
    return x * [1, 2, 3][x.long().sum().remainder(3)]  # index


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # branch
        return x
    return x * 2


def loop(x: Tensor) -> Tensor:
    while x.sum() < 100:  # loop
        x = x.abs() + 1
    return x


def to_list(x: Tensor) -> Tensor:
    return x * x.tolist()[0]  # tolist


def equal(x: Tensor) -> Tensor:
    return x * (2 if torch.equal(x, x + 1) else 3)  # equal


def allclose(x: Tensor) -> Tensor:
    return x * (2 if torch.allclose(x, x + 1) else 3)  # allclose


def printed(x: Tensor) -> Tensor:
    text = str(x)  # printed
    return x * len(text)


HOST_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "# item": item,
    "# float": as_float,
    "# int": as_int,
    "# index": as_index,
    "# branch": branch,
    "# loop": loop,
    "# tolist": to_list,
    "# equal": equal,
    "# allclose": allclose,
    "# printed": printed,
}


@pytest.mark.parametrize("mark", HOST_READS)
def test_a_host_read_is_refused_with_its_line(rand: Rand, mark: str) -> None:
    check_refused(HOST_READS[mark], (rand(0, 3),), "OL101", mark)


def nonzero(x: Tensor) -> Tensor:
    return x.nonzero()  # nonzero


def mask(x: Tensor) -> Tensor:
    return x[x > 0]  # mask


def masked_select(x: Tensor) -> Tensor:
    return torch.masked_select(x, x > 0)  # masked_select


def unique(x: Tensor) -> Tensor:
    return torch.unique(x)  # unique


def where_one(x: Tensor) -> Tensor:
    return torch.where(x > 0)[0]  # where_one


def repeat_interleave(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.abs().long())  # repeat_interleave


DATA_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "# nonzero": nonzero,
    "# mask": mask,
    "# masked_select": masked_select,
    "# unique": unique,
    "# where_one": where_one,
    "# repeat_interleave": repeat_interleave,
}


@pytest.mark.parametrize("mark", DATA_SHAPES)
def test_a_shape_that_depends_on_data_is_refused_with_its_line(rand: Rand, mark: str) -> None:
    check_refused(DATA_SHAPES[mark], (rand(0, 3),), "OL102", mark)


def test_where_names_file_and_line(rand: Rand) -> None:
    fast = ol.graph(item, warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        with pytest.raises(ol.CaptureError) as caught:
            fast(rand(0, 3))
    assert caught.value.where is not None
    assert f"test_calls.py:{line_of('# item')}" in caught.value.where


def test_the_line_is_the_users_not_a_librarys(device: torch.device, rand: Rand) -> None:
    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.max().item()  # deep in a module

    model = nn.Sequential(nn.Identity(), nn.Sequential(Peeks()))
    check_refused(model, (rand(0, 3),), "OL101", "# deep in a module")


def test_a_refusal_caught_by_the_callable_is_still_a_refusal(rand: Rand) -> None:
    """`try: x.item() except: ...` takes another branch under capture than it takes eagerly."""

    def f(x: Tensor) -> Tensor:
        try:
            scale = x[0].item()
        except Exception:
            scale = 0.0
        return x * scale

    def world() -> Any:
        return f, lambda i: (rand(i, 3),)

    assert right_or_refused(world, "OL101") == "OL101"


def test_on_refusal_eager_warns_once_and_stays_right(rand: Rand) -> None:
    fast = ol.graph(branch, warmup=1, on_refusal="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            assert_same(fast(rand(i, 3)), branch(rand(i, 3)))
    ours = [w for w in caught if issubclass(w.category, ol.GraphWarning)]
    assert len(ours) == 1
    assert "OL101" in str(ours[0].message)
    assert "# branch" in str(ours[0].message)
    assert len(fast.recordings) == 0


def test_on_refusal_eager_is_per_signature(rand: Rand) -> None:
    def f(x: Tensor, peek: bool) -> Tensor:
        return x * x[0].item() if peek else x * 2

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL101"):
        for i in range(8):
            assert_same(fast(rand(i, 3), bool(i % 2)), f(rand(i, 3), bool(i % 2)))
    assert len(fast.recordings) == 1
    assert fast.recordings[0].replays >= 3


# State stored during the call.


@dataclasses.dataclass
class Box:
    value: Any = None


class Remembers(nn.Module):
    """Stores a tensor on a plain attribute."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x + 1


def test_a_tensor_stored_on_the_module(rand: Rand) -> None:
    eager, model = Remembers(), Remembers()
    fast = ol.graph(model, warmup=2)
    kept: list[tuple[Tensor | None, Tensor | None]] = []
    with torch.no_grad():
        for i in range(8):
            assert_same(fast(rand(i, 3)), eager(rand(i, 3)))
            assert_same(fast.last, eager.last)
            kept.append((fast.last, eager.last))
        for got, expected in kept:
            assert_same(got, expected)
    assert replays(fast) >= 5


def test_a_stored_tensor_that_is_also_returned_is_the_same_object(rand: Rand) -> None:
    class Both(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    fast = ol.graph(Both(), warmup=1)
    with torch.no_grad():
        for i in range(5):
            y = fast(rand(i, 3))
            assert y is fast.last
            assert_same(y, rand(i, 3) * 2)
    assert replays(fast) > 0


def test_state_carried_from_call_to_call_on_the_module(rand: Rand) -> None:
    """h is replaced by a new tensor at each call and read by the next: a recurrent state."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = rand(77, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.h = self.h * 0.5 + x
            return self.h.clone()

    def world() -> Any:
        return Recurrent(), lambda i: (rand(i, 3),)

    right_or_refused(world, "OL105")


def test_a_buffer_replaced_on_the_module(device: torch.device, rand: Rand) -> None:
    class Averages(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, device=device))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.9 + x * 0.1
            return x - self.mean

    def world() -> Any:
        return Averages(), lambda i: (rand(i, 3),)

    right_or_refused(world, "OL105")


def stores_on_argument(x: Tensor, box: Box) -> Tensor:
    box.value = x * 2
    return x + 1


def test_a_tensor_stored_on_an_argument(rand: Rand) -> None:
    def world() -> Any:
        return stores_on_argument, lambda i: (rand(i, 3), Box())

    right_or_refused(world, "OL105")


def test_a_list_argument_appended_to(rand: Rand) -> None:
    def f(x: Tensor, out: list[Tensor]) -> Tensor:
        out.append(x * 2)
        return x + 1

    def world() -> Any:
        return f, lambda i: (rand(i, 3), [])

    right_or_refused(world, "OL105")


def test_a_dict_argument_assigned_to(rand: Rand) -> None:
    def f(x: Tensor, out: dict[str, Tensor]) -> Tensor:
        out["y"] = x * 2
        return x + 1

    def world() -> Any:
        return f, lambda i: (rand(i, 3), {"y": rand(i, 3)})

    right_or_refused(world, "OL105")


def test_a_tensor_popped_from_a_dict_argument(rand: Rand) -> None:
    def f(x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return x + inputs.pop("y")

    def world() -> Any:
        return f, lambda i: (rand(i, 3), {"y": rand(50 + i, 3), "z": rand(i, 1)})

    right_or_refused(world, "OL105")


def storing_in_closure(rand: Rand) -> Any:
    last = rand(0, 3)

    def f(x: Tensor) -> Tensor:
        nonlocal last
        y = x + last
        last = x * 2
        return y

    return f, lambda i: (rand(i, 3),)


def test_a_tensor_stored_in_a_closure(rand: Rand) -> None:
    right_or_refused(lambda: storing_in_closure(rand), "OL105")


LAST: Tensor | None = None
HISTORY: list[Tensor] = []


def stores_in_global(x: Tensor) -> Tensor:
    global LAST
    LAST = x * 2
    return x + 1


def appends_to_global(x: Tensor) -> Tensor:
    HISTORY.append(x * 2)
    return x + 1


def test_a_tensor_stored_in_a_global(rand: Rand) -> None:
    fast = ol.graph(stores_in_global, warmup=1)
    kept: list[tuple[Tensor | None, Tensor]] = []
    with torch.no_grad():
        try:
            for i in range(5):
                fast(rand(i, 3))
                kept.append((LAST, rand(i, 3) * 2))
        except ol.CaptureError as error:
            assert error.code == "OL105"
            assert "LAST" in str(error)
            return
        for got, expected in kept:
            assert_same(got, expected)
    assert replays(fast) > 0


@pytest.mark.parametrize("where", ["global list", "module list", "module dict", "closure list"])
def test_a_container_changed(rand: Rand, where: str) -> None:
    HISTORY.clear()

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.named: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if where == "module list":
                self.seen.append(x * 2)
            else:
                self.named["last"] = x * 2
            return x + 1

    model = Collects()
    closure: list[Tensor] = []

    def appends(x: Tensor) -> Tensor:
        closure.append(x * 2)
        return x + 1

    f, read = {
        "global list": (appends_to_global, lambda: list(HISTORY)),
        "module list": (model, lambda: list(model.seen)),
        "module dict": (model, lambda: [model.named["last"]]),
        "closure list": (appends, lambda: list(closure)),
    }[where]
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            try:
                fast(rand(i, 3))
            except ol.CaptureError as error:
                assert error.code == "OL105"
                assert i == 1
                # What the failed capture stored is gone again.
                assert_same(read(), [rand(0, 3) * 2])
                return
            assert_same(read()[-1], rand(i, 3) * 2)
            if where != "module dict":
                assert len(read()) == i + 1


def test_a_counter_on_the_module_does_not_split_or_stop_recording(rand: Rand) -> None:
    """Python effects are not repeated: documented, and no reason to record anew at each call."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    fast = ol.graph(Counts(), warmup=1)
    with torch.no_grad():
        for i in range(6):
            assert_same(fast(rand(i, 3)), rand(i, 3) * 2)
    assert len(fast.recordings) == 1
    assert fast.recordings[0].replays >= 4
