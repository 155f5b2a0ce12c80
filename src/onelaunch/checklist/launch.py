"""Steps that make other kernels of the same operations, and one launch of all kernels."""

from __future__ import annotations

import importlib.util

from onelaunch.checklist.step import Step
from onelaunch.checklist.subject import Compiled, NotPossible, Subject


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
