"""What a callable reads and changes behind its arguments, in Python and on tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.device.steps import small_model

from .side_by_side import right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def test_a_counter_that_chooses_a_buffer(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/2715

    The first of several micro-batches takes another way, which a flag of the module says."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_first_microbatch = True
            torch.manual_seed(3)
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("cast", torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            if self.is_first_microbatch:
                self.cast.copy_(self.weight.round(decimals=1))
                self.is_first_microbatch = False
            return x @ self.cast

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        layer = Layer().to(device)
        fast = graph(layer)
        for i in range(18):
            if i % 3 == 0:
                layer.is_first_microbatch = True
                layer.weight.mul_(1.1)
            yield fast(rand(i, 2, 4)), layer.is_first_microbatch, layer.cast.clone()

    side_by_side(program, device)


def test_state_that_a_module_keeps_through_training(device: torch.device, rand: Rand) -> None:
    """https://github.com/fangwei123456/spikingjelly/issues/594

    A membrane potential that is a number at first, and reset after each sequence."""

    class Neuron(nn.Module):
        v: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.v + (x - self.v) / 2
            spike = torch.sigmoid(4 * (self.v - 1))
            self.v = self.v * (1 - spike)
            return spike

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), Neuron()).to(device)

        @graph
        def sequence(x: Tensor) -> Tensor:
            net.zero_grad()
            loss = sum(net(row).square().mean() for row in x)
            loss.backward()
            net[1].v = 0.0
            return loss.detach()

        for i in range(9):
            yield sequence(rand(i, 4, 2, 3)), [p.grad.clone() for p in net.parameters()]

    side_by_side(program, device)


def test_spectral_norm_in_training(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/6929

    A power iteration in each forward, in place, and none in evaluation."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).to(device)
        fast = graph(net)
        for i in range(14):
            net.train(i % 4 != 3)
            net.zero_grad()
            y = fast(rand(i, 2, 4))
            y.sum().backward()
            yield y.detach(), [t.clone() for t in net.state_dict().values()]

    side_by_side(program, device)


def test_a_frozen_dataclass_with_tensors(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/3373

    Packed sequence parameters: a dataclass that makes a tensor in `__post_init__`."""

    @dataclasses.dataclass(frozen=True)
    class Packed:
        starts: Tensor
        longest: int
        index: Any = dataclasses.field(default=None, init=False)

        def __post_init__(self) -> None:
            positions = torch.arange(6, device=self.starts.device)
            object.__setattr__(self, "index", (positions[:, None] >= self.starts[1:]).sum(1))

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor, packed: Packed) -> Tensor:
            sums = torch.zeros(3, device=x.device).index_add(0, packed.index, x)
            return sums[packed.index] / packed.longest

        fast = graph(forward)
        for i in range(12):
            starts = torch.tensor([0, 1 + i % 3, 4], device=device)
            yield fast(rand(i, 6), Packed(starts, 3))

    side_by_side(program, device)


class Bag:
    """A registered container whose context is a value of its own class, compared by `==`."""

    def __init__(self, values: dict[str, Tensor], size: tuple[int, ...]) -> None:
        self.values, self.size = values, size

    @dataclasses.dataclass(frozen=True)
    class Context:
        keys: tuple[str, ...]
        size: tuple[int, ...]


def bag(values: list[Any], context: Any) -> Bag:
    return Bag(dict(zip(context.keys, values, strict=True)), context.size)


class MainGrad(torch.autograd.Function):
    """Adds the gradient of a weight to a buffer that hangs on it, and says so on the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.addmm_(x.mT, g)
        ctx.weight.grad_added_to_main_grad = True
        return g @ ctx.weight.mT, None


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_that_go_elsewhere(device: torch.device, rand: Rand, whole: bool) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/1204

    A backward adds to `weight.main_grad` and sets a flag on the weight; a replay sets none."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        weight: Any = nn.Parameter(rand(90, 3, 3))
        weight.main_grad = torch.zeros(3, 3, device=device)

        def forward(x: Tensor) -> Tensor:
            return MainGrad.apply(model(x), weight)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            return loss.detach()

        if whole:
            step = graph(step)
        else:
            forward = graph(forward)
        for i in range(12):
            weight.grad_added_to_main_grad = False
            if i == 8:
                weight.main_grad = torch.zeros(3, 3, device=device)
            yield step(rand(i, 5, 4)), weight.main_grad.clone(), weight.grad_added_to_main_grad

    right_or_refused(program, device)


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


class Plain:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.n == self.n

    def __hash__(self) -> int:
        return hash(self.n)


class Named(NamedTuple):
    n: int = 0


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("kind", [Frozen, Plain, Named, "dict", "list"])
def test_a_position_in_an_object_of_each_step(
    device: torch.device, rand: Rand, kind: Any, read: bool
) -> None:
    """https://github.com/sgl-project/sglang-omni/issues/801

    A streaming state holds a position, and each step makes the next state from the last."""

    def next_of(state: Any) -> Any:
        if kind == "dict":
            return {**state, "n": state["n"] + 1}
        return [state[0] + 1] if kind == "list" else kind(state.n + 1)

    def number(state: Any) -> Any:
        if kind == "dict":
            return state["n"]
        return state[0] if kind == "list" else state.n

    def program(graph: Any) -> Iterator[Any]:
        first: Any = {"dict": {"n": 0}, "list": [0]}
        stream = SimpleNamespace(state=first[kind] if isinstance(kind, str) else kind())

        def step(x: Tensor) -> Tensor:
            y = x + number(stream.state) if read else x * 2
            stream.state = next_of(stream.state)
            return y

        fast = graph(step)
        for i in range(12):
            yield fast(rand(i, 3)), number(stream.state)

    right_or_refused(program, device)


def test_a_position_and_a_tensor_in_such_an_object(device: torch.device, rand: Rand) -> None:
    """https://github.com/fangwei123456/spikingjelly/pull/717

    `outputs, states = forward(inputs, states)`, with the states kept in between."""

    @dataclasses.dataclass
    class State:
        n: int
        h: Tensor

    def program(graph: Any) -> Iterator[Any]:
        stream = SimpleNamespace(state=State(0, torch.zeros(3, device=device)))

        def step(x: Tensor) -> Tensor:
            state = stream.state
            stream.state = dataclasses.replace(state, n=state.n + 1, h=state.h * 0.5 + x)
            return stream.state.h * 2 + state.n

        fast = graph(step)
        for i in range(12):
            yield fast(rand(i, 3)), stream.state.n, stream.state.h

    right_or_refused(program, device)


@pytest.mark.parametrize("warmup", [1, 3])
def test_what_was_seen_is_a_set(device: torch.device, rand: Rand, warmup: int) -> None:
    """https://github.com/sgl-project/sglang/pull/973

    What was seen so far is a set of the host's, which grows within the call."""

    def program(graph: Any) -> Iterator[Any]:
        seen = {0}

        def step(x: Tensor) -> Tensor:
            seen.add(max(seen) + 1)
            return x * 2

        fast = graph(step)
        for i in range(8):
            yield fast(rand(i, 3)), sorted(seen)

    right_or_refused(program, device, "OL307", "OL309", "OL118", warmup=warmup)


def test_a_function_that_the_call_stores(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/2831

    Work on the host inside of a captured callable: it stores which function it used."""

    def program(graph: Any) -> Iterator[Any]:
        last = SimpleNamespace(used=None, config=None)
        config = SimpleNamespace(scale=2.0)

        def step(x: Tensor) -> Tensor:
            last.used, last.config = torch.relu, config
            return torch.relu(x) * config.scale

        fast = graph(step)
        for i in range(10):
            if i in (5, 8):
                last.used = last.config = None
            yield fast(rand(i, 3)), [last.used is torch.relu, last.config is config]

    right_or_refused(program, device)
