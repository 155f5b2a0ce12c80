"""The models of torchvision: of each module the one with the fewest parameters, and each of those
that segment or detect."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .subject import NotBuilt, Subject

EACH = ("detection", "segmentation")
SIDES = {"inception_v3": 299, "maxvit_t": 224}
SIDE = 224


def names() -> list[str]:
    """Models by their builders' names; of a module of classification its smallest stands for it."""
    from torchvision import models

    each = [name for part in EACH for name in models.list_models(module=getattr(models, part))]
    modules = {
        models.get_model_builder(name).__module__.rpartition(".")[2]
        for name in models.list_models(module=models)
    }
    return sorted([*each, *modules])


def build(name: str) -> Subject:
    """Build a model, without weights.

    Raises:
        NotBuilt: there is no such model.
    """
    from torchvision import models

    chosen = name if name in models.list_models() and not _is_module(name) else _smallest(name)
    torch.manual_seed(0)
    model = _made(chosen).eval()
    count = sum(p.numel() for p in model.parameters())
    kind = models.get_model_builder(chosen).__module__
    side = SIDES.get(chosen, SIDE)
    detects = ".detection." in kind
    about = f"{chosen}, {count:,} parameters, {'a list of two' if detects else 'two'}, {side} wide"
    return Subject(model, functools.partial(_arguments, side, detects), about)


def _is_module(name: str) -> bool:
    from torchvision import models

    return hasattr(getattr(models, name, None), "__path__") or any(
        models.get_model_builder(m).__module__ == f"torchvision.models.{name}"
        for m in models.list_models(module=models)
    )


def _made(name: str) -> torch.nn.Module:
    from torchvision import models

    backbone = {} if _of_classification(name) else {"weights_backbone": None}
    return models.get_model(name, weights=None, **backbone)


def _of_classification(name: str) -> bool:
    from torchvision import models

    return name in models.list_models(module=models)


def _smallest(module: str) -> str:
    from torchvision import models

    inside = [
        name
        for name in models.list_models(module=models)
        if models.get_model_builder(name).__module__ == f"torchvision.models.{module}"
    ]
    if not inside:
        raise NotBuilt(f"torchvision has no {module}")

    def size(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in _made(name).parameters())

    return min(inside, key=size)


def _arguments(side: int, detects: bool, seed: int) -> tuple[list[Any], dict[str, Any]]:
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return ([list(images)] if detects else [images]), {}
