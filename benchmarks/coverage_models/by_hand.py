"""What generic shrinking and generic inputs do not find, by the types of models of transformers."""

from __future__ import annotations

from typing import Any

import torch

from .inputs import BATCH, Field, Recipe, constant, floats, ints, mask

_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "label_length": 4,
    "num_time_features": 1,
    "lags_sequence": [1, 2, 3, 4, 5, 6, 7],
}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GLM = {
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
}
_HUNYUAN = {"head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
FIELDS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "informer": {k: v for k, v in _SERIES.items() if k != "label_length"},
    "time_series_transformer": {k: v for k, v in _SERIES.items() if k != "label_length"},
    "align": {"vision_config": _EFFICIENT},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 411},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "efficientnet": _EFFICIENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "hunyuan_vl": {"text_config": _HUNYUAN},
    "hunyuan_vl_text": _HUNYUAN,
    "moonshine_streaming": {"num_key_value_heads": 8},
    "voxtral": {"audio_token_id": 411},
    "xmod": {"default_language": "en_XX"},
    "glm4v_moe": {"text_config": _GLM},
    "glm4v_moe_text": _GLM,
    "gemma3n_audio": {"input_feat_size": 128},
    "instructblip": {"image_token_index": 411},
    "instructblipvideo": {"video_token_index": 411},
    "perceiver": {"d_latents": 64, "d_model": 64, "num_self_attends_per_block": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "janus": {"vq_config": {"base_channels": 32}},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 8},
}
"""Fields of configurations that have no default, or none that a model can be made of."""


def _ones(*shape: int) -> Field:
    return lambda _: torch.ones(shape)


def _whole(length: int) -> Field:
    return lambda _: torch.ones(BATCH, length, dtype=torch.int64)


_PAST = 15  # the context and the longest lag
_SERIES_INPUTS: Recipe = {
    "past_values": floats(BATCH, _PAST),
    "past_time_features": floats(BATCH, _PAST, 1),
    "past_observed_mask": _ones(BATCH, _PAST),
    "future_values": floats(BATCH, 4),
    "future_time_features": floats(BATCH, 4, 1),
}
_CODEBOOKS: Recipe = {"input_ids": ints(400, BATCH * 4, 8, low=3)}
_PATCHES: Recipe = {
    "pixel_values": floats(BATCH, 16, 768),
    "pixel_attention_mask": _whole(16),
    "spatial_shapes": constant([[4, 4]] * BATCH),
}
_SPEECH: Recipe = {"input_features": floats(BATCH, 64, 320)}
INPUTS: dict[str, Recipe] = {
    "autoformer": _SERIES_INPUTS,
    "informer": _SERIES_INPUTS,
    "time_series_transformer": _SERIES_INPUTS,
    "decision_transformer": {
        "states": floats(BATCH, 8, 17),
        "actions": floats(BATCH, 8, 4),
        "rewards": floats(BATCH, 8, 1),
        "returns_to_go": floats(BATCH, 8, 1),
        "timesteps": ints(8, BATCH, 8),
        "attention_mask": mask(BATCH, 8),
    },
    "gemma3n_audio": {
        "audio_mel": floats(BATCH, 64, 128),
        "audio_mel_mask": lambda _: torch.zeros(BATCH, 64, dtype=torch.bool),
    },
    "fun_asr_nano_encoder": {
        "input_features": floats(BATCH, 64, 560),
        "input_features_mask": _whole(64),
    },
    "qwen3_asr_encoder": {
        "input_features": floats(BATCH, 128, 200),
        "input_features_mask": _whole(200),
    },
    "audioflamingo3_encoder": {
        "input_features": floats(BATCH, 128, 3000),
        "input_features_mask": _whole(3000),
    },
    "idefics": {
        "input_ids": ints(400, BATCH, 16, low=3),
        "attention_mask": mask(BATCH, 16),
        "pixel_values": floats(BATCH, 1, 3, 96, 96),
        "image_attention_mask": lambda _: torch.ones(BATCH, 16, 1, dtype=torch.int64),
    },
    "kosmos-2": {
        "input_ids": ints(400, BATCH, 80, low=3),
        "pixel_values": floats(BATCH, 3, 96, 96),
        "image_embeds_position_mask": lambda _: (torch.arange(80) < 64).repeat(BATCH, 1),
    },
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": floats(BATCH, 1, 6400)},
    "timesfm2_5": {"past_values": floats(BATCH, 512)},
    "timesfm": {
        "past_values": floats(BATCH, 512),
        "past_values_padding": lambda _: torch.zeros(BATCH, 512),
        "freq": lambda _: torch.zeros(BATCH, 1, dtype=torch.int64),
    },
    "clap": {
        "input_ids": ints(400, BATCH, 16, low=3),
        "attention_mask": mask(BATCH, 16),
        "input_features": floats(BATCH, 1, 1001, 64),
    },
    "clvp": {
        "input_ids": ints(200, BATCH, 16, low=3),
        "attention_mask": mask(BATCH, 16),
        "input_features": floats(BATCH, 80, 64),
    },
    "dia": {
        "input_ids": ints(200, BATCH, 16, low=3),
        "decoder_input_ids": ints(400, BATCH, 6, 9, low=3),
    },
    "gemma4_vision": {
        "pixel_values": lambda g: torch.rand(BATCH, 36, 768, generator=g),
        "pixel_position_ids": lambda _: torch.cartesian_prod(*[torch.arange(6)] * 2).repeat(
            BATCH, 1, 1
        ),
    },
    "granite_speech5_ctc": _SPEECH,
    "granite_speech5_encoder": _SPEECH,
    "perceiver": {"inputs": floats(BATCH, 16, 64)},
    "siglip2": {"input_ids": ints(400, BATCH, 16), **_PATCHES},
    "siglip2_vision_model": _PATCHES,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
}
"""Inputs of meanings that no name tells."""
