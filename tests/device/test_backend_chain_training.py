"""In training too: what one recording makes and the next one reads is not copied, nor are the
gradients on their way back. A backward reads what its forward has read where the caller has it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .drop_in import on_accelerators, on_cuda
from .regions import compiled, replays, ways
from .training import Rand

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo reads it
    # torch's, where the first product of matrices in the engine's thread is a backward's
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
ROWS, WIDTH = 256, 1024
"""1 MiB of float32."""

Step = Callable[[nn.Module, Tensor], list[Tensor]]
"""Runs forwards and backwards of a model; returns what is to be compared beside the gradients."""


class Block(nn.Module):
    """A layer that saves its input, its statistics and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = nn.Linear(WIDTH, 64)
        self.outside = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(self.inside(self.norm(x)).tanh())


class Projection(nn.Module):
    """A layer that saves its input as a matrix, a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.inside(x).tanh())


class Layers(nn.Module):
    """Blocks with a break behind each, where `between` does something with the activation."""

    def __init__(
        self,
        between: Callable[[Tensor], Tensor] = lambda x: x,
        block: Callable[[], nn.Module] = Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.between = torch.compiler.disable(between)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def same_steps(
    model: nn.Module,
    step: Step,
    rand: Rand,
    *,
    grad: bool = True,
    same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> None:
    """Steps of the model and of its compiled copy give the same bits; what they gave stays."""
    twin = copy.deepcopy(model)
    fast = compiled(twin, codegen="eager")
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for i in range(9):
        found: list[list[Tensor]] = []
        for run, of in ((model, model), (fast, twin)):
            x = rand(i, ROWS, WIDTH).requires_grad_(grad)
            if i % 3 != 1:  # else the gradients are added to
                of.zero_grad(set_to_none=True)
            made = step(run, x)
            made += [p.grad for p in of.parameters() if p.grad is not None]
            if x.grad is not None:
                made.append(x.grad)
            found.append([t.detach().clone() for t in made])
        expected, got = found
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert same(g, e)
        kept.append((got, expected))
    for got, expected in kept:
        assert all(map(same, got, expected))


def once(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.square().mean().backward()
    return [y]


def summed(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Its gradient is expanded."""
    y = model(x)
    y.sum().backward()
    return [y]


def transposed(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.backward(torch.arange(ROWS * WIDTH, device=x.device).view(WIDTH, ROWS).t() / 1e5)
    return [y]


def two_forwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    a, b = model(x), model(x.detach() * 2)
    (a * b).mean().backward()
    return [a, b]


def the_second_backward_first(model: nn.Module, x: Tensor) -> list[Tensor]:
    a, b = model(x), model(x.detach() - 1)
    b.mean().backward()
    a.square().mean().backward()
    return [a, b]


def retained(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x).square().mean()
    y.backward(retain_graph=True)
    y.backward()
    return [y]


def asked(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients that are held while the next are made."""
    y = model(x).square().mean()
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    first = torch.autograd.grad(y, wanted, retain_graph=True)
    return [y, *first, *torch.autograd.grad(y, wanted)]


def unread(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A forward without a backward, then one with."""
    dropped = model(x + 1)
    return [dropped, *once(model, x)]


STEPS: dict[str, Step] = {
    "once": once,
    "two forwards": two_forwards,
    "the second backward first": the_second_backward_first,
    "retained": retained,
    "asked": asked,
    "unread": unread,
}


@on_accelerators
@pytest.mark.parametrize("name", STEPS)
def test_steps(device: torch.device, rand: Rand, name: str) -> None:
    same_steps(Layers().to(device), STEPS[name], rand)
    assert replays() >= 12
    assert ("rebind", "rebind") in ways()


@on_accelerators
def test_random_numbers(device: torch.device, rand: Rand) -> None:
    """Proving launches draw none: each call has the numbers of eager from the same seed, and so has
    the program after it."""

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(int(x[0, 0] * 1000))
        return [*once(model, x), torch.rand(4, device=device)]

    dropping = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
    same_steps(dropping.to(device), step, rand)
    assert replays() >= 5


@on_accelerators
@pytest.mark.parametrize("step", [summed, transposed])
def test_gradients_of_other_layouts(device: torch.device, rand: Rand, step: Step) -> None:
    """AOTAutograd makes them contiguous, and a matmul has other last bits then."""
    close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-2)
    same_steps(Layers().to(device), step, rand, same=close)


@on_accelerators
def test_an_input_that_is_no_leaf_or_needs_no_gradient(device: torch.device, rand: Rand) -> None:
    same_steps(Layers().to(device), lambda model, x: once(model, x * 2), rand)
    torch._dynamo.reset()
    same_steps(Layers().to(device), once, rand, grad=False)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def written(x: Tensor) -> Tensor:
    return x.mul_(2)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 3)
    x.retain_grad()
    return x


def a_part(x: Tensor) -> Tensor:
    return torch.cat([x, x + 1])[ROWS:]


@on_accelerators
@pytest.mark.parametrize("between", [doubled, written, hooked, a_part])
def test_what_the_program_does_in_between(
    device: torch.device, rand: Rand, between: Callable[[Tensor], Tensor]
) -> None:
    same_steps(Layers(between).to(device), once, rand)
    assert replays() >= 9


@on_accelerators
def test_backwards_that_come_some_calls_later(device: torch.device, rand: Rand) -> None:
    """Activations are each call's own until then."""
    waiting: dict[int, list[Tensor]] = {}

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        of = waiting.setdefault(id(model), [])
        of.append(model(x))
        if len(of) > 2:
            of.pop(0).square().mean().backward()
        return [t.detach() for t in of]

    same_steps(Layers().to(device), step, rand)


def other_memory(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A view keeps the memory that it was made of."""
    y = model(x)
    x.data = x.data * 2
    y.square().mean().backward()
    return [y]


@on_accelerators
@pytest.mark.parametrize("step", [once, two_forwards, retained, other_memory])
def test_inputs_that_are_saved_as_views(device: torch.device, rand: Rand, step: Step) -> None:
    def in_rows(model: nn.Module, x: Tensor) -> list[Tensor]:
        return step(model, x.detach().view(2, ROWS // 2, WIDTH))

    same_steps(Layers(block=Projection).to(device), in_rows, rand)
    assert replays() >= 12
    assert ways() == {("rebind", "rebind")}


@on_accelerators
def test_a_saved_activation_that_is_changed(device: torch.device, rand: Rand) -> None:
    """Eager raises, since its backward would read it; a replay reads it too."""
    block = Block().to(device)
    run = compiled(block, codegen="eager")
    for i in range(6):
        for f in (block, run):
            x = rand(i, ROWS, WIDTH)
            y = f(x)
            if i % 2:
                x.add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()
            else:
                y.sum().backward()
    assert replays() >= 2


@on_accelerators
def test_a_saved_result_that_is_changed(device: torch.device, rand: Rand) -> None:
    """The same where it needs no gradient itself."""

    def f(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        factor = by * 2
        return factor, x * factor

    run = compiled(f, codegen="eager")
    for i in range(8):
        for call in (f, run):
            factor, y = call(rand(i, ROWS, WIDTH).requires_grad_(), rand(i, ROWS, WIDTH))
            factor.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
    assert replays() >= 3


@on_accelerators
def test_an_activation_that_gets_other_memory(device: torch.device, rand: Rand) -> None:
    """`t.data = ...` after the forward: eager's backward reads what it has now."""

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        y = model(x)
        x.data = x.data * 2
        y.square().mean().backward()
        return [y]

    same_steps(Block().to(device), step, rand)
    assert replays() >= 3


# That there is no copy.


@on_accelerators
def test_small_activations_are_copied(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(8, 8).to(device)
    fast = compiled(layer, codegen="eager")
    for i in range(5):
        fast(rand(i, 4, 8)).sum().backward()
    assert ways() == {("node", "own")}


@on_accelerators
def test_other_processes_are_not_waited_for(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's launch would wait for a collective of theirs."""
    monkeypatch.setattr("onelaunch.capture.distributed.initialized", lambda: True)
    same_steps(Layers().to(device), once, rand)
    assert ways() == {("node", "own")}


@on_cuda
@pytest.mark.parametrize("options", [{"codegen": "eager"}, {}], ids=["eager", "inductor"])
def test_no_copy_runs(device: torch.device, rand: Rand, options: dict[str, Any]) -> None:
    """Neither of activations nor of gradients, in either direction."""
    model = Layers().to(device)
    fast = compiled(model, **options)
    given = rand(1, ROWS, WIDTH)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x = rand(0, ROWS, WIDTH).requires_grad_()
        fast(x).backward(given)

    for _ in range(6):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    copies = [e.name for e in profile.events() if "emcpy" in e.name and "DtoD" in e.name]
    assert ways() == {("rebind", "rebind")}
    assert not copies
