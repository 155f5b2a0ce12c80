"""All steps, in the order in which they are tried, and in that in which they are applied."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from onelaunch.tools.checklist.branches import SUMS
from onelaunch.tools.checklist.channels import PAD_CHANNELS
from onelaunch.tools.checklist.modes import CHANNELS_LAST, CUDNN_BENCHMARK, EVAL, INFERENCE, TF32
from onelaunch.tools.checklist.norms import DROP_BIAS, FOLD
from onelaunch.tools.checklist.parallel import PARALLEL
from onelaunch.tools.checklist.precision import FP8, HALF, INT8
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.subject import Compiled, NotPossible, Subject
from onelaunch.tools.names import known, listed


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
    """Find the named steps; a name without its way, such as ``"half"``, is all of its ways.

    Raises:
        ArgumentError: OL401, with the unknown names.
    """
    if names is None:
        return STEPS
    given = listed(names, str, where, "steps", "graph")
    families = list(dict.fromkeys(step.name.partition(":")[0] for step in STEPS))

    def is_step(name: str) -> bool:
        return name in families or name in BY_NAME

    wanted = known(given, families, "step", where, "steps=", "['graph']", is_step)
    return tuple(step for step in STEPS if any(_is_called(step, name) for name in wanted))


def _is_called(step: Step, name: str) -> bool:
    return step.name == name or step.name.partition(":")[0] == name
