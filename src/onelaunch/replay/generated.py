"""The lines of a generated function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from onelaunch.capture.recording import CapturedCall


@dataclass(eq=False)
class GeneratedFunction:
    """The lines of the function that replays a recording, and the objects that they name."""

    captured: CapturedCall
    inputs: list[str] = field(default_factory=list)  # the names of the recording's inputs
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    """The numbers of the shared containers that lines have made."""

    def line(self, text: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + text)

    def name(self, prefix: str, value: object) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}:")
        self.line("return MISS", 2)

    def compile(self, signature: str, label: str) -> Callable[..., Any]:
        text = "\n".join([f"def call({signature}):", *self.lines])
        exec(_code(text, f"<onelaunch {label}>"), self.names)
        # A function among its own names would keep a recording's memory until the next collection.
        return self.names.pop("call")


@functools.lru_cache(maxsize=64)
def _code(text: str, name: str) -> CodeType:
    """Compile a text, once for all recordings that differ in their objects alone. 0.5 ms."""
    return compile(text, name, "exec")


def tuple_of(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)
