"""A program twice, eager and graphed, a step of each in turn; what they yield must be equal.

A *program* takes `graph`, which is `ol.graph` in one of the two, and leaves its argument alone in
the other. It builds its own world, and yields what its user would look at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import onelaunch as ol
from tests.device.drop_in import assert_same, replays
from tests.device.steps import Randomness

Program = Callable[[Callable[..., Any]], Iterator[Any]]
END = object()


def side_by_side(
    program: Program,
    device: torch.device,
    *,
    replayed: int = 1,
    captures: int | None = None,
    by: Callable[..., Any] = ol.graph,
    **options: Any,
) -> list[Any]:
    """Run both, compare each value as it comes and again at the end, and return the graphed ones.

    Args:
        replayed: at least so many launches of each graphed callable.
        captures: at most so many captures of all together.
        by: what takes the place of `ol.graph`; its callables have no recordings to be counted.
        options: of `ol.graph`; those that the program gives come first.
    """
    made: list[Any] = []

    def graphed(fn: Any, **more: Any) -> Any:
        made.append(by(fn, **{**options, **more}))
        return made[-1]

    worlds = program(lambda fn, **_: fn), program(graphed)
    random = Randomness(device), Randomness(device)
    values: list[tuple[Any, ...]] = []
    for i in itertools.count():
        pair: list[Any] = []
        for world, state in zip(worlds, random, strict=True):
            with state:
                pair.append(next(world, END))
            assert torch.is_grad_enabled(), "decorate the program with no_grad: it yields inside"
        if pair[0] is END:
            assert pair[1] is END, "the graphed program yields more"
            break
        assert pair[1] is not END, "the eager program yields more"
        assert_same(pair[1], pair[0], f"step {i}")
        values.append(tuple(pair))
    for i, (expected, got) in enumerate(values):
        assert_same(got, expected, f"value of step {i}, after all steps")
    assert_same(random[1].draw(device), random[0].draw(device), "random state")
    for fast in made if by is ol.graph else ():
        assert replays(fast) >= replayed, [r.why for r in fast.recordings]
    if captures is not None:
        counted = sum(fast.stats().captures for fast in made)
        assert counted <= captures, [(r.callable, r.why) for f in made for r in f.recordings]
    return made


def refused(program: Program, device: torch.device, code: str, line: str, **options: Any) -> str:
    """Run the program graphed until it is refused with `code` at a line with the text `line`.

    The eager program must run to its end. Returns the message.
    """
    for _ in program(lambda fn, **_: fn):
        pass
    with pytest.raises(ol.CaptureError) as caught:
        for _ in program(lambda fn, **more: ol.graph(fn, **{**options, **more})):
            pass
    assert caught.value.code == code, str(caught.value)
    assert line in (caught.value.where or ""), str(caught.value)
    return str(caught.value)


def right_or_refused(program: Program, device: torch.device, *codes: str, **options: Any) -> None:
    """Both are the contract: every value right, or an error or warning with one of the codes; any
    error of ours where none is named."""
    try:
        side_by_side(program, device, replayed=0, **options)
    except (ol.GraphError, ol.GraphWarning) as refusal:
        if codes and refusal.code not in codes:
            raise
