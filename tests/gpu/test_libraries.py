"""What libraries keep for a recording outside of its pool: kept alive, or noticed when it goes.

docs/limits.md, "What libraries keep", has the list; each line of it is a test here.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import onelaunch as ol
from onelaunch.driver.cuda import nodes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]
DEVICE = torch.device("cuda", 0)
CACHE = torch.backends.cuda.cufft_plan_cache


@pytest.fixture
def plans() -> Iterator[None]:
    """An empty cache of plans, of the size that torch gives it."""
    CACHE[0].clear()
    size = CACHE[0].max_size
    yield
    CACHE[0].max_size = size


def overwritten() -> None:
    """Unused memory of the device is NaN from here on."""
    torch.cuda.empty_cache()
    sizes = (128, 1000, 70_000, 1 << 20, 1 << 22, 1 << 24)
    made = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes for _ in range(6)]
    torch.cuda.synchronize()
    del made
    torch.cuda.empty_cache()


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])


def recorded(f: Callable[[Tensor], Tensor], x: Tensor, calls: int = 5) -> ol.GraphedFunction:
    fast = ol.graph(f)
    for _ in range(calls):
        assert torch.equal(fast(x), f(x))
    return fast


@pytest.mark.parametrize("length", [1000, 1009, 4096, 100_003])
def test_plans_that_were_cleared(plans: None, length: int) -> None:
    x = torch.randn(4, length, device=DEVICE)
    expected = spectrum(x)
    fast = recorded(spectrum, x)
    CACHE[0].clear()
    overwritten()
    for _ in range(6):
        assert torch.equal(fast(x), expected)
    stats = fast.stats()
    assert stats.captures == 2
    assert stats.recordings[0].why == "torch has freed plans of cuFFT"
    assert stats.recordings[0].replays >= 4


def test_a_smaller_cache(plans: None) -> None:
    x = torch.randn(4, 1000, device=DEVICE)
    expected = spectrum(x)
    fast = recorded(spectrum, x)
    CACHE[0].max_size = 1
    CACHE[0].max_size = 4096
    torch.fft.rfft(torch.randn(333, device=DEVICE))
    overwritten()
    for _ in range(5):
        assert torch.equal(fast(x), expected)


def test_plans_that_other_plans_displaced(plans: None) -> None:
    CACHE[0].max_size = 16
    x = torch.randn(4, 1000, device=DEVICE)
    expected = spectrum(x)
    fast = recorded(spectrum, x)
    for n in range(40):
        torch.fft.rfft(torch.randn(200 + n, device=DEVICE))
    overwritten()
    assert torch.equal(fast(x), expected)  # a warm-up, for the plans were displaced
    with pytest.raises(ol.CaptureError, match=r"\[OL109\].*full with 16"):
        fast(x)
    CACHE[0].max_size = 4096
    fast.reset()
    for _ in range(6):
        assert torch.equal(fast(x), expected)
    assert fast.recordings[0].replays >= 2


def test_a_cache_that_keeps_nothing(plans: None) -> None:
    """Each transform makes a plan of its own, which allocates memory: no capture may."""
    CACHE[0].max_size = 0
    fast = ol.graph(spectrum)
    x = torch.randn(4, 1000, device=DEVICE)
    for _ in range(3):
        fast(x)
    with pytest.raises(ol.CaptureError, match=r"\[OL109\]"):
        fast(x)


def test_training_with_plans_that_were_cleared_between_forward_and_backward(plans: None) -> None:
    w, v = (torch.ones(256, device=DEVICE, requires_grad=True) for _ in range(2))
    fast = ol.graph(lambda x: spectrum(x * w).square())
    for i in range(12):
        x = torch.randn(4, 256, device=DEVICE)
        w.grad = v.grad = None
        y, z = fast(x), spectrum(x * v).square()
        if i == 8:
            CACHE[0].clear()
            overwritten()
        y.sum().backward()
        z.sum().backward()
        assert torch.equal(y, z)
        assert torch.equal(w.grad, v.grad)


def test_each_transform_is_known_by_the_name_of_a_kernel() -> None:
    """A transform of one element has no plan."""
    shapes = [
        *((n,) for n in range(2, 130)),
        (1009,),
        (4099,),
        (30030,),
        (1 << 20,),
        (3, 5),
        (64, 64),
    ]
    for shape in shapes:
        x = torch.randn(shape, device=DEVICE)
        for f in (torch.fft.rfftn, torch.fft.fftn, lambda t: torch.fft.irfftn(t, s=t.shape)):
            f(x)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                f(x)
            names = list(nodes.kernel_names(graph.raw_cuda_graph()))
            assert any(name and "fft" in name.lower() for name in names), (shape, names)


def test_no_launch_of_others_is_checked(plans: None) -> None:
    torch.fft.rfft(torch.randn(8, device=DEVICE))
    fast = recorded(lambda x: x * 2, torch.ones(3, device=DEVICE))
    CACHE[0].clear()
    fast(torch.ones(3, device=DEVICE))
    assert fast.stats().captures == 1


def _convolution() -> Callable[[Tensor], Tensor]:
    net = nn.Conv2d(16, 32, 3, padding=1).to(DEVICE, torch.half)
    net = net.to(memory_format=torch.channels_last)
    return lambda x: net(x.view(2, 16, 16, 16).half()).float()


def _fused_convolution() -> Callable[[Tensor], Tensor]:
    w, b = torch.randn(64, 16, 3, 3, device=DEVICE), torch.randn(64, device=DEVICE)
    ones = (1, 1)
    return lambda x: torch.cudnn_convolution_relu(x.view(2, 16, 16, 16), w, b, ones, ones, ones, 1)


def _attention() -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        x = x.view(1, 2, 64, 64).half()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(x, x, x)

    return f


def _recurrent() -> Callable[[Tensor], Tensor]:
    net = nn.LSTM(32, 64, 2).to(DEVICE)
    return lambda x: net(x.view(64, 4, 32))[0]


def _product() -> Callable[[Tensor], Tensor]:
    w = torch.randn(4096, 64, device=DEVICE, dtype=torch.half)
    return lambda x: x.view(2, 4096).half() @ w


def _solver() -> Callable[[Tensor], Tensor]:
    return lambda x: torch.linalg.inv_ex(x[:64].view(8, 8) + torch.eye(8, device=DEVICE))[0]


OF_LIBRARIES = {
    "cuDNN convolution": _convolution,
    "cuDNN fused convolution": _fused_convolution,
    "cuDNN attention": _attention,
    "cuDNN recurrent": _recurrent,
    "cuBLAS split product": _product,
    "cuSOLVER inverse": _solver,
}


@pytest.mark.parametrize("name", OF_LIBRARIES)
@torch.no_grad()
def test_the_thread_of_the_capture_ends(name: str) -> None:
    """Handles, workspaces and plans of cuDNN, cuBLAS and cuSOLVER belong to the thread."""
    torch.manual_seed(0)
    f = OF_LIBRARIES[name]()
    x = torch.randn(2 * 4096, device=DEVICE)
    expected = f(x)
    fast = ol.graph(f)

    def work() -> None:
        with torch.no_grad():
            for _ in range(5):
                fast(x)

    for run in (work, lambda: f(x)):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    del thread
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    overwritten()
    for _ in range(3):
        assert torch.equal(fast(x), expected)
    assert fast.stats().captures == 1


@torch.no_grad()
def test_compiled_kernels_outlive_a_reset_of_dynamo() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Softmax(-1)).to(DEVICE)
    x = torch.randn(16, 64, device=DEVICE)
    fast = ol.graph(net, compile=True)
    for _ in range(6):
        expected = fast(x)
    torch.compiler.reset()
    gc.collect()
    overwritten()
    for n in (3, 5, 9):  # modules that could take the place of those of the recording
        torch.compile(lambda t, n=n: (t * n).sin().sum(-1))(x)
    assert torch.equal(fast(x), expected)
    assert fast.stats().captures == 1


@torch.no_grad()
def test_a_kernel_of_triton_whose_function_forgets_it() -> None:
    from tests.gpu.triton_kernels import add_one

    def f(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        add_one[(1,)](x, y, x.numel(), BLOCK=128)
        return y

    x = torch.randn(100, device=DEVICE)
    fast = recorded(f, x)
    add_one.device_caches.clear()
    gc.collect()
    overwritten()
    assert torch.equal(fast(x), x + 1)
    assert fast.stats().captures == 1
