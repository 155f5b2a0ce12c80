"""Table of tensors: outputs that are, or share memory with, something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in, replays, right_or_refused


def share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def rises(tensors: list[Tensor], written: Tensor) -> list[bool]:
    """Which tensors' versions rise by a write into one of them."""
    before = [t._version for t in tensors]
    written.add_(1)
    return [t._version > version for t, version in zip(tensors, before, strict=True)]


def check_alias(fast: Any, arguments: Callable[[int], tuple[Any, ...]], f: Any) -> None:
    """Each output shares memory with the caller's tensors exactly as eager's outputs do."""
    kept: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for i in range(6):
            args, expected_args = arguments(i), arguments(i)
            got, expected = fast(*args), f(*expected_args)
            kept.append((got, expected))
            outs = got if isinstance(got, tuple) else (got,)
            expected_outs = expected if isinstance(expected, tuple) else (expected,)
            every, expected_every = [*args, *outs], [*expected_args, *expected_outs]
            for m in range(len(every)):
                for n in range(m):
                    at = f"call {i}: {n} and {m}"
                    assert (every[m] is every[n]) == (expected_every[m] is expected_every[n]), at
                    a, b = every[m], every[n]
                    c, d = expected_every[m], expected_every[n]
                    if a.numel() and b.numel():
                        assert share(a, b) == share(c, d), at
                        if share(c, d):
                            assert a.data_ptr() - b.data_ptr() == c.data_ptr() - d.data_ptr(), at
            # A write through one is seen through the other, in its version too.
            for o, e in zip(outs, expected_outs, strict=True):
                if e.numel() and 0 not in e.stride():
                    risen, expected_risen = rises(every, o), rises(expected_every, e)
                    assert risen == expected_risen, f"call {i}: versions"
            assert_same((got, args), (expected, expected_args))
        for got, expected in kept:
            assert_same(got, expected)
    assert replays(fast) >= 4


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "input": lambda x: x,
    "input twice": lambda x: (x, x),
    "detached": lambda x: x.detach(),
    "slice": lambda x: x[1:],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(2, -1),
    "expand": lambda x: x[:1].expand(3, 4),
    "dtype view": lambda x: x.view(torch.int32),
    "diagonal": lambda x: x.diagonal(),
    "unbind": lambda x: x.unbind(0),
    "view and copy": lambda x: (x[0], x[0].clone()),
    "mutated input": lambda x: x.add_(1),
    "view of mutated input": lambda x: x.add_(1)[1:],
    "outputs that share": lambda x: (lambda y: (y, y[1:], y.t()))(x * 2),
    "same output twice": lambda x: (lambda y: (y, y))(x * 2),
    "view without its base": lambda x: (x * 2)[1:, 1:],
    "two views without a base": lambda x: (lambda y: (y[:2], y[1:]))(x * 2),
    "expanded output": lambda x: (x.sum() * 1).expand(3, 4),
    "chunks": lambda x: (x + 1).chunk(2, 0),
    "empty slice": lambda x: x[:0],
    "empty slice of new": lambda x: (x * 2)[:0],
    "mutated after": lambda x: (lambda y: (y, y[0].add_(1)))(x * 2),
    "contiguous": lambda x: x.contiguous(),
    "to same": lambda x: x.to(x.dtype),
    "dropout in eval": lambda x: torch.nn.functional.dropout(x, training=False),
    "input and new": lambda x: (x, x + 1, x[0] + 1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases(rand: Rand, name: str) -> None:
    f = ALIASES[name]
    check_alias(ol.graph(f, warmup=1), lambda i: (rand(i, 3, 4),), f)


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_with_rebind(rand: Rand, name: str) -> None:
    f = ALIASES[name]
    check_alias(ol.graph(f, warmup=1, inputs="rebind"), lambda i: (rand(i, 3, 4),), f)


@pytest.mark.parametrize("offset", [None, 0, 1])
def test_as_strided_of_an_input(rand: Rand, offset: int | None) -> None:
    """Its offset counts from the start of the storage, which is the caller's."""
    right_or_refused(
        lambda: (lambda x: x.as_strided((3,), (4,), offset), lambda i: (rand(i, 3, 4),)), "OL109"
    )
    right_or_refused(
        lambda: (lambda x: x.as_strided((3,), (2,), offset), lambda i: (rand(i, 5, 4)[1:],)),
        "OL109",
    )


def test_a_view_of_one_of_two_inputs(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y[1:], x.t()

    check_alias(ol.graph(f, warmup=1), lambda i: (rand(i, 3, 4), rand(9 + i, 4)), f)


def test_an_input_that_is_a_view_returned_whole(rand: Rand) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, 1:]

    check_alias(ol.graph(f, warmup=1), lambda i: (rand(i, 5, 6)[1:, ::2],), f)


def test_conj_and_neg_views_of_an_input(rand: Rand) -> None:
    drop_in(
        lambda x: (x.conj(), x.imag, x.conj().imag, x.real),
        lambda i: (rand(i, 4, dtype=torch.complex64),),
    )


def test_as_strided_beyond_a_slice_is_refused(rand: Rand) -> None:
    fast = ol.graph(lambda x: x.as_strided((6,), (1,)) + 0, warmup=1)
    base = rand(0, 8)
    with torch.no_grad():
        fast(base[:3])
        with pytest.raises(ol.CaptureError) as caught:
            fast(base[:3])
    assert caught.value.code == "OL109"


def test_parameters_and_buffers_returned(device: torch.device, rand: Rand) -> None:
    class Gives(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3, device=device))
            self.register_buffer("state", torch.ones(3, device=device))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.weight, self.weight.t(), self.state, self.state[1:], x @ self.weight

    model = Gives()
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(5):
            weight, transposed, state, tail, y = fast(rand(i, 3))
            assert weight is model.weight
            assert state is model.state
            assert share(transposed, model.weight)
            assert tail.data_ptr() == model.state[1:].data_ptr()
            assert_same(transposed, model.weight.t())
            assert_same(y, rand(i, 3) @ model.weight)
            tail.add_(1)
            transposed.mul_(2)
            assert_same(state, model.state)
    assert replays(fast) >= 3


def test_an_output_that_is_a_view_with_grad_history_elsewhere(rand: Rand) -> None:
    """A view of a leaf that requires grad, taken under no_grad, is as eager's."""
    leaf = rand(0, 4).requires_grad_()
    drop_in(lambda x: (x[1:], x.detach()), lambda i: (leaf,))


def test_views_of_a_normal_tensor_in_inference_mode_are_normal(rand: Rand) -> None:
    """Found by random programs: `.real` is a view by another dtype."""
    drop_in(
        lambda x: (x.real, x.imag, x[1:], x.detach(), x.view(torch.float32)),
        lambda i: (rand(i, 4, dtype=torch.complex64),),
        mode=torch.inference_mode,
    )
