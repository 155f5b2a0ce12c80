"""The compiled version of a callable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch.capture import compilation
from onelaunch.capture.callee import Callee


def compiled(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> tuple[Any, list[object]]:
    """A function as a driver for CUDA runs it, and the graphs that Inductor would be given."""
    graphs: list[object] = []

    def backend(graph: Any, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "inductor", lambda mode, options: backend)

    def fn(x: Tensor) -> Tensor:
        return x * 2

    driver: Any = SimpleNamespace(compiler="inductor", capturing=lambda: False)
    return Callee(fn, True, dynamic, None).captured_form(driver), graphs


def test_every_size_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After eight Dynamo, left alone, runs the function eagerly."""
    run, graphs = compiled(monkeypatch, dynamic=False)
    for size in range(2, 14):
        assert torch.equal(run(torch.ones(size)), torch.full((size,), 2.0))
    assert len(graphs) == 12


def test_buckets_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, graphs = compiled(monkeypatch, dynamic=True)
    for size in range(1, 14):
        assert torch.equal(run(torch.ones(size)), torch.full((size,), 2.0))
    assert len(graphs) == 2  # one of them for size 1
