"""The families of timm, of each the model with the fewest parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .subject import NotBuilt, Subject

SMALL_WORDS = (
    *("zepto", "atto", "femto", "pico", "nano", "xxtiny", "xtiny", "xxs", "tiny", "xs"),
    *("_lite", "mini", "small", "_s0", "_a0", "_b0", "_t0", "_050", "_s", "18", "22", "26"),
)
TRIED = 8
"""Of a family, those whose names say that they are small; the others are not measured."""
MADE_UP = "test_"
"""The beginning of names of models that exist for timm's tests alone."""


def names() -> list[str]:
    """The families: modules of `timm.models` that enter a model."""
    import timm

    return sorted(module for module in timm.list_modules() if timm.list_models(module=module))


def build(family: str) -> Subject:
    """Build the smallest model of a family.

    Raises:
        NotBuilt: none could be made.
    """
    import timm

    chosen = _smallest(family)
    torch.manual_seed(0)
    model = timm.create_model(chosen, pretrained=False).eval()
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    size = tuple(config.get("input_size") or (3, 224, 224))
    count = sum(p.numel() for p in model.parameters())
    about = f"{chosen}, {count:,} parameters, {[2, *size]}"
    return Subject(model, functools.partial(_arguments, size), about)


def _arguments(size: tuple[int, ...], seed: int) -> tuple[list[Any], dict[str, Any]]:
    return [torch.randn(2, *size, generator=torch.Generator().manual_seed(seed))], {}


def _smallest(family: str) -> str:
    import timm

    def said(name: str) -> tuple[int, int]:
        sizes = [i for i, word in enumerate(SMALL_WORDS) if word in name]
        return min(sizes, default=len(SMALL_WORDS)), len(name)

    known = [n for n in timm.list_models(module=family) if not n.startswith(MADE_UP)]
    if not known:
        raise NotBuilt("it has no model")
    ranked = sorted(known, key=said)[:TRIED]
    sizes = {name: count for name in ranked if (count := _parameters(name)) is not None}
    return min(sizes, key=lambda name: sizes[name], default=ranked[0])


def _parameters(name: str) -> int | None:
    """How many a model has; None where it cannot be made without memory."""
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
    except Exception:  # noqa: BLE001  some read numbers that they made
        return None
    return sum(p.numel() for p in model.parameters())
