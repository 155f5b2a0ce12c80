"""``torch.compile(f, backend="onelaunch")``: each graph of Dynamo's is a recording.

Inductor compiles for CUDA. The emulated device gets torch's own operators, once as code whose
operations are seen, and once as code that hides them, as Inductor's does. What PyTorch's own tests
ask of its CUDA graph trees is asked here too.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.dynamo import backend, onelaunch
from onelaunch.dynamo.backend import graphs

from .drop_in import allocated, assert_same, on_accelerators, on_cpu
from .programs import Program, programs
from .regions import F, compiled, recordings, replays, same_calls, two_models
from .test_programs import world
from .training import Rand

pytestmark = pytest.mark.usefixtures("fresh")
PROGRAMS = 4
"""Random programs; each compiles several times."""


@pytest.fixture
def rand(rand: Rand) -> Rand:
    """Small whole numbers, with which whatever Inductor fuses is exact."""
    return lambda seed, *shape: rand(seed, *shape).mul(4).round()


# What is recorded.


@on_accelerators
def test_a_function(device: torch.device, rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: (rand(i, 100),))
    assert replays() == 5


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
    assert not graphs()


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
    assert len({id(graphed._pool) for graphed in graphs()}) == 1


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
def test_blocks_that_are_compiled_once(device: torch.device, rand: Rand) -> None:
    """One code, and a recording for the parameters of each block."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    fast = [torch.compile(block, backend=onelaunch) for block in blocks]

    def through(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).relu()
        return x

    with torch.no_grad():
        same_calls(
            lambda x: through(blocks, x), lambda x: through(fast, x), lambda i: (rand(i, 2, 4),)
        )
    assert len(recordings()) == 3
    assert replays() == 15


@on_accelerators
def test_sizes(device: torch.device, rand: Rand) -> None:
    """A recording for each, and no more than `max_recordings`."""

    def f(x: Tensor) -> Tensor:
        return (x * 2).sum(0)

    fast = compiled(f, max_recordings=3)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_calls(f, fast, lambda i: (rand(i, 2 + i // 5, 4),), calls=40)
    assert [str(w.message)[:7] for w in caught if w.category is ol.GraphWarning] == ["[OL301]"]
    assert max(len(graphed.recordings) for graphed in graphs()) == 3


@on_accelerators
def test_reset_frees_the_memory(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(64, 64).to(device)
    left: list[int] = []
    for _ in range(2):  # cuBLAS keeps the memory of its first use on a stream
        fast = compiled(lambda x: model(x).relu())
        for i in range(6):
            fast(rand(i, 32, 64)).sum().backward()
        assert replays() == 3
        model.zero_grad()
        torch._dynamo.reset()
        assert not graphs()
        del fast
        gc.collect()
        left.append(allocated(device))
    assert left[1] <= left[0]


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


# Arguments and results.


def written(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 1


def view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[1:].view(-1), x.sum()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def overlapping_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[0], y[1]


def none_and_numbers(x: Tensor) -> tuple[Tensor, None, int, float]:
    return x * 2, None, x.shape[0], 0.5


@on_accelerators
@pytest.mark.parametrize("f", [written, itself, view, twice, overlapping_results, none_and_numbers])
def test_aliases_and_writes(device: torch.device, rand: Rand, f: F) -> None:
    with torch.no_grad():
        fast = compiled(f)
        same_calls(f, fast, lambda i: (rand(i, 3, 4),))
        x = rand(9, 3, 4)
        expected, got = f(x.clone()), fast(x)
        if f is itself:
            assert got[0] is x
        if f is view:
            assert got[0]._base is x or got[0].data_ptr() == x[1:].data_ptr()
        if f is twice:
            assert got[0] is got[1]
    torch.testing.assert_close(got, expected)
    assert replays() >= 5


@on_accelerators
@pytest.mark.parametrize(
    "arguments",
    [
        lambda rand, i: (rand(i, 4)[None].expand(3, 4),),
        lambda rand, i: (rand(i, 13)[1:],),
        lambda rand, i: (rand(i, 4, 6)[:, ::2],),
        lambda rand, i: (rand(i, 4, 6).t(),),
        lambda rand, i: (rand(i, 0, 6),),
        lambda rand, i: (rand(i, 6)[None].expand(3, 6)[:, :4],),
    ],
    ids=["expanded", "unaligned", "strided", "transposed", "empty", "expanded and cut"],
)
def test_kinds_of_arguments(device: torch.device, rand: Rand, arguments: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2 + 1).relu()

    with torch.no_grad():
        same_calls(f, compiled(f), lambda i: arguments(rand, i))
    assert replays() == 5


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


# State.


class Counted(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), device=device))
        self.h = torch.zeros(4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.h = self.h * 0.5 + x
        return self.h * self.count


@on_accelerators
def test_state_that_is_written_and_replaced(device: torch.device, rand: Rand) -> None:
    model, other = Counted(device), Counted(device)
    with torch.no_grad():
        same_calls(model, compiled(other), lambda i: (rand(i, 4),), calls=12)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    assert replays() >= 3


@on_accelerators
def test_weights_that_move(device: torch.device, rand: Rand) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device).requires_grad_(False)
    fast = compiled(model)
    for i in range(16):
        if i == 5:
            model.weight.mul_(2)  # in place: the same recording
        if i == 6:
            model.weight.data = rand(90, 4, 4)
        if i == 11:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
            model.requires_grad_(False)
        x = rand(i, 2, 4)
        torch.testing.assert_close(fast(x), model(x))
    assert replays() >= 5


@on_accelerators
def test_random_numbers_follow_the_seed(device: torch.device, rand: Rand) -> None:
    fast = compiled(lambda x: nn.functional.dropout(x, 0.5))
    with torch.no_grad():
        for _ in range(6):
            fast(rand(1, 64))
        torch.manual_seed(3)
        first, second = fast(rand(1, 64)), fast(rand(1, 64))
        torch.manual_seed(3)
        assert_same(fast(rand(1, 64)), first)
        assert_same(fast(rand(1, 64)), second)
    assert not torch.equal(first, second)
    assert replays() >= 7


# Training.


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def assert_trained(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-4)
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)


@on_accelerators
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_training(device: torch.device, rand: Rand, norm: type[nn.Module]) -> None:
    model, other = two_models(
        device, lambda: nn.Sequential(nn.Linear(4, 8), norm(8), nn.GELU(), nn.Linear(8, 2))
    )
    fast = compiled(other)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for i in range(9):
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            optimizer.zero_grad()
            m(rand(i, 5, 4)).square().mean().backward()
            optimizer.step()
        assert_trained(model, other)
    assert replays() == 6


@on_accelerators
def test_gradients_accumulate(device: torch.device, rand: Rand) -> None:
    model, other = two_models(device, layers)
    fast = compiled(other)
    for i in range(12):
        for m, run in ((model, model), (other, fast)):
            if i % 3 == 0:
                m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert replays() == 9


@on_accelerators
def test_two_forwards_before_a_backward(device: torch.device, rand: Rand) -> None:
    """In Inductor's trees the second overwrites what the first has saved (pytorch#169545)."""
    model, other = two_models(device, layers)
    fast = compiled(other)
    for i in range(9):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            first, second = run(rand(i, 5, 4)), run(rand(i + 50, 5, 4))
            second.square().mean().backward()
            first.square().mean().backward(retain_graph=True)
            first.sum().backward()
        assert_trained(model, other)
    assert replays() >= 10


@on_accelerators
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_training_over_graph_breaks(device: torch.device, rand: Rand) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(y)

    model, other = two_models(device, Broken)
    fast = compiled(other)
    for i in range(8):
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)
    assert len(recordings()) == 2
    assert replays() == 10


@on_accelerators
def test_dropout_in_training(device: torch.device, rand: Rand) -> None:
    """The backward has the mask of its forward."""
    fast = compiled(lambda x: nn.functional.dropout(x, 0.5))
    for i in range(8):
        x = rand(i, 64).abs().add(1).requires_grad_()
        y = fast(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    assert replays() >= 5


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


# What cannot be captured.


def on_the_host(x: Tensor) -> Tensor:
    y = x.sin() * 2
    offsets = torch.arange(x.shape[-1], dtype=torch.float32).cumsum(0)
    return (y + offsets.to(x.device)).cos()


@on_accelerators
def test_a_part_on_the_host(device: torch.device, rand: Rand) -> None:
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL312") as caught:
        same_calls(on_the_host, compiled(on_the_host), lambda i: (rand(i, 3, 8),))
    assert len(caught) == 1
    assert "offsets = torch.arange" in str(caught[0].message)
    assert len(recordings()) == 2
    assert replays() == 10


@on_accelerators
def test_a_part_on_the_host_raises_where_that_is_asked(device: torch.device, rand: Rand) -> None:
    fast = compiled(on_the_host, on_refusal="raise")
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ol.CaptureError, match=r"OL103.*\n.*offsets = "):
            fast(rand(1, 3, 8))


@on_accelerators
def test_training_around_a_part_on_the_host(device: torch.device, rand: Rand) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            scale = y.detach().cpu().sum(0).sign()
            return self.second(y * scale.to(x.device))

    model, other = two_models(device, Split)
    fast = compiled(other)

    def step(i: int) -> None:
        for m, run in ((model, model), (other, fast)):
            m.zero_grad()
            run(rand(i, 5, 4)).square().mean().backward()
        assert_trained(model, other)

    with pytest.warns(ol.GraphWarning, match="OL312"):
        step(0)
    for i in range(1, 8):
        step(i)
    assert replays() == 10


@on_accelerators
def test_a_part_on_the_host_in_a_mode_of_its_own(device: torch.device, rand: Rand) -> None:
    """No cut leaves the mode: what eager computes without gradients has none."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        with torch.no_grad():
            scale = (w * 2).cpu().sum().to(x.device)
        return y * scale

    fast = compiled(f)

    def grad_of(run: F, i: int) -> Tensor:
        w = rand(50, 4).requires_grad_()
        return torch.autograd.grad(run(rand(i, 3, 4), w).sum(), w)[0]

    with pytest.warns(ol.GraphWarning, match="OL312"):
        grad_of(fast, 0)
    for i in range(6):
        torch.testing.assert_close(grad_of(fast, i), grad_of(f, i))
    assert not graphs()


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


def test_options_are_checked() -> None:
    for options in ({"codegen": "triton"}, {"warmup": 0}, {"pool": 3}, {"on_refusal": "split"}):
        with pytest.raises(ol.ArgumentError, match="OL401"):
            backend.Settings.of(None, options)
    settings = backend.Settings.of("max-autotune", {"epilogue_fusion": True, "warmup": 2})
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
