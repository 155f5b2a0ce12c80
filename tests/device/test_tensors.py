"""The contract's table of tensors: inputs that are written, outputs that alias, state that moves."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    assert_same,
    drop_in,
    drop_in_worlds,
    on_cpu_and_cuda,
    replays,
    right_or_refused,
)

Rand = Callable[..., Tensor]


# Inputs that are written.


def test_an_input_mutated_in_place(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    drop_in(f, lambda i: (rand(i, 4, 3),))


def test_an_input_mutated_through_a_view(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        x[1:3].t().zero_()
        x.view(-1)[0] = 5
        return x + 0

    drop_in(f, lambda i: (rand(i, 4, 3),))


def test_an_input_mutated_by_an_out_argument(rand: Rand) -> None:
    def f(x: Tensor, out: Tensor) -> Tensor:
        return torch.add(x, 1, out=out)

    drop_in(f, lambda i: (rand(i, 4), rand(100 + i, 4)))


def test_a_kv_cache(rand: Rand) -> None:
    def world() -> Any:
        cache = {"k": rand(500, 1, 16, 4), "v": rand(501, 1, 16, 4)}

        def decode(x: Tensor, position: Tensor, cache: dict[str, Tensor]) -> Tensor:
            cache["k"].index_copy_(1, position, x)
            cache["v"].index_copy_(1, position, x * 2)
            scores = (cache["k"] * x).sum(-1)
            return (scores.softmax(-1)[..., None] * cache["v"]).sum(1)

        def arguments(i: int) -> tuple[Any, ...]:
            position = torch.tensor([i], device=rand(0, 1).device)
            return rand(i, 1, 1, 4), position, cache

        return decode, arguments

    drop_in_worlds(world, calls=10)


def test_another_cache_in_its_place(rand: Rand) -> None:
    """Several sequences in turn, each with its own cache, one recording."""

    def world() -> Any:
        caches = [rand(500 + n, 8, 4) for n in range(3)]

        def f(x: Tensor, cache: Tensor) -> Tensor:
            cache.add_(x)
            return cache.sum(0)

        return f, lambda i: (rand(i, 4), caches[i % 3])

    drop_in_worlds(world, calls=9)


def test_a_cache_on_the_module(device: torch.device, rand: Rand) -> None:
    class Accumulates(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, device=device))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total * 2

    drop_in_worlds(lambda: (Accumulates(), lambda i: (rand(i, 3),)), calls=8)


def test_an_input_written_in_part_keeps_the_rest(rand: Rand) -> None:
    def f(x: Tensor) -> None:
        x[::2] = 0

    drop_in(f, lambda i: (rand(i, 6),))


def test_what_lies_between_a_sliced_inputs_elements_is_untouched(rand: Rand) -> None:
    def growing(i: int) -> tuple[Tensor, ...]:
        base = rand(i, 4, 6)
        return base[:, ::3], base

    drop_in(lambda x, base: x.add_(1) * 2, growing)


def test_the_order_of_reads_and_writes(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = x + y
        x.copy_(y)
        y.zero_()
        return before, x + 1, y + 1

    drop_in(f, lambda i: (rand(i, 4), rand(50 + i, 4)))


def test_two_arguments_that_overlap(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(2)
        return x + y

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        base = rand(i, 10)
        return base[:8], base[2:]

    drop_in(f, arguments)


def test_overlapping_arguments_of_different_dtype(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.bitwise_and_(0x7FFFFFFF)
        return x * 2

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = rand(i, 8)
        return x, x.view(torch.int32)[4:]

    drop_in(f, arguments)


def test_adjacent_arguments_that_do_not_overlap(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        base = rand(i, 8)
        return base[:4], base[4:]

    drop_in(f, arguments)


def test_interleaved_arguments(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        base = rand(i, 8)
        return base[::2], base[1::2]

    drop_in(f, arguments)


# Versions, and what autograd makes of them.


def test_the_version_of_a_written_input_rises(rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        x.add_(1)
        return x + y

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            x, y = rand(i, 3), rand(i, 3)
            base, other = x._version, y._version
            fast(x, y)
            assert x._version > base, f"call {i}"
            assert y._version == other, f"call {i}"
    assert replays(fast) > 0


def test_the_version_of_a_written_buffer_rises(device: torch.device, rand: Rand) -> None:
    model = nn.BatchNorm1d(3).to(device).train()
    fast = ol.graph(model, warmup=1)
    assert model.running_mean is not None
    with torch.no_grad():
        for i in range(5):
            before, weight = model.running_mean._version, model.weight._version
            fast(rand(i, 4, 3))
            assert model.running_mean._version > before, f"call {i}"
            assert model.weight._version == weight
    assert replays(fast) > 0


def test_a_saved_tensor_written_by_a_replay_is_an_error_in_backward(rand: Rand) -> None:
    fast = ol.graph(lambda x: x.mul_(2), warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    w = rand(0, 3).requires_grad_()
    x = rand(1, 3)
    loss = (w * x).sum()
    with torch.no_grad():
        fast(x)
    assert replays(fast) >= 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Metadata changed in place.


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.squeeze_(),
        lambda x: x.resize_(2, 2),
        lambda x: x.resize_(8, 8),
        lambda x: x.set_(torch.ones_like(x)),
        lambda x: setattr(x, "data", x.data * 2),
        lambda x: setattr(x, "data", x.data.t()),
    ],
    ids=[
        "t_",
        "transpose_",
        "unsqueeze_",
        "squeeze_",
        "shrink",
        "grow",
        "set_",
        "data",
        "data view",
    ],
)
def test_metadata_of_an_argument(rand: Rand, change: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor) -> Tensor:
        change(x)
        return x.clone() if x.numel() <= 12 else x[:2, :2].clone() * 0

    def world() -> Any:
        # Grown memory is not initialised: compare what was there before.
        return f, lambda i: (rand(i, 3, 4),)

    refused = right_or_refused_shape(world)
    assert refused in (None, "OL107")


def right_or_refused_shape(world: Callable[[], Any]) -> str | None:
    """As `right_or_refused`, but of arguments only the metadata (grown memory has no values)."""
    eager, eager_arguments = world()
    f, arguments = world()
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            expected_args, args = eager_arguments(i), arguments(i)
            expected = eager(*expected_args)
            try:
                got = fast(*args)
            except ol.CaptureError as error:
                return error.code
            assert_same(got, expected, f"call {i}")
            for a, b in zip(args, expected_args, strict=True):
                assert (a.shape, a.stride()) == (b.shape, b.stride()), f"call {i}"
    return None


def test_metadata_of_a_new_tensor_is_its_own(rand: Rand) -> None:
    drop_in(lambda x: (x * 2).t_().unsqueeze_(0), lambda i: (rand(i, 3, 4),))


def test_requires_grad_switched_on_inside(rand: Rand) -> None:
    def world() -> Any:
        return lambda x: x.mul(2).requires_grad_(), lambda i: (rand(i, 3),)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        eager, arguments = world()
        fast = ol.graph(eager, warmup=1)
        with torch.no_grad():
            for i in range(4):
                assert_same(fast(*arguments(i)), eager(*arguments(i)))


# Outputs that are, or share memory with, something else.


def share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


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
            for o, e in zip(outs, expected_outs, strict=True):
                assert o._is_view() == e._is_view(), f"call {i}"
            # A write through one is seen through the other.
            for o, e in zip(outs, expected_outs, strict=True):
                if e.numel() and 0 not in e.stride():
                    o.add_(1)
                    e.add_(1)
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
    "strided": lambda x: x.as_strided((3,), (4,), 1),
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


# State that moves.


class Model(nn.Module):
    scale: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.register_buffer("scale", torch.full((4,), 2.0, device=device))
        self.plain = torch.full((4,), 3.0, device=device)
        self.listed = [torch.full((4,), 5.0, device=device)]
        self.named = {"shift": torch.full((4,), 7.0, device=device)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + self.plain
        return y + self.listed[0] * self.named["shift"]


def new(t: Tensor, i: int) -> Tensor:
    """Another tensor of the same kind, other values, other memory."""
    return torch.full_like(t, 0.25 * i + 1).add_(t.detach())


def junk(device: torch.device) -> None:
    """Reuse memory that was freed, so that a stale read shows."""
    gc.collect()
    for _ in range(8):
        torch.full((4, 4), float("nan"), device=device)
        torch.full((4,), float("nan"), device=device)


def assign_state(m: Any, i: int) -> None:
    m.load_state_dict({k: new(v, i) for k, v in m.state_dict().items()}, assign=True)


def set_data(m: Any, i: int) -> None:
    m.linear.weight.data = new(m.linear.weight, i)


def restride(m: Any, i: int) -> None:
    m.linear.weight.data = new(m.linear.weight, i).t().contiguous().t()


def new_parameter(m: Any, i: int) -> None:
    m.linear.weight = nn.Parameter(new(m.linear.weight, i))


def swap(m: Any, i: int) -> None:
    torch.utils.swap_tensors(m.linear.bias, nn.Parameter(new(m.linear.bias, i)))


def set_storage(m: Any, i: int) -> None:
    with torch.no_grad():
        m.linear.bias.set_(new(m.linear.bias, i))


def new_buffer(m: Any, i: int) -> None:
    m.scale = new(m.scale, i)


def new_plain(m: Any, i: int) -> None:
    m.plain = new(m.plain, i)


def new_in_list(m: Any, i: int) -> None:
    m.listed[0] = new(m.listed[0], i)


def new_list(m: Any, i: int) -> None:
    m.listed = [new(m.listed[0], i)]


def new_in_dict(m: Any, i: int) -> None:
    m.named["shift"] = new(m.named["shift"], i)


def new_submodule(m: Any, i: int) -> None:
    linear = copy.deepcopy(m.linear)
    with torch.no_grad():
        linear.weight.add_(i)
    m.linear = linear


def to_and_back(m: Any, i: int) -> None:
    m.to(torch.float64)
    m.linear.weight.data.add_(i)
    m.to(torch.float32)


def fewer(m: Any, i: int) -> None:
    m.linear.bias = (
        None if i % 4 else nn.Parameter(torch.full((4,), float(i), device=m.scale.device))
    )


def aliased(m: Any, i: int) -> None:
    """Two slots that were apart hold one tensor now."""
    m.plain = m.scale


MOVES = [
    assign_state,
    set_data,
    restride,
    new_parameter,
    swap,
    set_storage,
    new_buffer,
    new_plain,
    new_in_list,
    new_list,
    new_in_dict,
    new_submodule,
    to_and_back,
    fewer,
    aliased,
]


def world_of_model(device: torch.device, rand: Rand) -> Any:
    torch.manual_seed(3)
    model = Model(device)
    return model, lambda i: (rand(i, 2, 4),)


@pytest.mark.parametrize("move", MOVES)
def test_state_that_moved(
    device: torch.device, rand: Rand, move: Callable[[Any, int], None]
) -> None:
    def between(i: int, model: Any) -> None:
        if i in (4, 8):
            move(model, i)
            junk(device)

    fast = drop_in_worlds(
        lambda: world_of_model(device, rand),
        calls=12,
        recordings=None,
        min_replays=4,
        between=between,
    )
    assert len(fast.recordings) < 6


@pytest.mark.parametrize("move", MOVES)
def test_state_that_moves_before_every_call(
    device: torch.device, rand: Rand, move: Callable[[Any, int], None]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        drop_in_worlds(
            lambda: world_of_model(device, rand),
            calls=6,
            recordings=None,
            min_replays=0,
            between=lambda i, model: move(model, i),
        )


def test_moved_and_moved_back(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 4, device=device)
    fast = ol.graph(model, warmup=1)
    a, b = model.weight.data, new(model.weight, 3)
    with torch.no_grad():
        for i in range(12):
            model.weight.data = b if (i // 3) % 2 else a
            assert_same(
                fast(rand(i, 2, 4)),
                torch.nn.functional.linear(rand(i, 2, 4), model.weight, model.bias),
            )
    assert replays(fast) >= 4


def test_what_a_recording_reads_stays_alive(device: torch.device, rand: Rand) -> None:
    """The weights live in the closure of a function that the caller dropped."""

    def build() -> Any:
        weight = rand(5, 4, 4)
        return ol.graph(lambda x: x @ weight, warmup=1)

    fast = build()
    with torch.no_grad():
        for i in range(4):
            junk(device)
            assert_same(fast(rand(i, 2, 4)), rand(i, 2, 4) @ rand(5, 4, 4))
    assert replays(fast) >= 3


def test_functional_call(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4, device=device)
    fast = ol.graph(model, warmup=1)
    state = {k: v.detach() for k, v in model.named_parameters()}
    with torch.no_grad():
        for i in range(8):
            given = {k: new(v, i) for k, v in state.items()} if i % 2 else state
            x = rand(i, 2, 4)
            assert_same(
                torch.func.functional_call(fast, given, (x,)),
                torch.nn.functional.linear(x, given["weight"], given["bias"]),
            )


def test_functional_call_inside(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 4, device=device)

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))

    drop_in(f, lambda i: (rand(i, 2, 4), rand(40 + i, 4, 4), rand(60 + i, 4)))


def test_a_closure_cell_rebound(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        weight = rand(0, 4)

        def f(x: Tensor) -> Tensor:
            return x * weight

        def arguments(i: int) -> tuple[Tensor]:
            nonlocal weight
            if i in (4, 7):
                weight = rand(i, 4)
                junk(device)
            return (rand(i, 4),)

        return f, arguments

    drop_in_worlds(world, calls=10, recordings=None, min_replays=4)


GLOBAL_WEIGHT: Tensor


def reads_global(x: Tensor) -> Tensor:
    return x * GLOBAL_WEIGHT


def test_a_global_rebound(device: torch.device, rand: Rand) -> None:
    global GLOBAL_WEIGHT
    GLOBAL_WEIGHT = rand(0, 4)
    fast = ol.graph(reads_global, warmup=1)
    with torch.no_grad():
        for i in range(10):
            if i in (4, 7):
                GLOBAL_WEIGHT = rand(i, 4)
                junk(device)
            assert_same(fast(rand(i, 4)), rand(i, 4) * GLOBAL_WEIGHT)
    assert replays(fast) >= 4


def test_a_tensor_of_an_object_in_a_closure(device: torch.device, rand: Rand) -> None:
    class Holder:
        def __init__(self) -> None:
            self.weight = rand(0, 4)

    def world() -> Any:
        holder = Holder()

        def arguments(i: int) -> tuple[Tensor]:
            if i in (4, 7):
                holder.weight = rand(i, 4)
                junk(device)
            return (rand(i, 4),)

        return (lambda x: x * holder.weight), arguments

    drop_in_worlds(world, calls=10, recordings=None, min_replays=3)


def test_a_tensor_of_a_bound_methods_owner(device: torch.device, rand: Rand) -> None:
    class Engine:
        def __init__(self) -> None:
            self.weight = rand(0, 4)

        def step(self, x: Tensor) -> Tensor:
            return x * self.weight

    def world() -> Any:
        engine = Engine()

        def arguments(i: int) -> tuple[Tensor]:
            if i in (4, 7):
                engine.weight = rand(i, 4)
                junk(device)
            return (rand(i, 4),)

        return engine.step, arguments

    drop_in_worlds(world, calls=10, recordings=None, min_replays=4)


def test_a_default_argument_and_a_partial(rand: Rand) -> None:
    weight = rand(0, 4)

    def f(x: Tensor, w: Tensor = weight) -> Tensor:
        return x * w

    drop_in(f, lambda i: (rand(i, 4),))
    drop_in(functools.partial(f, w=rand(1, 4)), lambda i: (rand(i, 4),))


def test_a_default_argument_rebound(rand: Rand) -> None:
    def f(x: Tensor, w: Tensor = rand(0, 4)) -> Tensor:  # noqa: B008
        return x * w

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(8):
            if i == 4:
                f.__defaults__ = (rand(99, 4),)
            assert_same(fast(rand(i, 4)), f(rand(i, 4)))
    assert replays(fast) >= 3


def test_a_tensor_that_no_slot_holds_is_named(rand: Rand) -> None:
    """An iterator hands it out: no attribute, cell or global leads to it."""
    hidden = {"weight": rand(0, 4)}

    class Opaque:
        __slots__ = ("get",)

        def __init__(self, get: Callable[[], Tensor]) -> None:
            self.get = get

    opaque = Opaque(iter(lambda: hidden["weight"], None).__next__)

    def f(x: Tensor) -> Tensor:
        return x * opaque.get()

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            assert_same(fast(rand(i, 4)), rand(i, 4) * hidden["weight"])
    assert len(fast.recordings) == 1
    assert len(fast.recordings[0].untraced) == 1


def test_traced_state_is_not_named_as_untraced(device: torch.device, rand: Rand) -> None:
    fast = drop_in_worlds(lambda: world_of_model(device, rand))
    assert list(fast.recordings[0].untraced) == []


def test_tied_weights_untied(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        torch.manual_seed(3)
        a, b = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
        b.weight = a.weight
        return nn.Sequential(a, b), lambda i: (rand(i, 2, 4),)

    def between(i: int, model: Any) -> None:
        if i == 4:
            model[1].weight = nn.Parameter(new(model[1].weight, i))

    drop_in_worlds(world, calls=9, recordings=None, min_replays=4, between=between)


# State that changes in place.


def in_place(m: Any, i: int) -> None:
    with torch.no_grad():
        m.linear.weight.mul_(0.5).add_(i)


def load_in_place(m: Any, i: int) -> None:
    m.load_state_dict({k: new(v, i) for k, v in m.state_dict().items()})


def copy_data(m: Any, i: int) -> None:
    m.linear.weight.data.copy_(new(m.linear.weight, i))


def buffer_in_place(m: Any, i: int) -> None:
    m.scale.fill_(i)
    m.plain.fill_(i)
    m.listed[0].fill_(i)
    m.named["shift"].fill_(i)


def optimizer_step(m: Any, i: int) -> None:
    m.linear.weight.grad = torch.full_like(m.linear.weight, float(i))
    torch.optim.SGD([m.linear.weight], lr=0.1).step()
    m.linear.weight.grad = None


@pytest.mark.parametrize(
    "change", [in_place, load_in_place, copy_data, buffer_in_place, optimizer_step]
)
def test_changes_in_place_are_seen_by_the_same_recording(
    device: torch.device, rand: Rand, change: Callable[[Any, int], None]
) -> None:
    drop_in_worlds(lambda: world_of_model(device, rand), calls=6, recordings=1, between=change)


# Kinds of tensors.


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
