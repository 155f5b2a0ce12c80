"""Table of tensors: layouts, sizes and dtypes that a memcpy can and cannot carry."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in, on_cpu_and_cuda, replays, right_or_refused

KINDS: dict[str, Callable[[Rand, int], Tensor]] = {
    "scalar": lambda r, i: r(i),
    "one element": lambda r, i: r(i, 1),
    "empty": lambda r, i: r(i, 0),
    "empty rows": lambda r, i: r(i, 0, 4),
    "empty columns": lambda r, i: r(i, 4, 0),
    "expanded": lambda r, i: r(i, 1, 4).expand(3, 4),
    "expanded scalar": lambda r, i: r(i).expand(3, 4),
    "columns": lambda r, i: r(i, 4, 6)[:, 1:3],
    "rows": lambda r, i: r(i, 6, 4)[1:3],
    "steps": lambda r, i: r(i, 12)[::3],
    "steps of both": lambda r, i: r(i, 6, 6)[::2, ::3],
    "transposed": lambda r, i: r(i, 4, 3).t(),
    "permuted": lambda r, i: r(i, 2, 3, 4).permute(2, 0, 1),
    "permuted slice": lambda r, i: r(i, 4, 3, 4).permute(2, 0, 1)[1:, ::2],
    "channels last": lambda r, i: r(i, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "unaligned": lambda r, i: r(i, 9)[1:],
    "unaligned bytes": lambda r, i: r(i, 9, dtype=torch.uint8)[1:],
    "windows": lambda r, i: r(i, 8).as_strided((5, 3), (1, 1)),
    "windows of 3-D": lambda r, i: r(i, 4, 8).unfold(1, 3, 2),
    "conj": lambda r, i: r(i, 4, dtype=torch.complex64).conj(),
    "conj slice": lambda r, i: r(i, 8, dtype=torch.complex64).conj()[::2],
    "neg": lambda r, i: torch._neg_view(r(i, 4)),
    "imag of conj": lambda r, i: r(i, 4, dtype=torch.complex64).conj().imag,
    "odd size": lambda r, i: r(i, 7, dtype=torch.uint8),
    "stride zero inside": lambda r, i: r(i, 3, 1, 2).expand(3, 4, 2),
    "size one with odd stride": lambda r, i: r(i, 8).as_strided((1, 4), (77, 2)),
    "diagonal": lambda r, i: r(i, 5, 5).diagonal(),
    "large": lambda r, i: r(i, 257, 129),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensor(rand: Rand, kind: str) -> None:
    make = KINDS[kind]
    fast = drop_in(lambda x: (x * 2, x + x, x.clone()), lambda i: (make(rand, i),))
    travels = set(fast.recordings[0].inputs.values())
    assert travels <= {"node", "copy", "fill", "rebind", "address", "constant"}
    assert len(fast.recordings[0].inputs) == 1
    assert len(fast.recordings[0].outputs) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensor_as_fresh_outputs(rand: Rand, kind: str) -> None:
    """The output has the kind; computed inside from a plain input."""
    make = KINDS[kind]

    def f(x: Tensor) -> Tensor:
        def scaled(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            n = max(1, torch.Size(shape).numel())
            t = x.repeat(-(-n // x.numel()))[: torch.Size(shape).numel()].reshape(shape)
            return t.to(dtype)

        return make(scaled, 0)

    drop_in(f, lambda i: (rand(i, 8).abs(),))


WRITABLE = [k for k in KINDS if "expand" not in k and "windows" not in k and "stride zero" not in k]


@pytest.mark.parametrize("kind", WRITABLE)
def test_kinds_of_tensor_written_in_place(rand: Rand, kind: str) -> None:
    make = KINDS[kind]
    drop_in(lambda x: x.mul_(2), lambda i: (make(rand, i),))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensor_by_rebind(rand: Rand, kind: str) -> None:
    make = KINDS[kind]
    drop_in(lambda x: (x * 2, x.sum()), lambda i: (make(rand, i),), inputs="rebind")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
    ids=str,
)
def test_dtypes(rand: Rand, dtype: torch.dtype) -> None:
    drop_in(
        lambda x: (x.clone(), x.view(-1)[1:], x.t().contiguous()),
        lambda i: (rand(i, 3, 5, dtype=dtype),),
    )


def test_signed_zeros_and_nans_travel_unchanged(rand: Rand) -> None:
    patterns = [0x7FC00001, -0x00400000, -0x80000000, 0, 0x7F800000]

    def arguments(i: int) -> tuple[Tensor]:
        values = torch.tensor(patterns[i % 5 :] + patterns[: i % 5], dtype=torch.int32)
        return (values.view(torch.float32).to(rand(0, 1).device),)

    drop_in(lambda x: (x.clone(), x[1:]), arguments, calls=6)


@on_cpu_and_cuda
def test_sparse_tensors_are_right(device: torch.device, rand: Rand) -> None:
    def f(s: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(s, x)

    fast = ol.graph(f, warmup=1, on_refusal="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            s = torch.relu(rand(i, 4, 4)).to_sparse()
            assert_same(fast(s, rand(i, 4, 2)), f(s, rand(i, 4, 2)))


@on_cpu_and_cuda
def test_sparse_results_are_right_or_refused(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        return lambda x: torch.relu(x).to_sparse(), lambda i: (rand(i, 4, 4),)

    assert right_or_refused(world, "OL101", "OL102", "OL108", "OL109") is not None


def test_many_inputs_and_outputs(rand: Rand) -> None:
    def f(*xs: Tensor) -> list[Tensor]:
        return [x * (k + 1) for k, x in enumerate(xs)]

    drop_in(f, lambda i: tuple(rand(100 * i + k, k + 1) for k in range(40)))


def test_an_input_that_nothing_reads(rand: Rand) -> None:
    drop_in(lambda x, y: x * 2, lambda i: (rand(i, 3), rand(i, 5)))


def test_an_output_that_depends_on_no_input(device: torch.device, rand: Rand) -> None:
    drop_in(lambda x: torch.arange(4, device=device) * 2, lambda i: (rand(i, 3),))


def test_arguments_freed_after_the_call_are_not_touched(device: torch.device, rand: Rand) -> None:
    """The next launch must not read or write memory of the last call's arguments."""
    fast = ol.graph(lambda x: x.mul_(2) + 1, warmup=1)
    with torch.no_grad():
        for i in range(10):
            x = rand(i, 64)
            y = fast(x)
            del x
            other = torch.full((64,), 5.0, device=device)
            assert_same(y, rand(i, 64) * 2 + 1)
            z = fast(rand(100 + i, 64))
            assert_same(other, torch.full((64,), 5.0, device=device))
            assert_same(z, rand(100 + i, 64) * 2 + 1)
    assert replays(fast) > 0


def _nested(n: int, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(k + 1, 3) for k in range(n)], layout=layout)


PROTOTYPES = pytest.mark.filterwarnings("ignore:.*(prototype|beta)")

WITHOUT_STRIDES: dict[str, Callable[[int], Tensor]] = {
    "sparse": lambda n: torch.eye(n).to_sparse(),
    "sparse rows": lambda n: torch.eye(n).to_sparse_csr(),
    "sparse parameter": lambda n: torch.nn.Parameter(torch.eye(n).to_sparse()),
    "nested": _nested,
    "jagged": lambda n: _nested(n, torch.jagged),
}


@PROTOTYPES
@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
def test_state_without_strides_is_replaced(device: torch.device, rand: Rand, kind: str) -> None:
    """Its sizes are numbers of Python, which a recording holds."""
    if kind == "jagged" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 asks the dispatcher for its dimensions, which is refused")
    state = {"t": WITHOUT_STRIDES[kind](2)}
    fast = ol.graph(lambda x: x * state["t"].size(0), warmup=1)
    with torch.no_grad():
        for n in (2, 3, 2, 4):
            state["t"] = WITHOUT_STRIDES[kind](n)
            for i in range(4):
                assert_same(fast(rand(i, 3)), rand(i, 3) * n)
    assert replays(fast) >= 2


@PROTOTYPES
@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
def test_state_without_strides_is_returned(device: torch.device, rand: Rand, kind: str) -> None:
    state = WITHOUT_STRIDES[kind](2)
    fast = ol.graph(lambda x: (x * 2, state), warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        with pytest.raises(ol.CaptureError, match="OL108"):
            fast(rand(0, 3))


@PROTOTYPES
def test_a_nested_argument_runs_as_usual(rand: Rand) -> None:
    fast = ol.graph(lambda x: x.to_padded_tensor(0.0) * 2, warmup=1)
    for n in (2, 3, 3, 3):
        assert_same(fast(_nested(n)), _nested(n).to_padded_tensor(0.0) * 2)
    assert not fast.recordings
