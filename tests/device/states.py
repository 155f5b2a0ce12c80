"""A callable with a state in Python twice, eager and graphed, compared after each call.

A *world* is a function that builds the state and the callable, equal each time that it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, random_tensor

World = tuple[Any, Callable[[Tensor], Any]]
Place = tuple[Callable[..., float], Callable[[float], object]]
"""What reads a number, and what changes it."""


def as_eager(
    device: torch.device,
    world: Callable[[], World],
    between: Callable[[Any, int], object] = lambda state, i: None,
    *,
    calls: int = 12,
    shown: Callable[[Any], Any] = lambda state: repr(vars(state)),
    code: str | None = None,
    grad: bool = False,
    warmup: int = 1,
    **options: Any,
) -> Any:
    """Compare each call until a refusal with this code, and return the graphed callable.

    Args:
        between: changes the state of either world before call i.
        shown: what of the state is compared.
    """
    (mine, f), (theirs, eager) = world(), world()
    fast, refused = ol.graph(f, warmup=warmup, **options), None
    with torch.set_grad_enabled(grad):
        for i in range(calls):
            between(mine, i)
            between(theirs, i)
            x = torch.arange(3.0).to(device) + i + 1
            try:
                got = fast(x)
            except ol.CaptureError as error:
                refused = error
                break
            assert_same(got, eager(x), f"call {i}")
            assert_same(shown(mine), shown(theirs), f"state after call {i}")
    assert (None if refused is None else refused.code) == code, refused
    return fast


def reads_anew(
    device: torch.device, made: Callable[[], Place], recordings: int | None = None
) -> None:
    """Calls equal eager's before and after a change of the number that they read."""

    def world() -> tuple[Any, Any]:
        read, change = made()

        def f(x: Tensor) -> Tensor:
            return x * read()

        f.change = change  # type: ignore[attr-defined]
        return f, lambda i: (random_tensor(i, 3, device=device),)

    def between(i: int, f: Any) -> None:
        f = f.fn if isinstance(f, ol.Graphed) else f
        f.change(2.0 if i < 4 else 3.0)

    drop_in_worlds(world, calls=8, recordings=recordings, min_replays=4, between=between)
