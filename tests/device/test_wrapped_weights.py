"""Tensors made of several others, without memory of their own: quantised weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import onelaunch as ol

from .drop_in import Rand, assert_same, compare, drop_in_worlds, on_accelerators, replays


class Scaled(Tensor):
    """Integers and a scale for each row, dequantised by every operation."""

    q: Tensor
    s: Tensor
    bias: float

    def __new__(cls, q: Tensor, s: Tensor, bias: float = 0.0) -> Scaled:
        made: Any = Tensor._make_wrapper_subclass(cls, q.shape, dtype=s.dtype, device=q.device)
        return made

    def __init__(self, q: Tensor, s: Tensor, bias: float = 0.0) -> None:
        self.q, self.s, self.bias = q, s, bias

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["q", "s"], self.bias

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, bias: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["q"], inner["s"], bias)

    def dequantize(self) -> Tensor:
        return self.q.to(self.s.dtype) * self.s + self.bias

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Scaled(...)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            t = args[0]
            kept = {key: value for key, value in kwargs.items() if key != "dtype"}
            q, s = func(t.q, **kept), func(t.s, **(kwargs if func is not aten.clone else kept))
            return type(t)(q, s, t.bias)
        if func is aten.copy_.default and isinstance(args[1], Scaled):
            args[0].q.copy_(args[1].q)
            args[0].s.copy_(args[1].s)
            return args[0]

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, Scaled) else value

        args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)


class Twice(Scaled):
    """A tensor whose first part is itself made of two."""

    def dequantize(self) -> Tensor:
        return self.q.dequantize() * self.s


def scaled(rand: Rand, seed: int, *shape: int, bias: float = 0.0) -> Scaled:
    q = (rand(seed, *shape) * 40).to(torch.int8)
    return Scaled(q, rand(seed + 1, shape[0], 1).abs(), bias)


def frozen(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)


def quantise(net: Any) -> Any:
    """Put `Scaled` weights into every linear layer."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                s = layer.weight.abs().amax(1, keepdim=True) / 127
                layer.weight = frozen(Scaled((layer.weight / s).round().to(torch.int8), s))
    return net


def network(device: torch.device) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return net.eval().to(device)


def by(rand: Rand) -> Callable[[int], tuple[Tensor]]:
    return lambda i: (rand(100 + i, 4, 16),)


def quantised(device: torch.device, rand: Rand) -> Callable[[], Any]:
    return lambda: (quantise(network(device)), by(rand))


def refused(fast: Any, rand: Rand, code: str) -> ol.CaptureError:
    """Call until the call is refused, and return the refusal."""
    with pytest.raises(ol.CaptureError) as caught:  # noqa: PT012
        for i in range(5):
            fast(*by(rand)(i))
    assert caught.value.code == code
    return caught.value


MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=str)


@MODES
def test_weights_made_of_two_tensors(device: torch.device, rand: Rand, mode: Any) -> None:
    drop_in_worlds(quantised(device, rand), mode=mode)


TORCHAO: dict[str, Callable[[Any], Any]] = {
    "int8": lambda q: q.Int8WeightOnlyConfig(),
    "int8 dynamic": lambda q: q.Int8DynamicActivationInt8WeightConfig(),
    "float8": lambda q: q.Float8WeightOnlyConfig(),
    "intx": lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int8),
}


@MODES
@pytest.mark.parametrize("config", TORCHAO)
def test_torchao(device: torch.device, rand: Rand, config: str, mode: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def world() -> Any:
        net = network(torch.device("cpu"))
        quantization.quantize_(net, TORCHAO[config](quantization))
        return net.to(device), by(rand)

    drop_in_worlds(world, mode=mode)


def test_compiled(device: torch.device, rand: Rand) -> None:
    torch._dynamo.reset()
    drop_in_worlds(quantised(device, rand), compile=True, min_replays=2)


def test_grad_mode_with_frozen_weights(device: torch.device, rand: Rand) -> None:
    net = quantise(network(device))
    twin = copy.deepcopy(net)
    fast: Any = ol.graph(net, warmup=1)
    for i in range(4):
        for f in (fast, twin):
            f.zero_grad()
            f(*by(rand)(i)).sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert replays(fast)


def test_gradient_of_a_weight_is_refused(device: torch.device, rand: Rand) -> None:
    net = quantise(network(device))
    net[0].weight.requires_grad_()
    fast: Any = ol.graph(net, warmup=1)
    assert "0.weight" in refused(fast, rand, "OL114").what
    compare(fast, net, by(rand), 3)
    assert replays(fast)


def test_whole_step_with_a_weight_that_learns_is_refused(device: torch.device, rand: Rand) -> None:
    net = quantise(network(device))
    net[0].weight.requires_grad_()

    @ol.graph
    def step(x: Tensor) -> None:
        with torch.enable_grad():
            net(x).sum().backward()

    with torch.no_grad():
        refused(step, rand, "OL114")


def put(net: Any, name: str, value: Any) -> None:
    setattr(net[0].weight, name, value)


def load(seed: int, made: Callable[[Tensor], Any], **options: Any) -> Callable[[Any, Rand], Any]:
    return lambda net, rand: net[0].load_state_dict(
        {**net[0].state_dict(), "weight": made(scaled(rand, seed, 32, 16))}, **options
    )


CHANGES: dict[str, Callable[[Any, Rand], Any]] = {
    "a part, in place": lambda net, rand: net[0].weight.s.mul_(2),
    "a part, by data": lambda net, rand: setattr(net[0].weight.s, "data", rand(5, 32, 1)),
    "a part, replaced": lambda net, rand: put(net, "s", rand(5, 32, 1)),
    "a number beside the parts": lambda net, rand: put(net, "bias", 0.5),
    "the weight": lambda net, rand: setattr(net[0], "weight", frozen(scaled(rand, 7, 32, 16))),
    "load_state_dict": load(8, lambda t: t),
    "load_state_dict(assign=True)": load(9, frozen, assign=True),
    "swap_tensors": lambda net, rand: torch.utils.swap_tensors(
        net[0].weight, frozen(scaled(rand, 6, 32, 16))
    ),
    "quantised again": lambda net, rand: quantise(
        net.load_state_dict(network(net[2].bias.device).state_dict(), assign=True) and net
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@MODES
def test_a_change_between_calls_is_seen(
    device: torch.device, rand: Rand, change: str, mode: Any
) -> None:
    def between(i: int, net: Any) -> None:
        if i == 3:
            with torch.no_grad():
                CHANGES[change](net, rand)

    drop_in_worlds(
        quantised(device, rand), calls=8, recordings=None, min_replays=3, between=between, mode=mode
    )


def test_another_dtype(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        def arguments(i: int) -> tuple[Tensor]:
            return (rand(i, 4, 16).to(torch.float32 if i < 3 else torch.float64),)

        return quantise(network(device)), arguments

    def between(i: int, net: Any) -> None:
        if i == 3:
            net.to(torch.float64)

    drop_in_worlds(world, calls=8, recordings=None, min_replays=3, between=between)


def test_a_weight_that_starts_to_require_grad(device: torch.device, rand: Rand) -> None:
    net = quantise(network(device)).requires_grad_(False)
    fast: Any = ol.graph(net, warmup=1)
    compare(fast, net, by(rand), 3, torch.enable_grad)
    assert replays(fast)
    net[2].weight.requires_grad_()
    refused(fast, rand, "OL114")


class Holder:
    def __init__(self, rand: Rand) -> None:
        self.w = scaled(rand, 1, 16, 16)
        self.more = {"w": [scaled(rand, 3, 16, 16)]}

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w + x @ self.more["w"][0]


class Buffered(nn.Module):
    w: Tensor

    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.register_buffer("w", scaled(rand, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def closure(device: torch.device, rand: Rand) -> Any:
    w, more = scaled(rand, 1, 16, 16), (scaled(rand, 2, 16, 16, bias=0.25),)
    return lambda x: x @ w @ more[0]


def nested(device: torch.device, rand: Rand) -> Any:
    w = Twice(scaled(rand, 1, 16, 16), rand(4, 16, 1))
    return lambda x: x @ w


def shared(device: torch.device, rand: Rand) -> Any:
    net = quantise(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))).to(device)
    net[1].weight = net[0].weight
    return net


def parametrized(device: torch.device, rand: Rand) -> Any:
    net = quantise(network(device))
    parametrize.register_parametrization(net[0], "bias", Double())
    return net


def written(device: torch.device, rand: Rand) -> Any:
    inner = scaled(rand, 1, 16, 16)
    w = Twice(inner, rand(4, 16, 1))

    def f(x: Tensor) -> Tensor:
        inner.s.mul_(1.5)
        return x @ w

    return f


PLACES: dict[str, Callable[[torch.device, Rand], Any]] = {
    "an object": lambda device, rand: Holder(rand),
    "a closure": closure,
    "in another": nested,
    "shared": shared,
    "beside a parametrisation": parametrized,
    "a buffer": lambda device, rand: Buffered(rand),
    "written in the call": written,
    "a global": lambda device, rand: lambda x: x @ HELD[device],
}


HELD: dict[torch.device, Tensor] = {}


@pytest.mark.parametrize("place", PLACES)
def test_where_it_is_held(device: torch.device, rand: Rand, place: str) -> None:
    HELD[device] = scaled(rand, 1, 16, 16)

    def world() -> Any:
        torch.manual_seed(1)
        return PLACES[place](device, rand), by(rand)

    drop_in_worlds(world)


def test_as_result_it_is_refused(device: torch.device, rand: Rand) -> None:
    w = scaled(rand, 1, 16, 16)

    def made(x: Tensor) -> Tensor:
        return Scaled(w.q * 2, w.s + x.sum())

    def held(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, w

    for f in (made, held):
        with torch.no_grad():
            error = refused(ol.graph(f, warmup=1), rand, "OL108")
        assert "Scaled" in error.what
        assert "dequantize" in error.fix


def kept(net: Any) -> None:
    net[0].weight = frozen(Scaled(net[0].weight.q + 1, net[0].weight.s * 2))


def exchanged(net: Any) -> None:
    net[0].weight, net[1].weight = net[1].weight, net[0].weight


@pytest.mark.parametrize("store", [kept, exchanged])
def test_stored_in_a_call_it_is_refused(
    device: torch.device, rand: Rand, store: Callable[[Any], None]
) -> None:
    net = quantise(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))).to(device)

    def f(x: Tensor) -> Tensor:
        y = net(x)
        store(net)
        return y

    with torch.no_grad():
        assert "Scaled" in refused(ol.graph(f, warmup=1), rand, "OL105").what


def test_as_argument_the_call_is_inlined(device: torch.device, rand: Rand) -> None:
    fast: Any = ol.graph(torch.matmul, warmup=1)
    compare(fast, torch.matmul, lambda i: (*by(rand)(i), scaled(rand, i, 16, 16)), 4)
    assert not fast.recordings


def test_made_and_dropped_in_a_call(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        net = network(device)

        def f(x: Tensor) -> Tensor:
            w = Scaled(x.round().to(torch.int8), x.abs().amax(1, keepdim=True))
            return net(w) + w

        return f, by(rand)

    drop_in_worlds(world)


class Read:
    """A weight with a scale, which the host reads in the `__torch_function__` of its class."""

    def __init__(self, weight: Tensor, scale: Tensor, read: Callable[[Tensor], float]) -> None:
        self.weight, self.scale, self.read = weight, scale, read

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, own = args
        return func(x, own.weight) * own.read(own.scale)


def by_list(t: Tensor) -> float:
    return t.tolist()[0]


def by_item(t: Tensor) -> float:
    return t[0].item()


def by_print(t: Tensor) -> float:
    return float(str(t[:1]).split("[")[1].split("]")[0])


READS = pytest.mark.parametrize("read", [by_list, by_item, by_print])


@READS
def test_a_read_in_the_function_of_a_class_is_refused(
    device: torch.device, rand: Rand, read: Any
) -> None:
    weight: Any = Read(rand(0, 3, 4), torch.full((2,), 0.5, device=device), read)
    fast = ol.graph(lambda x: F.linear(x, weight), warmup=1)
    with torch.no_grad():
        fast(rand(0, 2, 4))
        with pytest.raises(ol.CaptureError, match="OL101"):
            fast(rand(1, 2, 4))


@pytest.mark.parametrize("trains", [False, True])
@READS
@on_accelerators  # on a CPU the number is a result of the device
def test_a_number_that_the_function_of_a_class_reads_is_watched(
    device: torch.device, rand: Rand, read: Any, trains: bool
) -> None:
    weight: Any = Read(rand(0, 3, 4).requires_grad_(trains), torch.ones(2), read)
    plain: Callable[[Tensor], Tensor] = lambda x: F.linear(x, weight)  # noqa: E731
    fast = ol.graph(plain, warmup=1)
    for i in range(6):
        weight.scale.fill_(max(i, 3))
        x = rand(i, 2, 4)
        assert_same(fast(x), plain(x))
    assert replays(fast) >= 1
