"""Hugging Face architectures of six kinds, made small: as eager, or refused by name and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .architectures import ARCHITECTURES, REFUSED, Architecture, Refused
from .drop_in import replays
from .results import report

transformers = pytest.importorskip("transformers")


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a result, in order; of a cache, its keys and values."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for child in tree.values() for t in tensors(child)]
    if isinstance(tree, (list, tuple)):
        return [t for child in tree for t in tensors(child)]
    if hasattr(tree, "layers"):
        return [t for layer in tree.layers for t in tensors(vars(layer))]
    return []


def assert_close(got: Any, expected: Any) -> None:
    """Within the tolerance of the dtype, and the same structure."""
    assert type(got) is type(expected)
    assert list(got.keys()) == list(expected.keys())
    a, b = tensors(dict(got)), tensors(dict(expected))
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.cpu(), y.cpu())


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def run(device: torch.device, architecture: Architecture) -> Any:
    """Five calls beside eager, every result compared again at the end."""
    model: Any = architecture.build(device)
    fast: Any = ol.graph(model, warmup=2)
    kept: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for i in range(5):
            inputs = architecture.arguments(i, device)
            kept.append((fast(**inputs), model(**inputs)))
            assert_close(*kept[-1])
    for got, expected in kept:
        assert_close(got, expected)
    return fast


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_architecture(
    device: torch.device, architecture: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = run(device, architecture)
    assert len(fast.recordings) == 1
    assert replays(fast) == 3
    figures = {"kind": architecture.kind, "result": "as eager", "nodes": fast.recordings[0].nodes}
    with capsys.disabled():
        report("architectures.json", f"{device.type} {architecture.name}", figures)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: r.architecture.name)
def test_refused(
    device: torch.device, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = refused.architecture
    figures = {"kind": architecture.kind, "result": "as eager"}
    if device.type in refused.on:
        with pytest.raises(ol.CaptureError) as caught:
            run(device, architecture)
        assert caught.value.code == refused.code
        assert refused.source in (caught.value.where or "")
        figures["result"] = f"refused, {refused.code}: {refused.reason}"
        # Of an installed package, the path within it: results name no machine's folders.
        figures["line"] = (caught.value.where or "the result").rpartition("site-packages/")[2]
    else:
        assert replays(run(device, architecture)) == 3
    with capsys.disabled():
        report("architectures.json", f"{device.type} {architecture.name}", figures)
