"""BERT-base, randomly initialised, on one sentence of 16 tokens. Needs `transformers`."""

from __future__ import annotations

import torch

from examples.placement import Call, ready


def model() -> Call:
    from transformers import BertConfig, BertModel

    config = BertConfig()
    return ready(BertModel(config), torch.randint(config.vocab_size, (1, 16)))
