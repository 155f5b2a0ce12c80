"""What one recording of a compiled program makes and the next one reads: no copy, and the program's
own all the same.

Tensors of 1 MiB and more are reached by the kernels where the caller has them. What the Python code
between the recordings does with them is up to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.dynamo import onelaunch

from .drop_in import on_accelerators, on_cuda
from .regions import F, compiled, recordings, replays, same_calls, ways
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")
ROWS, WIDTH = 512, 1024
"""2 MiB of float32."""


def first(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu()


def second(x: Tensor) -> Tensor:
    return (x - 3).abs() + x


def handed_on(x: Tensor) -> Tensor:
    y = first(x)
    torch._dynamo.graph_break()
    z = second(y)
    torch._dynamo.graph_break()
    return first(z)


def kept() -> F:
    seen: list[Tensor] = []

    def f(x: Tensor) -> list[Tensor]:
        y = first(x)
        torch._dynamo.graph_break()
        seen.append(y)
        return [second(y), *seen[-3:]]

    return f


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = first(x)
    torch._dynamo.graph_break()
    before = y.clone()
    torch._dynamo.graph_break()
    y[1:].add_(1)
    torch._dynamo.graph_break()
    return second(y), y - before


def returned_too(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = first(x)
    torch._dynamo.graph_break()
    return y, second(y), y[2:].t()


def given_back(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.add_(1)
    torch._dynamo.graph_break()
    return second(y), y


def read_twice(x: Tensor) -> Tensor:
    y = first(x)
    torch._dynamo.graph_break()
    z = second(y)
    torch._dynamo.graph_break()
    return z + y


def smaller_after_larger(x: Tensor) -> Tensor:
    wide = torch.cat([x, x + 1, x - 1, x * 2])
    y = wide.cumsum(0)[::4].contiguous()
    torch._dynamo.graph_break()
    return second(y.cumsum(1))


def a_part(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([first(x), second(x)])
    top, low = both.chunk(2)
    torch._dynamo.graph_break()
    return top * 2, low + top


def padded_inside(x: Tensor) -> Tensor:
    y = nn.functional.pad(x, (0, 1))[:, :-1]
    torch._dynamo.graph_break()
    return second(y)


PROGRAMS: dict[str, Callable[[], F]] = {
    "handed on": lambda: handed_on,
    "kept": kept,
    "written": lambda: written,
    "returned too": lambda: returned_too,
    "given back": lambda: given_back,
    "read twice": lambda: read_twice,
    "smaller after larger": lambda: smaller_after_larger,
    "a part": lambda: a_part,
    "padded inside": lambda: padded_inside,
}


@on_accelerators
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_handed_on_is_the_programs_own(device: torch.device, rand: Rand, name: str) -> None:
    """Values, and results of earlier calls, which nothing may overwrite."""
    f, g = PROGRAMS[name](), compiled(PROGRAMS[name](), codegen="eager")
    same_calls(f, g, lambda i: (rand(i, ROWS, WIDTH),), calls=9)
    assert replays() >= 6


@on_accelerators
def test_layers_that_are_compiled_once(device: torch.device, rand: Rand) -> None:
    """As `model.compile()` of each repeated block does."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).to(device)
    layers.requires_grad_(False)
    for layer in layers:
        layer.weight.mul_(64).round_()
        layer.bias.round_()
    plain = nn.Sequential(*layers)

    def f(x: Tensor) -> Tensor:
        return plain(x)

    run = compiled(lambda layer, x: layer(x), codegen="eager")

    def g(x: Tensor) -> Tensor:
        for layer in layers:
            x = run(layer, x)
        return x

    same_calls(f, g, lambda i: (rand(i, ROWS, WIDTH).sign(),), calls=8)
    assert replays() >= 9
    assert device.type != "cuda" or ways() == {("rebind", "rebind")}


def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    a = x.sum(0)
    return a, a.view(-1)


def writes_one(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    t = c.tanh()
    r = b[..., ::2].unsqueeze(0).expand(2, 3)
    a[..., 0].mul_(2)
    return r, t


@on_accelerators
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_that_share_memory(device: torch.device, rand: Rand, grad: bool) -> None:
    """One is a view of the other, one is written and a view of the other is returned: AOTAutograd's
    code makes both anew from what they are views of. Where they require grad, it runs eagerly."""
    first, then = compiled(shared, codegen="eager"), compiled(writes_one, codegen="eager")
    for i in range(7):
        found: list[list[Tensor | None]] = []
        for f, g in ((shared, writes_one), (first, then)):
            x = rand(i, 4, 6).requires_grad_(grad)
            a, b = f(x)
            r, y = g(a, b, rand(i + 9, 2, 6))
            if grad:
                (r.square().sum() + (y * a.sum()).sum()).backward()
            found.append([r, y, a, b, x.grad])
        torch.testing.assert_close(found[1], found[0])
    assert replays() >= (3 if grad else 6)


# On CUDA: that there is no copy.


@on_cuda
def test_nothing_is_copied_between_the_recordings(device: torch.device, rand: Rand) -> None:
    fast = compiled(handed_on, codegen="eager")
    same_calls(handed_on, fast, lambda i: (rand(i, ROWS, WIDTH),))
    assert len(recordings()) == 3
    assert ways() == {("rebind", "rebind")}


@on_cuda
def test_nor_in_inductors_code(device: torch.device, rand: Rand) -> None:
    fast = compiled(handed_on)
    same_calls(handed_on, fast, lambda i: (rand(i, ROWS, WIDTH),))
    assert ways() == {("rebind", "rebind")}
    assert {r.nodes - 2 for r in recordings()} == {1}  # the copies are there, and turned off


@on_cuda
def test_small_tensors_are_copied(device: torch.device, rand: Rand) -> None:
    fast = compiled(handed_on, codegen="eager")
    same_calls(handed_on, fast, lambda i: (rand(i, 4, 4),))
    assert ways() == {("node", "own")}


@on_cuda
def test_parts_around_an_operator_of_the_host(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = first(x)
        offset = torch.arange(WIDTH, dtype=torch.float32).cumsum(0)
        offset += 1
        return second(y) + offset.to(x.device)

    with pytest.warns(match="OL312"):
        same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, ROWS, WIDTH),))
    assert ("rebind", "rebind") in ways()


@on_cuda
def test_a_history_of_the_programs_own_goes_on(device: torch.device, rand: Rand) -> None:
    """Captures and proofs read torch's history of allocations, of which there is one."""
    history: Any = torch.cuda.memory
    history._record_memory_history("all", context=None, stacks="python", max_entries=1000)
    try:
        before = history._snapshot()["device_traces"][device.index or 0]
        fast = torch.compile(handed_on, backend=onelaunch, options={"codegen": "eager"})
        same_calls(handed_on, fast, lambda i: (rand(i, ROWS, WIDTH),))
        assert torch._C._cuda_isHistoryEnabled()
        assert {out for _, out in ways()} == {"rebind"}
        assert len(history._snapshot()["device_traces"][device.index or 0]) > len(before)
    finally:
        history._record_memory_history(None)
    torch._dynamo.reset()
    fast = torch.compile(handed_on, backend=onelaunch, options={"codegen": "eager"})
    same_calls(handed_on, fast, lambda i: (rand(i, ROWS, WIDTH),))
    assert not torch._C._cuda_isHistoryEnabled()
    assert {out for _, out in ways()} == {"rebind"}
