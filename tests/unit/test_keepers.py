"""Who keeps a graph: the tensor is found and named."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onelaunch.autograd.diagnose import explained
from onelaunch.errors import CaptureError

REFUSED = CaptureError(
    "OL109", "CUDA error: operation would make the legacy stream depend on a capturing one"
)


HISTORY: list[Tensor] = []


def losses_of(model: nn.Module) -> list[Tensor]:
    losses: list[Tensor] = []
    for i in range(3):
        loss = model(torch.ones(2, 3) * i).sum()
        loss.backward()
        losses.append(loss)
    return losses


def test_a_list_of_losses_is_named() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    HISTORY.extend(losses_of(model))
    error = explained(REFUSED, model.parameters())
    assert error.code == "OL109"
    assert "`HISTORY[" in error.what
    assert "float32[]" in error.what
    assert "loss.detach()" in error.fix
    assert explained(REFUSED, other.parameters()) is REFUSED
    HISTORY.clear()
    assert explained(REFUSED, model.parameters()) is REFUSED


def test_a_list_that_is_a_local_variable() -> None:
    model = nn.Linear(3, 2)
    history = losses_of(model)
    assert "a tensor, float32[]" in explained(REFUSED, model.parameters()).what
    del history
    assert explained(REFUSED, model.parameters()) is REFUSED


def test_a_tensor_on_an_object_is_named() -> None:
    model = nn.Linear(3, 2)
    model.last = losses_of(model)[-1]  # pyright: ignore[reportAttributeAccessIssue]
    assert "`last`" in explained(REFUSED, model.parameters()).what


def test_other_refusals_stay_as_they_are() -> None:
    model = nn.Linear(3, 2)
    history = losses_of(model)
    for error in (CaptureError("OL101", "legacy stream"), CaptureError("OL109", "no")):
        assert explained(error, model.parameters()) is error
    del history
