"""What generic shrinking and generic inputs do not find, by the types of models of transformers."""

from __future__ import annotations

from typing import Any

from .inputs import Recipe

LEFT_OUT: dict[str, str] = {}
"""Types that are left out, and why."""

FIELDS: dict[str, dict[str, Any]] = {}
"""Fields of configurations."""

INPUTS: dict[str, Recipe] = {}
"""Inputs."""
