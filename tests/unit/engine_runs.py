"""Run the engines on `engine_targets.py`, then their code where nothing can import onelaunch.

A process of its own, since torchax names torch's one device for extensions, as the emulated device
of these tests does. It is given names of targets, and prints the rows, with the error of the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onelaunch.tools.bench import ENGINES, compare
from onelaunch.tools.bench.engines.engine import Built, Engine, Mode
from onelaunch.tools.bench.engines.flat import tensors_of
from onelaunch.tools.bench.target import load
from onelaunch.tools.bench.workload import Workload

TARGETS = Path(__file__).parent / "engine_targets.py"
OURS = (
    *("onelaunch", "onelaunch-rebind", "onelaunch-static"),
    *("onelaunch-parallel", "onelaunch-compile"),
)
EAGER = ("eager", "no_grad", "inference_mode")
EXPORTERS = ("onnxruntime", "tvm", "openxla")
RUN: dict[str, tuple[str, ...]] = {
    "layers": (*EAGER, "torchscript", "torchscript-script", "compile", *OURS, *EXPORTERS),
    # Beside torchax torch.compile works.
    "function": ("eager", "openxla", "compile", "aotinductor", *OURS, "onnxruntime", "tvm"),
    "strided": ("eager", "compile", *OURS, *EXPORTERS),
    "convolutions": EXPORTERS,
    "sequence": EXPORTERS,
}
CODED = ("layers", "function", "strided")


@dataclass(frozen=True)
class Watched:
    """An engine, with the form of what it returns."""

    engine: Engine
    forms: dict[str, str]

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def title(self) -> str:
        return self.engine.title

    @property
    def mode(self) -> Mode:
        return self.engine.mode

    def missing(self, device: torch.device) -> str | None:
        return self.engine.missing(device)

    def build(self, workload: Workload) -> Built:
        built = self.engine.build(workload)
        self.forms[self.name] = form(built.call(*workload.args, **workload.kwargs))
        return built

    def code(self, workload: Workload) -> str:
        return self.engine.code(workload)


def form(result: Any) -> str:
    """Write a result with the dtypes and sizes of its tensors in their place."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)}"
        if dataclasses.is_dataclass(value):
            parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return type(value).__name__, pytree.tree_map(leaf, parts)
        return value

    return repr(pytree.tree_map(leaf, result))


def rows(name: str, engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compare the engines on a target."""
    found: dict[str, dict[str, Any]] = {}
    fn, args, kwargs = load(f"{TARGETS}:{name}")
    forms: dict[str, str] = {}
    with torch.no_grad():
        expected = form(fn(*args, **kwargs))
    watched = [Watched(ENGINES[engine], forms) for engine in engines]
    for row in compare(fn, args, kwargs, engines=watched, seconds=0.2):
        same = forms.get(row.engine) == expected
        found[row.engine] = {
            "status": row.status,
            "reason": row.reason,
            "error": row.error,
            "form": same or f"{forms.get(row.engine)} and not {expected}",
        }
    return found


class Blocked:
    """Lets nothing import onelaunch."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "onelaunch":
            raise ImportError("the code of another engine imports onelaunch")


@contextlib.contextmanager
def without_onelaunch() -> Generator[None]:
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name[:9] == "onelaunch"}
    blocked = Blocked()
    sys.meta_path.insert(0, blocked)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        sys.meta_path.remove(blocked)  # pyright: ignore[reportArgumentType]
        sys.modules.update(held)


def run_code(name: str, engine: str) -> float | str:
    """Run the code of an engine; the largest difference from eager, or the traceback."""
    workload = Workload(*load(f"{TARGETS}:{name}"))
    positional, _ = workload.names
    given = dict(zip(positional, workload.args, strict=True)) | workload.kwargs
    scope: dict[str, Any] = {"torch": torch, "model": workload.fn, **given}
    with torch.no_grad():
        expected = workload.copy()()
    code = ENGINES[engine].code(workload)
    with contextlib.nullcontext() if engine in OURS else without_onelaunch():
        try:
            exec(code, scope)
        except Exception:  # noqa: BLE001  the test shows it
            return traceback.format_exc()
    pairs = zip(tensors_of(scope["y"]), tensors_of(expected), strict=True)
    wide = torch.complex128
    return max(float((a.to(wide) - b.to(wide)).abs().max()) for a, b in pairs)


def main() -> None:
    """Run the engines on the targets that are named."""
    absent = [n for n in ("onnxruntime", "tvm", "torchax") if importlib.util.find_spec(n) is None]
    assert not absent, absent
    found: dict[str, dict[str, Any]] = {name: {} for name in sys.argv[1:]}
    for last in (False, True):
        for name, rows_found in found.items():
            engines = RUN[name][-1:] if last else RUN[name][:-1]
            rows_found |= rows(name, engines)
            for engine in engines if name in CODED else ():
                rows_found[engine]["code"] = run_code(name, engine)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
