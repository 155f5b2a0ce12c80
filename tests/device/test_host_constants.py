"""Values of the host's that a call brings to the device: the same at each call, and kept there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, gradients_alike, on_accelerators, replays
from .steps import step_over

pytestmark = on_accelerators

TABLE = torch.arange(3.0)
AGAIN = itertools.cycle((1.0, 2.0, 3.0))
LARGE = torch.linspace(-1, 1, 900).reshape(3, 300)
PICKED = np.array([0, 2])
MASK = torch.tensor([True, False, True])


def filled(x: Tensor) -> Tensor:
    return torch.empty(3, device=x.device).copy_(torch.tensor([1.0, 2.0, 3.0])) + x


def changed(x: Tensor) -> Tensor:
    """Each call changes a copy, and never the value that is kept."""
    return torch.tensor([1.0, 2.0, 3.0], device=x.device).add_(1) + x


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, [0, 2]] = 1.0
    y[:, [1]] = torch.tensor([5.0]).to(x.device)
    return y


def assigned_by_index(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.ones(1, dtype=torch.long, device=x.device)] = 1.0
    y[y > 0.5] = 3
    y[0] = 2.0
    return y


def masked(x: Tensor) -> Tensor:
    """By numbers of the host and the device, which torch does by filling, or by counting."""
    y = x.clone()
    y[y > 0.5] = torch.tensor(3.0)
    y[y < -0.5] = torch.tensor([2.0])
    y[y[:, 0] > 0] = y.detach().sum()
    y[np.array([True, False])] = 1.0
    y[MASK[:2], 0] = torch.tensor([7.0])
    return y


def masked_with_negative_zeros(x: Tensor) -> Tensor:
    """For gradients, which must not be added to zeros."""
    y = x.clone()
    y[y > 0.5] = torch.tensor(3.0)
    return y * -0.0


def masked_by_rows(x: Tensor) -> Tensor:
    """By one value for each place of a mask, whose number then does not matter."""
    y, row, x = x.expand(4, 2, 3).clone(), x[0].detach() * 2, x.detach()
    y[y[..., 0] > 0] = row
    y[y[:, 0, 0] < 0] = row
    y[y[..., 1] > 0] = row[None]
    y[y[:, 1, 1] < 0] = x + 1
    y[y[:, 1, 2] < 0] = x[None, :, :1]
    y[y[:, 1, 2] > 0] = y[0, 1].detach().clone()
    y = y.index_put((y[..., 0] > 0,), row[:1])
    return y.index_put_((y[..., 0] > 0.5,), row)


def put(x: Tensor) -> Tensor:
    at = torch.tensor([0, 1]), torch.tensor([0, 2])
    y = torch.index_put(x, at, torch.tensor(5.0))
    y = y.index_put((MASK[:2],), torch.tensor(5.0), accumulate=True)
    y = y.index_put((y > 1,), torch.tensor(4.0))
    return y.index_put_((torch.tensor([0, 0]),), x[:1], accumulate=True)


def of_default_device(x: Tensor) -> Tensor:
    with x.device:
        return x * torch.tensor([1.0, 2.0, 3.0])


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "number": lambda x: x * torch.tensor(2.5, device=x.device),
    "new_tensor": lambda x: x + x.new_tensor([1, 2, 3]),
    "as_tensor": lambda x: x[:, torch.as_tensor(PICKED, device=x.device)],
    "from_numpy": lambda x: x[:, torch.from_numpy(PICKED).to(x.device)],
    "arange": lambda x: x * torch.arange(3).to(x.device),
    "computed": lambda x: x * (torch.arange(3) * 2 - 1).float().to(x.device),
    "table": lambda x: x + TABLE.to(x.device),
    "table_like": lambda x: x + TABLE.to(x),
    "large": lambda x: x @ LARGE.to(x.device),
    "transposed": lambda x: (x @ LARGE.t().contiguous().t().to(x.device)).sum(1),
    "least": lambda x: torch.where(
        x > 0.5, x, torch.tensor(torch.finfo(x.dtype).min, device=x.device)
    ),
    "list": lambda x: x[:, [0, 2]] * 2,
    "last": lambda x: x[[-1]] * 2,
    "host_index": lambda x: x[:, torch.tensor([0, 2])] * 2,
    "nested_list": lambda x: x[:, [[0, 1], [2, 0]]] * 2,
    "tuple": lambda x: x[:, (0, 2)] + x[range(2), range(2)][:, None],
    "list_of_bools": lambda x: x[:, [True, False, True]] * 2,
    "array": lambda x: x[:, PICKED] * 2,
    "array_mask": lambda x: x[:, np.array([True, False, True])] * 2,
    "numbers_of_numpy": lambda x: x[:, [PICKED[0], np.int64(1)]] * 2,
    "host_mask": lambda x: x[:, MASK] * 2,
    "masked": masked,
    "masked_by_rows": masked_by_rows,
    "masked_with_negative_zeros": masked_with_negative_zeros,
    "put": put,
    "state_returned": lambda x: (x + 1, TABLE, TABLE * 2, torch.arange(len(x))),
    "returned": lambda x: (x + 1, torch.tensor([1.0, 2.0], device=x.device)),
    "empty": lambda x: torch.cat([x.flatten(), torch.tensor([], device=x.device)]),
    "filled": filled,
    "changed": changed,
    "assigned": assigned,
    "assigned_by_index": assigned_by_index,
    "of_default_device": of_default_device,
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_replays(name: str, grad: bool, rand: Rand) -> None:
    f = PROGRAMS[name]
    fast = ol.graph(f)
    for i in range(6):
        x, y = (rand(i, 2, 3).requires_grad_(grad) for _ in range(2))
        with torch.set_grad_enabled(grad):
            found, expected = fast(x), f(y)
        assert_same(found, expected)
        if grad:
            first = found[0] if isinstance(found, tuple) else found
            own = expected[0] if isinstance(expected, tuple) else expected
            first.sum().backward()
            own.sum().backward()
            assert_same(x.grad, y.grad)
    assert replays(fast) == 3
    assert len(fast.recordings) == 1
    assert not fast.recordings[0].untraced


def test_one_capture_is_enough(rand: Rand, missed: list[int]) -> None:
    """The warm-up shows which values will be wanted."""

    def f(x: Tensor) -> Tensor:
        for i in range(5):
            x = x + torch.tensor([float(i), 1.0, 2.0], device=x.device)
        return x

    fast = ol.graph(f)
    alike(fast, f, rand, 3, calls=6)
    assert missed == [5]
    assert replays(fast) == 3


def test_state_that_it_comes_from_is_compared(rand: Rand) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = [1.0, 2.0, 3.0]
            self.table = torch.arange(3.0)
            self.large = torch.ones(3, 300)
            self.number = torch.tensor(2.0)

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * torch.tensor(self.scale, device=x.device) + self.table.to(x.device)
            return scaled @ self.large.to(x.device) * self.number

    model = Scaled()
    fast = ol.graph(model)
    for change in (
        lambda: None,
        lambda: model.scale.__setitem__(1, 5.0),
        lambda: model.table.add_(1),
        lambda: model.large.mul_(2),
        lambda: model.number.fill_(3),
        lambda: setattr(model, "table", torch.zeros(3)),
    ):
        change()
        alike(fast, model, rand, 2, 3)
    assert replays(fast) > 0


def copied_into(state: Tensor) -> Tensor:
    made = torch.zeros(3)
    made.copy_(state)
    return made


def assigned_into(state: Tensor) -> Tensor:
    made = torch.empty(3)
    made[:] = state
    return made


def added(state: Tensor) -> Tensor:
    made = torch.ones(3)
    made += state
    return made


def put_out(state: Tensor) -> Tensor:
    made = torch.zeros(3)
    torch.mul(state, 2, out=made)
    return made


def padded(state: Tensor) -> Tensor:
    rows = nn.utils.rnn.pad_sequence([state, torch.ones(2)], batch_first=True)
    return rows[0]


def scattered(state: Tensor) -> Tensor:
    return torch.zeros(3, 9).scatter_(1, state.long()[:, None], 1.0).sum(0)[:3]


@pytest.mark.parametrize(
    "make",
    [copied_into, assigned_into, added, put_out, padded, scattered],
    ids=lambda f: f.__name__,
)
def test_what_is_written_into_a_constant_counts(
    make: Callable[[Tensor], Tensor], rand: Rand
) -> None:
    """Memory that the call makes and fills from state is no constant of the code."""
    state = torch.arange(3.0)

    def f(x: Tensor) -> Tensor:
        return x * make(state).to(x.device)

    fast = ol.graph(f)
    for k in range(3):
        alike(fast, f, rand, 3)
        state[k] += 3
    assert replays(fast) > 3


def test_an_argument_written_into_a_constant_is_refused(rand: Rand) -> None:
    def f(x: Tensor, given: Tensor) -> Tensor:
        made = torch.zeros(3)
        made[:] = given
        return x * made.to(x.device)

    fast = ol.graph(f)
    with torch.no_grad():
        for i in range(3):
            assert_same(fast(rand(i, 3), torch.full((3,), float(i))), rand(i, 3) * i)
        with pytest.raises(ol.CaptureError, match="OL103"):  # noqa: PT012
            for _ in range(2):  # the first may be one more warm-up
                assert_same(fast(rand(4, 3), torch.full((3,), 4.0)), rand(4, 3) * 4)


def test_writes_that_no_version_tells_of(rand: Rand) -> None:
    """`.data`, NumPy, fused optimizers: state is compared by its bytes, large state refused."""
    state, batch_norm = torch.arange(1000.0), nn.BatchNorm1d(200)
    weight = nn.Parameter(torch.ones(200))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)

    def f(x: Tensor) -> Tensor:
        mean, own = batch_norm.running_mean, weight.detach()
        assert mean is not None
        return x * state.to(x.device)[:3] + mean.to(x.device)[:3] * own.to(x.device)[:3]

    def step() -> None:
        weight.grad = torch.ones(200)
        optimizer.step()

    fast = ol.graph(f)
    for change in (
        lambda: None,
        lambda: state.data.mul_(2),
        lambda: state.numpy().__setitem__(1, 50.0),
        lambda: setattr(state, "data", torch.arange(1000.0) * 3),
        lambda: batch_norm(torch.arange(800.0).view(4, 200)),
        step,
    ):
        change()
        alike(fast, f, rand, 3)
    assert replays(fast) > 6
    large = torch.arange(10_000.0)
    with torch.no_grad():
        error = refused(ol.graph(lambda x: x * large.to(x.device)[3]), rand)
    assert error.code == "OL103"


def refused(fast: Callable[[Tensor], Tensor], rand: Rand) -> ol.CaptureError:
    """The error of the first call that is refused."""
    try:
        for i in range(9):
            fast(rand(i, 3))
    except ol.CaptureError as error:
        return error
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("moving", "code"),
    [
        (lambda x: torch.tensor(time.perf_counter() % 1, device=x.device), "OL117"),
        (lambda x: torch.tensor([time.perf_counter() % 1] * 99).to(x.device)[:3], "OL117"),
        (lambda x: x.new_tensor(next(AGAIN)), "OL117"),
        (lambda x: torch.rand(3).to(x.device), "OL103"),
        (lambda x: torch.rand(()), "OL104"),
        (lambda x: torch.zeros(3).normal_().to(x.device), "OL103"),
        (lambda x: torch.empty(3).to(x.device) * 0, "OL103"),
    ],
    ids=[
        "clock",
        "clocks",
        "values that come again",
        "random",
        "random number",
        "filled",
        "uninitialized",
    ],
)
def test_what_moves_is_refused(moving: Callable[[Tensor], Tensor], code: str, rand: Rand) -> None:
    fast = ol.graph(lambda x: x + moving(x))
    with torch.no_grad():
        error = refused(fast, rand)
    assert error.code == code
    assert "test_host_constants.py" in str(error.where)


def test_a_host_tensor_that_wants_gradients_is_refused(rand: Rand) -> None:
    weight = torch.ones(3, requires_grad=True)
    fast = ol.graph(lambda x: x * weight.to(x.device))
    assert refused(fast, rand).code == "OL103"


def test_values_outlive_what_they_came_from(rand: Rand) -> None:
    eager: list[Any] = [
        lambda x, k=k: x + torch.tensor([k, 1.0, 2.0], device=x.device) for k in range(6)
    ]
    made = [ol.graph(f) for f in eager]
    alike(lambda x: [f(x) for f in made], lambda x: [f(x) for f in eager], rand, 3, calls=8)
    assert all(replays(fast) == 5 for fast in made)


def test_with_buckets(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]).to(x.device)
        return x * torch.tensor([1.0, 2.0, 3.0], device=x.device) + rows[:, None]

    fast = ol.graph(f, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    with torch.no_grad():
        for i in range(20):
            x = rand(i, 1 + i % 8, 3)
            assert_same(fast(x), f(x))
    assert replays(fast) > 8


def test_a_host_parameter_without_gradients(rand: Rand) -> None:
    number, table = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))

    def f(x: Tensor) -> Tensor:
        return x * number + table.to(x.device)

    fast = ol.graph(f)
    for _ in range(2):
        alike(fast, f, rand, 2, 3)
        with torch.no_grad():
            number.mul_(2)
            table.add_(1)
    assert replays(fast) > 2


def test_constants_of_inference(rand: Rand) -> None:
    with torch.inference_mode():
        table, number = torch.arange(3.0), torch.tensor(2.0)
    f: Callable[[Tensor], Tensor] = lambda x: x * number + table.to(x.device)  # noqa: E731
    fast = ol.graph(f)
    alike(fast, f, rand, 2, 3, calls=6)
    assert replays(fast) == 3


def test_state_on_the_host_is_returned_as_it_is(rand: Rand) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x + 1, self.table, self.table + 1

    model = Counted()
    fast = ol.graph(model)
    with torch.no_grad():
        for k in range(3):
            for i in range(5):
                y, table, more = fast(rand(i, 2, 3))
                assert table is model.table
                assert_same([y, more], [rand(i, 2, 3) + 1, model.table + 1])
                more.zero_()  # a copy
            model.table = model.table * 2 if k else model.table.add_(5)
    assert replays(fast) > 3


def test_an_argument_on_the_host_that_is_returned_changed_is_refused(rand: Rand) -> None:
    fast = ol.graph(lambda x, host: (x + 1, host * 2))
    for i in range(3):
        fast(rand(i, 3), torch.full((3,), float(i)))
    with pytest.raises(ol.CaptureError, match="OL104"):
        fast(rand(3, 3), torch.full((3,), 3.0))


def test_numbers_of_an_own_optimizer(device: torch.device, rand: Rand) -> None:
    """That become tensors: each value has a recording."""

    class Descent(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                rates = torch.tensor([group["lr"], 0.5]).to(device)
                for p in group["params"]:
                    p.sub_(torch.tensor(group["lr"], device=device) * p.grad + 0 * rates[1])

    def stepping() -> tuple[Descent, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        optimizer = Descent(model.parameters(), 0.1)
        return optimizer, step_over(model, optimizer)

    (theirs, eager), (ours, step) = stepping(), stepping()
    fast = ol.graph(step)
    for i in range(18):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = 0.1 if i < 8 else 0.05
        assert_same(fast(rand(i, 2, 3)), eager(rand(i, 2, 3)), f"call {i}")
    assert replays(fast) >= 10
    assert len(fast.recordings) == 2


def masked_by_tensors(x: Tensor) -> tuple[Tensor, Any]:
    """Torch asks a tensor that fills for its value, and copies one of the host that is chosen."""
    mask = x.t() > 0.3
    y = x.t().masked_fill(mask, x.amax())
    z = torch.where(mask, torch.tensor(0.25), y) + torch.where(mask, y, torch.tensor(2.0))
    half = x.half().masked_fill(x > 0, torch.scalar_tensor(-torch.inf, device=x.device).half())
    row = x[0].masked_fill(x > 1, x[0, 0])
    z.masked_fill_(z < 0, y.sum())
    return torch.cat([z.t(), half.float(), row]), y.stride()


def test_tensors_that_fill(rand: Rand) -> None:
    fast = ol.graph(masked_by_tensors)
    alike(fast, masked_by_tensors, rand, 2, 3, calls=6)
    assert replays(fast) >= 2


def test_tensors_that_fill_in_training(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.masked_fill(x > 0, x.sum()) * x).masked_fill(x < -1, x[0, 0])

    fast = ol.graph(f)
    gradients_alike(fast, f, rand, 2, 3, calls=6)
    assert replays(fast) >= 2


def test_ahead_of_time(rand: Rand) -> None:
    fast = ol.graph(PROGRAMS["tensor"])
    with torch.no_grad():
        fast.capture(rand(0, 2, 3))
    alike(fast, PROGRAMS["tensor"], rand, 2, 3, calls=1)
    assert replays(fast) == 1
