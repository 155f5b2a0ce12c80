"""The workloads of `benchmarks.optimize`: those of the examples, and newer kinds of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from examples.placement import Call, ready
from examples.workloads import WORKLOADS as NAMED

SMALL = ("linear_small", "linear", "conv", "conv2d", "sine", "mlp", "cnn", "rnn")
LARGE = ("resnet50_small", "resnet50", "resnext101", "bert")


class ViT(nn.Module):
    """ViT-S/16 of torch's own layers: float32 (batch, 3, 224, 224) to logits (batch, 1000)."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            *(width, heads, 4 * width, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.layers(x))[:, 0])


def vit() -> Call:
    """A ViT on one image: timm's, or torch's layers where timm is not installed."""
    return _of_timm("vit_small_patch16_224") or ready(ViT(), torch.randn(1, 3, 224, 224))


def efficientnet() -> Call:
    """EfficientNet-B0 on one image: timm's, or torchvision's."""
    found = _of_timm("efficientnet_b0")
    if found is None:
        from torchvision.models import efficientnet_b0

        found = ready(efficientnet_b0(), torch.randn(1, 3, 224, 224))
    return found


def _of_timm(name: str) -> Call | None:
    try:
        import timm
    except ModuleNotFoundError:
        return None
    return ready(timm.create_model(name), torch.randn(1, 3, 224, 224))


class Decoder(nn.Module):
    """A Llama of 6 layers: int64 (batch, length) to the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
        self.decoder = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]


def decoder() -> Call:
    """A small decoder's step: the next token after 16."""
    return ready(Decoder(), torch.randint(32000, (1, 16)))


class Embedder(nn.Module):
    """MiniLM-L6, weights drawn: int64 tokens (batch, length) to unit vectors (batch, 384)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
        config = BertConfig(num_hidden_layers=6, attn_implementation="sdpa", **sizes)
        self.encoder = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        return nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)


def sentences(length: int) -> tuple[Tensor, Tensor]:
    """Eight sentences of up to that many tokens, with the mask of those that are there."""
    tokens = torch.randint(30522, (8, length))
    there = torch.linspace(length // 2, length, 8).long()
    return tokens, (torch.arange(length) < there[:, None]).long()


def embedder() -> Call:
    """An embedding model on a batch of sentences."""
    return ready(Embedder(), *sentences(LENGTHS[0]))


LENGTHS = (16, 9, 12, 31, 22, 14, 27, 19)


def lengths(args: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """Batches of sentences of other lengths, where the first is."""
    return [tuple(t.to(args[0].device) for t in sentences(length)) for length in LENGTHS]


KINDS: dict[str, Callable[[], Call]] = {
    "vit": vit,
    "efficientnet": efficientnet,
    "decoder": decoder,
    "embedder": embedder,
}
CYCLES: dict[str, Callable[[Sequence[Any]], list[tuple[Tensor, ...]]]] = {"embedder": lengths}
"""Workloads whose sizes change from call to call: the arguments of a round of calls."""
WORKLOADS: dict[str, Callable[[], Any]] = {**NAMED, **KINDS}
ORDER = (*SMALL, *LARGE, *KINDS)
