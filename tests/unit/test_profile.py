"""`ol.profile`: work counted exactly, time divided, limits named, gains bounded."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

import onelaunch as ol
from onelaunch.tools.bench.trace import read
from onelaunch.tools.profiler import measure
from onelaunch.tools.profiler.breakdown import Part, Seen, parts_on_cpu, parts_on_gpu, seen_in
from onelaunch.tools.profiler.counting import CallWork, Work, count
from onelaunch.tools.profiler.measure import bound_of, laid_out
from onelaunch.tools.profiler.peaks import Peaks, measure_peaks
from onelaunch.tools.profiler.remedies import Remedy, remedies_on_cpu, remedies_on_gpu
from onelaunch.tools.profiler.roofline import roofline
from onelaunch.tools.report.terminal import show
from tests.unit.cuda_trace import RELU, SGEMM, eager, graphed

CPU = torch.device("cpu")


def counted(fn: Any, *args: Any, grad: bool = False) -> CallWork:
    with torch.set_grad_enabled(grad):
        return count(lambda: fn(*args), CPU)


# What is counted.

VECTOR = torch.ones(16)
COUNTED: dict[str, tuple[Any, Tensor, int | None, int]] = {
    "a linear layer": (  # bias, input, weight, result
        *(nn.Linear(64, 32), torch.ones(8, 64), 2 * 8 * 64 * 32),
        4 * (32 + 8 * 64 + 64 * 32 + 8 * 32),
    ),
    "a convolution": (
        *(nn.Conv2d(3, 16, 3, bias=False), torch.ones(4, 3, 32, 32), 2 * 4 * 16 * 30 * 30 * 27),
        4 * (4 * 3 * 32 * 32 + 16 * 3 * 3 * 3 + 4 * 16 * 30 * 30),
    ),
    "what is in between": (
        *(lambda x: ((x + 1) * 2).relu().sum(), torch.ones(1024), 0, 4 * (1024 + 1)),
    ),
    "a weight that is read twice moves once": (
        *(lambda w: w @ (w @ VECTOR), torch.ones(16, 16), None, 4 * (16 * 16 + 16 + 16)),
    ),
    "the rows that are looked up": (
        *(nn.Embedding(10_000, 8), torch.tensor([[1, 2, 3]]), 0, 4 * 3 * 8 * 2 + 8 * 3),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_a_call_computes_and_moves_at_least(name: str) -> None:
    fn, x, flops, least_bytes = COUNTED[name]
    found = counted(fn, x)
    assert found.least_bytes == least_bytes
    assert flops in (None, found.flops)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_operator_that_compiles_a_function_is_named_and_still_compiles() -> None:
    def fn(q: Tensor) -> Any:
        return flex_attention(q, q, q)

    q = torch.ones(1, 2, 16, 16)
    found = ol.profile(fn, (q,))
    assert "inside compiled code, flex_attention is not counted" in found.remarks[0]
    (finding,) = ol.diagnose(fn, (q,)).findings
    assert (finding.code, finding.what[:16]) == ("OL109", "`flex_attention`")
    assert torch.equal(torch.compile(fn, backend="eager", fullgraph=True)(q), fn(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operator_has_a_name_and_a_dtype(dtype: torch.dtype) -> None:
    (work,) = counted(nn.Linear(64, 32).to(dtype), torch.ones(8, 64, dtype=dtype)).works
    moved = dtype.itemsize * (32 + 8 * 64 + 64 * 32 + 8 * 32)
    assert work == Work("aten::addmm", 2 * 8 * 64 * 32, moved, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_as_torch_counts(mode: Any) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x, heads = torch.ones(2, 6, 32), torch.ones(2, 4, 16, 8)
    with mode():
        found = count(lambda: layer(x), CPU)
        with FlopCounterMode(display=False) as torchs:
            layer(x)
        attended = count(lambda: F.scaled_dot_product_attention(heads, heads, heads), CPU)
    assert found.flops == torchs.get_total_flops()
    assert attended.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)


def test_a_backward() -> None:
    net, x = nn.Linear(16, 8), torch.ones(4, 16)
    found = counted(lambda: net(x).sum().backward(), grad=True)
    assert found.flops == 2 * (2 * 4 * 16 * 8)  # the weight's gradient; the input needs none
    assert found.backward
    assert not counted(lambda: net(x)).backward


@pytest.mark.parametrize(
    ("fn", "read_and_written"),
    [
        (lambda x: x + 1, 2),
        (lambda x: x + x[:1], 2 + 1 / 8),
        (lambda x: x.add_(1), 2),
        (lambda x: x.mul_(x), 2),
        (lambda x: x[:4].copy_(x[4:]), 1),
        (lambda x: x.zero_(), 1),
        (lambda x: torch.add(x, x, out=torch.empty_like(x)), 2),
        (lambda x: torch.add(x, 1, out=x), 2),
        (lambda x: x.t().reshape(4, 16)[1:].expand(2, 3, 16), 2),  # reshape copies, the rest not
        (lambda x: x.view(4, 16).unsqueeze(0), 0),
        (lambda x: x.sum(dim=0), 1 + 1 / 8),
        (lambda x: F.embedding(torch.tensor([1]), x), 2 / 8 + 8 / 256),
        (lambda x: x[:1].expand(8, 8) + 1, 1 / 8 + 1),
        (lambda x: ((x + 1) * 2).relu().sum(), 6 + 1 + 1 / 64),
    ],
)
def test_the_bytes_of_operators(fn: Any, read_and_written: float) -> None:
    found = counted(fn, torch.ones(8, 8))
    assert found.nbytes == read_and_written * 256


def test_what_is_written_outside_is_left() -> None:
    total, x = torch.zeros(64), torch.ones(64)

    def add() -> None:
        total.add_(x)

    assert counted(add).least_bytes == 4 * 3 * 64


def test_arithmetic_without_a_formula_is_named() -> None:
    found = counted(nn.LSTM(4, 4).eval(), torch.ones(2, 3, 4))
    assert found.unknown == ["aten::mkldnn_rnn_layer"] or found.flops > 0


def test_what_raises_leaves_no_mode_behind() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        counted(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert torch._C._len_torch_dispatch_stack() == 0


# The roofline, on a machine that is easy to reckon with.

PEAKS = Peaks(2**20, bytes_per_us=1e3, flops_per_us={"float32": 1e4, "bfloat16": 4e4}, launch_us=5)


def test_each_operator_waits_for_the_slower_of_both() -> None:
    works = [Work("aten::mm", 10**6, 2_000, "float32"), Work("aten::relu", 0, 3_000, "float32")]
    roof = roofline(CallWork(works, least_bytes=1_000), PEAKS)
    assert (roof.memory_us, roof.arithmetic_us, roof.roofline_us) == (5.0, 100.0, 103.0)
    assert roof.waits_for == "arithmetic"
    assert roof.fused_us == 100.0
    assert roof.half_us == 25.0 + 1.5
    assert roof.flops == {"float32": 10**6}


def test_half_precision_does_nothing_for_half_precision() -> None:
    roof = roofline(CallWork([Work("aten::relu", 0, 3_000, "bfloat16")], 3_000), PEAKS)
    assert roof.half_us == roof.roofline_us == 3.0
    assert roof.waits_for == "memory"


# Where the time goes, on a GPU.


def on_gpu(*rows: Any) -> Seen:
    return seen_in(read([row for some in rows for row in some]))


def test_copies_waits_and_launches_are_told_apart() -> None:
    seen = on_gpu(eager(1000.0), eager(2000.0))  # two calls, and the figures of one
    assert (seen.kernels, seen.kernels_us, seen.copies_us) == (2, 24.0, 2.0)
    assert seen.launches == 2
    assert (seen.launching, seen.waiting) == (0.11, 0.30)
    assert [(heavy.name, heavy.us, heavy.runs) for heavy in seen.heaviest] == [
        (SGEMM, 20.0, 1),
        (RELU, 4.0, 1),
        ("Memcpy DtoH (Device -> Pageable)", 2.0, 1),
    ]
    assert seen.heaviest[0].operators == ("aten::addmm",)
    assert seen.heaviest[0].share == 20 / 26


def test_the_parts_of_a_lane_add_up() -> None:
    parts = parts_on_gpu(on_gpu(eager()), wall_us=60.0, host_us=50.0)
    took = {part.name: part.us for part in parts}
    assert took["launches"] == pytest.approx(5.5)
    assert took["waits"] == pytest.approx(15.0)
    assert took["operators"] == pytest.approx(29.5)
    assert (took["idle"], took["kernels"], took["copies"], took["gaps"]) == (10.0, 24.0, 2.0, 34.0)
    for lane in ("host", "gpu"):
        assert sum(part.us for part in parts if part.lane == lane) == pytest.approx(60.0)


@pytest.mark.parametrize("launch", [True, False], ids=["runtime", "driver"])
def test_a_replay_is_one_launch(launch: bool) -> None:
    seen = on_gpu(graphed(launch))
    assert seen.launches == 1
    assert seen.kernels == 3
    assert not seen.heaviest[0].operators


def test_work_that_overlaps_is_counted_once() -> None:
    rows = eager()
    other = [{**row, "tid": 13} for row in rows if row.get("cat") == "kernel"]
    assert on_gpu([*rows, *other]).kernels_us == 24.0


def test_no_part_is_longer_than_the_call() -> None:
    """Timers and traces differ: a trace may show more work than the wall time has."""
    for part in parts_on_gpu(on_gpu(eager()), wall_us=20.0, host_us=30.0):
        assert 0.0 <= part.us <= 20.0


def test_the_parts_of_a_cpu() -> None:
    seen = replace(on_gpu(eager()), operating=0.5, copying=0.2)
    assert parts_on_cpu(seen, 100.0) == (
        Part("operators", "host", 50.0),
        Part("copies", "host", 20.0),
        Part("Python", "host", 30.0),
    )


@pytest.mark.parametrize(
    ("host", "gpu", "roofline_us", "bound"),
    [
        (200.0, 24.0, 20.0, "launches"),
        (20.0, 24.0, 20.0, "memory"),
        (20.0, 24.0, 1.0, "overhead"),
        (30.0, 24.0, 20.0, "memory"),  # without its waits the host takes 21
    ],
)
def test_what_bounds_a_call_on_a_gpu(
    host: float, gpu: float, roofline_us: float, bound: str
) -> None:
    work = Work("aten::relu", 0, int(roofline_us * 1e3), "float32")
    roof = roofline(CallWork([work], 1), PEAKS)
    times: Any = {"wall": max(host, gpu), "host": host, "gpu": gpu}
    assert bound_of(on_gpu(eager()), roof, times) == bound


TIMES: Any = {"wall": 210.0, "host": 210.0, "gpu": 26.0}
WORK = CallWork([Work("aten::mm", 20_000, 12_000, "float32")], least_bytes=6_000)


def test_the_profile_of_a_gpu() -> None:
    found = laid_out("net.py:model", TIMES, WORK, PEAKS, on_gpu(eager()))
    assert found.bound == "launches"
    assert found.summary == (
        "Bound by launches: the GPU is busy 26.0 us of 210 us; one launch can give at most 8.1x."
    )
    assert (found.limit.gpu_us, found.limit.kernels, found.launches) == (26.0, 2, 2)
    assert not found.unseen
    assert ol.Profile.from_json(found.to_json()) == found


def test_the_profile_of_a_replay() -> None:
    times: Any = {"wall": 30.0, "host": 12.0, "gpu": 26.0}
    found = laid_out("model", times, WORK, PEAKS, on_gpu(graphed(launch=False)))
    assert found.bound == "memory"
    assert found.summary.startswith(
        "Bound by memory: the kernels take 25.0 us of 30.0 us and reach 48% of the measured "
    )


def test_more_than_a_peak_is_marked() -> None:
    times: Any = {"wall": 30.0, "host": 12.0, "gpu": 26.0}
    work = CallWork([Work("aten::relu", 0, 100_000, "float32")], least_bytes=6_000)
    found = laid_out("model", times, work, PEAKS, on_gpu(graphed(launch=False)))
    assert found.reached == 4.0
    assert "4.0x as fast as the measured bandwidth" in found.summary
    assert "stays in a cache, or the peak was measured too low" in found.summary
    assert "%" not in found.summary


def test_where_the_profiler_sees_no_kernel_the_times_count() -> None:
    rows = [row for row in eager() if row.get("cat") not in ("kernel", "gpu_memcpy")]
    found = laid_out("model", TIMES, WORK, PEAKS, on_gpu(rows))
    assert found.bound == "launches"
    assert found.busy_us == 26.0
    assert found.limit.kernels is None
    assert "saw no kernel" in found.remarks[0]


def test_a_dtype_without_a_peak_is_named() -> None:
    work = CallWork([Work("aten::_scaled_mm", 10, 20, "float8_e4m3fn")], 20)
    found = laid_out("model", TIMES, work, PEAKS, on_gpu(eager()))
    assert found.remarks == ("The peak of products in float8_e4m3fn could not be measured.",)
    assert measure_peaks(CPU, 1, frozenset({"bool"})).flops_per_us == {}


def test_what_a_gpu_shows_is_printed() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    show(laid_out("net.py:model", TIMES, WORK, PEAKS, on_gpu(eager())).document(), console)
    text = console.export_text()
    for said in (" host  █", "  GPU  █", "launches 23.1 us", "gaps 184 us", "copies 2.0 us"):
        assert said in text
    assert "launched by" in text
    assert "aten::addmm" in text
    assert "one launch         8.1x  26.0 us  ol.graph(model)" in text
    assert "onelaunch doctor net.py:model" in text
    assert "On a CPU" not in text


# What can be gained.


def remedies(
    parts: tuple[Part, ...], wall: float, launches: float = 2, trains: bool = False
) -> dict[str, Remedy]:
    work = Work("aten::mm", 20_000, 12_000, "float32")
    roof = roofline(CallWork([work], least_bytes=6_000), PEAKS)
    found = remedies_on_gpu(parts, wall, launches, roof, PEAKS, "net.py:model", trains)
    assert [r.at_most for r in found] == sorted((r.at_most for r in found), reverse=True)
    return {remedy.name: remedy for remedy in found}


def test_what_each_remedy_can_gain_at_most() -> None:
    wall = 210.0
    parts = parts_on_gpu(on_gpu(eager()), wall_us=wall, host_us=210.0)
    found = remedies(parts, wall)
    left = {name: remedy.wall_us for name, remedy in found.items()}
    assert left["one launch"] == 26.0  # the kernels and the copy
    assert found["one launch"].at_most == pytest.approx(210 / 26)
    assert left["fused kernels"] == 6.0  # the bytes of inputs and results, at the peak
    assert left["half precision"] == pytest.approx(147.0)  # the host's work does not shrink
    assert "no copies" not in left  # 208: less than 2%
    assert left["no waits"] == pytest.approx(147.0)
    assert found["half precision"].how == "onelaunch optimize net.py:model --max-error 1e-2"
    assert found["no waits"].how == "onelaunch doctor net.py:model"
    half = remedies(parts, wall, trains=True)["half precision"]
    assert "optimize" not in half.how  # which refuses a step


def test_one_launch_takes_as_long_as_a_launch() -> None:
    seen = replace(on_gpu(eager()), kernels_us=1.0, copies_us=0.0)
    found = remedies(parts_on_gpu(seen, 100.0, 100.0), 100.0)
    assert found["one launch"].wall_us == PEAKS.launch_us


def test_what_is_one_launch_is_not_made_one() -> None:
    parts = parts_on_gpu(on_gpu(graphed(launch=True)), 30.0, 12.0)
    assert "one launch" not in remedies(parts, 30.0, launches=1)


def test_no_remedy_makes_a_call_slower() -> None:
    """A roofline longer than the call: it came from a cache that the peak did not."""
    roof = roofline(CallWork([Work("aten::relu", 0, 10**6, "bfloat16")], 10**6), PEAKS)
    parts = (Part("operators", "host", 10.0), Part("copies", "host", 0.0))
    assert remedies_on_cpu(parts, 10.0, roof, PEAKS, None) == ()


# Whole profiles, here.


def test_a_large_elementwise_operator_waits_for_memory() -> None:
    x, y = torch.ones(4_000_000), torch.ones(4_000_000)
    found = ol.profile(lambda: torch.add(x, y, out=x))
    assert found.bound == "memory"
    assert found.roofline.nbytes == 3 * x.nbytes
    assert found.heaviest[0].name == "aten::add"
    assert found.summary.startswith("Bound by memory: the operators take ")


def test_a_large_product_waits_for_arithmetic() -> None:
    x = torch.ones(512, 512)
    found = ol.profile(torch.mm, (x, x))
    assert found.bound == "arithmetic"
    assert found.roofline.flops == {"float32": 2 * 512**3}
    assert found.roofline.arithmetic_us > 5 * found.roofline.memory_us
    assert found.heaviest[0].name == "aten::mm"


def test_tiny_operators_wait_for_neither() -> None:
    def tiny(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 1
        return x

    found = ol.profile(tiny, (torch.ones(2),))
    assert found.bound == "overhead"
    assert found.heaviest[0].runs == 20
    assert found.remedies[0].name == "fused kernels"


def test_a_profile_is_data() -> None:
    found = ol.profile(nn.Linear(8, 4).eval(), (torch.ones(2, 8),), name="net.py:model")
    assert ol.Profile.from_json(found.to_json()) == found
    assert found.workload == "net.py:model"
    assert sum(part.us for part in found.parts) == pytest.approx(found.wall_us)
    assert math.isclose(sum(heavy.share for heavy in found.heaviest), 1.0, abs_tol=0.05)
    assert found.limit.gpu_us is None
    assert found.launches is None
    assert "no launches" in found.unseen[0]
    assert found.environment["torch"] == torch.__version__


@pytest.mark.parametrize("text", ["[]", '{"workload": "net"}', '{"heaviest": 3}'])
def test_other_json_is_no_profile(text: str) -> None:
    with pytest.raises(ValueError, match="not a profile"):
        ol.Profile.from_json(text)


def test_the_callers_model_is_not_touched() -> None:
    net = nn.BatchNorm1d(4)
    state = torch.random.get_rng_state()
    ol.profile(lambda x: F.dropout(net(x)).sum().backward(), (torch.ones(2, 4),))
    assert net.num_batches_tracked is not None
    assert net.num_batches_tracked.item() == 0
    assert net.weight.grad is None
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_module_in_eval_mode_runs_without_grad() -> None:
    seen: list[bool] = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return x + 1

    ol.profile(Net().eval(), (torch.ones(2),))
    assert not any(seen)
    seen.clear()
    ol.profile(Net(), (torch.ones(2),))
    assert all(seen)


def test_a_graphed_callable_is_profiled_as_it_replays() -> None:
    fast: Any = ol.graph(nn.Linear(8, 8).eval())
    found = ol.profile(fast, (torch.ones(2, 8),))
    assert found.roofline.flops == {"float32": 2 * 2 * 8 * 8}
    assert "aten::addmm" in {heavy.name for heavy in found.heaviest}


def test_what_returns_no_tensor_is_profiled() -> None:
    x = torch.ones(8)

    def add() -> None:
        x.add_(1)

    assert "aten::add_" in {heavy.name for heavy in ol.profile(add).heaviest}


def test_a_callable_without_operators_is_named() -> None:
    with pytest.raises(ol.ArgumentError, match=r"OL401.*runs no operator"):
        ol.profile(lambda: 1)


def test_another_profiler_is_left_alone() -> None:
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only_cpu) as other:
        with pytest.raises(ol.ArgumentError, match="another profiler is at work"):
            ol.profile(torch.relu, (torch.ones(2),))
        torch.ones(2).sum()
    assert "aten::sum" in {event.name for event in other.events() or []}


def test_an_interrupt_leaves_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for step in ("time_calls", "measure_peaks", "seen_in"):
        with monkeypatch.context() as patch:
            patch.setattr(measure, step, stop)
            with pytest.raises(KeyboardInterrupt):
                ol.profile(nn.Linear(2, 2).eval(), (torch.ones(2, 2),))
        assert torch.is_grad_enabled()
        assert not torch.autograd._profiler_enabled()
        assert torch._C._len_torch_dispatch_stack() == 0


def test_each_step_is_told() -> None:
    told: list[tuple[str, float]] = []
    ol.profile(
        torch.relu, (torch.ones(2),), on_progress=lambda text, part: told.append((text, part))
    )
    assert [text.split()[0] for text, _ in told] == [
        *("running", "timing", "counting", "measuring", "tracing")
    ]
    assert [part for _, part in told] == sorted(part for _, part in told)


def test_peaks_are_measured_once() -> None:
    some = measure_peaks(CPU, 1_000_000, frozenset({"float32"}))
    assert some == measure_peaks(CPU, 900_000, frozenset({"float32"}))
    assert some.working_set == 2**20
    assert some.bytes_per_us > 100  # 0.1 GB/s
    assert some.flops_per_us["float32"] > 100  # 0.1 GFLOP/s


@pytest.mark.gpu
def test_small_kernels_on_a_gpu_wait_for_launches() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).eval().cuda()
    found = ol.profile(net, (torch.randn(8, 64, device="cuda"),))
    assert found.bound == "launches"
    assert found.launches is not None
    assert found.launches >= 20
    assert found.limit.kernels is not None
    assert found.limit.kernels >= 20
    assert found.summary.startswith("Bound by launches: the GPU is busy ")
    assert found.remedies[0].at_most > 1.5
    assert not found.unseen


@pytest.mark.gpu
def test_a_replay_on_a_gpu_is_one_launch() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).eval().cuda()
    found = ol.profile(ol.graph(net), (torch.randn(8, 64, device="cuda"),))
    assert found.launches == 1
    assert "one launch" not in {remedy.name for remedy in found.remedies}


@pytest.mark.gpu
def test_large_kernels_on_a_gpu_wait_for_memory_or_arithmetic() -> None:
    x = torch.ones(2**26, device="cuda")
    assert ol.profile(lambda: torch.add(x, x, out=x)).bound == "memory"
    a = torch.ones(8192, 8192, device="cuda")
    assert ol.profile(lambda: a @ a).bound == "arithmetic"


@pytest.mark.gpu
def test_a_wait_on_a_gpu_is_seen() -> None:
    x = torch.ones(2**26, device="cuda")
    found = ol.profile(lambda: (x * 2).sum().item())
    waits = next(part for part in found.parts if part.name == "waits")
    assert waits.us > 0.2 * found.wall_us
