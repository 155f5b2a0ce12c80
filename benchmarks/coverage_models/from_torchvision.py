"""The models of torchvision: of each module the one with the fewest parameters, and each of those
that segment or detect."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .subject import NotBuilt, Subject

EACH = ("detection", "segmentation")
SIDES = {"inception_v3": 299}
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

    chosen = _smallest(name) if _members(name) else name
    if chosen not in models.list_models():
        raise NotBuilt(f"torchvision has no {name}")
    torch.manual_seed(0)
    model = _made(chosen).eval()
    count = sum(p.numel() for p in model.parameters())
    kind = models.get_model_builder(chosen).__module__
    side = SIDES.get(chosen, SIDE)
    detects = ".detection." in kind
    about = f"{chosen}, {count:,} parameters, {'a list of two' if detects else 'two'}, {side} wide"
    return Subject(model, functools.partial(_arguments, side, detects), about)


def _members(module: str) -> list[str]:
    """The models of a module of classification."""
    from torchvision import models

    full = f"torchvision.models.{module}"
    names = models.list_models(module=models)
    return [name for name in names if models.get_model_builder(name).__module__ == full]


def _made(name: str) -> torch.nn.Module:
    from torchvision import models

    backbone = {} if _of_classification(name) else {"weights_backbone": None}
    return models.get_model(name, weights=None, **backbone)


def _of_classification(name: str) -> bool:
    from torchvision import models

    return name in models.list_models(module=models)


def _smallest(module: str) -> str:
    def size(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in _made(name).parameters())

    return min(_members(module), key=size)


def _arguments(side: int, detects: bool, seed: int) -> tuple[list[Any], dict[str, Any]]:
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return ([list(images)] if detects else [images]), {}
