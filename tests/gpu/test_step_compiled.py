"""A whole step through `torch.compile`, captured whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onelaunch as ol
from tests.device.steps import training_of

pytestmark = pytest.mark.gpu


# Dynamo keeps it from being shown, which does not keep it from being an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("where", ["step", "model"])
def test_a_compiled_step_trains_as_eager_does(where: str) -> None:
    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        return model, torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)

    (model, optimizer), (other, second) = job(), job()
    eager = training_of(model, optimizer).step
    if where == "model":
        other.compile()
    fast = ol.graph(training_of(other, second).step, compile=where == "step")
    x, y = torch.randn(16, 32).cuda(), torch.randn(16, 8).cuda()
    for i in range(12):
        got, expected = fast(x + i, y), eager(x + i, y)
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert sum(r.replays for r in fast.recordings) >= 7
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fast(x, y).backward()
