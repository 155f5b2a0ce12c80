"""BERT, randomly initialised: BERT-base on one sentence, and MiniLM's shape on padded batches.

Needs `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.placement import Call, ready


def model() -> Call:
    """BERT-base on one sentence of 16 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig()
    return ready(BertModel(config), torch.randint(config.vocab_size, (1, 16)))


class Encoder(nn.Module):
    """BERT on sentences of different lengths: the last hidden state."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(**config), add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens and a mask, both int64 of shape (batch, length), 1 where there is a token, to
        (batch, length, width)."""
        # With a mask of four dimensions transformers does not ask the device whether it is all 1.
        keep = mask[:, None, None, :] != 0
        return self.bert(input_ids=tokens, attention_mask=keep).last_hidden_state


def minilm(layers: int = 6, width: int = 384) -> Encoder:
    """An encoder of the shape of MiniLM-L6: 12 heads, 4 times the width inside."""
    return Encoder(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=12,
        intermediate_size=4 * width,
    )


def sentences(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens and mask for `Encoder`, on the host: one row of full length, others shorter."""
    tokens = torch.randint(30522, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    lengths[0] = length
    return tokens, (torch.arange(length) < lengths).long()
