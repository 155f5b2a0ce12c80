"""Waits of the host for the device: named by line, with a GPU and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.cuda import synchronize

import onelaunch as ol
from onelaunch import testing
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.cli import run
from onelaunch.tools.doctor.run import watch
from onelaunch.tools.doctor.spot import Spot
from onelaunch.tools.doctor.waits import Waits

Program = Callable[[Tensor], Any]
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu", "tape"]


@pytest.fixture(params=DEVICES)
def x(request: pytest.FixtureRequest) -> Tensor:
    testing.install()
    return torch.ones(4, device=request.param)


def device(x: Tensor) -> Tensor:
    y = x * 2
    torch.cuda.synchronize()  # waits
    return y


def by_name(x: Tensor) -> Tensor:
    synchronize()  # waits
    return x * 2


def accelerator(x: Tensor) -> Tensor:
    torch.accelerator.synchronize()  # waits
    return x * 2


def stream(x: Tensor) -> Tensor:
    y = x * 2
    torch.cuda.current_stream().synchronize()  # waits
    return y


def idle(x: Tensor) -> Tensor:
    y = x * 2
    return y if torch.cuda.current_stream().query() else y + 1  # waits


def event(x: Tensor) -> Tensor:
    done = torch.cuda.Event()
    y = x * 2
    done.record()
    done.synchronize()  # waits
    return y


def asked(x: Tensor) -> Tensor:
    done = torch.cuda.Event(enable_timing=True)
    y = x * 2
    done.record()
    return y if done.query() else y + 1  # waits


def twice(x: Tensor) -> Tensor:
    torch.cuda.synchronize()  # waits
    y = x * 2
    torch.cuda.synchronize()  # waits
    return y


@pytest.mark.parametrize(
    "fn",
    [device, by_name, accelerator, stream, idle, event, asked, twice],
    ids=lambda fn: fn.__name__,
)
def test_a_wait_is_named_by_its_line(fn: Program, x: Tensor) -> None:
    text = Path(__file__).read_text().splitlines()
    first = fn.__code__.co_firstlineno
    lines = {first + i for i in range(8) if "# waits" in text[first + i - 1]}
    ends = next(i for i in range(first, len(text)) if not text[i].strip())
    lines = {line for line in lines if line <= ends}
    found = [f for f in ol.diagnose(fn, (x,)).findings if f.severity == "blocks-capture"]
    assert {f.code for f in found} == {"OL109"}
    assert {f.line for f in found} == lines
    assert "capture" in found[0].found_by
    if x.device.type != "cuda":
        assert all("run" in f.found_by for f in found)


def side(x: Tensor) -> Tensor:
    """Fork to a stream and join it: a graph has both."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x * 2
    done = torch.cuda.Event()
    done.record(other)
    torch.cuda.current_stream().wait_event(done)
    return y + 1


def test_streams_and_events_that_order_work_are_no_fault(x: Tensor) -> None:
    diagnosis = ol.diagnose(side, (x,))
    assert diagnosis.replayed
    assert not [f for f in diagnosis.findings if f.severity == "blocks-capture"]


def test_torch_is_as_before() -> None:
    functions = (torch.cuda.synchronize, torch.cuda.current_stream, torch.accelerator.synchronize)
    codes = [function.__code__ for function in functions]
    makers = [vars(kind)["__new__"] for kind in (torch.cuda.Event, torch.cuda.Stream)]

    def fails(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        raise LookupError

    with pytest.raises(LookupError):
        ol.diagnose(fails, (torch.ones(3),))
    assert [function.__code__ for function in functions] == codes
    kinds = (torch.cuda.Event, torch.cuda.Stream)
    assert all(vars(kind)["__new__"] is make for kind, make in zip(kinds, makers, strict=True))


def test_the_command_runs_a_model_that_makes_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "streams.py"
    file.write_text("""
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()

    def forward(self, x):
        y = x * 2
        self.side.synchronize()
        return y

def model():
    return Model().eval(), (torch.ones(3),)
""")
    assert run(["doctor", f"{file}:model", "--select", "blocks-capture"]) == 1
    out = capsys.readouterr().out
    assert "OL109 device-refusal" in out
    assert f"{file}:11:9" in out.replace("\n", "")


# `torch.cuda.set_sync_debug_mode`

SYNCHRONIZES = "called a synchronizing CUDA operation"


def warn_of(*texts: str) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=1)


def test_torchs_warnings_of_waits_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch and what becomes of its answer, on any machine."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    spots = iter((Spot("model.py", 3, 1, "y = wait(x)"), Spot("model.py", 5, 1, "z = wait(y)")))
    waits, on_gpu = Waits(), SimpleNamespace(device=torch.device("cuda"))
    begun = waits.begin(cast(Workload, on_gpu), lambda: next(spots))
    with pytest.warns(UserWarning, match="something else") as shown, begun:
        warn_of(SYNCHRONIZES, SYNCHRONIZES, "something else")
    assert len(shown) == 1
    assert modes == ["warn", 0]
    assert [(f.code, f.line, f.found_by) for f in waits.findings()] == [
        ("OL101", 3, ("run",)),
        ("OL101", 5, ("run",)),
    ]


def test_on_a_cpu_torch_is_not_asked() -> None:
    waits = Waits()
    watch(Workload(lambda x: x * x.sum().item(), (torch.ones(3),)), [waits], backward=False)
    assert waits.findings() == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fn",
    [lambda x: x * x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero()],
    ids=["read", "copy", "shape"],
)
def test_a_gpu_warns_of_waits(fn: Program) -> None:
    x = torch.ones(4, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    waits = Waits()
    watch(Workload(fn, (x,)), [waits], backward=False)
    assert torch.cuda.get_sync_debug_mode() == before
    assert {f.line for f in waits.findings()} == {fn.__code__.co_firstlineno}
    assert {f.found_by for f in waits.findings()} == {("run",)}
    found = [f for f in ol.diagnose(fn, (x,)).findings if f.severity == "blocks-capture"]
    assert len(found) == 1  # torch's warning adds nothing to what is known of the line
    assert found[0].line == fn.__code__.co_firstlineno
