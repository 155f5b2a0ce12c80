"""Collectives in recordings, and what modules of several processes ask for: a group of one.

What two processes make of it is in tests/multi_gpu.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import onelaunch as ol
from onelaunch.capture import distributed

from .drop_in import alike, assert_same, random_tensor, replays
from .steps import step_over

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def rows(i: int) -> Tensor:
    return random_tensor(i, 4, 3)


def test_collectives_are_repeated_and_write() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        dist.all_reduce(x)
        total = y + 1
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        dist.broadcast(y, src=0)
        return total, parts[0] + 1

    fast: Any = ol.graph(f, warmup=1)
    for i in range(6):
        given, expected = [rows(i), rows(i + 50)], [rows(i), rows(i + 50)]
        assert_same(fast(*given), f(*expected))
        assert_same(given, expected)
    assert replays(fast) == 5


def test_what_a_collective_writes_is_known_to_be_written() -> None:
    """A tensor read by address, whose only writer is a collective."""
    total = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        dist.all_reduce(total)
        return total + x

    fast: Any = ol.graph(f, warmup=1)
    alike(fast, lambda x: x + total, random_tensor, 3)
    assert replays(fast) == 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_a_step_over_ddp_warms_up_for_eleven_calls() -> None:
    """And DDP's lists of its buffers, made anew at each forward, ask for no new recording."""
    model, expected = network(), network()
    step, eager = step_over(DDP(model)), step_over(DDP(expected))
    fast: Any = ol.graph(step, warmup=2)
    for i in range(16):
        assert_same(fast(rows(i)), eager(rows(i)))
        assert len(fast.recordings) == (i >= 11)
    assert_same(model.state_dict(), expected.state_dict())
    assert replays(fast) == 5
    for _ in range(3):
        fast(rows(0)[:2])
    assert len(fast.recordings) == 2  # DDP has had its ten: another size needs two calls more


def test_an_eager_forward_between_replays() -> None:
    """Validation through the same DDP module, which lists its buffers anew."""
    model = network()
    wrapped = DDP(model)
    fast: Any = ol.graph(step_over(wrapped))
    for i in range(20):
        fast(rows(i))
        with torch.no_grad():
            wrapped(rows(i))
    assert len(fast.recordings) == 1


def refused(call: Any) -> ol.GraphError:
    with pytest.raises(ol.GraphError) as caught:
        call()
    assert caught.value.code == "OL130"
    return caught.value


def test_a_pair_around_ddp_is_refused_with_the_line_to_write() -> None:
    wrapped = DDP(network())
    assert "DistributedDataParallel(ol.graph(module))" in refused(lambda: ol.graph(wrapped)).fix
    around = nn.Sequential(wrapped, nn.ReLU())
    assert "`DistributedDataParallel`" in refused(lambda: ol.graph(around)).what


def test_a_graph_inside_ddp() -> None:
    model, expected = network(), network()
    fast: Any = ol.graph(model)
    step, eager = step_over(DDP(fast)), step_over(DDP(expected))
    for i in range(8):
        assert_same(step(rows(i)), eager(rows(i)))
    assert_same(model.state_dict(), expected.state_dict())


def test_a_copy_of_a_wrapped_module_is_free() -> None:
    wrapped = DDP(network())
    fast: Any = ol.graph(copy.deepcopy(wrapped.module))
    alike(fast, fast, random_tensor, 4, 3)


@pytest.mark.parametrize("kept", [True, False], ids=["alive", "dropped"])
def test_recordings_are_freed_before_process_groups_end(kept: bool) -> None:
    """NCCL would wait for them; whoever is left runs eagerly again, and warms up."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        if dist.is_initialized():
            dist.all_reduce(y)
        return y

    fast: Any = ol.graph(f, warmup=1)
    for i in range(3):
        fast(rows(i))
    graph = fast._table.entries[0].captured.graph
    resets: list[bool] = []
    reset = graph.reset
    graph.reset = lambda: (resets.append(True), reset())[1]
    if not kept:
        graph.cycle, fast = graph, None
    dist.destroy_process_group()
    assert resets
    assert not dist.is_initialized()
    if kept:
        assert fast.recordings == []
        assert_same(fast(rows(0)), rows(0) * 2)


def sharded() -> Any:
    mesh = init_device_mesh("cpu", (1,))
    return fully_shard(network(), mesh=mesh, reshard_after_forward=False)


def parts(model: nn.Module) -> list[Tensor]:
    """What this process holds of the state of a sharded model, gradients included."""
    held = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    return [getattr(t, "_local_tensor", t) for t in held]


def test_a_step_over_fsdp2() -> None:
    """DTensors with their gradients and momenta, and parameters freed between the calls."""
    model, expected = sharded(), sharded()
    step, eager = step_over(model), step_over(expected)
    fast: Any = ol.graph(step, warmup=1)
    for i in range(8):
        assert_same(fast(rows(i)), eager(rows(i)))
        assert_same(parts(model), parts(expected))
        # FSDP has its first two calls, and some of its code runs in the third for the first time.
        assert len(fast.recordings) == (i >= 3)
    assert replays(fast) == 6
    assert fast.recordings[0].untraced == []


def test_a_state_dict_that_is_loaded_into_fsdp2() -> None:
    model, expected = sharded(), sharded()
    step, eager = step_over(model), step_over(expected)
    fast: Any = ol.graph(step)
    for i in range(12):
        assert_same(fast(rows(i)), eager(rows(i)))
        if i == 6:
            for each in (model, expected):
                each.load_state_dict({k: v * 2 for k, v in each.state_dict().items()})
    assert_same(parts(model), parts(expected))


def test_a_step_over_fsdp2_that_a_capture_breaks_off() -> None:
    """FSDP is left as if the capture had not been: its parameters sharded, nothing pending."""
    model, expected = sharded(), sharded()

    def step_reading(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            number = loss.item()
            loss.backward()
            optimizer.step()
            return number

        return step

    fast: Any = ol.graph(step_reading(model), on_refusal="eager")
    eager = step_reading(expected)
    for i in range(6):
        with pytest.warns(ol.GraphWarning, match="OL101") if i == 3 else nullcontext():
            result = fast(rows(i))
        assert result == eager(rows(i))
        assert_same(parts(model), parts(expected))
    assert fast.recordings == []


def test_a_dtensor_as_result_is_refused() -> None:
    model = sharded()

    def step(x: Tensor) -> Tensor:
        model(x).sum().backward()
        result = model[0].weight.grad * 2
        model.zero_grad()
        return result

    fast: Any = ol.graph(step)
    for i in range(3):
        fast(rows(i))
    with pytest.raises(ol.CaptureError, match="DTensor") as caught:
        fast(rows(3))
    assert caught.value.code == "OL108"
    assert "full_tensor" in caught.value.fix


def test_fsdp2_captured_ahead_is_refused() -> None:
    fast: Any = ol.graph(step_over(sharded()))
    assert "call the step" in refused(lambda: fast.capture(rows(0))).fix


def test_fsdp2_that_reshards_after_forward_is_refused() -> None:
    model = sharded()
    assert distributed.refused_step([model]) is None
    model.set_reshard_after_forward(True)
    error = distributed.refused_step([model])
    assert error is not None
    assert "reshard_after_forward=False" in error.fix


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_ddp_that_reads_what_was_used_is_refused(option: str) -> None:
    step: Any = ol.graph(step_over(DDP(network(), **{option: True})))
    assert f"leave `{option}` out" in refused(lambda: step(rows(0))).fix


def test_without_a_process_group_nothing_is_asked() -> None:
    dist.destroy_process_group()
    assert distributed.least_warmup([network()]) == 0
    assert distributed.refused_step([network()]) is None
    assert not distributed.is_unsharded(lambda: [network()])
    assert distributed.spread(network()) is None
