"""Hugging Face architectures made small: a configuration, random weights, inputs that vary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


def ids(seed: int, batch: int = 2, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (batch, length), generator=generator)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> Inputs:
    return {"input_ids": ids(seed)}


def masked_text(seed: int) -> Inputs:
    return {**text(seed), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}


def causal(batch: int, length: int) -> Tensor:
    """A mask that says all, so that transformers does not ask the device what it says."""
    return torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1).clone()


def causal_text(seed: int) -> Inputs:
    return {**text(seed), "attention_mask": causal(2, 12)}


def text_to_causal_text(seed: int) -> Inputs:
    return {**text_to_text(seed), "decoder_attention_mask": causal(2, 5)}


def text_to_text(seed: int) -> Inputs:
    return {"input_ids": ids(seed), "decoder_input_ids": ids(seed + 500, 2, 5)}


def image(seed: int) -> Inputs:
    return {"pixel_values": values(seed, 2, 3, 32, 32)}


def sound(seed: int) -> Inputs:
    return {"input_values": values(seed, 2, 400)}


def spectrum(seed: int) -> Inputs:
    decoder = {"decoder_input_ids": ids(seed, 2, 5), "decoder_attention_mask": causal(2, 5)}
    return {"input_features": values(seed, 2, 8, 40), **decoder}


def text_and_image(seed: int) -> Inputs:
    return {**text(seed), **image(seed)}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model: `transformers` names of its configuration and class, and what makes it small."""

    name: str
    kind: str
    config: str
    model: str
    inputs: Callable[[int], Inputs]
    small: dict[str, Any]

    def build(self, device: torch.device) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.small)
        return getattr(transformers, self.model)(config).eval().to(device)

    def arguments(self, seed: int, device: torch.device) -> Inputs:
        return {k: v.to(device) for k, v in self.inputs(seed).items()}


LAYERS = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**LAYERS, "intermediate_size": 48, "max_position_embeddings": 40}
CAUSAL = {**ENCODER, "use_cache": False}
DECODER = {**CAUSAL, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "use_cache": False,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}

ARCHITECTURES = [
    Architecture("bert", "text encoder", "BertConfig", "BertModel", text, ENCODER),
    Architecture("roberta", "text encoder", "RobertaConfig", "RobertaModel", text, ENCODER),
    Architecture("electra", "text encoder", "ElectraConfig", "ElectraModel", text, ENCODER),
    Architecture(
        "deberta-v2", "text encoder", "DebertaV2Config", "DebertaV2Model", masked_text, ENCODER
    ),
    Architecture(
        "albert",
        "text encoder",
        "AlbertConfig",
        "AlbertModel",
        text,
        {**ENCODER, "embedding_size": 16},
    ),
    Architecture(
        "distilbert",
        "text encoder",
        "DistilBertConfig",
        "DistilBertModel",
        text,
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    Architecture(
        "gpt2",
        "text decoder",
        "GPT2Config",
        "GPT2LMHeadModel",
        causal_text,
        GPT2,
    ),
    Architecture("llama", "text decoder", "LlamaConfig", "LlamaForCausalLM", causal_text, DECODER),
    Architecture("qwen2", "text decoder", "Qwen2Config", "Qwen2ForCausalLM", causal_text, DECODER),
    Architecture("phi", "text decoder", "PhiConfig", "PhiForCausalLM", causal_text, CAUSAL),
    Architecture(
        "gpt-neox", "text decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", causal_text, CAUSAL
    ),
    Architecture(
        "opt",
        "text decoder",
        "OPTConfig",
        "OPTForCausalLM",
        text,
        {
            **LAYERS,
            "use_cache": False,
            "ffn_dim": 48,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 32,
        },
    ),
    Architecture(
        "t5",
        "text to text",
        "T5Config",
        "T5ForConditionalGeneration",
        text_to_text,
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "use_cache": False,
        },
    ),
    Architecture(
        "bart",
        "text to text",
        "BartConfig",
        "BartModel",
        text_to_causal_text,
        {
            "vocab_size": 99,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 40,
            "use_cache": False,
        },
    ),
    Architecture("vit", "vision", "ViTConfig", "ViTModel", image, VISION),
    Architecture("dinov2", "vision", "Dinov2Config", "Dinov2Model", image, VISION),
    Architecture(
        "convnext",
        "vision",
        "ConvNextConfig",
        "ConvNextModel",
        image,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    Architecture(
        "resnet",
        "vision",
        "ResNetConfig",
        "ResNetModel",
        image,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    Architecture(
        "swin",
        "vision",
        "SwinConfig",
        "SwinModel",
        image,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    Architecture(
        "wav2vec2",
        "audio",
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        sound,
        {
            **LAYERS,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_kernel": [8, 4],
            "conv_stride": [4, 2],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    Architecture(
        "whisper",
        "audio",
        "WhisperConfig",
        "WhisperModel",
        spectrum,
        {
            "vocab_size": 99,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
    ),
    Architecture(
        "clip",
        "multimodal",
        "CLIPConfig",
        "CLIPModel",
        text_and_image,
        {"text_config": {**ENCODER, "eos_token_id": 2}, "vision_config": VISION},
    ),
    Architecture(
        "siglip",
        "multimodal",
        "SiglipConfig",
        "SiglipModel",
        text_and_image,
        {"text_config": ENCODER, "vision_config": VISION},
    ),
    Architecture(
        "mixtral",
        "mixture of experts",
        "MixtralConfig",
        "MixtralForCausalLM",
        causal_text,
        {
            **DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # The grouped way counts with histc of integers, which the host does not have.
            "experts_implementation": "batched_mm",
        },
    ),
    Architecture(
        "mamba",
        "state-space model",
        "MambaConfig",
        "MambaForCausalLM",
        text,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "use_cache": False,
        },
    ),
]


def _with(name: str, variant: str, **changes: Any) -> Architecture:
    (found,) = (a for a in ARCHITECTURES if a.name == name)
    return dataclasses.replace(found, name=f"{name} {variant}", **changes)


# The results hold a cache: an object with layers, whose keys and values are tensors.
ARCHITECTURES += [
    _with("gpt2", "with its cache", small={**GPT2, "use_cache": True}),
    _with("llama", "with its cache", small={**DECODER, "use_cache": True}),
]


@dataclasses.dataclass(frozen=True)
class Refused:
    """A use of an architecture that cannot be captured: the code, the source line, the reason."""

    architecture: Architecture
    code: str
    source: str
    reason: str
    on: tuple[str, ...] = ("cpu", "tape", "cuda")


_MASK = (
    "whether the mask masks anything decides the path; where CUDA captures, transformers takes "
    "the general one without asking"
)
REFUSED = [
    Refused(
        _with("bert", "with a mask", inputs=masked_text),
        "OL101",
        "padding_mask.all()",
        _MASK,
        (),
    ),
    Refused(
        _with("llama", "with a mask", inputs=masked_text),
        "OL101",
        "fast_all(padding_mask)",
        _MASK,
        (),
    ),
]
