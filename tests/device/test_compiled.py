"""``compile=True``: what a callable reads and writes is learned from an eager run of another call.

Inductor compiles for CUDA, and AOTAutograd for the emulated device. On plain CPU tensors the
callable stands for its compiled version, whose operations nobody watches either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, on_accelerators, on_cpu_and_cuda, replays
from .regions import two_models
from .test_backend_worlds import with_statistics
from .training import Rand

pytestmark = pytest.mark.usefixtures("compiled", "whole_numbers")


def written(x: Tensor) -> Tensor:
    x.add_(2)
    return x


def half(c: Tensor, x: Tensor) -> Tensor:
    c[:, 1] = x
    return c.sum(0) * 2


def chained(c: Tensor, x: Tensor) -> Tensor:
    c.mul_(0.5).add_(x[:, None])
    return c * 2


def both(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    c += x[:, None]
    return c[0], x


def one_of_two(c: Tensor, x: Tensor) -> Tensor:
    x.add_(c[:, 0])
    return c[:, 1]


def nested(c: Tensor, x: Tensor) -> list[Tensor]:
    for row in c:
        row.clamp_(-0.5, 0.5)
    return [c, x + 1]


PROGRAMS: list[Callable[..., Any]] = [half, chained, both, one_of_two, nested]


def options(warmup: int = 1) -> dict[str, Any]:
    return {"compile": True, "warmup": warmup + 1, "calls": 7, "min_replays": 3}


@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("f", PROGRAMS)
def test_arguments_that_are_written(
    device: torch.device, rand: Rand, f: Callable[..., Any], warmup: int
) -> None:
    drop_in_worlds(lambda: (f, lambda i: (rand(i, 3, 4), rand(i + 50, 3))), **options(warmup))


def test_an_argument_that_is_returned(device: torch.device, rand: Rand) -> None:
    drop_in_worlds(lambda: (written, lambda i: (rand(i, 3, 4),)), **options())


def test_two_arguments_of_one_memory(device: torch.device, rand: Rand) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 8)
        return whole[:4], whole[4:]

    drop_in_worlds(lambda: (f, arguments), **options())

    def overlapping(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 8)
        return whole[:5], whole[3:]

    drop_in_worlds(lambda: (lambda a, b: (a.mul_(3), b + 1)[1], overlapping), **options())

    def inside(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 12)
        return whole[2:7], whole[5:10]

    drop_in_worlds(lambda: (lambda a, b: (a.mul_(3), b + 1)[1], inside), **options())


def test_an_argument_that_is_state_too(device: torch.device, rand: Rand) -> None:
    """It is read where it is, and its place in the state is watched."""

    def world() -> Any:
        class Holder:
            kept = rand(1, 4)

        def f(x: Tensor) -> Tensor:
            return x * Holder.kept

        def arguments(i: int) -> tuple[Tensor]:
            if i == 4:
                now = Holder.kept
                Holder.kept = rand(9, 4)
                return (now,)
            return (Holder.kept,)

        return f, arguments

    drop_in_worlds(world, **(options() | {"recordings": None, "min_replays": 0}))


class Recurrent(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.h = torch.zeros(4, device=device)
        self.register_buffer("count", torch.zeros((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.h = self.h * 0.5 + x
        return self.h * self.count


def test_state_that_each_call_replaces(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        return Recurrent(device), lambda i: (rand(i, 4),)

    drop_in_worlds(world, **options())


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_state_that_is_replaced_between_calls(device: torch.device, rand: Rand, when: int) -> None:
    """Before the capture too: it is watched where it is, not as the tensor that it was."""

    def world() -> Any:
        class Holder:
            weight = rand(1, 4)

        def f(x: Tensor) -> Tensor:
            Holder.weight.add_(1)
            return x * Holder.weight

        def arguments(i: int) -> tuple[Tensor]:
            if i in (when, when + 2):
                Holder.weight = rand(10 + i, 4)
            return (rand(i, 4),)

        return f, arguments

    more = {"recordings": None, "min_replays": 1, "calls": 9}
    drop_in_worlds(world, **(options() | more))


@on_accelerators
def test_tensors_of_the_host_are_refused(device: torch.device, rand: Rand) -> None:
    """As without ``compile``, if they are no constants; those are in test_compiled_constants.py."""

    def f(x: Tensor, table: Tensor) -> Tensor:
        return x * table.to(x.device)

    def g(x: Tensor, n: Tensor) -> Tensor:
        n.add_(1)
        return x * 2

    for called, arg, code in ((f, torch.ones(4), "OL103"), (g, torch.tensor(1.0), "OL104")):
        fast = ol.graph(called, compile=True, warmup=2)
        with torch.no_grad():
            for _ in range(2):
                fast(rand(1, 4), arg)
            with pytest.raises(ol.CaptureError, match=code):
                [fast(rand(1, 4), arg) for _ in range(2)]


@on_accelerators
def test_a_refusal_says_the_same_at_each_call(device: torch.device, rand: Rand) -> None:
    """Of a module, whose refusals name more than they find."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y * y.sum().item()

    fast = ol.graph(Model().to(device), compile=True, warmup=2)
    said: list[str] = []
    with torch.no_grad():
        for i in range(6):
            try:
                fast(rand(i, 2, 4))
            except ol.CaptureError as error:
                said.append(str(error))
    assert len(said) >= 3
    assert len(set(said)) == 1
    assert said[0].count("on_refusal") == 1


def test_ahead(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(half, compile=True)
    with torch.no_grad():
        c, x = rand(1, 3, 4), rand(2, 3)
        before = c.clone()
        fast.capture(c, x)
        assert_same(c, before)
        for i in range(3):
            a, b, x = rand(i, 3, 4), rand(i, 3, 4), rand(i + 5, 3)
            assert_same(fast(a, x), half(b, x))
            assert_same(a, b)
    assert replays(fast) == 3


@on_cpu_and_cuda
@pytest.mark.parametrize("grad", [False, True])
def test_a_part_that_is_compiled(device: torch.device, rand: Rand, grad: bool) -> None:
    """The memory that its kernels take is seen by no mode."""
    torch.manual_seed(0)
    part = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device))
    fast = ol.graph(lambda x: (part(x * 2) * 3).sin())
    with torch.set_grad_enabled(grad):
        for i in range(12):
            x, same = rand(i, 5, 4), rand(i, 5, 4)
            # Recorded as it is written, and Inductor's kernels have other bits.
            torch.testing.assert_close(fast(x), (part(same * 2) * 3).sin())
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4


@on_accelerators
def test_every_size_is_compiled_before_its_capture(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin() * 2

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for i in range(80):
            x = rand(i, 2 + i // 4, 8)
            torch.testing.assert_close(fast(x), f(x))
    assert len(fast.recordings) == 20
    assert replays(fast) == 20
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 20


@on_accelerators
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x * n,
        lambda x, n: x * (n * 2),
        lambda x, n: x * n.to(x.device),
        lambda x, n: torch.where(n > 2, x, (n + 1).to(x.device) - x),
    ],
)
def test_a_number_of_the_host_is_read_at_each_call(
    device: torch.device, rand: Rand, f: Callable[..., Tensor], ahead: bool
) -> None:
    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        if ahead:
            fast.capture(rand(0, 3, 4), torch.tensor(0.0))
        for i in range(8):
            n = torch.tensor(float(i))
            torch.testing.assert_close(fast(rand(i, 3, 4), n), f(rand(i, 3, 4), n))
    assert len(fast.recordings) == 1


@dataclass
class Carry:
    """What a call is given, and gives on to the next."""

    number: Tensor
    items: dict[str, Any] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)


def carries(x: Tensor, carry: Carry) -> Tensor:
    carry.items["calls"] = carry.items.get("calls", 0) + 1
    carry.items["last"] = x * carry.number
    carry.log.append(carry.items["last"].sum())
    return x * carry.number + 1


@on_accelerators
@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_written_into_containers_lasts(
    device: torch.device, rand: Rand, on_host: bool
) -> None:
    """In a warm-up too, where a number of the host is on the device, as a capture has it."""
    fast = ol.graph(carries, compile=True, on_refusal="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(6):
            x, number = rand(i, 3, 4), torch.tensor(float(i), device="cpu" if on_host else device)
            mine, own = Carry(number), Carry(number)
            assert_same(fast(x, mine), carries(x, own))
            assert mine.number is number
            assert mine.items["calls"] == 1
            assert_same([mine.items["last"], *mine.log], [own.items["last"], *own.log])


@on_accelerators
@pytest.mark.parametrize("wrap", [lambda n: {"n": n}, lambda n: [n], lambda n: ((n,), 1), Carry])
def test_a_number_of_the_host_in_a_container(
    device: torch.device, rand: Rand, wrap: Callable[[Tensor], Any]
) -> None:
    def f(x: Tensor, given: Any) -> Tensor:
        if isinstance(given, Carry):
            return x * given.number
        return x * (
            given["n"] if isinstance(given, dict) else torch.utils._pytree.tree_leaves(given)[0]
        )

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for i in range(7):
            x, given = rand(i, 3, 4), wrap(torch.tensor(float(i)))
            assert_same(fast(x, given), f(x, given))
    assert replays(fast) == 4


@on_accelerators
def test_a_number_of_the_host_among_host_tensors(device: torch.device, rand: Rand) -> None:
    """On the device, as a capture has it, they would not go together."""

    def f(x: Tensor, n: Tensor) -> Tensor:
        return x + (n + torch.arange(4.0)).to(x.device)

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for i in range(3):
            n = torch.tensor(float(i))
            torch.testing.assert_close(fast(rand(i, 3, 4), n), f(rand(i, 3, 4), n))
        with pytest.raises(ol.CaptureError, match="OL104"):
            fast(rand(3, 3, 4), torch.tensor(3.0))


@on_accelerators
@pytest.mark.parametrize(
    ("f", "code"),
    [
        (lambda x: x / x.sum().item(), "OL101"),
        (lambda x: x * 2 if x.sum() > 0 else x, "OL101"),
        (lambda x: x * len(x.sum(0).tolist()), "OL101"),
        (lambda x: x * len(x.tolist()), "OL101"),
        (lambda x: x[x > 0], "OL102"),
        (lambda x: (x * 2).cpu().sin().to(x.device), "OL103"),
        (lambda x: x + torch.rand(4).to(x.device), "OL103"),
        (lambda x: x + torch.zeros(4).normal_().to(x.device), "OL103"),
        (lambda x: x + torch.empty(4).to(x.device) * 0, "OL103"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_host_does_has_its_code(
    device: torch.device, rand: Rand, f: Callable[[Tensor], Tensor], code: str, ahead: bool
) -> None:
    """That of a run without ``compile``, whatever the device says of the compiled code."""
    fast = ol.graph(f, compile=True)
    run = fast.capture if ahead else fast
    with torch.no_grad(), pytest.raises(ol.CaptureError, match=code) as caught:
        [run(rand(i, 3, 4)) for i in range(6)]
    assert str(caught.value.where).startswith("tests/device/test_compiled.py")


@on_accelerators
def test_a_part_on_the_host_runs_in_pieces(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).cpu().sin().to(x.device) + 1

    fast = ol.graph(f, compile=True, on_refusal="split")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            torch.testing.assert_close(fast(rand(i, 3, 4)), f(rand(i, 3, 4)))
    assert {str(w.message)[1:6] for w in caught} == {"OL311", "OL312"}
    assert fast.stats().replays >= 4


# Training; more of it is in test_backend_worlds.py.


@on_accelerators
def test_an_argument_gets_its_gradient(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, with_statistics)
    fast = ol.graph(other, compile=True)
    for i in range(8):
        grads: list[Tensor] = []
        for m in (model, fast):
            x = rand(i, 5, 4).requires_grad_()
            grads += torch.autograd.grad(m(x).sum(), x)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)
    assert all(p.grad is None for p in fast.parameters())


@on_accelerators
def test_a_saved_argument_is_changed_before_the_backward(device: torch.device, rand: Rand) -> None:
    fast = ol.graph(nn.Linear(4, 2).to(device), compile=True)
    for i in range(8):
        x = rand(i, 5, 4)
        y = fast(x).sum()
        if i == 6:
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        else:
            y.backward()
    assert replays(fast) >= 3


@on_accelerators
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo of torch 2.11
def test_hooks_inside_are_refused(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 2)
        return y.sin()

    fast = ol.graph(f, compile=True)
    with pytest.raises(ol.CaptureError, match="OL112"):
        [fast(rand(i, 3).requires_grad_()).sum().backward() for i in range(6)]


@on_accelerators
@pytest.mark.parametrize("ahead", [False, True])
def test_code_that_reads_the_device_unless_it_is_compiled(rand: Rand, ahead: bool) -> None:
    """transformers' masks do: the eager run that stands for compiled code goes its way."""

    def f(x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
        if not traced and bool((x > 1e6).all()):
            return x
        return x * 2

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        if ahead:
            fast.capture(rand(0, 4))
        for i in range(8):
            assert_same(fast(rand(i, 4)), rand(i, 4) * 2)
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4


@pytest.mark.filterwarnings("ignore:\\nOnline softmax is disabled")  # of torch 2.11's Inductor
@on_accelerators
@pytest.mark.parametrize("heads", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_code_that_asks_for_function_modes(
    device: torch.device, rand: Rand, heads: Callable[..., nn.Module]
) -> None:
    """`nn.MultiheadAttention` in eval does. Dynamo compiles anew if another function answers."""
    attention = heads(8, 2, batch_first=True).to(device).eval()

    def f(x: Tensor) -> Tensor:
        h = x.relu()
        return attention(h) if heads is nn.TransformerEncoderLayer else attention(h, h, h)[0]

    fast = ol.graph(f, compile=True)
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 2, 3, 8)
            torch.testing.assert_close(fast(x), f(x), rtol=1e-3, atol=1e-4)
    assert len(fast.recordings) == 1
    assert replays(fast) >= 4
