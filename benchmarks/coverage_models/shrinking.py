"""Configurations of transformers made small, by the names and values of their fields.

Widths are divided by one number all over a configuration, which keeps their ratios; layers are cut
to two, or to one of each kind; vocabularies, experts and images have a limit.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = re.compile(
    r"(^|_)(size|sizes|dim|dims|channels|width|rank|filters|features|inplanes|mlp|embd|inner|units"
    r"|model|ff|kv|ssm|upsample_groups|planes|channel_list|hidden|groups_dim|d_head|d_rel|dff|kq)$|^(d|n)_(model|ff"
    r"|kv|embd|inner|head_dim)$|^scale$|_ffn_dim$|_dim_\dd$|_pos_feats$|_dim_per_stage$|^mamba_d_ssm$"
)
NO_WIDTH = re.compile(
    r"vocab|image|patch|kernel|window|chunk|block|pool|stride|crop|tile|grid|codebook|frame|mel"
    r"|(?<!up)sample|buckets|spatial|temporal|batch|merge|(?<!adapter_)input_size|^in_channels|num_channels|state_size"
    r"|^num_(?!filters)|max_|audio_channels|feature_size|slice|^input_channels|context_size|hash|^out_features"
    r"|_scale$|label|expand|conv_channels|cross_attn|bbox|feat_sizes|k_sizes|masked_unit|query_size"
)
LAYERS = re.compile(
    r"(^|_)(layers?|depths?|n_layers?|num_blocks|n_block|block_repeats|numb_of_layers)(_config)?$"
    r"|^num_\w*_layers$|^num_block_repeats$|^layers_per_block$|_num_blocks$|_depth$"
)
NO_LAYERS = re.compile(
    r"feat_extract|no_rope|max_window|adapter_layers|only_layers|kv_shared|select|feature_layer"
    r"|vision_layer|target_layer|subsample|max_depth|min_depth|per_layer|conditional|extract_layers"
    r"|hidden_size|lstm|downsample|stack_layers|fov|hash|exit_layer|conv_layers|^cross_attention"
)
INDICES = re.compile(
    r"indices$|indexes$|(^|_)index_layers$|feature_layers?$|select_layers?$|hook_ids$"
    r"|extract_layers$|vision_layer$|target_layers$|block_indexes$|cross_attention_layers$"
)
VOCABULARY = re.compile(r"vocab_size$|_vocab$|vocab_size_per_layer_input$")
TOKEN = re.compile(
    r"(token_id|token_ids|token_index|bos_id|eos_id|start_id|end_id|newline_id|vocab_offset)$"
)
EXPERTS = re.compile(r"^(num_|n_)\w*experts$|^moe_num_experts$|^num_experts$|^n_routed_experts$")
IMAGE = re.compile(r"(image_size|img_size|^input_resolution|pretrain_image_size)$")
QUERIES = re.compile(r"^num_(queries|denoising)$|num_proposals$")
POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|max_seq_len|max_seq_length|max_sequence_length"
    r"|max_target_positions|context_length)$"
)
OUTPUTS = frozenset(("_out_features", "out_features", "stage_names"))
"""Of a backbone, named by its stages; `out_indices` says the same."""
HEADS = 4
"""Of attention over images, whose width is an odd multiple of the usual number of heads."""
SPLIT = frozenset(("head_dim", "d_kv", "num_key_value_heads"))
"""Where a width's division among heads is said by more than their number."""
STAGES = ("depths", "depth", "stage_channels", "stage_num_blocks", "stem_channels")
OF_BASE = frozenset(("chunk_size_feed_forward", "id2label", "label2id", "transformers_version"))


@dataclass
class Scale:
    """How small.

    Attributes:
        divisor: of all widths of 32 and more.
        image: the largest side of an image; None leaves them as they are.
        vocabulary: the largest vocabulary; ids of tokens above it are numbered anew from its end.
        layers: at most so many of a kind.
    """

    divisor: int = 16
    image: int | None = 224
    vocabulary: int = 512
    layers: int = 2
    experts: int = 16
    queries: int = 16
    positions: int | None = 512
    tokens: dict[int, int] = field(default_factory=dict)

    def token(self, value: int) -> int:
        """A token's id in the small vocabulary; the same one for the same id."""
        if value < self.vocabulary - 100:
            return value
        return self.tokens.setdefault(value, self.vocabulary - 1 - len(self.tokens))


def small(config: Any, scale: Scale, by_hand: Mapping[str, Any] | None = None) -> Any:
    """Make a configuration of the same class, made small.

    Args:
        config: one with the defaults of its class.
        scale: how small.
        by_hand: fields as they are to be; those of a configuration inside by a mapping.
    """
    values = {k: v for k, v in vars(config).items() if k not in OF_BASE}
    usual = vars(type(config)())
    by_hand = dict(by_hand or {})
    accepted = _accepted(type(config))
    overrides: dict[str, Any] = {}
    staged = any(isinstance(values.get(name), (list, tuple)) for name in STAGES)
    deep = scale.layers if staged else _layers_needed(values, scale.layers)
    kept = _kept_layers(config, values, deep)
    for name, value in values.items():
        if name in by_hand and not _is_config(value):
            continue
        if _is_config(value):
            new = small(value, scale, by_hand.pop(name, None))
        elif kept is not None and _per_layer(name, value, config):
            new = [value[i] for i in kept] if not isinstance(value, tuple) else None
            new = tuple(value[i] for i in kept) if new is None else new
        elif staged and INDICES.search(name):
            new = value
        elif name == "num_heads" and isinstance(value, int) and not SPLIT & set(values):
            new = min(value, HEADS)
        elif kept is not None and name in ("num_hidden_layers", "num_layers", "n_layer"):
            new = len(kept)
        else:
            new = _small(config, name, value, scale, deep)
        public = name.removeprefix("_")
        if name in OUTPUTS or (new is value and _alike(value, usual.get(name))):
            continue
        if name == "_out_indices":
            overrides[public] = new
        elif accepted is None or name in accepted or public in accepted:
            overrides[name if accepted is None or name in accepted else public] = new
    overrides.update(by_hand)
    overrides.update(_aligned(values, overrides, by_hand))
    overrides.update(_dividing(values | overrides, by_hand))
    return type(config)(**overrides)


WHOLE = (
    ("hidden_size", "num_attention_heads"),
    ("embed_dim", "num_heads"),
    ("embed_dim", "num_attention_heads"),
    ("num_attention_heads", "num_key_value_heads"),
)
"""Numbers of which the second divides the first."""


def _dividing(values: Mapping[str, Any], by_hand: Mapping[str, Any]) -> dict[str, int]:
    """Heads that still divide a width: fewer of them, where each has no width of its own."""
    found: dict[str, int] = {}
    for whole, part in WHOLE:
        n, heads = (found.get(k, values.get(k)) for k in (whole, part))
        apart = whole != "num_attention_heads" and isinstance(values.get("head_dim"), int)
        if type(n) is type(heads) is int and n > 0 and heads > 0 and n % heads and not apart:
            found[part] = math.gcd(n, heads)
    return {k: v for k, v in found.items() if k not in by_hand}


INNER = re.compile(r"intermediate|ffn")


def _aligned(
    values: Mapping[str, Any], new: Mapping[str, Any], by_hand: Mapping[str, Any]
) -> dict[str, int]:
    """Widths of experts in multiples of 16: kernels of grouped products need rows of 16 bytes."""
    if not any(EXPERTS.search(k) and type(v) is int and v > 1 for k, v in values.items()):
        return {}
    apart = isinstance(values.get("head_dim"), int)
    return {
        k: -(-v // 16) * 16
        for k, v in new.items()
        if k not in by_hand and type(v) is int and v >= 2 and _of_experts(k, apart)
    }


def _of_experts(name: str, apart: bool) -> bool:
    return bool(INNER.search(name)) or (apart and name == "hidden_size")


def _alike(value: Any, usual: Any) -> bool:
    """Whether a constructor gives the field this value by itself."""
    return _is_config(value) or (type(value) is type(usual) and value == usual)


def _is_config(value: object) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _accepted(cls: type) -> set[str] | None:
    """The names that its constructor takes; None for any."""
    names = set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}
    return names or None


def _layers_needed(values: Mapping[str, Any], least: int) -> int:
    """As many layers as indices into them ask for, so that they can stay apart."""
    lists = [
        v for k, v in values.items() if INDICES.search(k) and isinstance(v, (list, tuple)) and v
    ]
    return max([least, *(len(v) for v in lists if all(isinstance(i, int) for i in v))])


def _per_layer(name: str, value: Any, config: Any) -> bool:
    count = getattr(config, "num_hidden_layers", None)
    return (
        isinstance(value, (list, tuple))
        and isinstance(count, int)
        and len(value) == count > 2
        and not INDICES.search(name)
    )


def _kept_layers(config: Any, values: Mapping[str, Any], least: int) -> list[int] | None:
    """One layer of each kind, where a configuration lists the kinds; None where it does not."""
    lists = [v for k, v in values.items() if _per_layer(k, v, config)]
    if not lists:
        return None
    kinds = [str(kind) for kind in zip(*lists, strict=True)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:6]
    others = [i for i in range(len(kinds)) if i not in first]
    return sorted(first + others[: max(0, least - len(first))])


def _small(config: Any, name: str, value: Any, scale: Scale, deep: int) -> Any:
    if isinstance(value, (list, tuple)) and value:
        if INDICES.search(name) and all(isinstance(i, int) for i in value):
            return type(value)(_ranked(list(value), deep))
        if WIDTH.search(name) and any(type(v) is int and v < 32 for v in value[1:]):
            return value  # what is left of a narrow one would not fit the wider ones' ratios
        new = [_small(config, name, item, scale, deep) for item in value]
        return value if new == list(value) else type(value)(new)
    if name == "use_pretrained_backbone":
        return False
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(config, value, scale)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    return _small_number(name, value, scale, deep)


def _small_number(name: str, value: int, scale: Scale, deep: int) -> int:
    if TOKEN.search(name):
        return scale.token(value)
    if VOCABULARY.search(name):
        return min(value, scale.vocabulary)
    if INDICES.search(name):
        return min(value, deep - 1)
    if EXPERTS.search(name):
        return min(value, scale.experts)
    if name == "num_kv_shared_layers":
        return 0
    if QUERIES.search(name):
        return min(value, scale.queries)
    if IMAGE.search(name):
        return value if scale.image is None else min(value, scale.image)
    if POSITIONS.search(name):
        return value if scale.positions is None else min(value, scale.positions)
    if LAYERS.search(name) and not NO_LAYERS.search(name):
        return min(value, deep)
    if WIDTH.search(name) and not NO_WIDTH.search(name) and value >= 32:
        return max(2, value // scale.divisor)
    return value


def _ranked(indices: list[int], deep: int) -> list[int]:
    """Indices of layers moved together, in the order that they had; those from the end stay."""
    order = sorted(set(indices))
    return [i if i < 0 else min(order.index(i), deep - 1) for i in indices]


SECTION = re.compile(r"""mrope_section["'], \[(\d+), (\d+), (\d+)\]""")


def _small_rope(config: Any, value: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Cut the sections of a rotary embedding as its width is; some are in a model's code."""
    if not value:
        return value
    section = value.get("mrope_section")
    if section is None:
        module = type(config).__module__.replace("configuration_", "modeling_")
        found = SECTION.search(inspect.getsource(importlib.import_module(module)))
        section = found and [int(n) for n in found.groups()]
    if not section:
        return value
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    half = int((width or 2 * sum(section)) * value.get("partial_rotary_factor", 1)) // 2
    ends = [sum(section[:i]) * half // (sum(section) * scale.divisor) for i in range(4)]
    return {**value, "mrope_section": [b - a for a, b in itertools.pairwise(ends)]}
