"""The emulated device: its memory, its transfers, its tensors."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch import testing
from onelaunch.driver.select import driver_of
from onelaunch.errors import CaptureError
from tests.unit.captured import Captured, Program, assert_same


@pytest.fixture
def tape() -> torch.device:
    testing.install()
    gc.collect()
    return torch.device("tape")


def test_blocks_are_reused_and_poisoned(tape: torch.device) -> None:
    before = testing.memory_allocated()
    x = torch.ones(1000, device=tape)
    assert testing.memory_allocated() - before == 4096
    address = x.data_ptr()
    view = x[10:]
    del x
    assert testing.memory_allocated() - before == 4096
    assert view.data_ptr() == address + 40
    del view
    assert testing.memory_allocated() == before
    y = torch.empty(1000, device=tape)
    assert y.data_ptr() == address
    assert y.isnan().all()


def test_a_result_of_given_memory_draws_once(tape: torch.device) -> None:
    generator, again = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(3):
        drawn = torch.randperm(9, generator=generator, out=torch.empty(0, device=tape).long())
        assert torch.equal(drawn.cpu(), torch.randperm(9, generator=again))


def test_an_operation_that_draws_nothing_leaves_the_draws_of_other_threads(
    tape: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device runs an operation on memory that is given twice, the first for sizes."""
    monkeypatch.setattr(torch.random, "set_rng_state", lambda state: pytest.fail("set"))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: pytest.fail("set"))
    assert torch.arange(3, device=tape).tolist() == [0, 1, 2]


def test_dead_memory_is_poisoned_before_each_launch(tape: torch.device) -> None:
    driver = driver_of("tape")
    pool = driver.new_pool(tape)
    first, z = driver.capture(lambda c: torch.ones(100, device=tape), pool)
    second, y = driver.capture(lambda c: torch.ones(100, device=tape) + 1, pool)
    address = y.data_ptr()
    del y
    second.launch([], [])
    assert ctypes.c_float.from_address(address).value == 2.0
    first.launch([], [])
    assert math.isnan(ctypes.c_float.from_address(address).value)
    assert z.eq(1).all()


def test_out_of_memory(tape: torch.device) -> None:
    pool = driver_of("tape").new_pool(tape)
    x = torch.ones(4, device=tape)
    before = testing.memory_reserved()
    testing.set_memory_limit(before + (4 << 20))
    try:
        with pytest.raises(CaptureError, match="OL111"):
            Captured(lambda x: torch.empty(8 << 20, device=tape) + x.sum(), x, pool=pool)
    finally:
        testing.set_memory_limit(None)
    gc.collect()
    pool.trim()
    assert testing.memory_reserved() == before
    assert_same(Captured(lambda x: x + 1, x, pool=pool)(x), [x + 1])


@pytest.mark.thorough
def test_captures_and_resets_leak_nothing(tape: torch.device) -> None:
    x = torch.randn(100, 100).to(tape)

    def once() -> tuple[int, int]:
        captured = Captured(lambda x: (x @ x).relu().sum(0), x)
        captured(x)
        captured.graph.reset()
        del captured
        gc.collect()
        return testing.memory_allocated(), testing.memory_reserved()

    before = once()
    assert [once() for _ in range(10)] == [before] * 10


def test_a_number_of_the_host_is_frozen(tape: torch.device) -> None:
    """As on CUDA: the kernels hold the value that a 0-dim tensor of the host had."""
    scale = torch.tensor(2.0)
    x = torch.ones(3).to(tape)
    captured = Captured(lambda x: x * scale, x)
    scale.fill_(100)
    assert_same(captured(x), [x * 2])


TRANSFERS: dict[str, Program] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to the device": lambda x: x + torch.ones(2).to("tape"),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0], device="tape"),
    "copy in": lambda x: x.clone().copy_(torch.ones(2)),
    "copy out": lambda x: torch.ones(2).copy_(x),
    "index": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", TRANSFERS)
def test_transfers_are_refused(name: str, mode: Callable[[], Any], tape: torch.device) -> None:
    x = torch.ones(2).to(tape)
    with mode():
        TRANSFERS[name](x)
        with pytest.raises(CaptureError, match="OL103") as refused:
            Captured(TRANSFERS[name], x)
    assert "test_emulated.py" in str(refused.value.where)


def test_devices_do_not_mix(tape: torch.device) -> None:
    x = torch.ones(2).to(tape)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(2)
    assert (x * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_host_work_in_a_device_capture_runs_once(tape: torch.device) -> None:
    """Tensors of the host are Python's business: computed in the capture, not in a replay."""
    count = torch.zeros(2)
    x = torch.ones(2).to(tape)

    def program(x: Tensor) -> Tensor:
        count.add_(1)
        return x * count[0].item()

    captured = Captured(program, x)
    captured(x)
    assert count.tolist() == [1.0, 1.0]


def test_a_module_moves_to_the_device_and_back(tape: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(5, 3)
    wanted = model(x)
    model.to(tape)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.device.type == "tape"
    copied = copy.deepcopy(model)
    model[0].weight.data.zero_()
    assert_same([copied(x.to(tape))], [wanted.to(tape)])
    assert_same([pickle.loads(pickle.dumps(copied))(x.to(tape))], [wanted.to(tape)])
    assert_same([copied.cpu()(x)], [wanted])


def test_assigned_data_keeps_its_memory(tape: torch.device) -> None:
    p = nn.Parameter(torch.zeros(100, device=tape))
    p.data = torch.ones(100, device=tape)
    others = [torch.full((100,), 5.0, device=tape) for _ in range(4)]
    assert p.eq(1).all()
    assert all(p.data_ptr() != t.data_ptr() for t in others)
    p.data.set_(others[0])
    assert p.data_ptr() != others[0].data_ptr() or p.eq(5).all()


def test_integers_are_counted(tape: torch.device) -> None:
    def count(x: Tensor) -> Tensor:
        return torch.histc(x.int(), bins=4, min=0, max=3)

    x = torch.tensor([0.0, 1.0, 1.0, 3.0], device=tape)
    assert count(x).dtype == torch.int32
    fast = ol.graph(count)
    for _ in range(5):
        assert fast(x).tolist() == [1, 2, 0, 1]
    assert fast.stats().replays == 2


def test_printing(tape: torch.device) -> None:
    assert repr(torch.ones(2, device=tape)) == "tensor([1., 1.], device='tape:0')"
    assert f"{torch.ones((), device=tape):.2f}" == "1.00"


def test_torch_finds_no_allocator_of_its_own(tape: torch.device) -> None:
    kept = torch.ones(10, device=tape)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_stats() == {}
    assert kept.sum().item() == 10


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_fakes_of_convolutions_have_the_layout(tape: torch.device, kind: Any) -> None:
    """AOTAutograd compiles by it: a copy to the layout that a result has already is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, 8, 3, padding=1), nn.GroupNorm(2, 8)).to(tape)
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8, device=tape).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    found: list[list[Tensor | None]] = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        run(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(found[1], found[0])
    torch._dynamo.reset()
