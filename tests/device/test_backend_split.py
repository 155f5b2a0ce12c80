"""What cannot be captured splits a compiled graph: the rest of it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.driver.select import driver_of
from tests.fuzz.gradients import Tripled

from .drop_in import on_accelerators
from .regions import F, compiled, on_the_host, recordings, replays, same_calls
from .test_concurrency_threads import run_threads
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")


# Work on the host.


@on_accelerators
def test_a_part_on_the_host_raises_where_that_is_asked(device: torch.device, rand: Rand) -> None:
    fast = compiled(on_the_host, on_refusal="raise")
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ol.CaptureError, match=r"OL103.*\n.*offsets = "):
            fast(rand(1, 3, 8))


@on_accelerators
def test_an_operator_marked_as_unsafe(device: torch.device, rand: Rand) -> None:
    with torch.library._scoped_library("onelaunch_tests", "FRAGMENT") as library:
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("unsafe", lambda x: x + 1, "CompositeExplicitAutograd")
        torch.library.register_fake("onelaunch_tests::unsafe", torch.empty_like, lib=library)

        def f(x: Tensor) -> Tensor:
            return torch.ops.onelaunch_tests.unsafe(x * 2).relu()

        with torch.no_grad(), pytest.warns(ol.GraphWarning, match="unsafe in CUDA graphs"):
            same_calls(f, compiled(f), lambda i: (rand(i, 8),))
        assert replays() == 10


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
def test_an_index_after_a_cut(device: torch.device, rand: Rand) -> None:
    """It is of its own part, not of that whose tensor it is taken from."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        offsets = torch.arange(4).cumsum(0)
        offsets += -1
        y.add_(offsets.to(x.device))
        return y[:, offsets.remainder(4).to(x.device)] + y[0]

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 3, 4),))
    assert replays() >= 4


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312", "ignore:.*OL113")  # such a part runs as it is
def test_gradients_of_a_write_after_a_cut(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 1
        offsets = torch.arange(4.0).cumsum(0)
        offsets += 1
        y.mul_(3)
        return y * offsets.to(x.device)

    def last(x: Tensor) -> Tensor:
        y = x * 1
        offsets = torch.arange(4.0).cumsum(0)
        offsets += 1
        x.detach().add_(offsets.to(x.device))
        y.mul_(3)
        return y

    for program in (f, last):
        fast = compiled(program, codegen="eager")
        for i in range(8):
            xs = [rand(i, 3, 4).requires_grad_() for _ in range(2)]
            ys = [run(x) for run, x in zip((fast, program), xs, strict=True)]
            torch.testing.assert_close(*ys)
            torch.testing.assert_close(
                *(torch.autograd.grad(y.sum(), x) for x, y in zip(xs, ys, strict=True))
            )


# Modes that the graph turns on and off: no cut leaves one.


def host(x: Tensor) -> Tensor:
    offsets = torch.arange(x.shape[-1], dtype=torch.float32).cumsum(0)
    offsets += 1
    return x + offsets.to(x.device)


def between(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (w * 2).sum()
    y = host(x * w)
    with torch.no_grad():
        most = y.amax()
    return y * scale * most


def inside(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    with torch.no_grad():
        scale = host(w * 2).sum()
    return y * scale


def constant(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    with torch.no_grad():
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        scale += 1
        scale = scale.to(x.device)
    return y * scale


def nested(x: Tensor, w: Tensor) -> Tensor:
    y = host(x * w)
    with torch.no_grad(), torch.enable_grad():
        z = y * 3
    with torch.autocast(x.device.type, enabled=False):
        z = z * w
    return host(z)


def levels(x: Tensor, w: Tensor) -> Tensor:
    sums = torch.func.vmap(lambda row: row.square().sum())(x)
    y = host(x * w) * sums[:, None]
    slopes = torch.func.grad(lambda t: t.square().sum())(y.detach())
    return host(slopes) + y


def to_the_end(x: Tensor, w: Tensor) -> Tensor:
    y = host(x * w)
    torch.set_grad_enabled(False)
    return host(y * 2)


MODES = {
    "between": (between, 2),
    "inside": (inside, 2),
    "constant": (constant, 2),
    "nested": (nested, 3),
    "levels": (levels, 3),
    "to the end": (to_the_end, 2),  # the part that leaves grad mode off runs as it is
}
"""Programs, and the parts of each that are recorded."""


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312", "ignore:.*OL119", "ignore:.*deprecated")
@pytest.mark.parametrize("name", MODES)
def test_modes_of_a_graph(device: torch.device, rand: Rand, name: str) -> None:
    program, parts = MODES[name]

    def calls(f: F) -> list[Tensor]:
        found: list[Tensor] = []
        for i in range(6):
            w = rand(50 + i, 4).requires_grad_()
            y = f(rand(i, 3, 4), w)
            torch.set_grad_enabled(True)
            found.append(y.detach())
            if y.requires_grad:
                found += torch.autograd.grad(y.sum(), w)
        return found

    expected, got = calls(program), calls(compiled(program, codegen="eager"))
    torch.testing.assert_close(got, expected)
    assert len([r for r in recordings() if r.replays]) == parts


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL119", "ignore:.*OL303")
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_that_ends_in_another_grad_mode(
    device: torch.device, rand: Rand, grad: bool
) -> None:
    """It is compiled in that which it begins in."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        torch.set_grad_enabled(not grad)
        return y, y * 3 + x

    def calls(f: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[object]:
        found: list[object] = []
        for i in range(4):
            x = rand(i, 4).requires_grad_()
            with torch.set_grad_enabled(grad):
                made = f(x)
                found.append(torch.is_grad_enabled())
            for t in made:
                found.append(t.requires_grad)
                if t.requires_grad:
                    t.sum().backward(retain_graph=True)
            found.append(None if x.grad is None else x.grad.tolist())
        return found

    assert calls(compiled(f, codegen="eager")) == calls(f)


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo does, in torch 2.13
def test_a_view_of_a_function_whose_base_is_written(device: torch.device, rand: Rand) -> None:
    """Autograd refuses to look at such a view; the look at the graph does without it."""

    def f(x: Tensor) -> Tensor:
        y = Tripled.apply(x).relu()
        x.detach().add_(1)
        return y.detach() * 2

    same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 3, 4).requires_grad_(),))


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
def test_a_symbolic_size_as_a_float(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return host(torch.arange(float(x.shape[-1]), device=x.device) * x)

    with torch.no_grad():
        same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 3, 4 + i % 3),))


class ClampedOnTheHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.cpu().clamp(-1, 1).to(grad.device)


@on_accelerators
def test_a_backward_on_the_host(device: torch.device, rand: Rand) -> None:
    """The forward is recorded, and its backward runs as it is."""

    def f(x: Tensor) -> Tensor:
        return ClampedOnTheHost.apply(x * 2).cos()

    def gradient(f: F, i: int) -> Tensor:
        x = rand(i, 4).requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]

    fast = compiled(f, codegen="eager")
    with pytest.warns(ol.GraphWarning, match="OL306.*OL103"):
        got = [gradient(fast, i) for i in range(8)]
    torch.testing.assert_close(got, [gradient(f, i) for i in range(8)])
    assert replays() >= 4


# Custom operators, whose insides show only under capture.


@pytest.fixture
def waiting(device: torch.device) -> Iterator[Callable[..., Tensor]]:
    """An operator that reads its argument on the host, with a gradient; a capture refuses it. The
    emulated device repeats an operator as a whole, so there it refuses itself."""

    def waits(x: Tensor, ends: Tensor) -> Tensor:
        if x.device.type != "cuda" and driver_of(x.device.type).capturing():
            raise ol.CaptureError("OL109", "operation not permitted when stream is capturing")
        rows = zip([0, *ends.tolist()], [*ends.tolist(), len(x)], strict=True)
        return torch.cat([x[start:end] * (n + 1) for n, (start, end) in enumerate(rows)])

    with torch.library._scoped_library("onelaunch_tests", "FRAGMENT") as library:
        library.define("waits(Tensor x, Tensor ends) -> Tensor")
        library.impl("waits", waits, "CompositeExplicitAutograd")
        name = "onelaunch_tests::waits"
        torch.library.register_fake(name, lambda x, ends: torch.empty_like(x), lib=library)

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return torch.ops.onelaunch_tests.waits(grad, *ctx.saved_tensors), None

        def keep(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[1])

        torch.library.register_autograd(name, backward, setup_context=keep, lib=library)
        yield torch.ops.onelaunch_tests.waits


@on_accelerators
@pytest.mark.parametrize("trains", [False, True])
def test_an_operator_that_waits_inside(
    device: torch.device, rand: Rand, waiting: F, trains: bool
) -> None:
    """The capture that it stops has the graph compiled anew, in parts around it."""
    layer = nn.Linear(4, 4).to(device).requires_grad_(trains)

    def f(x: Tensor, ends: Tensor) -> Tensor:
        y = waiting(layer(x).relu(), ends)
        return waiting(layer(y), ends) * 2

    def trained(run: F, i: int) -> tuple[Tensor, ...]:
        ends = torch.tensor([i % 3, 3], device=device)
        y = run(rand(i, 4, 4), ends)
        return (
            (y, *torch.autograd.grad(y.square().sum(), list(layer.parameters())))
            if trains
            else (y,)
        )

    fast = compiled(f)

    def calls() -> None:
        for i in range(12):
            torch.testing.assert_close(trained(fast, i), trained(f, i), rtol=1e-4, atol=1e-4)

    with pytest.warns(ol.GraphWarning, match=r"OL312.*`waits`.*\n.*y = waiting") as warned:
        calls()
    assert len([w for w in warned if "OL312" in str(w.message)]) == 1
    assert len(recordings()) == 3
    assert replays() >= 15


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
def test_an_operator_that_waits_inside_at_many_sizes(
    device: torch.device, rand: Rand, waiting: F
) -> None:
    def f(x: Tensor, ends: Tensor) -> Tensor:
        return waiting(x.relu() + 1, ends).sum(-1) * 2

    ends = torch.tensor([1, 2], device=device)
    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 3 + i % 4, 4), ends), calls=44)
    assert len(recordings()) >= 6
    assert replays() >= 30


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
def test_threads_meet_an_operator_that_waits_inside(
    device: torch.device, rand: Rand, waiting: F
) -> None:
    def f(x: Tensor, ends: Tensor) -> Tensor:
        return waiting(x.relu() + 1, ends) * 2

    fast, ends = compiled(f), torch.tensor([1, 2], device=device)

    def work(thread: int) -> None:
        for i in range(12):
            x = rand(100 * thread + i, 4, 4)
            torch.testing.assert_close(fast(x, ends), f(x, ends))

    with torch.no_grad():
        fast(rand(0, 4, 4), ends)  # Dynamo compiles in one thread
    run_threads(4, work)
    assert replays() >= 6


@on_accelerators
def test_an_operator_that_waits_inside_raises_where_that_is_asked(
    device: torch.device, rand: Rand, waiting: F
) -> None:
    fast = compiled(lambda x, ends: waiting(x * 2, ends) + 1, on_refusal="raise")
    ends = torch.tensor([1, 2], device=device)

    def calls() -> None:
        for i in range(6):
            fast(rand(i, 4, 4), ends)

    with torch.no_grad(), pytest.raises(ol.CaptureError, match="OL109"):
        calls()


# Numbers that change, and what the nodes of a graph compute inside.


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312", "ignore:.*Profiler")
def test_an_optimizer_that_computes_on_the_host(device: torch.device, rand: Rand) -> None:
    """NAdam's factors are numbers of the host; its learning rate changes."""

    def trained(compile_: bool) -> list[Tensor]:
        params = [nn.Parameter(rand(i, 4)) for i in range(2)]
        optimizer = torch.optim.NAdam(params, lr=0.1)
        step = compiled(optimizer.step, codegen="eager") if compile_ else optimizer.step
        for i in range(10):
            optimizer.param_groups[0]["lr"] = 0.1 / max(1, i - 3)
            sum(p.square().sum() for p in params).backward()
            step()
            optimizer.zero_grad()
        return [p.detach() for p in params]

    torch.testing.assert_close(trained(True), trained(False))


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clamp(-most, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.most * ctx.saved_tensors[0], None


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
def test_a_number_that_a_function_of_autograd_takes(device: torch.device, rand: Rand) -> None:
    """What reads it is in a graph of its own, inside the other."""
    w = rand(9, 4).requires_grad_()

    def f(x: Tensor, most: float) -> Tensor:
        return Clamped.apply(x * w, most)

    fast = compiled(f, codegen="eager")
    for i in range(9):
        most, x = float(1 + i // 3), rand(i, 3, 4)
        got, expected = fast(x, most), f(x, most)
        torch.testing.assert_close(got, expected)
        pairs = [torch.autograd.grad(y.sum(), w) for y in (got, expected)]
        torch.testing.assert_close(*pairs)


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*OL312")  # 2.11 makes host tensors
def test_derivatives_of_derivatives(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.func.hessian(lambda t: t.pow(3).sum())(x)

    with torch.no_grad():
        same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 4),))
