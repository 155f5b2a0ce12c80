"""The architectures of transformers, each from the configuration of its class, made small."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn

from .by_hand import FIELDS, INPUTS
from .inputs import Recipe, made, parameters, recipes, special_tokens
from .shrinking import Scale, small
from .subject import NotBuilt, Subject

SCALES = (
    *((divisor, 96, 2) for divisor in (32, 16, 8)),
    (32, 96, 8),
    *((divisor, 96, 2) for divisor in (4, 2, 1)),
    *((divisor, 224, 2) for divisor in (8, 4, 1)),
    *((divisor, None, 2) for divisor in (32, 16, 4, 1)),
)
"""What widths are divided by, the largest image (None: the default) and the layers, in the
order in which they are tried."""
MOST_PARAMETERS = 48e6
SAFE_DIVISOR = 8
SECONDS = 12.0
"""Of the processor, for the search of a small configuration and of inputs."""
EAGER_SECONDS = 5.0


def names() -> list[str]:
    """The types of models that have a class to be made by."""
    from transformers.models.auto import modeling_auto as auto

    found = {**auto.MODEL_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found.update(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted(found)


def build(name: str) -> Subject:
    """Build the architecture small.

    Raises:
        NotBuilt: no small configuration and inputs were found that eager runs.
    """
    deadline = time.process_time() + SECONDS
    told: list[str] = []
    for rich in (True, False):
        for divisor, image, layers in SCALES:
            scale = Scale(divisor, image, layers=layers, positions=512 if image else None)
            at = f"1/{divisor}"
            if time.process_time() > deadline:
                raise NotBuilt("; ".join(dict.fromkeys(["time is up", *told])))
            try:
                model = _small_model(name, scale)
                recipe = _recipe(name, model, deadline, rich)
            except ImportError as error:  # of a package, at any scale
                raise NotBuilt(f"ImportError: {' '.join(str(error).split())[:160]}") from error
            except Exception as error:  # noqa: BLE001  the next scale may fit
                told.append(f"{at}: {error if isinstance(error, NotBuilt) else _line(error)}")
                continue
            count = sum(p.numel() for p in model.parameters())
            shapes = {k: _shape(v) for k, v in made(recipe, 0).items()}
            about = f"{type(model).__name__}, {count:,} parameters, {shapes}"
            return Subject(model, functools.partial(_arguments, recipe), about)
    raise NotBuilt("; ".join(dict.fromkeys(told)))


def _arguments(recipe: Recipe, seed: int) -> tuple[list[Any], dict[str, Any]]:
    return [], made(recipe, seed)


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, torch.Tensor) else value


def _line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160] if str(error) else ''}"
    )


def _model_class(name: str) -> type[nn.Module]:
    """The class with a head for language where there is one, of an encoder with its decoder if it
    has both; else the one without a head."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for mapping in (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        found = mapping.get(name)
        found = found[0] if isinstance(found, (list, tuple)) else found
        headed = mapping is not auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
            found is not None and ("ForCausalLM" in found or name not in auto.MODEL_MAPPING_NAMES)
        )
        if found is not None and headed:
            return getattr(transformers, found)
    raise NotBuilt("no class")


def _small_model(name: str, scale: Scale) -> nn.Module:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = _model_class(name)
    config_class = CONFIG_MAPPING[name]
    wanted = getattr(cls, "config_class", None)
    config = small(config_class(), scale, FIELDS.get(name))
    if wanted is not None and not isinstance(config, wanted):
        part = next((v for v in vars(config).values() if isinstance(v, wanted)), None)
        config = config if part is None else part
    count = _parameters(cls, config)
    if count is None and scale.divisor < SAFE_DIVISOR:
        raise NotBuilt("it cannot be made without memory, and may be large")
    if count is not None and count > MOST_PARAMETERS:
        raise NotBuilt(f"{count:,.0f} parameters")
    torch.manual_seed(0)
    return cls(config).eval()


def _parameters(cls: Any, config: Any) -> int | None:
    """How many the model has; None where it cannot be made without memory."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in cls(config).parameters())
    except (RuntimeError, NotImplementedError):  # some read numbers that they made
        return None


def _recipe(name: str, model: nn.Module, deadline: float, rich: bool) -> Recipe:
    """The first inputs that eager runs; `rich`: with the images and sounds that it takes."""
    special: dict[int, int] = {}
    told = ""
    again = True
    while again:
        again = False
        by_hand = [INPUTS[name]] if name in INPUTS else None
        for recipe in by_hand or recipes(model, model.config, special, rich):
            if time.process_time() > deadline:
                raise NotBuilt(f"time is up; {told}")
            error = _fails(model, recipe)
            if error is None:
                return recipe
            more = special_tokens(model.config, error, special)
            if more is not None:
                special, again = more, True
                break
            told = told or f"{_line(error)}, of {', '.join(recipe)}"
    raise NotBuilt(told or f"no inputs are known for {', '.join(parameters(model))}"[:200])


def _fails(model: nn.Module, recipe: Recipe) -> Exception | None:
    start = time.process_time()
    try:
        with torch.no_grad():
            model(**made(recipe, 0))
    except Exception as error:  # noqa: BLE001  what does not fit says so in any way
        return error
    if time.process_time() - start > EAGER_SECONDS:
        return NotBuilt("too slow in eager")
    return None
