"""Random functions in grad mode; `python -m tests.fuzz.gradients` runs more of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz import gradients

PROGRAMS = {"cpu": 150, "tape": 60, "cuda": 60}


def test_functions_are_right_or_refused(device: torch.device) -> None:
    count = PROGRAMS[device.type]
    said: list[str] = []
    found = gradients.fuzz(range(1, 1 + count), device, said.append)
    assert not said, said[0]
    assert found["replayed"] > count / 2


@pytest.mark.parametrize("device", ["tape"], indirect=True)
@pytest.mark.thorough
def test_compiled_programs(device: torch.device) -> None:
    said: list[str] = []
    found = gradients.fuzz(range(1, 13), device, said.append, "compile")
    assert not said, said[0]
    assert found["replayed"] > 4


KNOWN: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "a detached view beside its result": ("h = x @ w", ("h", "h.detach()[1:]"), {}),
    "a view with a gradient of its own": ("h = Tripled.apply(w)", ("h",), {}),
    "a view that no_grad makes": ("with torch.no_grad(): h = w[1:]", ("x * 2", "h"), {}),
    "a chunk of it": ("with torch.no_grad(): h = w.chunk(2)[0]", ("h.view(-1)", "x"), {}),
    "a view that enable_grad makes": ("with torch.enable_grad(): h = w.t()", ("h",), {}),
    "a part of a buffer is written": ("b[0] = 1", ("x * w",), {}),
    "a buffer gets values that require grad": ("b.add_(x)", ("b",), {}),
    "a view of the second of two halves": ("h = y.t()", ("x @ w", "h"), {"given": "halves"}),
    "a view beside a detached argument": ("h = y[1:]", ("x @ w", "h"), {"given": "detached"}),
    "views of what is no result": ("h = x @ w", ("h.t()", "h[0]"), {"writes": True}),
}
"""name -> a line, the results and the rest of a program that was wrong."""


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", KNOWN)
def test_functions_that_were_wrong(device: torch.device, name: str, mode: str) -> None:
    line, results, rest = KNOWN[name]
    found = gradients.Program(1, (line,), results, (), mode, {}, **rest)
    for trained in ((), ("x",), ("w",), ("x", "y", "w")):
        became, why = gradients.verdict(replace(found, trained=trained), device)
        assert became in ("right", "refused"), f"{trained}: {why}"


def test_a_wrong_function_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees what is wrong: here, results without their gradients."""

    def detached(f: object, **options: object) -> object:
        def fast(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(t.detach() for t in f(x, y))  # type: ignore[operator]

        fast.recordings = ()  # type: ignore[attr-defined]
        return fast

    monkeypatch.setattr(gradients.ol, "graph", detached)
    said: list[str] = []
    found = gradients.fuzz(range(1, 15), torch.device("cpu"), said.append)
    assert found["wrong"] == len(said) > 0
