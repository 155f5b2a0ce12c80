"""Results that are kept, handed on and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.device.drop_in import random_tensor

from .side_by_side import side_by_side

Rand = Callable[..., Tensor]


def test_two_results_are_kept(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/170604

    The second call of a reduce-overhead function overwrites the result of the first."""

    def program(graph: Any) -> Iterator[Any]:
        square = graph(lambda x: x @ x)
        for i in range(4):
            first = square(rand(i, 4, 4))
            second = square(rand(i + 10, 4, 4))
            yield first, second, first - second

    side_by_side(program, device, captures=1)


def test_a_detached_result_is_kept(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/104435

    A result that was detached goes unnoticed when the next run overwrites it."""

    def program(graph: Any) -> Iterator[Any]:
        layer = nn.Linear(4, 4).to(device)
        with torch.no_grad():
            layer.weight.copy_(rand(1, 4, 4))
            layer.bias.zero_()
        fast, kept = graph(layer), []
        for i in range(6):
            kept.append(fast(rand(i, 2, 4)).detach())
            yield list(kept)

    side_by_side(program, device, captures=1)


def test_a_result_is_the_next_argument(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/152887

    `x = f(x)` in a loop, as a stack of blocks does, raises under reduce-overhead."""

    def program(graph: Any) -> Iterator[Any]:
        block = graph(lambda x: torch.tanh(x + 1) * 0.5)
        for start in range(3):
            x = rand(start, 2, 4)
            for _ in range(4):
                x = block(x)
                yield x

    side_by_side(program, device, captures=1)


def test_state_that_is_a_result_goes_back_in_and_is_written(
    device: torch.device, rand: Rand
) -> None:
    """https://github.com/pytorch/pytorch/pull/193294

    A result that comes back as an argument, and is changed in place there, ends the process."""

    def program(graph: Any) -> Iterator[Any]:
        def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state.mul_(0.5).add_(x)
            return state, state * 2

        fast, state, states = graph(step), torch.zeros(2, 3, device=device), []
        for i in range(7):
            state, out = fast(state, rand(i, 2, 3))
            states.append(state.clone())
            yield out, list(states)

    side_by_side(program, device, captures=2)


def test_an_attribute_that_forward_sets(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/114844

    A replay leaves the tensor that forward stores in the module as it was at the capture."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
            self.x: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.x = self.one(x)
            return self.two(self.x)

    def program(graph: Any) -> Iterator[Any]:
        net = Net().to(device)
        fast = graph(net)
        for i in range(9):
            if i == 6:
                net.x = torch.full((2, 4), 100.0, device=device)
            with torch.no_grad():
                y = fast(rand(i, 2, 3))
            yield y, net.x

    side_by_side(program, device)


def test_results_that_are_arguments_and_parameters(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/154824

    Cudagraph trees free an input of an earlier graph that is also a result of this one."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        weight = nn.Parameter(rand(50, 3, 3))
        first = graph(lambda x: (x @ weight, x))
        second = graph(lambda h, x: (h, h + x, x.view(-1), weight))
        for i in range(6):
            h, x = first(rand(i, 3, 3))
            a, b, c, w = second(h, x)
            yield a, b, c, [a is h, c.data_ptr() == x.data_ptr(), w is weight]

    side_by_side(program, device)


def test_a_slice_of_one_buffer_of_all_sizes(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/pull/9724

    One graph for each batch size over one input buffer: its results share and lose memory."""

    def program(graph: Any) -> Iterator[Any]:
        buffer = torch.zeros(8, 4, device=device)

        def double(x: Tensor) -> Tensor:
            y = x.clone()
            y += 1
            return y * 2

        fast, kept = graph(double), []
        for _ in range(2):
            for n in (8, 4, 2, 1):
                for i in range(5):
                    buffer[:n].copy_(rand(i + n, n, 4))
                    kept.append(fast(buffer[:n]))
                    yield kept[-1]
        yield kept

    side_by_side(program, device, captures=4)


def test_a_result_that_aliases_an_external_tensor(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/174649

    A check that inputs are alive takes a slice of an input for memory of the graph."""

    def program(graph: Any) -> Iterator[Any]:
        table = rand(9, 6, 3)
        part, row = graph(lambda a: a[1:]), graph(lambda i: table[2:4] + i)
        for i in range(6):
            a = rand(i, 4, 3)
            tail = part(a)
            a.zero_()
            yield tail, row(rand(i, 3))
            table.add_(1)

    side_by_side(program, device)


def test_one_graph_after_another_in_one_pool(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/144386

    Whether a result of the last run of a tree may still be read depends on the device."""
    import onelaunch as ol

    def program(graph: Any) -> Iterator[Any]:
        pool = ol.Pool()
        f = graph(lambda x: torch.relu(x) @ x, pool=pool)
        g = graph(lambda x, y: (x * y).sum(0), pool=pool)
        h = graph(lambda x: x.cumsum(0), pool=pool)
        last: Any = torch.zeros(4, 4, device=device)
        for i in range(6):
            a = f(rand(i, 4, 4))
            b = g(a, last)
            last = h(a)
            yield a, b, last

    side_by_side(program, device, captures=3)


def test_the_same_function_inside_and_outside(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/170604

    A block that is graphed by itself, and called by a graphed model too."""

    def program(graph: Any) -> Iterator[Any]:
        scale = torch.full((), 1.5, device=device)
        block = graph(lambda x: torch.sin(x) * scale)
        model = graph(lambda x: block(block(x)) + x)
        for i in range(8):
            x = rand(i, 3, 3)
            yield block(x), model(x)
            scale.mul_(0.9)

    side_by_side(program, device)


def test_a_named_tuple_of_results_and_none(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/124582

    `make_graphed_callables` fails for a function without parameters, and for what is no tensor."""
    import collections

    Out = collections.namedtuple("Out", ["values", "missing", "number", "indices"])

    def program(graph: Any) -> Iterator[Any]:
        def take(x: Tensor, i: Tensor) -> Any:
            best = x.max(0)
            return Out(torch.gather(x, 0, i), None, x.shape[0], best.indices)

        fast = graph(take)
        for i in range(6):
            out = fast(rand(i, 4, 3), torch.tensor([[i % 4, 1, 2]], device=device))
            assert type(out).__name__ == "Out"
            yield tuple(out)

    side_by_side(program, device, captures=1)


def test_writes_to_part_of_a_leaf(device: torch.device) -> None:
    """https://github.com/pytorch/pytorch/issues/102830

    An argument that was made by an index assignment, with gradients behind it, fails to capture."""

    def program(graph: Any) -> Iterator[Any]:
        add = graph(lambda a, b: a + b * b)
        for i in range(6):
            a = random_tensor(i, 1, 4, 3, 3, device=device)
            b = random_tensor(i + 10, 1, 4, 3, 3, device=device)
            leaf = random_tensor(i + 20, 1, 4, 2, device=device).requires_grad_()
            b[..., 1] = leaf[..., 1, None]
            y = add(a, b)
            y.square().sum().backward()
            yield y.detach(), leaf.grad.clone()

    side_by_side(program, device)
