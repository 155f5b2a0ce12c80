"""All models, by the library that they come from: ``transformers/bert``, ``timm/resnet``."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from .subject import NotBuilt, Subject

SOURCES = {
    "transformers": "from_transformers",
    "timm": "from_timm",
    "torchvision": "from_torchvision",
}
TRAINED_EVERY = 5
"""So many models for one that is trained as well: more than 100 of those that can be built."""


def _source(library: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{SOURCES[library]}")


def missing() -> list[str]:
    """The libraries that are not installed."""
    return [library for library in SOURCES if importlib.util.find_spec(library) is None]


def names() -> list[str]:
    """All models of the libraries that are installed."""
    there = [library for library in SOURCES if library not in missing()]
    return [f"{library}/{name}" for library in there for name in _source(library).names()]


def build(name: str) -> Subject:
    """Build a model on the host.

    Raises:
        NotBuilt: it cannot be built small, or eager does not run it.
    """
    library, _, rest = name.partition("/")
    try:
        return _source(library).build(rest)
    except ImportError as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
