"""Values of host tensors that the host reads beside device work: a recording for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, drop_in_worlds, on_accelerators, replays

pytestmark = on_accelerators


def several(f: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]], n: int = 3) -> None:
    for i in range(n):
        f(*arguments(i))


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tolist": lambda x, n: x.split(n.tolist()),
    "numpy": lambda x, n: x * float(n.numpy().sum()),
    "item": lambda x, n: x * n[1].item(),
    "int": lambda x, n: x[: int(n[0])],
    "float": lambda x, n: x + float(n[0]),
    "bool": lambda x, n: x.sin() if n[0] > 2 else x.cos(),
    "index": lambda x, n: x[n[0] :],
    "str": lambda x, n: x * len(str(n)) + int(str(n[0].item())),
    "format": lambda x, n: x * int(f"{n[1]}"),
    "computed from it": lambda x, n: x * int((n * 2 + 1).sum()),
    "iterated": lambda x, n: torch.cat([x[:k] for k in n]),
    "a size": lambda x, n: x.new_zeros(int(n.max())) + 1,
    "what is not zero": lambda x, n: x * len(n.nonzero()) + n.nonzero().tolist()[-1][0],
    "equal": lambda x, n: x.sin() if torch.equal(n, n.flip(0)) else x.cos(),
    "a tensor of a list": lambda x, n: x * torch.tensor([[n[0]], [n[1]]], device=x.device).sum(),
    "new_tensor of a list": lambda x, n: x * x.new_tensor([2, n[1]]).sum(),
    "an index of a list": lambda x, n: x.expand(6, 5)[[n[0], n[1]], :].sum(0),
    "as_tensor of a list": lambda x, n: x + torch.as_tensor([n[1], 2.5, n[0]]).sum().item(),
}
VALUES = [[2, 3], [3, 2], [1, 4], [3, 2], [5, 0], [2, 3], [5, 0], [1, 4]]


@pytest.mark.parametrize("name", list(READS))
def test_an_argument(name: str, rand: Rand) -> None:
    drop_in(
        READS[name],
        lambda i: (rand(i, 5), torch.tensor(VALUES[i // 3 % 8])),
        calls=60,
        recordings=None,
        min_replays=40,
    )


NUMBERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, n: x * n.item(),
    "int": lambda x, n: x[: int(n)],
    "index": lambda x, n: x[n:] + n,
    "format": lambda x, n: x * int(f"{n.item()}"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_argument_of_one_number(name: str, rand: Rand) -> None:
    drop_in(
        NUMBERS[name],
        lambda i: (rand(i, 5), torch.tensor([2, 3, 2, 1, 3, 1][i // 3 % 6])),
        calls=36,
        recordings=3,
        min_replays=24,
    )


def test_another_number_is_still_read_at_each_call(rand: Rand) -> None:
    drop_in(
        lambda x, n, scale: x[: int(n)] * scale,
        lambda i: (rand(i, 5), torch.tensor(2), torch.tensor(float(i))),
    )


@pytest.mark.parametrize("name", list(READS))
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_state(name: str, how: str, rand: Rand) -> None:
    class Holder:
        def __init__(self) -> None:
            self.lengths = torch.tensor([2, 3])

        def __call__(self, x: Tensor) -> Any:
            return READS[name](x, self.lengths)

    def between(i: int, f: Any) -> None:
        holder = getattr(f, "fn", f)
        value = torch.tensor(VALUES[i // 4 % 8])
        if how == "in place":
            holder.lengths.copy_(value)
        elif i % 4 == 0:
            holder.lengths = value

    drop_in_worlds(
        lambda: (Holder(), lambda i: (rand(i, 5),)),
        calls=32,
        between=between,
        recordings=None,
        min_replays=16,
    )


def test_large_state_written_in_place(rand: Rand) -> None:
    table = torch.arange(10_000)

    def f(x: Tensor) -> Tensor:
        return x[: int(table[3])]

    fast = ol.graph(f, warmup=1)
    for table[3] in (1, 2, 3):
        alike(fast, f, rand, 5, calls=4)
    assert replays(fast) >= 6
    assert len(fast.recordings) == 1  # those before can never fit again


def test_a_range_to_a_host_number_is_refused(rand: Rand) -> None:
    """A kernel without a tensor of the device among its arguments holds the number too."""
    fast = ol.graph(lambda x, n: x * torch.linspace(0, n[1], 5, device=x.device))
    with pytest.raises(ol.CaptureError, match="OL104"):
        several(fast, lambda i: (rand(i, 5), torch.tensor([2.0, 3.0])), 4)


def test_a_large_argument_is_refused_with_its_line(rand: Rand) -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        return x * sum(n.tolist())  # the line

    fast = ol.graph(f, warmup=1)
    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL104") as caught:
        several(fast, lambda i: (rand(i, 5), torch.arange(1000)))
    assert "# the line" in (caught.value.where or "")


def test_random_numbers_of_the_host_are_refused(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x * torch.rand(3).tolist()[0]  # the line

    fast = ol.graph(f, warmup=1)
    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL104") as caught:
        several(fast, lambda i: (rand(i, 5),))
    assert "# the line" in (caught.value.where or "")


def test_constants_of_the_call_may_be_read(rand: Rand) -> None:
    drop_in(lambda x: x.split(torch.tensor([2, 3]).tolist()), lambda i: (rand(i, 5),))


def test_too_many_values_are_named(rand: Rand) -> None:
    fast = ol.graph(lambda x, n: x[: int(n[0])], warmup=1, max_recordings=2)
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match=r"OL301.*values of `args\[1\]`"):
        several(fast, lambda i: (rand(i, 5), torch.tensor([1 + i // 3, 0])), 12)


def test_a_host_argument_that_is_not_read_costs_no_recording(rand: Rand) -> None:
    drop_in(lambda x, n: x * n.shape[0], lambda i: (rand(i, 5), torch.tensor([i, i + 1])))


def test_lengths_in_training(device: torch.device, rand: Rand) -> None:
    layer = torch.nn.Linear(4, 4).to(device)
    fast = ol.graph(lambda x, n: [part.sum() for part in layer(x).split(n.tolist())])
    for i in range(24):
        n = torch.tensor(VALUES[i // 6])
        layer.zero_grad()
        sum(fast(rand(i, 5, 4), n)).backward()
        got = layer.weight.grad
        layer.zero_grad()
        sum(part.sum() for part in layer(rand(i, 5, 4)).split(n.tolist())).backward()
        assert_same(got, layer.weight.grad)
    assert replays(fast) >= 6
