"""Table of calls: subclasses, transforms, tracers and outer captures get the callable itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import onelaunch as ol

from .drop_in import Rand, alike, assert_same, drop_in, on_cpu_and_cuda, replays


class Tagged(Tensor):
    pass


class Counted:
    """A recorded callable, and how often its Python ran since."""

    def __init__(self, rand: Rand) -> None:
        self.ran = 0
        self.fast = ol.graph(self.f, warmup=1)
        with torch.no_grad():
            for i in range(3):
                self.fast(rand(i, 3))
        assert replays(self.fast) > 0
        self.ran = 0
        self.recordings = len(self.fast.recordings)

    def f(self, x: Tensor) -> Tensor:
        self.ran += 1
        return x.sin() * 2

    def check_inlined(self) -> None:
        assert self.ran > 0, "the callable itself did not run"
        assert len(self.fast.recordings) == self.recordings


@on_cpu_and_cuda
def test_subclass(rand: Rand) -> None:
    counted = Counted(rand)
    with torch.no_grad():
        for i in range(4):
            x = rand(i, 3)
            expected, got = counted.f(x.as_subclass(Tagged)), counted.fast(x.as_subclass(Tagged))
            assert type(got) is Tagged
            assert_same(got, expected)
        counted.check_inlined()
        assert_same(counted.fast(rand(9, 3)), rand(9, 3).sin() * 2)


@on_cpu_and_cuda
def test_subclass_inside_a_container(rand: Rand) -> None:
    fast = ol.graph(lambda d: d["x"] * 2, warmup=1)
    with torch.no_grad():
        for i in range(4):
            assert type(fast({"x": rand(i, 3).as_subclass(Tagged)})) is Tagged
    assert len(fast.recordings) == 0


def test_parameter_as_an_argument(rand: Rand) -> None:
    p = nn.Parameter(rand(0, 3))
    drop_in(lambda x, p: x * p, lambda i: (rand(i, 3), p))


def test_vmap(rand: Rand) -> None:
    counted = Counted(rand)
    alike(torch.vmap(counted.fast), lambda x: x.sin() * 2, rand, 5, 3)
    counted.check_inlined()


# The first dual number of a process loads decompositions that torch.jit scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@on_cpu_and_cuda
def test_functorch_grad_and_jvp(device: torch.device, rand: Rand) -> None:
    counted = Counted(rand)
    for i in range(3):
        x = rand(i, 3)
        assert_same(
            torch.func.grad(lambda x: counted.fast(x).sum())(x),
            torch.func.grad(lambda x: counted.f(x).sum())(x),
        )
        assert_same(
            torch.func.jvp(counted.fast, (x,), (torch.ones_like(x),)),
            torch.func.jvp(counted.f, (x,), (torch.ones_like(x),)),
        )
    counted.check_inlined()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@on_cpu_and_cuda
def test_dual_numbers(device: torch.device, rand: Rand) -> None:
    import torch.autograd.forward_ad as fwd

    counted = Counted(rand)
    with fwd.dual_level():
        for i in range(3):
            x = fwd.make_dual(rand(i, 3), torch.ones_like(rand(i, 3)))
            primal, tangent = fwd.unpack_dual(counted.fast(x))
            expected_primal, expected_tangent = fwd.unpack_dual(counted.f(x))
            assert_same(primal, expected_primal)
            assert tangent is not None
            assert_same(tangent, expected_tangent)
    counted.check_inlined()


@on_cpu_and_cuda
def test_fake_tensors(device: torch.device, rand: Rand) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    counted = Counted(rand)
    mode = FakeTensorMode()
    x = mode.from_tensor(rand(0, 3))
    with torch.no_grad():
        for _ in range(3):
            assert isinstance(counted.fast(x), FakeTensor)
        with mode:
            for _ in range(3):
                assert isinstance(counted.fast(torch.empty(3, device=device)), FakeTensor)
    counted.check_inlined()


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode(rand: Rand) -> None:
    counted = Counted(rand)
    with torch.autograd.set_detect_anomaly(True):
        alike(counted.fast, lambda x: x.sin() * 2, rand, 3)
    counted.check_inlined()


def test_dispatch_mode(rand: Rand) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ops.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    counted = Counted(rand)
    for i in range(3):
        x = rand(i, 3)
        with torch.no_grad(), Seen() as seen:
            got = counted.fast(x)
        assert_same(got, x.sin() * 2)
        assert "aten::sin" in seen.ops
    counted.check_inlined()


def test_function_mode(rand: Rand) -> None:
    from torch.overrides import TorchFunctionMode

    class CosForSin(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is Tensor.sin:
                func = Tensor.cos
            return func(*args, **(kwargs or {}))

    counted = Counted(rand)
    with CosForSin():
        alike(counted.fast, lambda x: x.cos() * 2, rand, 3)
    alike(counted.fast, lambda x: x.sin() * 2, rand, 3)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore:.*OL313")
def test_torch_compile_traces_through(device: torch.device, rand: Rand) -> None:
    counted = Counted(rand)
    compiled = torch.compile(lambda x: counted.fast(x) + 1, backend="eager")
    alike(compiled, lambda x: x.sin() * 2 + 1, rand, 3)
    torch._dynamo.reset()


@on_cpu_and_cuda
def test_make_fx_traces_through(device: torch.device, rand: Rand) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    counted = Counted(rand)
    with torch.no_grad():
        traced = make_fx(lambda x: counted.fast(x))(rand(0, 3))
    assert "sin" in traced.code
    alike(traced, lambda x: x.sin() * 2, rand, 3)
    counted.check_inlined()


def test_inside_another_capture(rand: Rand) -> None:
    """The inner callable belongs to the outer recording, whether it was recorded before or not."""
    counted = Counted(rand)
    cold = ol.graph(lambda x: x.exp(), warmup=1)

    def outer(x: Tensor) -> Tensor:
        return counted.fast(x) + cold(x * 0.5)

    def eager(x: Tensor) -> Tensor:
        return (x.sin() * 2) + (x * 0.5).exp()

    outer_fast = ol.graph(outer, warmup=2)
    alike(outer_fast, eager, rand, 3, calls=8)
    assert outer_fast.recordings[0].replays >= 5
    counted.fast.reset()
    cold.reset()
    alike(outer_fast, eager, rand, 3, calls=4)


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("on_refusal", ["raise", "eager"])
@pytest.mark.parametrize("warmup", [1, 3])
def test_an_operator_that_takes_functions_is_refused(
    rand: Rand, own: bool, on_refusal: Any, warmup: int
) -> None:
    """The first call is made and shows it, and the others are refused. Under a mode Dynamo will not
    compile its parts, nor ever after, so none is on."""
    attention: Any = torch.compile(flex_attention) if own else flex_attention
    q = rand(0, 1, 2, 128, 16)
    k, v = q + 1, q + 2  # Inductor of torch 2.11 wants three on a CPU
    fast = ol.graph(lambda q: attention(q, k, v) * 2, warmup=warmup, on_refusal=on_refusal)
    refused = 0
    with torch.no_grad():
        expected = attention(q, k, v)
        for _ in range(4):
            try:
                torch.testing.assert_close(fast(q), expected * 2)
            except ol.CaptureError as error:
                refused += error.code == "OL109" and "takes functions" in error.what
            torch.testing.assert_close(attention(q, k, v), expected)
    assert refused == {"raise": 3, "eager": 0}[on_refusal]
    assert not fast.recordings


@on_cpu_and_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("attends", [False, True])
def test_a_call_that_is_refused_for_such_an_operator_is_made_once(
    device: torch.device, rand: Rand, grad: bool, warmup: int, compile: bool, attends: bool
) -> None:
    written = torch.zeros(3, device=device)

    def f(x: Tensor, written: Tensor) -> Tensor:
        written.add_(1)
        if attends:
            q = x.view(1, 1, 3, 1).expand(1, 1, 3, 16)
            return flex_attention(q, q, q).sum((0, 1, 3)) + written  # pyright: ignore
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)) + written

    ours, expected = written.clone(), written
    fast = ol.graph(
        functools.partial(f, written=ours), warmup=warmup, compile=compile, on_refusal="eager"
    )
    with torch.set_grad_enabled(grad):
        for i in range(4):
            assert_same(fast(rand(i, 3)), f(rand(i, 3), expected))
            assert_same(ours, expected)
    assert not fast.recordings


@pytest.mark.parametrize("kind", ["function", "module", "buckets", "inside"])
def test_a_graphed_callable_that_is_compiled_is_named(rand: Rand, kind: str) -> None:
    """Its recordings are not used there."""
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return (x * 2).sin()

    f.__name__ = f"{kind} on {rand(0, 1).device}"  # each is told of once
    model: Any = f
    if kind == "module":
        model = type(f.__name__, (nn.Tanh,), {})()
    fast = ol.graph(model, buckets=ol.Buckets(0, (4,)) if kind == "buckets" else None)
    compiled = torch.compile(
        (lambda x: fast(x)) if kind == "inside" else fast, backend="eager", fullgraph=True
    )
    with torch.no_grad():
        with pytest.warns(ol.GraphWarning, match=r"OL313.*(\n.*)*compile=True"):
            compiled(rand(0, 3, 4))
        assert_same(compiled(rand(1, 3, 4)), model(rand(1, 3, 4)))
    assert fast.stats().warmup_calls == 0
