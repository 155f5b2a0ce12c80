"""Twenty-five Hugging Face architectures, made small: as eager, or refused by name and line."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .architectures import ARCHITECTURES, Architecture
from .drop_in import replays
from .results import report

transformers = pytest.importorskip("transformers")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an architecture cannot be captured: the code, the source line, and what it means."""

    code: str
    source: str
    reason: str


# Empty: every architecture of the table is recorded.
REFUSED: dict[str, Refusal] = {}


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


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_architecture(
    device: torch.device, architecture: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = architecture.build(device)
    fast: Any = ol.graph(model, warmup=2)
    kept: list[tuple[Any, Any]] = []
    refusal = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", ol.GraphWarning)
        for i in range(5):
            inputs = architecture.arguments(i, device)
            expected = model(**inputs)
            try:
                got = fast(**inputs)
            except ol.CaptureError as error:
                refusal = error
                break
            assert_close(got, expected)
            kept.append((got, expected))
        for got, expected in kept:
            assert_close(got, expected)
    known = REFUSED.get(architecture.name)
    if known is not None:
        assert refusal is not None, "recorded now: take it out of the table"
        assert refusal.code == known.code
        assert refusal.where is not None
        assert known.source in refusal.where
        result = f"refused, {known.code}: {known.reason}"
    else:
        assert refusal is None, str(refusal)
        assert len(fast.recordings) == 1
        assert replays(fast) == 3
        result = "as eager"
    with capsys.disabled():
        report(
            "architectures.json",
            f"{device.type} {architecture.name}",
            {
                "kind": architecture.kind,
                "result": result,
            },
        )
