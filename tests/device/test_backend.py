"""``torch.compile(f, backend="onelaunch")``: each graph of Dynamo's is a recording.

Inductor compiles for CUDA. The emulated device gets torch's own operators. What PyTorch's own tests
ask of its CUDA graph trees is asked here too.
"""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.dynamo import backend, onelaunch
from onelaunch.dynamo.backend import regions

from .drop_in import on_accelerators, on_cpu
from .programs import Program, programs
from .regions import F, compiled, recordings, replays, same_calls
from .test_programs import world
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh", "whole_numbers")
PROGRAMS = 4
"""Random programs; each compiles several times."""


# What is recorded.


@on_accelerators
def test_a_float_that_changes_from_call_to_call(device: torch.device, rand: Rand) -> None:
    """Dynamo passes it as a tensor from the second value on: one recording reads it each time."""
    layer = nn.Linear(4, 4).to(device)

    def f(x: Tensor, beta: float) -> Tensor:
        return layer(x) * beta + beta

    with torch.no_grad():
        same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 2, 4), 0.25 * i), calls=10)
    assert len(recordings()) == 1
    assert replays() >= 5


@pytest.mark.thorough
@on_accelerators
@pytest.mark.filterwarnings("ignore:.*OL312")
def test_an_optimizer_under_a_schedule(device: torch.device, rand: Rand) -> None:
    def trained(compile_: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.5, foreach=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = compiled(optimizer.step, codegen="eager") if compile_ else optimizer.step
        for i in range(10):
            layer(rand(i, 2, 4)).square().sum().backward()
            step()
            optimizer.zero_grad()
            schedule.step()
        return layer.weight.detach()

    torch.testing.assert_close(trained(True), trained(False))


@on_cpu
def test_on_plain_cpu_tensors_the_compiled_code_runs(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    same_calls(f, compiled(f, codegen="eager"), lambda i: (rand(i, 100),))
    assert not regions.graphs()


@on_accelerators
def test_graph_breaks_share_a_pool(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        z = y.relu()
        torch._dynamo.graph_break()
        return z - x

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 100),))
    assert len(recordings()) == 3
    assert replays() == 15
    assert len({id(graphed._pool) for graphed in regions.graphs()}) == 1


@on_accelerators
@pytest.mark.parametrize("how", ["fullgraph", "method", "disabled"])
def test_ways_to_compile(device: torch.device, rand: Rand, how: str) -> None:
    @torch.compiler.disable
    def left_out(x: Tensor) -> Tensor:
        return x + 1

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return left_out(x * 2) * 3 if how == "disabled" else x * 2 + 1

    model, eager = Model(), Model()
    run: Any = model
    if how == "method":
        model.compile(backend=onelaunch)
    else:
        run = torch.compile(model, backend=onelaunch, fullgraph=how == "fullgraph")
    with torch.no_grad():
        same_calls(eager, run, lambda i: (rand(i, 100),))
    assert len(recordings()) == (2 if how == "disabled" else 1)


@on_accelerators
def test_a_model_that_is_dropped_is_freed_by_reset(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(8, 8).to(device)
    alive = weakref.ref(model.weight)
    with torch.no_grad():
        fast = compiled(model)
        for i in range(6):
            fast(rand(i, 2, 8))
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
    assert not regions.graphs()


# Arguments and results.


@on_accelerators
def test_a_tensor_given_twice(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        x = rand(i, 3)
        return (x, x) if i % 2 else (x, rand(i + 50, 3))

    with torch.no_grad():
        same_calls(f, compiled(f), arguments, calls=14)
    assert replays() >= 6


@on_accelerators
@pytest.mark.parametrize("first", [0, 2])
def test_arguments_that_overlap(device: torch.device, rand: Rand, first: int) -> None:
    """In another way from call to call, which Dynamo does not always notice."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y.add_(1) + 0

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 24)
        second = first + (2 if i % 2 else 8)
        return whole[first : first + 8], whole[second : second + 8]

    with torch.no_grad():
        same_calls(f, compiled(f), arguments, calls=12)
    assert replays() >= 4


@on_accelerators
def test_a_graph_without_inputs(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.arange(4, device=device) * 2

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 3),))
    assert replays() >= 4


@on_accelerators
def test_a_number_of_the_host(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        return x * n + 1

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 3), torch.tensor(float(i))))
    assert replays() == 5


@on_accelerators
def test_tensors_that_fill(device: torch.device, rand: Rand) -> None:
    """CUDA's kernel takes their values on the host."""

    def f(x: Tensor) -> Tensor:
        y = x.t().masked_fill(x.t() > 1, x.amax())
        return (y * 2).masked_fill_(y < 0, x.sum()) + y.stride(0)

    fast = compiled(f, codegen="eager")
    same_calls(f, fast, lambda i: (rand(i, 2, 4),))
    x, y = (rand(0, 2, 4).requires_grad_() for _ in range(2))
    for i in range(6):
        given = rand(i, 4, 2)
        fast(x).backward(given)
        f(y).backward(given)
        torch.testing.assert_close(x.grad, y.grad)
    assert replays() >= 6


@on_accelerators
def test_a_cache_marked_as_static_is_written_where_it_is(device: torch.device, rand: Rand) -> None:
    def world() -> tuple[Tensor, F]:
        cache = torch.zeros(8, 4, device=device)
        torch._dynamo.mark_static_address(cache)

        def step(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
            cache.index_copy_(0, at, x)
            return cache.sum(0)

        return cache, step

    (cache, step), (other, fast) = world(), world()
    fast = compiled(fast)
    with torch.no_grad():
        for i in range(8):
            at = torch.full((1,), i, device=device)
            x = rand(i, 1, 4)
            torch.testing.assert_close(fast(other, x, at), step(cache, x, at))
            torch.testing.assert_close(other, cache)
    assert replays() == 5


# Training.


@on_accelerators
def test_attention_in_training(device: torch.device, rand: Rand) -> None:
    fast = compiled(
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square()
    )
    for i in range(8):
        x = rand(i, 1, 2, 16, 8).requires_grad_()
        same = x.detach().clone().requires_grad_()
        fast(x).sum().backward()
        attended = nn.functional.scaled_dot_product_attention(same, same, same, is_causal=True)
        attended.square().sum().backward()
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-3, atol=1e-3)
    assert replays() >= 5


# Options.


def test_options_are_checked() -> None:
    for options in ({"codegen": "triton"}, {"warmup": 0}, {"pool": 3}, {"on_refusal": "split"}):
        with pytest.raises(ol.ArgumentError, match="OL401"):
            backend.CompileSettings.of(None, options)
    for name, near in {"bukets": "fix: +buckets", "epilog_fusion": "epilogue_fusion"}.items():
        for codegen in ("eager", "inductor"):
            with pytest.raises(ol.ArgumentError, match=f"(?s)no option '{name}'.*{near}"):
                backend.CompileSettings.of(None, {"codegen": codegen, name: None})
    settings = backend.CompileSettings.of("max-autotune", {"epilogue_fusion": True, "warmup": 2})
    assert settings.inductor == {"epilogue_fusion": True}
    assert settings.graph.warmup == 2


# Random programs.


@on_accelerators
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of what it does not trace
def test_random_programs(device: torch.device) -> None:
    """Those of `test_programs`, as far as Dynamo and AOTAutograd run them."""
    ran = 0

    @settings(
        max_examples=PROGRAMS,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def check(program: Program) -> None:
        nonlocal ran
        torch._dynamo.reset()
        settled = program.settle(torch.device("cpu") if device.type == "tape" else device)
        (other, arguments), (plain, _) = world(settled, device), world(settled, device)
        fast = compiled(other, codegen="eager", warmup=1)
        usual = torch.compile(plain, backend="aot_eager")
        with torch.no_grad():
            for i in range(6):
                theirs, given = arguments(i), arguments(i)
                try:
                    expected = usual(*theirs)
                except Exception:  # noqa: BLE001  torch's own backend does not run it either
                    return
                got = fast(*given)
                torch.testing.assert_close(got, expected, equal_nan=True)
                torch.testing.assert_close(given, theirs, equal_nan=True)
        ran += bool(replays())

    check()
    assert ran


@on_accelerators
@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(
    "name", ["iadd", "isub", "imul", "itruediv", "ipow", "truediv", "sub", "pow"]
)
def test_a_number_that_changes_on_the_left_of_an_operator(
    device: torch.device, rand: Rand, name: str, kind: type
) -> None:
    """`n += x` makes a tensor: the number is not written. diffusers' PNDMScheduler sums up so."""
    operate = getattr(operator, name)

    def f(n: float, x: Tensor) -> Tensor:
        return operate(n, x) * 2

    fast = compiled(f, codegen="eager")
    same_calls(f, fast, lambda i: (kind(i + 2), rand(i, 5).abs() + 1), rtol=0, atol=0)
