"""Memory: pools, garbage, plans of libraries, streams, what is freed below a recording."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onelaunch as ol
from tests.device.drop_in import allocated, on_accelerators, on_cuda, replays
from tests.device.steps import small_model

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


@pytest.mark.thorough
def test_garbage_is_collected_in_the_callable(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/161037

    A collection during a capture destroys another graph, which ends the capture."""

    class Loop:
        """Garbage that only a collection frees, with a graph in it."""

        def __init__(self, graphed: Any) -> None:
            self.graphed, self.own = graphed, self

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            gc.collect()
            return torch.relu(x) * 2

        for j in range(3):
            old = graph(lambda x: x + 1)
            for i in range(5):
                old(rand(i, 3))
            Loop(old)
            del old
            fast = graph(forward)
            for i in range(6):
                yield fast(rand(i + j, 3))

    side_by_side(program, device)


def test_graphs_are_let_go(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/tensordict/pull/1805

    A graphed module keeps itself alive, and its graph with it."""
    model = small_model(device).eval()
    fast = ol.graph(model)
    for i in range(6):
        with torch.no_grad():
            fast(rand(i, 5, 4))
    assert replays(fast) > 0
    gone = weakref.ref(model[0].weight)
    del model, fast
    gc.collect()
    assert gone() is None


@on_accelerators
def test_memory_comes_back_after_a_refusal(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/190348

    A capture that failed keeps its private pool for the rest of the process."""

    def failing(x: Tensor) -> Tensor:
        big = x.expand(1000, *x.shape).contiguous()
        return big * big.sum().item()

    for _ in range(3):
        fast = ol.graph(failing, warmup=1)
        fast(rand(0, 64, 64))
        with pytest.raises(ol.CaptureError):
            fast(rand(1, 64, 64))
        del fast
    before = allocated(device)
    for _ in range(4):
        fast = ol.graph(failing, warmup=1)
        fast(rand(0, 64, 64))
        with pytest.raises(ol.CaptureError):
            fast(rand(1, 64, 64))
        del fast
    assert allocated(device) <= before


@on_accelerators
def test_a_cycle_of_captures_does_not_grow(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/warp/issues/1429

    Each cycle captures a graph that allocates and keeps a result: memory grows with the cycles."""

    def cycle() -> None:
        class Sim:
            def step(self, x: Tensor) -> Tensor:
                self.state = x.clone() * 2
                return self.state + 1

        fast = ol.graph(Sim().step)
        for i in range(6):
            fast(rand(i, 256, 64))

    cycle()
    before = allocated(device)
    for _ in range(4):
        cycle()
    assert allocated(device) <= before


def test_sizes_in_any_order(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/pull/9724

    Small graphs captured before large ones in one pool, and results of all of them kept."""

    def program(graph: Any) -> Iterator[Any]:
        pool, model = ol.Pool(), small_model(device).eval()
        fast, kept = graph(model, pool=pool), list[Any]()
        for n in (1, 2, 8, 4):
            for i in range(6):
                y = fast(rand(i + n, n, 4)).detach()
                kept.append(y)
                yield y
        for n in (4, 1, 8, 2, 8):
            kept.append(fast(rand(n, n, 4)).detach())
        yield kept

    side_by_side(program, device, captures=4)


def test_a_table_is_freed_below(device: torch.device, rand: Rand) -> None:
    """https://github.com/beehive-lab/TornadoVM/issues/1006

    Buffers that are pointed elsewhere after the capture: replays read memory that is gone."""

    class Model:
        def __init__(self) -> None:
            self.table = rand(5, 6, 4)

        def __call__(self, i: Tensor) -> Tensor:
            return self.table[i] * 2

    def program(graph: Any) -> Iterator[Any]:
        model = Model()
        fast = graph(model)
        for i in range(16):
            if i in (5, 6, 11):
                model.table = rand(100 + i, 6 + i, 4)
                gc.collect()
                torch.full((64, 64), float("nan"), device=device)
            yield fast(torch.tensor([i % 6, 2], device=device))

    side_by_side(program, device)


@on_cuda
@pytest.mark.parametrize("way", ["clear", "shrink", "others"])
def test_plans_of_transforms_go_away(device: torch.device, rand: Rand, way: str) -> None:
    """https://github.com/pytorch/pytorch/issues/94893

    cuFFT's plans lie in a cache whose size one sets; a captured transform needs its plan."""

    def program(graph: Any) -> Iterator[Any]:
        cache = torch.backends.cuda.cufft_plan_cache[0]
        size = cache.max_size
        fast = graph(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]))
        try:
            for i in range(12):
                yield fast(rand(i, 4, 131))
                if i == 6:
                    if way == "clear":
                        cache.clear()
                    elif way == "shrink":
                        cache.max_size = 1
                    else:
                        cache.max_size = 4
                        for n in range(20):
                            torch.fft.rfft(rand(n, 100 + n))
                    torch.full((1 << 20,), float("nan"), device=device)
        finally:
            cache.max_size = size

    if way == "clear" or device.type != "cuda":
        side_by_side(program, device)
    else:  # the cache is full: nobody knows which plan goes next
        right_or_refused(program, device, "OL109")


def test_transforms(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/67140

    The second transform of a size, with a cached plan, overwrites its argument or is wrong."""

    def program(graph: Any) -> Iterator[Any]:
        window = torch.hann_window(16, device=device)

        def spectrum(x: Tensor) -> Any:
            s = torch.stft(x, 16, 4, window=window, return_complex=True)
            return s.abs(), torch.fft.irfft(s * 2, dim=1), x

        fast = graph(spectrum)
        for i in range(6):
            x = rand(i, 2, 64)
            yield fast(x), x

    side_by_side(program, device, captures=1)


def test_an_inverse_transform_that_checks_its_window(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/119420

    `torch.stft` and back in a loop; the inverse asks the host whether its window covers all."""
    window = torch.hann_window(16, device=device)

    def refusing(graph: Any) -> Iterator[Any]:
        fast = graph(lambda s: torch.istft(s, 16, 4, window=window))  # here
        for i in range(6):
            yield fast(torch.stft(rand(i, 2, 64), 16, 4, window=window, return_complex=True))

    assert "F.fold" in refused(refusing, device, "OL101", "# here")

    def inverse(s: Tensor) -> Tensor:
        frames = torch.fft.irfft(s, 16, dim=-2) * window[:, None]
        squares = window.square()[None, :, None].expand_as(frames)
        size: Any = {"output_size": (1, 4 * s.shape[-1] + 12), "kernel_size": (1, 16)}
        size["stride"] = (1, 4)
        return (F.fold(frames, **size) / F.fold(squares, **size))[:, 0, 0, 8:-8]

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(inverse)
        for i in range(6):
            x = rand(i, 2, 64)
            y = fast(torch.stft(x, 16, 4, window=window, return_complex=True))
            torch.testing.assert_close(y, x)
            yield y

    side_by_side(program, device, captures=1)


@on_cuda
def test_a_side_stream_inside(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/151199

    Buffers that a side stream allocates within the captured region."""

    def program(graph: Any) -> Iterator[Any]:
        side = torch.cuda.Stream()

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = torch.ones_like(x) * x.sum()
            b = x * 2
            torch.cuda.current_stream().wait_stream(side)
            a.record_stream(torch.cuda.current_stream())
            return a, b

        fast = graph(both)
        for i in range(8):
            yield fast(rand(i, 64))

    side_by_side(program, device)


@on_cuda
def test_an_event_for_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/155372

    An event that is recorded inside of a graph, and waited for outside."""

    def program(graph: Any) -> Iterator[Any]:
        event = torch.cuda.Event()

        def forward(x: Tensor) -> Tensor:
            y = x * 2
            event.record()
            return y + 1

        fast = graph(forward)
        for i in range(8):
            y = fast(rand(i, 64))
            event.synchronize()
            yield y

    right_or_refused(program, device, "OL109")


@on_cuda
def test_work_that_is_not_joined(device: torch.device, rand: Rand) -> None:
    """https://github.com/deepseek-ai/DeepEP/issues/62

    "capturing stream has unjoined work", with no line."""

    def forward(x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        return x * 2

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(forward)
        for i in range(5):
            yield fast(rand(i, 8))

    refused(program, device, "OL109", "")


def test_a_model_that_is_moved_away_and_back(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/accelerate/issues/3885

    A model goes to the host between requests, and comes back to other memory."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).eval()
        fast = graph(model)
        for i in range(16):
            if i in (5, 10):
                model.to("cpu")
                torch.full((64, 64), float("nan"), device=device)
                model.to(device)
            yield fast(rand(i, 5, 4))

    side_by_side(program, device)


def test_a_layer_whose_weights_come_for_its_call(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/150711

    Hooks of an offloaded model bring the weights before each forward, and drop them after."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).eval()
        for layer in model:
            for name, p in list(layer.named_parameters()):
                host = p.detach().cpu()

                def load(m: Any, args: Any, name: str = name, host: Tensor = host) -> None:
                    setattr(m, name, nn.Parameter(host.to(device), requires_grad=False))

                layer.register_forward_pre_hook(load)
        fast = graph(model, on_refusal="eager")
        for i in range(6):
            yield fast(rand(i, 5, 4))

    with pytest.warns(ol.GraphWarning):
        side_by_side(program, device, replayed=0)
