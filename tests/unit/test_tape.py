"""The tape through its protocol: plain CPU tensors, and the emulated device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch import testing
from onelaunch.driver.protocol import Capture, Driver, Released
from onelaunch.driver.select import driver_of
from onelaunch.errors import CaptureError
from tests.unit.captured import Captured, Program, assert_same, flat


@pytest.fixture(params=["cpu", "tape"])
def device(request: pytest.FixtureRequest) -> torch.device:
    testing.install()
    return torch.device(request.param)


@pytest.fixture
def driver(device: torch.device) -> Driver:
    return driver_of(device.type)


def in_place(x: Tensor) -> Any:
    y = x.clone()
    y[0].mul_(2)
    y.t_()
    y.add_(x.t())
    return y, y[1]


def foreach(x: Tensor) -> Any:
    xs = [x, x + 1, x * 2]
    torch._foreach_add_(xs[1:], xs[:2])
    return torch._foreach_mul(xs, 3.0)


def out_arguments(x: Tensor) -> Any:
    y = torch.empty_like(x)
    torch.add(x, x, out=y)
    z = torch.empty(0, device=x.device)
    torch.mul(y, x, out=z)
    return y, z


def grown(x: Tensor) -> Tensor:
    y = torch.empty(2, device=x.device).fill_(1.0)
    y.resize_(4, 4)
    y[1:] = x[1:]
    y[0, 2:] = 0
    return y + x


def gradients(x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        loss = (x.sin() * x).sum() + torch.nn.functional.conv1d(x[None], x[None, :, :2]).pow(
            2
        ).sum()
        (grad,) = torch.autograd.grad(loss, x)
    return loss.detach(), grad


PROGRAMS: dict[str, Program] = {
    "pointwise": lambda x: (x * 2 + 1).relu(),
    "views": lambda x: (x.t() @ x)[:, 1:].reshape(-1).view(3, 4) * 2,
    "expanded": lambda x: x[:1].expand(3, 4).contiguous() + x[0, 0],
    "no change": lambda x: x.contiguous().to(x.dtype).reshape(x.shape) + 1,
    "in place": in_place,
    "several outputs": lambda x: (*x.max(1), *torch.topk(x, 2), *torch.std_mean(x, 0), *x.split(2)),
    "foreach": foreach,
    "out=": out_arguments,
    "resize_": grown,
    "complex": lambda x: (torch.fft.fft(x), torch.complex(x, x).conj() * 2),
    "bool": lambda x: ((x > 0).any(), (x > 0) & (x < 1)),
    "empty": lambda x: (x[:0] * 2, x[:0].sum(), torch.cat([x[:0], x])),
    "half": lambda x: (x.half() @ x.half().t(), x.bfloat16().softmax(-1)),
    "where": lambda x: torch.where(x > 0, x, x.mean()),
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(0, (x > 0).long(), x),
    "gather": lambda x: x[x.argsort(0), torch.arange(4, device=x.device)],
    "fills": lambda x: torch.full((2, 2), 3.0, device=x.device) + torch.ones_like(x)[:2, :2],
    "index put": lambda x: x.clone().index_put_((torch.arange(2, device=x.device),), x[2:]),
    "masked fill": lambda x: x.masked_fill(x > 0, 2.0),
    "layer norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "batch norm": lambda x: nn.functional.batch_norm(x, x[0], x[1].abs()),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "strided": lambda x: torch.empty_strided((4, 4), (1, 4), device=x.device).copy_(x).mul(2),
    "cumsum": lambda x: x.cumsum(0).flip(1).roll(1, 0),
    "gradients": gradients,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_as_eager(name: str, mode: Callable[[], Any], device: torch.device) -> None:
    if name == "gradients" and mode is torch.inference_mode:
        mode = torch.no_grad  # autograd cannot be switched on inside inference mode
    program = PROGRAMS[name]
    with mode():
        captured = Captured(program, torch.randn(4, 4).to(device))
        for _ in range(2):
            x = torch.randn(4, 4).to(device)
            assert_same(captured(x), flat(program(x)))


@pytest.mark.parametrize("layout", ["transposed", "narrow", "scalar", "empty", "int8", "bool"])
def test_input_bytes(layout: str, device: torch.device) -> None:
    def source() -> Tensor:
        x = torch.randn(4, 6).to(device)
        return {
            "transposed": x.t(),
            "narrow": x[1:, 2:5],
            "scalar": x[0, 0],
            "empty": x[:0],
            "int8": (x * 10).to(torch.int8),
            "bool": x > 0,
        }[layout]

    captured = Captured(lambda x: (x.float() + 1, x.clone()), source())
    x = source()
    assert_same(captured(x), [x.float() + 1, x.clone()])


def test_travels(device: torch.device, driver: Driver) -> None:
    x, scalar = torch.randn(3, 1).to(device).expand(3, 4), torch.tensor(2.0)
    out: list[Tensor] = []

    def body(capture: Capture) -> None:
        buffer = torch.empty(3, 4, device=device)
        number = torch.empty((), device=device)
        capture.input(x, buffer, "copy")
        capture.input(scalar, number, "fill")
        y = buffer * number
        out.append(y)
        capture.output(driver.alias(y, torch.uint8, (48,), (1,), 0))

    graph, _ = driver.capture(body, driver.new_pool(device))
    assert graph.travels == ("copy", "fill")
    target = torch.empty(3, 4, device=device)
    graph.launch([x * 2, torch.tensor(0.5)], [target])
    assert_same([target], [x * 1.0])


def test_displacement(device: torch.device, driver: Driver) -> None:
    """A port may copy more than the tensor: the region around it."""
    base = torch.arange(8.0).to(device)
    other = base + 10

    def body(capture: Capture) -> None:
        block = driver.empty(32, device)
        capture.input(base[3:5], block, "node", 12)
        x = driver.alias(block, torch.float32, (8,), (1,), 0)
        y = x * 2
        capture.output(driver.alias(y, torch.uint8, (32,), (1,), 0), 4)

    graph, _ = driver.capture(body, driver.new_pool(device))
    target = torch.empty(8, device=device)
    graph.launch([other[3:5]], [target[1:]])
    assert_same([target], [other * 2])


def test_alias_and_region(device: torch.device, driver: Driver) -> None:
    x = torch.arange(12.0).view(3, 4).to(device)
    whole, part = driver.region(x), driver.region(x[1:, 1])
    assert whole.stop - whole.start == 48
    assert (part.start - whole.start, part.stop - whole.start) == (20, 40)
    assert whole.overlaps(part)
    assert not driver.region(x[0]).overlaps(driver.region(x[1]))
    assert driver.region(x[:0]).start == driver.region(x[:0]).stop
    again = driver.alias(x[1], torch.int32, (2, 2), (4, 1), 0)
    assert again.data_ptr() == x[1].data_ptr()
    assert_same([again.view(torch.float32)], [x[1:3, :2]])
    assert driver.empty(100, device).data_ptr() % 64 == 0
    assert driver.empty(0, device).shape == (0,)


def test_capture_leaves_no_trace(device: torch.device) -> None:
    w, b = torch.ones(4, 4).to(device), torch.ones(4).to(device)
    batch_norm = nn.BatchNorm1d(4).to(device)
    example = torch.randn(4, 4).to(device)
    state = torch.get_rng_state()

    def program(x: Tensor) -> Tensor:
        w.view(-1)[2:5].add_(1)
        b.copy_(x[0])
        return batch_norm(nn.functional.dropout(x, 0.5)) + w + b

    with torch.no_grad():
        captured = Captured(program, example)
        assert w.eq(1).all()
        assert b.eq(1).all()
        assert batch_norm.running_mean.eq(0).all()
        assert batch_norm.num_batches_tracked == 0
        assert torch.equal(state, torch.get_rng_state())
        kept = [t.clone() for t in (w, b, *batch_norm.buffers())]
        x, y = torch.randn(4, 4).to(device), torch.randn(4, 4).to(device)
        torch.manual_seed(3)
        wanted = [program(x), program(y), *(t.clone() for t in (w, b, *batch_norm.buffers()))]
        end = torch.get_rng_state()
        for t, before in zip((w, b, *batch_norm.buffers()), kept, strict=True):
            t.copy_(before)
        torch.manual_seed(3)
        assert_same([*captured(x), *captured(y), w, b, *batch_norm.buffers()], wanted)
        assert torch.equal(end, torch.get_rng_state())


def test_a_storage_that_the_program_resizes() -> None:
    """As FSDP frees a parameter and has it again: repeated, and put back after the capture."""
    whole, kept = torch.zeros(4, 4), torch.ones(4, 4)
    whole.untyped_storage().resize_(0)

    def program(x: Tensor) -> Tensor:
        whole.untyped_storage().resize_(whole.nbytes)
        whole.copy_(x)
        y = whole * 2 + kept
        kept.add_(1)
        whole.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(2 * kept.nbytes)
        return y

    captured = Captured(program, torch.randn(4, 4))
    assert whole.untyped_storage().nbytes() == 0
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert kept.eq(1).all()
    for i in range(3):
        x = torch.randn(4, 4)
        assert_same(captured(x), [x * 2 + (1 + i)])
        assert whole.untyped_storage().nbytes() == 0
    assert kept.eq(4).all()
    assert kept.untyped_storage().nbytes() == 2 * kept.nbytes
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_storage_of_the_recording_cannot_be_resized() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.untyped_storage().resize_(0)
        return x + 1

    with pytest.raises(CaptureError) as caught:
        Captured(program, torch.randn(4, 4))
    assert caught.value.code == "OL107"


def test_a_generator_of_its_own(device: torch.device, driver: Driver) -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()

    def body(capture: Capture) -> Tensor:
        return torch.rand(4, device=device, generator=generator)

    graph, y = driver.capture(body, driver.new_pool(device), [generator])
    assert torch.equal(before, generator.get_state())
    graph.launch([], [])
    first = y.clone()
    graph.launch([], [])
    assert not torch.equal(first.cpu(), y.cpu())
    generator.set_state(before)
    assert torch.equal(first.cpu(), torch.rand(4, device=device, generator=generator).cpu())


def test_the_body_raises(device: torch.device, driver: Driver) -> None:
    w = torch.ones(4).to(device)
    state = torch.get_rng_state()
    pool = driver.new_pool(device)

    def program(x: Tensor) -> Tensor:
        w.add_(x)
        torch.rand(3, device=device)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Captured(program, w, pool=pool)
    assert w.eq(1).all()
    assert torch.equal(state, torch.get_rng_state())
    assert not driver.capturing()
    assert_same(Captured(lambda x: x + 1, w, pool=pool)(w), [w + 1])


def test_capturing_is_of_this_thread(device: torch.device, driver: Driver) -> None:
    seen: list[bool] = []

    def body(capture: Capture) -> None:
        thread = threading.Thread(target=lambda: seen.append(driver.capturing()))
        seen.append(driver.capturing())
        thread.start()
        thread.join()

    driver.capture(body, driver.new_pool(device))
    assert seen == [True, False]
    assert not driver.capturing()


def test_nested_captures_and_launches_are_refused(device: torch.device) -> None:
    x = torch.ones(2).to(device)
    inner = Captured(lambda x: x + 1, x)
    with pytest.raises(CaptureError, match="OL109"):
        Captured(lambda x: Captured(lambda x: x + 1, x)(x), x)
    with pytest.raises(CaptureError, match="OL109"):
        Captured(lambda x: inner(x), x)


def test_reset(device: torch.device, driver: Driver) -> None:
    x = torch.ones(4).to(device)
    pool = driver.new_pool(device)
    first, second = (Captured(lambda x: x + 1, x, pool=pool) for _ in range(2))
    assert first.graph.nodes == 3
    assert pool.memory_bytes >= first.graph.memory_bytes > 0
    first.graph.reset()
    first.graph.reset()
    with pytest.raises(Released):
        first(x)
    assert_same(second(x), [x + 1])
    second.graph.reset()
    assert pool.memory_bytes == 0


def test_constants_of_the_body_start_anew() -> None:
    """`torch.tensor` inside a body, then changed in place: each replay finds it as it was made."""

    def program(x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0])
        total += x
        return total * 2

    x = torch.ones(2)
    captured = Captured(program, x)
    for _ in range(2):
        assert_same(captured(x), [program(x)])


def test_a_compiled_function_runs_as_it_is_written() -> None:
    compiled = torch.compile(PROGRAMS["pointwise"], backend="aot_eager")
    x = torch.randn(4)
    compiled(x)
    assert_same(Captured(compiled, torch.randn(4))(x), [PROGRAMS["pointwise"](x)])
