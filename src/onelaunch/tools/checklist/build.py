"""A callable made of a workload by a list of steps."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from onelaunch.tools.bench.entry import only_errors
from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist.clock import UNLIMITED, Clock
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import in_order
from onelaunch.tools.checklist.subject import WARMUP, NotPossible, subject_of


@dataclass(frozen=True)
class ChangedCall:
    """A callable that steps have changed.

    Attributes:
        call: takes the arguments of the workload's callable.
        did: what each step did, by its name.
        inputs: copies of the arguments, for timing.
    """

    call: Callable[..., Any]
    did: dict[str, str | None]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    def __call__(self) -> Any:
        args, kwargs = self.inputs
        return self.call(*args, **kwargs)

    def warm(self, clock: Clock = UNLIMITED) -> None:
        """Call it until its calls no longer compile or record.

        Raises:
            TimeIsUp: by the clock, between two calls.
        """
        for _ in range(WARMUP + 2):
            clock.check()
            self()


class Refusal(NotPossible):
    """The step that cannot be taken, with the reason."""

    def __init__(self, step: Step, why: str) -> None:
        super().__init__(why)
        self.step = step


def build(workload: Workload, steps: Iterable[Step]) -> ChangedCall:
    """Copy a workload and take steps on the copy.

    Raises:
        Refusal: one of the steps is not possible.
        Exception: whatever a step or a library raises.
    """
    subject = subject_of(workload)
    did: dict[str, str | None] = {}
    for step in in_order(steps):
        try:
            did[step.name] = step.take(subject)
        except NotPossible as error:
            raise Refusal(step, str(error)) from error
    return ChangedCall(subject.call(), did, workload.copy_inputs())


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep the chatter of autotuners and compilers away; their warnings are about their own
    code."""
    hushed, errors = only_errors("torch._dynamo"), contextlib.redirect_stderr(io.StringIO())
    with hushed, warnings.catch_warnings(), errors:
        warnings.simplefilter("ignore")
        yield
