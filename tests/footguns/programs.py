"""The examples of rules as programs, and what a graph captured by hand makes of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.doctor.emulated import streams
from onelaunch.tools.doctor.replay import BareRecording, Replay, replay
from onelaunch.tools.rules.rule import Rule

BEYOND = {
    "OL110": "an option: a capture ahead of the first call",
    "OL111": "memory that runs out",
    "OL113": "a backward outside, of a result that is written",
    "OL119": "a mode of the process, which the example would leave changed",
    "OL121": "a scaler, which works on CUDA alone",
    "OL123": "an option that changes in the third call, and in the fourth",
    "OL130": "a module under DDP or FSDP: needs a process group",
    "OL140": "an option: sizes that are padded",
    "OL302": "an argument that cannot be compared, from call to call",
    "OL306": "a backward outside",
    "OL307": "what happens over many calls",
}
"""Rules that no small program shows: code -> what it takes."""
LINES = {
    "OL108": "def model(x):",
    "OL114": "",
    "OL115": "return x.grad",
    "OL118": "self.step += 1",
    "OL120": "optimizer.step()",
}
"""code -> the text of the fault's line, where the better program has it too, or there is none."""


def load(text: str, file: Path, device: str) -> ModuleType:
    """Run the text of an example as a module of its own; it makes `model` and `args`.

    Tensors are made on a device; the emulated one stands for CUDA.
    """
    file.write_text(text.replace('"cuda"', f'"{device}"'))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.device(device):
        spec.loader.exec_module(module)
    return module


def workload_of(module: ModuleType) -> Workload:
    return Workload(module.model, module.args)


def fault_lines(rule: Rule) -> set[str]:
    """Return the lines that a rule's fault may be at: those of the example that are not in the
    program without the fault."""
    if rule.code in LINES:
        return {LINES[rule.code]}
    good = {line.strip() for line in rule.instead.splitlines()}
    return {line.strip() for line in rule.example.splitlines()} - good


def bare(
    text: str, rule: Rule, file: Path, device: str, record: Callable[[Workload], BareRecording]
) -> Replay:
    """Record a program bare, and compare replays with eager calls."""
    workload = workload_of(load(text, file, device))
    with streams():
        return replay(workload, other_size=rule.code == "OL507", record=record)


def by_hand(workload: Workload) -> BareRecording:
    """Record a workload by `torch.cuda.graph`, as its documentation does."""
    args, kwargs = workload.copy_inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        workload.fn(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result: Any = workload.fn(*args, **kwargs)
    return BareRecording((args, kwargs), result, graph.replay, graph.reset)
