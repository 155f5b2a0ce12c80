"""Inputs for a forward, by the names of its parameters and the configuration.

A *recipe* names a shape and a kind for each input; it makes inputs of the same shapes for any seed.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TARGET = 2, 16, 6
Field = Callable[[torch.Generator], Any]
Recipe = dict[str, Field]


def made(recipe: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Make the inputs of a recipe; what is no function stands for itself."""
    generator = torch.Generator().manual_seed(seed)
    return {k: field(generator) if callable(field) else field for k, field in recipe.items()}


def floats(*shape: int) -> Field:
    """Normal values."""
    return lambda g: torch.randn(shape, generator=g)


def ints(high: int, *shape: int, low: int = 0) -> Field:
    """Integers from `low` up to `high`, which is left out."""
    return lambda g: torch.randint(low, max(high, low + 1), shape, generator=g)


def constant(value: Any) -> Field:
    """The same tensor for each seed."""
    return lambda _: torch.tensor(value)


def mask(batch: int, length: int, *, dtype: torch.dtype = torch.int64) -> Field:
    """A mask whose last row is padded, by a number that depends on the seed."""

    def make(g: torch.Generator) -> Tensor:
        found = torch.ones(batch, length, dtype=dtype)
        padding = int(torch.randint(1, max(2, length // 2), (1,), generator=g))
        found[-1, length - padding :] = 0
        return found

    return make


def boxes(batch: int, length: int) -> Field:
    """Boxes of a page, left, top, right and bottom."""

    def make(g: torch.Generator) -> Tensor:
        corner = torch.randint(0, 400, (batch, length, 2), generator=g)
        return torch.cat([corner, corner + torch.randint(1, 400, corner.shape, generator=g)], -1)

    return make


def tokens(vocabulary: int, special: Mapping[int, int], length: int = LENGTH) -> Field:
    """Ids of tokens, each row beginning with so many of each special one."""
    taken = set(special)
    allowed = [i for i in range(3, max(4, vocabulary - 40)) if i not in taken]

    def make(g: torch.Generator) -> Tensor:
        front = [token for token, count in special.items() for _ in range(count)]
        rest = torch.tensor(allowed)[torch.randint(len(allowed), (BATCH, length), generator=g)]
        return torch.cat([torch.tensor(front, dtype=torch.int64).expand(BATCH, -1), rest], 1)

    return make


def seek(config: Any, *names: str, parts: tuple[str, ...] = ()) -> Any:
    """The first of these fields that a configuration has, or one of its parts; None without."""
    inside = [v for k, v in vars(config).items() if hasattr(v, "model_type") and _named(k, parts)]
    others = [v for v in vars(config).values() if hasattr(v, "model_type") and v not in inside]
    for place in (*inside, config, *others) if parts else (config, *others):
        for name in names:
            value = getattr(place, name, None)
            if value is not None:
                return value
    for place in (*inside, *others):
        value = seek(place, *names, parts=parts)
        if value is not None:
            return value
    return None


def _named(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


VISION = ("vision", "visual", "image", "encoder", "backbone", "vit")
SOUND = ("audio", "speech", "acoustic", "encoder")
TEXT = ("text", "decoder", "llm", "language")


def vocabulary(config: Any) -> int:
    """How many tokens there are."""
    found = seek(config, "vocab_size", "src_vocab_size", parts=TEXT)
    return found if isinstance(found, int) else 99


def _side(value: Any) -> tuple[int, int]:
    if isinstance(value, (list, tuple)):
        return int(value[0]), int(value[-1])
    if isinstance(value, dict):
        sides = [v for v in value.values() if isinstance(v, int)]
        return sides[0], sides[-1]
    return int(value), int(value)


def image_shapes(config: Any) -> list[tuple[int, ...]]:
    """Shapes of `pixel_values` to try."""
    channels = seek(config, "num_channels", "in_channels", "in_chans", parts=VISION)
    channels = channels if isinstance(channels, int) else 3
    size = seek(config, "image_size", "img_size", "pretrain_image_size", parts=VISION)
    sides = [_side(size)] if size else []
    sides += [side for side in ((224, 224), (64, 64)) if side not in sides]
    frames = seek(config, "num_frames", "frames", parts=VISION)
    frames = frames if isinstance(frames, int) else 4
    shapes: list[tuple[int, ...]] = [(BATCH, channels, *side) for side in sides[:2]]
    shapes += [(BATCH, frames, channels, *sides[0]), (BATCH, 1, channels, *sides[0])]
    return [*shapes, (BATCH, channels, frames, *sides[0]), (BATCH, 2, channels, *sides[0])]


def patch_fields(config: Any) -> dict[str, Any] | None:
    """`pixel_values` as rows of patches with their grid, as Qwen2-VL and its kin take them."""
    patch = seek(config, "patch_size", parts=VISION)
    if not isinstance(patch, int):
        return None
    time = seek(config, "temporal_patch_size", parts=VISION)
    time = time if isinstance(time, int) else 1
    channels = seek(config, "in_channels", "in_chans", "num_channels", parts=VISION)
    channels = channels if isinstance(channels, int) else 3
    side, grid = 4, [[1, 4, 4]] * BATCH
    width = channels * time * patch * patch
    return {"pixel_values": floats(BATCH * side * side, width), "image_grid_thw": constant(grid)}


def _rows(config: Any) -> list[Any]:
    """Patches of images of a grid each: in rows, or as small images."""
    patch = seek(config, "patch_size", parts=VISION)
    fields = patch_fields(config)
    if fields is None:
        return []
    return [fields["pixel_values"], floats(BATCH * 16, 3, patch, patch)]


def _images(config: Any, names: Container[str]) -> list[Any]:
    if "grid_thw" in names or "grid_thws" in names:
        return _rows(config)
    if "target_sizes" in names and (patch := seek(config, "patch_size", parts=VISION)):
        return [floats(1, 3, patch, BATCH * 16 * patch)]
    return [floats(*shape) for shape in image_shapes(config)]


def _hidden(config: Any, names: Container[str], length: int) -> list[Any]:
    patches = patch_fields(config)
    if "grid_thw" in names and patches is not None:
        return [patches["pixel_values"]]
    hidden = seek(config, "hidden_size", "d_model", "n_embd", parts=TEXT)
    return [floats(BATCH, length, hidden if isinstance(hidden, int) else 32)]


def sound_shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    """Shapes of sounds to try: waves, then features in either order."""
    bins = seek(
        config,
        *("num_mel_bins", "feature_size", "input_feat_size", "n_mels", "num_bins", "input_dim"),
        *("input_feat_per_channel", "feature_projection_input_dim", "mel_bins", "input_size"),
        parts=SOUND,
    )
    bins = bins if isinstance(bins, int) else 80
    places = seek(config, "max_source_positions", parts=SOUND)
    times = [2 * places] if isinstance(places, int) and places <= 3000 else []
    times += [t for t in (64, 128, 200, 1024) if t not in times]
    waves: list[tuple[int, ...]] = [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 16000), (BATCH, 1920)]
    spectra: list[tuple[int, ...]] = []
    for time in times:
        spectra += [(BATCH, bins, time), (BATCH, time, bins)]
    if name == "input_values":
        longest = seek(config, "max_length", parts=SOUND)
        if isinstance(longest, int):
            spectra.insert(0, (BATCH, longest, bins))
        return [*waves[:2], *spectra[:4], *waves[2:]]
    return [*spectra, *waves[:2]]


NO_INPUT = frozenset(("self", "args", "kwargs", "deprecated_arguments"))
PLURAL = {"input_features": "feature_attention_mask"}


def parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of its forward."""
    found = inspect.signature(model.forward).parameters
    return {k: v for k, v in found.items() if k not in NO_INPUT and v.kind not in (2, 4)}


def _required(names: Mapping[str, inspect.Parameter], main: str) -> list[str]:
    wanted = [k for k, v in names.items() if v.default is inspect.Parameter.empty]
    return wanted if not main or main in wanted else [main, *wanted]


def choices(name: str, config: Any, special: Mapping[int, int], names: Container[str]) -> list[Any]:
    """The fields to try for an input; none where its name says nothing."""
    words = vocabulary(config)
    length = LENGTH + sum(special.values())
    hidden = seek(config, "encoder_hidden_size", "hidden_size", "d_model", parts=TEXT)
    patches = patch_fields(config)
    series = [seek(config, name) or 1 for name in ("context_length", "num_input_channels")]
    own = seek(config, "hidden_size", "d_model", parts=TEXT) or 32
    simple: dict[str, list[Any]] = {
        "input_ids": [tokens(words, special)],
        "decoder_input_ids": [ints(words - 40, BATCH, TARGET, low=3)],
        "attention_mask": [mask(BATCH, length)],
        "decoder_attention_mask": [mask(BATCH, TARGET)],
        "token_type_ids": [lambda _: torch.zeros(BATCH, length, dtype=torch.int64)],
        "mm_token_type_ids": [tokens_kinds(special)],
        "bbox": [boxes(BATCH, length)],
        "inputs_embeds": [floats(BATCH, length, hidden or 32)],
        "hidden_states": _hidden(config, names, length),
        "grid_thw": [patches["image_grid_thw"]] if patches else [],
        "past_values": [floats(BATCH, *series)],
        "encoder_hidden_states": [floats(BATCH, 8, hidden or 32)],
        "pixel_values": _images(config, names),
        "pixel_values_videos": [floats(*shape) for shape in image_shapes(config)[2:]],
        "target_sizes": [constant([[4, 4]] * BATCH)],
        "merge_sizes": [constant([1] * BATCH)],
        "qformer_input_ids": [ints(99, BATCH, TARGET, low=3)],
        "query_embeds": [floats(BATCH, 8, own)],
        "noise_embeds": [floats(BATCH, length, own)],
        "context_hidden_states": [floats(BATCH, length, n * own) for n in (1, 5)],
        "latents": [floats(BATCH, own, 8), floats(BATCH, 8, own)],
        "pixel_mask": [lambda _: torch.ones(BATCH, *image_shapes(config)[0][-2:]).long()],
        "input_features": [floats(*s) for s in sound_shapes(config, "input_features")],
        "input_values": [floats(*s) for s in sound_shapes(config, "input_values")],
        "audio_values": [floats(*s) for s in sound_shapes(config, "input_values")],
        "image_sizes": [constant([list(image_shapes(config)[0][-2:])] * BATCH)],
        "position_ids": [lambda _: torch.arange(length).expand(BATCH, -1).clone()],
        "visual_feats": [floats(BATCH, 8, seek(config, "visual_feat_dim") or 1)],
        "visual_pos": [floats(BATCH, 8, 4)],
        "flattened_patches": [_flattened(seek(config, "patch_embed_hidden_size") or 1)],
        "input_points": [lambda g: 60 * torch.rand(BATCH, 1, 1, 2, generator=g)],
    }
    return simple.get(name, [])


def _flattened(width: int) -> Field:
    """Patches of an image with their row and column before them, as Pix2Struct takes them."""

    def make(g: torch.Generator) -> Tensor:
        places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).expand(BATCH, -1, -1)
        return torch.cat([places, torch.randn(BATCH, 16, width, generator=g)], -1)

    return make


def tokens_kinds(special: Mapping[int, int]) -> Field:
    """1 where a token stands for a piece of an image, and 0 elsewhere."""
    count = sum(special.values())
    row = [1] * count + [0] * LENGTH
    return constant([row] * BATCH)


_FEATURES = ("pixel_values", "input_features", "visual_feats", "visual_pos")
OPTIONAL = (
    ("input_ids", "attention_mask", *_FEATURES, "bbox", "decoder_input_ids"),
    ("input_ids", *_FEATURES, "bbox", "decoder_input_ids"),
    ("input_ids", "attention_mask", "pixel_values", "decoder_input_ids", "bbox"),
    ("input_ids", "attention_mask", "decoder_input_ids", "bbox"),
    ("input_ids", "decoder_input_ids"),
)
MOST_TRIES = 12


def recipes(
    model: nn.Module, config: Any, special: Mapping[int, int], rich: bool
) -> Iterator[Recipe]:
    """The recipes to try for a model, those with more inputs first; with `rich` only those."""
    names = parameters(model)
    main = getattr(model, "main_input_name", "input_ids")
    required = _required(names, main if main in names else "")
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    wishes: list[tuple[str, ...]] = []
    for optional in OPTIONAL[:1] if rich else OPTIONAL[1:]:
        wanted = list(dict.fromkeys([*required, *(n for n in optional if n in names)]))
        if not decodes and "decoder_input_ids" not in required:
            wanted = [n for n in wanted if n != "decoder_input_ids"]
        if "input_ids" not in wanted:
            wanted = [n for n in wanted if n != "attention_mask" or n in required]
        if "query_embeds" in wanted and "encoder_hidden_states" in names:
            wanted.append("encoder_hidden_states")
        if "target_sizes" in names and "pixel_values" in wanted:
            wanted.append("target_sizes")
        if special and "mm_token_type_ids" in names:
            wanted.append("mm_token_type_ids")
        wishes.append(tuple(wanted))
    for wanted in dict.fromkeys(wishes):
        yield from _combined(list(wanted), names, config, special)


def _combined(
    wanted: list[str], names: Mapping[str, Any], config: Any, special: Mapping[int, int]
) -> Iterator[Recipe]:
    patches = patch_fields(config)
    if "image_grid_thw" in names and "pixel_values" in wanted and patches is not None:
        rest = [n for n in wanted if n not in patches]
        yield from _product(rest, config, special, names, patches)
        return
    yield from _product(wanted, config, special, names, {})
    if "image_sizes" in names and "pixel_values" in wanted:
        yield from _product([*wanted, "image_sizes"], config, special, names, {})


def _product(
    wanted: list[str],
    config: Any,
    special: Mapping[int, int],
    names: Container[str],
    given: Mapping[str, Any],
) -> Iterator[Recipe]:
    fields = [choices(name, config, special, names) for name in wanted]
    if not all(fields):
        return
    for chosen in itertools.islice(itertools.product(*fields), MOST_TRIES):
        yield {**dict(zip(wanted, chosen, strict=True)), **given}


COUNTED = re.compile(
    r"(image|video|audio) features and .*?match\D*(\d+)\D+(\d+)", re.IGNORECASE | re.DOTALL
)
MOST_SPECIAL = 1500


def special_tokens(config: Any, error: Exception, seen: Mapping[int, int]) -> dict[int, int] | None:
    """What rows of ids have to begin with, as told by the error of a model that counts them."""
    found = COUNTED.search(str(error))
    if found is None:
        return None
    kind = found[1].lower()
    names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_context_token_id")
    token = seek(config, *names)
    features = int(found[3])
    hidden = seek(config, "hidden_size", "d_model", parts=TEXT)
    if features > MOST_SPECIAL and isinstance(hidden, int):  # some count numbers, not vectors
        features //= hidden
    if not isinstance(token, int) or token in seen or features % BATCH or not features:
        return None
    if features > MOST_SPECIAL:
        return None
    return {**seen, token: features // BATCH}
