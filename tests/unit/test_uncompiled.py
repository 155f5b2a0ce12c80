"""First calls import no compiler, and a compiler that comes later leaves our code alone."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch.uncompiled import once_imported
from onelaunch.unwinding import DispatchMode

START = """
import sys
import torch
from torch import nn
import onelaunch as ol

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
if DEVICE == "tape":
    import onelaunch.testing
    onelaunch.testing.install()
device = torch.device(DEVICE)


def linear():
    return nn.Linear(8, 8, device=device)


model = nn.Sequential(linear(), nn.ReLU(), linear())
x = torch.ones(4, 8).to(device)
there = {name for name in COMPILERS if name in sys.modules}  # by torch, for parameters of a class

def lean(fast, what):
    assert fast.recordings, what
    new = {name for name in COMPILERS if name in sys.modules} - there
    assert not new, f"{what} imported {new}"
"""
LEAN = """
with torch.no_grad():
    fast = ol.graph(model)
    for _ in range(5):
        fast(x)
    lean(fast, "inference")
    fast = ol.graph(model)
    fast.capture(x)
    lean(fast, "a capture")
    fast = ol.graph(model, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    for size in (4, 4, 4, 4, 3, 8, 8, 8, 8, 6):
        fast(torch.ones(size, 8).to(device))
    lean(fast, "buckets")

fast = ol.graph(model)
for _ in range(5):
    fast(x).sum().backward()
lean(fast, "a pair")
fast = ol.graph(model, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
for size in (4, 4, 4, 4, 3, 3):
    fast(torch.ones(size, 8).to(device)).sum().backward()
lean(fast, "buckets of pairs")
fast = ol.graph(model)
for _ in range(5):
    fast(x).sum().backward()
    hook = model[0].weight.register_hook(lambda grad: grad)
    fast(x).sum().backward()
    hook.remove()
lean(fast, "a hook")
fast = ol.make_graphed_callables(linear(), (x,))
fast(x).sum().backward()

def step(x):
    model.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
    return loss.detach()

fast = ol.graph(step)
for _ in range(5):
    fast(x)
lean(fast, "a whole step")

class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()
        self.second = linear()

    def forward(self, x):
        x = self.first(x)
        print(x.sum().item(), file=sys.stderr)
        return self.second(x)

fast = ol.graph(Refused(), on_refusal="split")
with torch.no_grad():
    for _ in range(6):
        fast(x)
assert not ({name for name in COMPILERS if name in sys.modules} - there), "pieces"
"""
STEPPED = """
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # torch's own import of Dynamo

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

step(x)
there = {name for name in COMPILERS if name in sys.modules}
fast = ol.graph(step, capturable=True)
for _ in range(5):
    fast(x)
lean(fast, "a whole step with an optimizer")
"""
LATER = """
import os
from onelaunch.uncompiled import _PACKAGES

fast = ol.graph(model)
for _ in range(5):
    fast(x).sum().backward()
lean(fast, "a pair")

def back(y):
    torch._dynamo.graph_break()  # Dynamo compiles what is called from here on
    y.sum().backward()
    return y * 2

import torch._dynamo.trace_rules as rules
from torch._dynamo.convert_frame import output_codes
run = torch.compile(back, backend="eager")
for _ in range(5):
    assert torch.allclose(run(fast(x)), model(x) * 2)
for _ in range(5):
    assert torch.allclose(torch.compile(lambda x: fast(x) * 2, backend="eager")(x), model(x) * 2)
folder = os.path.dirname(ol.__file__)
skipped = {path for path in rules.SKIP_DIRS if path.startswith(folder)}
assert len(skipped) == len(_PACKAGES), skipped
made = [code().co_filename for code in output_codes.seen if code() is not None]
assert made
for name in made:
    assert not any(name.startswith(path) for path in skipped), name
"""
INSIDE = """
def inner(x):
    return model(x) * 2

made = []
def imports(x):
    import torch._dynamo
    if not made:
        made.append(torch.compile(inner, backend="eager"))
    return made[0](x) + 1

def checkpointed(x):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(inner, x, use_reentrant=False)

fast = ol.graph(FUNCTION)
for i in range(6):
    y = fast(x + i)
    y.sum().backward()
    assert torch.allclose(y, FUNCTION(x + i)), i
assert "torch._dynamo" in sys.modules
assert len(fast.recordings) == 1
"""
CAPTURED = """
import threading

fast = ol.graph(model)
stop = threading.Event()
errors = []

def calls():
    own = ol.graph(nn.Sequential(linear(), nn.ReLU()))
    try:
        while not stop.is_set():
            own.reset()
            for i in range(5):
                own(x + i).sum().backward()
    except BaseException as error:
        errors.append(error)

thread = threading.Thread(target=calls)
thread.start()
for i in range(3):
    fast(x).sum().backward()
import torch._dynamo
run = torch.compile(lambda x: model(x).relu(), backend="eager")
for i in range(5):
    assert torch.allclose(run(x), model(x).relu())
    assert torch.allclose(fast(x), model(x))
stop.set()
thread.join()
assert not errors, errors
assert len(fast.recordings) == 1
"""
"""Dynamo comes in one thread while another warms up and captures."""


def run_fresh(*programs: str, device: str = "cpu", **names: str) -> None:
    """Run a program in a process of its own."""
    text = "".join(textwrap.dedent(program) for program in programs).replace("DEVICE", repr(device))
    for name, value in names.items():
        text = text.replace(name, value)
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fresh(*parts: str, device: str = "cpu", thorough: bool = False, **names: str) -> Any:
    marks = [pytest.mark.thorough] if thorough else []
    marks += [pytest.mark.gpu] if device == "cuda" else []
    return pytest.param(parts, device, names, marks=marks)


PROGRAMS = {
    "first calls": fresh(LEAN),
    "first calls on the tape": fresh(LEAN, device="tape"),
    "first calls on a GPU": fresh(LEAN, device="cuda"),
    "a step as in eager": fresh(STEPPED),
    "a step as in eager on a GPU": fresh(STEPPED, device="cuda"),
    "Dynamo later": fresh(LATER, thorough=True),
    "Dynamo by the callable": fresh(INSIDE, FUNCTION="imports", thorough=True),
    "Dynamo by a checkpoint": fresh(INSIDE, FUNCTION="checkpointed", thorough=True),
    "Dynamo while another thread captures": fresh(CAPTURED, thorough=True),
}


@pytest.mark.parametrize(("parts", "device", "names"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_process_imports_no_compiler_of_itself(
    parts: tuple[str, ...], device: str, names: dict[str, str]
) -> None:
    run_fresh(START, *parts, device=device, **names)


class _Doubling(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _twice(func(*args, **(kwargs or {})))


def _twice(x: Tensor) -> Tensor:
    return x + x


def test_dynamo_compiles_no_mode_of_ours_nor_what_it_calls() -> None:
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def f(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with _Doubling():
            return x * 3

    torch._dynamo.reset()
    assert torch.compile(f, backend=backend)(torch.ones(2)).tolist() == [6.0, 6.0]
    assert not graphs
    torch._dynamo.reset()


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module whose import takes a moment, and fails while a file says so."""
    name = "onelaunch_slow_module"
    text = f"""
    import pathlib, time
    time.sleep(0.2)
    if pathlib.Path({str(tmp_path / "fails")!r}).exists():
        raise ImportError("not now")
    done = True
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    assert sys.meta_path == finders


def is_done(name: str, found: list[bool]) -> Callable[[], None]:
    return lambda: found.append(vars(sys.modules[name]).get("done", False))


def test_functions_run_once_a_module_is_there(slow_module: str) -> None:
    found: list[bool] = []
    once_imported(slow_module, is_done(slow_module, found))
    once_imported(slow_module, is_done(slow_module, found))
    assert importlib.util.find_spec(slow_module) is not None  # to look is no import
    assert not found
    importlib.import_module(slow_module)
    assert found == [True, True]
    once_imported(slow_module, is_done(slow_module, found))
    assert found == [True] * 3
    importlib.reload(sys.modules[slow_module])
    assert found == [True] * 3


def test_an_import_in_another_thread_is_waited_for(slow_module: str) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=importlib.import_module, args=(slow_module,))
    thread.start()
    while slow_module not in sys.modules:
        time.sleep(0.001)
    once_imported(slow_module, is_done(slow_module, found))
    thread.join()
    assert found == [True]


def test_an_import_that_fails_is_not_the_end(slow_module: str, tmp_path: Path) -> None:
    found: list[bool] = []
    once_imported(slow_module, is_done(slow_module, found))
    (tmp_path / "fails").touch()
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(slow_module)
    assert not found
    (tmp_path / "fails").unlink()
    importlib.import_module(slow_module)
    assert found == [True]
