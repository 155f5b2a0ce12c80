"""What the tests of the backend of `torch.compile` share; their fixture is `fresh`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.dynamo import onelaunch
from onelaunch.dynamo.backend import regions

F = Callable[..., Any]


def on_the_host(x: Tensor) -> Tensor:
    y = x.sin() * 2
    offsets = torch.arange(x.shape[-1], dtype=torch.float32).cumsum(0)
    offsets += 1  # what is written is no constant
    return (y + offsets.to(x.device)).cos()


def compiled(f: F, **options: Any) -> Any:
    return torch.compile(f, backend=onelaunch, options=options or None)


def recordings() -> list[ol.Recording]:
    return [recording for graphed in regions.graphs() for recording in graphed.recordings]


def replays() -> int:
    return sum(recording.replays for recording in recordings())


def ways() -> set[tuple[str, str]]:
    """How the first argument of each recording travels, and the memory of its first result."""
    return {(next(iter(r.inputs.values())), r.outputs[0]) for r in recordings()}


def same_calls(
    f: F, g: F, arguments: Callable[[int], tuple[Any, ...]], calls: int = 8, **tolerance: float
) -> None:
    """Calls of both give the same results and leave the same arguments; results stay."""
    kept: list[tuple[Any, Any]] = []
    for i in range(calls):
        expected_args, args = arguments(i), arguments(i)
        expected, got = f(*expected_args), g(*args)
        torch.testing.assert_close(got, expected, **tolerance)
        torch.testing.assert_close(args, expected_args)
        kept.append((got, expected))
    for got, expected in kept:
        torch.testing.assert_close(got, expected, **tolerance)


def two_models(device: torch.device, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    made: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make().to(device))
    return made[0], made[1]
