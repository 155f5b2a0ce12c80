"""The engines that need no GPU really run, and the code that they give does what they do."""

from __future__ import annotations

import contextlib
import re
import tomllib
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.call import tree
from onelaunch.tools.bench import ENGINES, compare
from onelaunch.tools.bench.engines import ALONE, aotinductor, byhand
from onelaunch.tools.bench.engines.pytorch import Compile
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.report.units import memory

QUICK = ("eager", "no_grad", "inference_mode", "torchscript", "torchscript-script")
OURS = (
    *("onelaunch", "onelaunch-rebind", "onelaunch-static"),
    *("onelaunch-parallel", "onelaunch-compile"),
)
CUDA_ONLY = ("by-hand", "make_graphed_callables", "reduce-overhead", "cudagraphs", "bare")
PACKAGES = {
    "onnxruntime": "onnxruntime is not installed: pip install onnxruntime onnxscript",
    "tensorrt": "torch_tensorrt is not installed: pip install torch-tensorrt",
    "openxla": "torchax is not installed: pip install torchax jax",
    "tvm": "tvm is not installed: pip install apache-tvm",
}


class Masked(nn.Module):
    """A layer with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask


def masked() -> Workload:
    return Workload(Masked().eval(), (torch.randn(4, 8),), {"mask": torch.rand(4, 1)})


def plain() -> Workload:
    return Workload(nn.Linear(8, 3).eval(), (torch.randn(4, 8),))


@pytest.mark.parametrize("workload", [plain(), masked()], ids=["positional", "keyword"])
def test_quick_engines_run(workload: Workload) -> None:
    result = compare(
        workload.fn, workload.args, workload.kwargs, engines=[*QUICK, *OURS], seconds=0.05
    )
    for row in result.rows:
        assert row.status == "ok", row
        assert row.error is not None
        assert row.error < 1e-5
        assert row.build_seconds is not None
        assert row.wall is not None
        assert row.host is not None
        assert row.gpu is None


def test_onelaunch_says_how_its_inputs_travel_and_what_its_recordings_hold() -> None:
    workload = plain()
    row = compare(workload.fn, workload.args, engines=["onelaunch"], seconds=0.01).rows[0]
    assert row.notes[0].startswith("float32[4, 8] on cpu: ")
    assert "nodes; inputs: " in row.notes[0]
    assert row.notes[0].endswith(f"; {memory(row.memory_bytes or 0)} in the pool")
    assert row.memory_bytes is not None


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_cuda_engines_say_what_they_need(name: str) -> None:
    why = ENGINES[name].missing(torch.device("cpu"))
    assert why is not None
    assert "needs" in why
    assert ENGINES[name].missing(torch.device("cuda")) is None


@pytest.mark.parametrize("name", PACKAGES)
def test_an_absent_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert ENGINES[name].missing(torch.device("cuda")) == PACKAGES[name]


def test_an_engine_that_runs_elsewhere_says_where() -> None:
    why = ENGINES["tensorrt"].missing(torch.device("cpu"))
    assert why is not None
    assert why.startswith("needs an NVIDIA GPU") or torch.cuda.is_available()
    for name in ("onnxruntime", "openxla", "tvm"):
        assert ENGINES[name].missing(torch.device("cpu")) is None
        assert "no xpu device" in (ENGINES[name].missing(torch.device("xpu")) or "")


def test_the_extras_of_the_engines_exist() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    listed = {re.split(r"[<>=;\[ ]", each)[0] for extra in extras for each in extra}
    for why in PACKAGES.values():
        installed = why.partition("pip install ")[2].split()
        assert installed
        assert listed.issuperset(installed), why


def no_arguments() -> Tensor:
    return torch.ones(3) * 2


@pytest.mark.parametrize("name", [*QUICK, *OURS])
@pytest.mark.parametrize(
    "workload",
    [plain(), masked(), Workload(no_arguments, (), {})],
    ids=["positional", "keyword", "no arguments"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_code_of_an_engine_runs(name: str, workload: Workload) -> None:
    names = dict(zip(workload.names[0], workload.args, strict=True)) | workload.kwargs
    scope: dict[str, Any] = {"torch": torch, "model": workload.fn, **names}
    exec(ENGINES[name].code(workload), scope)
    assert torch.allclose(scope["y"], workload(), atol=1e-5)


class Replay:
    """Stands in for a captured graph: runs the callable again on the same memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run

    def reset(self) -> None:
        self.replay = lambda: None


@pytest.mark.parametrize(("name", "copies"), [("by-hand", True), ("bare", False)])
def test_a_graph_by_hand_copies_in_replays_and_clones(
    name: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(fn: Any, workload: Workload) -> tuple[Replay, list[Tensor], tree.Flat]:
        args, _ = workload.copy_inputs()
        out = fn(*args)
        return Replay(lambda: out.copy_(fn(*args))), list(args), tree.flatten(out)

    monkeypatch.setattr(byhand, "capture", capture)
    workload = plain()
    with torch.no_grad():
        built = ENGINES[name].build(workload)
        other = torch.randn(4, 8)
        first = built.call(other)
        assert torch.equal(first, workload.fn(other))
        assert built.bare is not None
        built.bare()
        second = built.call(workload.args[0])
        assert torch.equal(second, workload())
        assert not torch.equal(first, second)
        assert isinstance(built.bare(), list) is copies
    built.close()


def test_the_capture_by_hand_warms_up_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            order.append("wait")

    @contextlib.contextmanager
    def entered(thing: object) -> Generator[None]:
        order.append(f"enter {type(thing).__name__}")
        yield
        order.append("leave")

    def fn(x: Tensor) -> Tensor:
        order.append("call")
        return x + 1

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Replay(lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", entered)
    x = torch.zeros(2)
    _, inputs, result = byhand.capture(fn, Workload(fn, (x,)))
    warm = ["wait", "enter Stream", *["call"] * 4, "leave", "wait"]
    assert order == [*warm, "enter Replay", "call", "leave"]
    assert inputs[0] is not x
    assert torch.equal(result.tensors[0], x + 1)


def test_make_graphed_callables_is_timed_on_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[Tensor] = []

    def graphed(fn: Any, sample_args: tuple[Tensor, ...]) -> Any:
        samples.extend(sample_args)
        return fn

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    workload = plain()
    ENGINES["make_graphed_callables"].build(workload)
    assert samples[0] is not workload.args[0]
    with pytest.raises(TypeError, match="no keyword arguments"):
        ENGINES["make_graphed_callables"].build(masked())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["by-hand", "make_graphed_callables", "reduce-overhead", "cudagraphs", *OURS]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice of compilers' about TF32 and the like
def test_the_code_of_an_engine_runs_on_a_gpu(name: str) -> None:
    x = torch.randn(4, 8, device="cuda")
    model = nn.Linear(8, 3).cuda().eval()
    scope: dict[str, Any] = {"torch": torch, "model": model, "x": x}
    with torch.no_grad():
        expected = model(x)
    exec(ENGINES[name].code(Workload(model, (x,))), scope)
    assert torch.allclose(scope["y"], expected, atol=1e-3)


def test_a_crash_of_an_incumbent_is_told() -> None:
    with pytest.raises(RuntimeError, match="`abort` of this build of PyTorch dies of SIGABRT"):
        aotinductor._survives("abort", "import os; os.abort()")
    aotinductor._survives("getpid", "import os; os.getpid()")


@pytest.mark.gpu
def test_every_engine_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda().eval()
    quick = [name for name in ENGINES if "max-autotune" not in name and name not in ALONE]
    result = compare(model, (torch.randn(4, 64, device="cuda"),), engines=quick, seconds=3.0)
    for row in result.rows:
        if row.engine == "aotinductor" and row.status == "failed":
            assert row.reason is not None
            assert "dies of SIG" in row.reason  # torch's own loader, in a process of its own
            continue
        expected = "missing" if row.engine in PACKAGES and row.status == "missing" else "ok"
        assert row.status == expected, row
        if row.status == "ok":
            assert row.gpu is not None
            assert (row.memory_bytes is None) == (row.engine in PACKAGES), row
    overwritten = {row.engine for row in result.rows if row.fresh_output is False}
    # Whether reduce-overhead captures, and so overwrites, is Inductor's decision.
    assert {"make_graphed_callables", "onelaunch-static"} <= overwritten
    assert {"eager", "by-hand", "onelaunch", "onelaunch-rebind"}.isdisjoint(overwritten)
    assert result.profile is not None
    assert result.profile.bound == "launches"
    assert result.profile.kernels


def test_a_graph_break_is_not_logged_into_the_progress_bar(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Compile("compile", "torch.compile", (("backend", "eager"),))  # Dynamo's part alone
    result = compare(lambda x: x * x.max().item(), (torch.ones(3),), engines=[engine], seconds=0.01)
    assert result.rows[0].status == "ok"
    assert "Graph break" not in capfd.readouterr().err + caplog.text


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def listed(x: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x + 1e-5 * torch.tensor(y.tolist())


def unread(x: Tensor, y: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("given", [torch.ones(8), -torch.ones(8), torch.randn(8)])
def test_a_trace_of_a_branch_is_not_the_fastest(given: Tensor) -> None:
    result = compare(branching, (given,), engines=["no_grad", "torchscript"], seconds=0.02)
    row = result["torchscript"]
    assert (row.status, row.wall) == ("failed", None)
    assert row.reason == (
        "TracerWarning: Converting a tensor to a Python boolean might cause the trace to be "
        "incorrect"
    )
    assert result.best is result["no_grad"]


@pytest.mark.thorough
def test_a_trace_with_a_constant_in_place_of_an_input_is_refused() -> None:
    """Even where its results are right within the tolerance, and nothing warned."""
    args = torch.ones(8), torch.randn(8)
    row = compare(listed, args, engines=["torchscript"], seconds=0.02).rows[0]
    assert row.reason == "ValueError: the trace holds a constant in place of the input y"
    keyword = {"y": args[1]}
    row = compare(listed, args[:1], keyword, engines=["torchscript"], seconds=0.02).rows[0]
    assert row.reason == "ValueError: the trace holds a constant in place of the input y"
    assert compare(unread, args, engines=["torchscript"], seconds=0.02).rows[0].status == "ok"
