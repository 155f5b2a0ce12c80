"""Inductor's kernels that start while the one before ends, in recordings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.capture.compilation import inductor
from onelaunch.driver.cuda import nodes
from tests.device.drop_in import assert_same, replays
from tests.gpu.recorded import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled", "option")]
OPTION = "triton.enable_pdl"
config: Any = importlib.import_module("torch._inductor.config")
CALLS = 40


@pytest.fixture
def option() -> Iterator[None]:
    """Turns Inductor's option on."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("it takes a Hopper or later")
    torch._dynamo.reset()
    with config.patch({OPTION: True}):
        yield


class Net(nn.Module):
    """Kernels of Inductor's between products, two branches, and memory that is filled and added
    to. All values are whole, so that no order of a sum changes a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(-3, 4, (64, 64)).float(), requires_grad=False)

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        low = (x @ self.table).clamp(-40, 40).round()
        high = (x.flip(0) @ self.table).abs().fmod(17)
        filled = torch.zeros(x.shape[0] * 2, 64, device=x.device).index_add(0, at, low)
        norm = (high - high.amax(-1, keepdim=True)) + filled[: x.shape[0]].sum(-1, keepdim=True)
        return (norm @ self.table).fmod(29) + low, filled.cumsum(0).amax(0)


def inputs(number: int, rows: int = 4096) -> tuple[Tensor, Tensor]:
    made = torch.Generator(DEVICE).manual_seed(number)
    x = torch.randint(-5, 6, (rows, 64), device=DEVICE, generator=made).float()
    return x, torch.randperm(2 * rows, device=DEVICE, generator=made)[:rows]


def graph_of(fast: Any) -> Any:
    (entry,) = fast.__graphed__._table.entries
    return entry.captured.graph


def early(raw: int) -> int:
    """The number of kernels that start early."""
    return sum(1 for data in nodes.edges(raw).values() if data)


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True, "auto"])
def test_the_same_bits_as_without(parallel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = Net().to(DEVICE)
    fast: Any = ol.graph(model, compile=True, parallel=parallel)
    for i in range(4):
        fast(*inputs(i))
    torch._dynamo.reset()
    with config.patch({OPTION: False}):
        plain = ol.graph(model, compile=True, parallel=parallel)
        for i in range(4):
            plain(*inputs(i))
    got = [fast(*inputs(i)) for i in range(CALLS)]  # many at once
    for i, found in enumerate(got):
        assert_same(found, plain(*inputs(i)), f"call {i}")
        assert_same(found, model(*inputs(i)), f"call {i}, eager")
    assert replays(fast) >= CALLS
    assert early(graph_of(plain).raw[0]) == 0
    chain = fast.recordings[0].parallel is None
    started = early(graph_of(fast).raw[0])
    assert started > 0 if not parallel else chain or not started


@torch.no_grad()
def test_every_kernel_waits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    own, sources = module.CachingAutotuner.run, dict[str, str]()

    def run(kernel: Any, *args: Any, **keywords: Any) -> Any:
        assert kernel.triton_meta["launch_pdl"]
        sources[kernel.fn.__name__] = kernel.fn.src
        return own(kernel, *args, **keywords)

    monkeypatch.setattr(module.CachingAutotuner, "run", run)
    fast = ol.graph(Net().to(DEVICE), compile=True)
    for i in range(4):
        fast(*inputs(i))
    assert len(sources) >= 4
    for name, source in sources.items():
        first = min(source.find(f"tl.{op}") % len(source) for op in ("load", "store", "atomic"))
        assert 0 < source.find("gdc_wait") < first, name


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
def test_a_step_trains_as_without() -> None:
    """A forward, a backward and an optimizer, whose gradients are filled and added to."""

    def trained(value: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.GELU()).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, capturable=True)

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                return loss.clone()

        with config.patch({OPTION: value}):
            fast = ol.graph(step, compile=True)
            made = torch.Generator(DEVICE).manual_seed(1)
            order = [torch.randperm(500, device=DEVICE, generator=made)[:256] for _ in range(10)]
            losses = [fast(tokens) for tokens in order]
        return [*losses, *model.parameters()]

    for one, other in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_inputs_in_place() -> None:
    def f(x: Tensor) -> Tensor:
        return ((x * 2).sum(-1, keepdim=True) + x).abs().amax(0)

    fast, made = ol.graph(f, compile=True, inputs="rebind"), torch.Generator(DEVICE).manual_seed(3)
    for i in range(12):
        x = torch.randint(-9, 9, (1 << 13, 512), device=DEVICE, generator=made).float()
        assert_same(fast(x), f(x), f"call {i}")
    assert fast.recordings[0].inputs == {"args[0]": "rebind"}


@torch.no_grad()
def test_after_a_join_a_fill_and_a_copy() -> None:
    """Torch's own capture of kernels that follow two others, a node that fills, and one that
    copies."""
    run: Any = torch.compile(lambda x: (x + 1).amax(0) + x, backend=inductor(None, {}))
    x, y = (inputs(i)[0] for i in range(2))
    one, other = x.clone(), torch.empty_like(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)

    def work() -> list[Tensor]:
        main = torch.cuda.current_stream()
        first = run(x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = run(y)
        main.wait_stream(side)
        joined = run(first)
        one.zero_()
        filled = run(one)
        other.copy_(y)
        return [first, second, joined, filled, run(other)]

    expected = [t.clone() for t in work()]
    with torch.cuda.graph(graph):
        found = work()
    graph.instantiate()
    assert early(graph.raw_cuda_graph()) > 0
    for t in found:
        t.fill_(-1)
    for _ in range(CALLS):
        graph.replay()
    assert_same(found, expected)
