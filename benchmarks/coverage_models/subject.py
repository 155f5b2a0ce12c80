"""A model with its inputs, ready to be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


class NotBuilt(Exception):
    """A model that cannot be built here; the message says why."""


@dataclass
class Subject:
    """A model on the host, and what makes its inputs.

    Attributes:
        arguments: for a seed the positional and the keyword arguments, of the same shapes for each
            seed, on the host.
        about: what was built, for the record.
    """

    model: nn.Module
    arguments: Callable[[int], tuple[list[Any], dict[str, Any]]]
    about: str
