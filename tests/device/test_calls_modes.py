"""Table of calls: modes.

A callable that asks Python for a mode and computes with it shows a wrong replay in its result,
whatever the device's kernels make of the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in_worlds, on_cpu_and_cuda, replays

_C: Any = torch._C


Mode = tuple[Callable[[], Any], Callable[[], Any]]
"""What enters it, and what the callable reads of it."""


def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Mode:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        before = read()
        write(value)
        try:
            yield
        finally:
            write(before)

    return entered, read


def attribute(owner: Any, name: str, value: Any) -> Mode:
    return setting(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


def sdpa_state() -> tuple[bool, ...]:
    b = torch.backends.cuda
    return (
        b.flash_sdp_enabled(),
        b.mem_efficient_sdp_enabled(),
        b.math_sdp_enabled(),
        b.cudnn_sdp_enabled(),
    )


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
MODES: dict[str, Mode] = {
    "grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "matmul precision": setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "matmul tf32": attribute(_cuda.matmul, "allow_tf32", True),
    "matmul fp32_precision": attribute(_cuda.matmul, "fp32_precision", "tf32"),
    "convolution fp32_precision": attribute(_cudnn.conv, "fp32_precision", "ieee"),
    "fp16 reduction": attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction": attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cudnn tf32": attribute(_cudnn, "allow_tf32", False),
    "cudnn benchmark": attribute(_cudnn, "benchmark", True),
    "cudnn deterministic": attribute(_cudnn, "deterministic", True),
    "cudnn enabled": attribute(_cudnn, "enabled", False),
    "mkldnn": setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, False),
    "mkldnn deterministic": attribute(torch.backends.mkldnn, "deterministic", True),
    "uninitialized memory": attribute(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "deterministic": setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "default dtype": setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": (lambda: torch.device("meta"), lambda: str(torch.get_default_device())),
    "fp16 accumulation": attribute(_cuda.matmul, "allow_fp16_accumulation", True),
    "half-precision reduction of math attention": setting(
        _cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "order of attention": (
        lambda: torch.nn.attention.sdpa_kernel(
            [SDPBackend(backend) for backend in reversed(_C._get_sdp_priority_order())],
            set_priority=True,
        ),
        _C._get_sdp_priority_order,
    ),
    "sdpa backends": (lambda: torch.nn.attention.sdpa_kernel(SDPBackend.MATH), sdpa_state),
    "cpu autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "cuda autocast": (
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: torch.is_autocast_enabled("cuda"),
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(rand: Rand, name: str) -> None:
    if name == "cuda autocast" and not torch.cuda.is_available():
        # torch itself disables CUDA autocast (with a warning) where there is no CUDA.
        pytest.skip("no GPU")
    context, read = MODES[name]
    with torch.no_grad():
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


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_each_precision_of_products(rand: Rand, precision: str) -> None:
    """Torch's own guard of modes knows two of the three."""
    fast = ol.graph(lambda x: x * len(torch.get_float32_matmul_precision()), warmup=1)
    for now in ("highest", "high", "medium", precision):
        torch.set_float32_matmul_precision(now)
        alike(fast, lambda x, now=now: x * len(now), rand, 3, calls=3)
    assert len(fast.recordings) == 3


FLAGS: dict[str, tuple[Callable[[bool], Any], Callable[[Tensor], Any]]] = {
    "fast path of attention": (
        torch.backends.mha.set_fastpath_enabled,
        lambda x: x * (2 if torch.backends.mha.get_fastpath_enabled() else 3),
    ),
    "opt_einsum": (
        lambda on: setattr(torch.backends.opt_einsum, "enabled", on),
        lambda x: x * (2 if torch.backends.opt_einsum.enabled else 3),
    ),
}
"""Flags that torch keeps in Python, and computes with."""


@pytest.mark.parametrize("name", FLAGS)
def test_flags_in_python(rand: Rand, name: str) -> None:
    write, f = FLAGS[name]
    fast = ol.graph(f, warmup=1)
    try:
        for on in (True, False, True):
            write(on)
            alike(fast, f, rand, 3)
    finally:
        write(True)
    assert replays(fast) > 0


@on_cpu_and_cuda
def test_autocast_dtype(device: torch.device, rand: Rand) -> None:
    weight = rand(50, 4, 4)
    dtypes = [None, torch.bfloat16, torch.float16]

    def f(x: Tensor) -> Tensor:
        return x @ weight

    fast = ol.graph(f, warmup=1)
    for i in range(12):
        dtype = dtypes[i % 3]
        cast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
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


def test_the_recording_takes_the_fused_operations_that_eager_takes(
    device: torch.device, rand: Rand
) -> None:
    """Torch asks for a function mode before it takes them, and captures are watched by one."""

    def world() -> Any:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(device)
        return model, lambda i: (rand(i, 3, 5, 16),)

    with torch.no_grad():
        drop_in_worlds(world, calls=6)


def test_a_function_mode_inside_the_callable_is_seen_as_in_eager(rand: Rand) -> None:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def asked(x: Tensor) -> Tensor:
        return x + (10 if torch.overrides.has_torch_function((x,)) else 1)

    def f(x: Tensor) -> Tensor:
        with Doubles():
            y = asked(x)
        return asked(y)

    before = torch.overrides.has_torch_function
    with torch.no_grad():
        drop_in_worlds(lambda: (f, lambda i: (rand(i, 3),)), calls=6)
    assert torch.overrides.has_torch_function is before


class Answering:
    """An object that has every attribute, so that torch takes it for one with a
    `__torch_function__`, which its class does not have."""

    def __getattr__(self, name: str) -> int:
        return 5

    def __radd__(self, x: Tensor) -> Tensor:
        return x * 3


def test_an_operand_that_has_every_attribute(rand: Rand) -> None:
    operand: Any = Answering()
    fast = ol.graph(lambda x: x + operand, warmup=1)
    alike(fast, lambda x: x * 3, rand, 3)
    assert replays(fast)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_that_packs_its_sequences_is_refused(device: torch.device, rand: Rand) -> None:
    """It zeroes what is masked, and shortens its result, as the mask's values say."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, mask_check=False).eval().to(device)
    mask = torch.zeros(3, 5, dtype=torch.bool, device=device)
    mask[0, 3:] = True
    fast: Any = ol.graph(model, warmup=1)
    with torch.no_grad():
        expected = model(rand(0, 3, 5, 16), src_key_padding_mask=mask)
        assert not expected[0, 3:].any()
        assert_same(fast(rand(0, 3, 5, 16), src_key_padding_mask=mask), expected)
        with pytest.raises(ol.CaptureError, match=r"OL10[29]"):
            fast(rand(0, 3, 5, 16), src_key_padding_mask=mask)
        with pytest.raises(ol.CaptureError, match=r"OL10[29]"):
            fast.capture(rand(0, 3, 5, 16), src_key_padding_mask=mask)
