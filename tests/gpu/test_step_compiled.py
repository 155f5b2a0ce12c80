"""A whole step through `torch.compile`, captured whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


class Classifier(nn.Module):
    """A small BERT in float32, whose attention is the memory-efficient one."""

    def __init__(self, p: float) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            hidden_dropout_prob=p,
            attention_probs_dropout_prob=p,
            attn_implementation="sdpa",
        )
        self.bert, self.head = BertModel(config), nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(tokens).pooler_output)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:\\nOnline softmax is disabled:UserWarning")  # of Inductor
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_bert_with_dropout_trains(p: float, fused: bool) -> None:
    """Its attention keeps seeds on the host in eager, which the watched run of it sees."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        model = Classifier(p).cuda().train()
        options: Any = {"fused": True} if fused else {}
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True, **options)

        def step(tokens: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        fast = ol.graph(step, compile=True)
        generator = torch.Generator("cuda").manual_seed(1)
        tokens = torch.randint(30000, (8, 16), generator=generator, device="cuda")
        labels = torch.arange(8, device="cuda") % 2
        found = [fast(tokens, labels).item() for _ in range(20)]
        assert sum(r.replays for r in fast.recordings) >= 14
        return found

    first, again = losses(), losses()
    assert all(map(math.isfinite, first))
    assert sum(first[-5:]) < 0.8 * sum(first[:5])
    torch.testing.assert_close(again, first, rtol=1e-3, atol=1e-4)
