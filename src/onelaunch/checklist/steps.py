"""All steps, in the order in which they are tried, and in that in which they are applied."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import cast

from onelaunch.checklist.branches import SUMS
from onelaunch.checklist.channels import PAD_CHANNELS
from onelaunch.checklist.modes import CHANNELS_LAST, CUDNN_BENCHMARK, EVAL, INFERENCE, TF32
from onelaunch.checklist.norms import DROP_BIAS, FOLD
from onelaunch.checklist.parallel import PARALLEL
from onelaunch.checklist.precision import FP8, HALF, INT8
from onelaunch.checklist.step import Step
from onelaunch.checklist.subject import Compiled, NotPossible, Subject
from onelaunch.errors import ArgumentError


def _inductor(mode: Compiled) -> Step:
    def take(subject: Subject) -> None:
        if subject.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise NotPossible("triton is not installed")
        if mode == "max-autotune" and subject.device.type == "cpu":
            raise NotPossible("its templates are a GPU's")
        subject.compiled = mode

    title = "kernels by Inductor" + (", the fastest of many" if mode == "max-autotune" else "")
    return Step(f"inductor:{mode}", title, take, mode == "max-autotune", "inductor")


def _graph(subject: Subject) -> None:
    subject.graphed = True


INDUCTOR = (_inductor("default"), _inductor("max-autotune"))
GRAPH = Step("graph", "one launch", _graph)

STEPS = (
    # One launch comes early, since beside the host's time a faster kernel would not be noticed;
    # channels last after fewer bits, which convolutions compute so; what compiles long, late.
    *(EVAL, INFERENCE, GRAPH, FOLD, DROP_BIAS, SUMS, PARALLEL),
    *HALF,
    *(CHANNELS_LAST, PAD_CHANNELS, CUDNN_BENCHMARK, TF32),
    *INDUCTOR,
    *INT8,
    *FP8,
)
"""All steps, in the order in which they are tried."""

BY_NAME = {step.name: step for step in STEPS}
# What rewrites modules comes before what changes their numbers.
_APPLIED = (
    *(EVAL, INFERENCE, FOLD, DROP_BIAS, SUMS, PARALLEL, PAD_CHANNELS, CHANNELS_LAST),
    *(*HALF, *INT8, *FP8, CUDNN_BENCHMARK, TF32, *INDUCTOR, GRAPH),
)
_RANK = {step.name: rank for rank, step in enumerate(_APPLIED)}


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Sort steps into the order in which they are applied; those of nobody's come last."""
    return sorted(steps, key=lambda step: _RANK.get(step.name, len(_RANK)))


def choose(names: object, where: str) -> tuple[Step, ...]:
    """Find the steps of these names; a name without its way, such as ``"half"``, is all of them.

    Raises:
        ArgumentError: OL401, with the unknown names.
    """
    if names is None:
        return STEPS
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    given = list(cast("Sequence[object]", names)) if listed else []
    if not given or not all(isinstance(name, str) for name in given):
        raise ArgumentError(
            "OL401",
            f"steps={names!r:.60}",
            where=where,
            why="a list of names is expected",
            fix='steps=["inference-mode", "graph"]',
        )
    wanted = cast("list[str]", given)
    unknown = [name for name in wanted if not any(_is_called(step, name) for step in STEPS)]
    if unknown:
        families = list(dict.fromkeys(step.name.partition(":")[0] for step in STEPS))
        close = difflib.get_close_matches(unknown[0], [*families, *BY_NAME], 1) or ["graph"]
        raise ArgumentError(
            "OL401",
            f"no step is called {' or '.join(unknown)}",
            where=where,
            why=f"the steps are {', '.join(families)}",
            fix=f"steps={close}",
        )
    return tuple(step for step in STEPS if any(_is_called(step, name) for name in wanted))


def _is_called(step: Step, name: str) -> bool:
    return step.name == name or step.name.partition(":")[0] == name
