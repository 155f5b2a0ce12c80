"""`optimize`: the inference checklist, tried on a copy of a callable."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from onelaunch.bench.environment import environment
from onelaunch.bench.reference import Reference, make_reference
from onelaunch.bench.timers import Timer, timers_for
from onelaunch.bench.workload import Workload
from onelaunch.checklist.build import RECOMPILE_LIMIT, Built, build, free, quiet
from onelaunch.checklist.check import own_error
from onelaunch.checklist.modes import EVAL, in_train_mode
from onelaunch.checklist.plan import Plan, Trial
from onelaunch.checklist.search import OnProgress, Search
from onelaunch.checklist.step import Step
from onelaunch.checklist.steps import choose
from onelaunch.checklist.subject import modules_behind, subject_of
from onelaunch.checklist.turns import Turns, in_turns
from onelaunch.errors import ArgumentError, kind_of

P = ParamSpec("P")
R = TypeVar("R")
FINAL_SECONDS = 2.0
LEAST_FINAL_SECONDS = 0.5


class Optimized(Generic[P, R]):
    """A callable to which the steps of a plan were applied: a drop-in for the original, in
    inference. It has its own copy of the parameters; its results are the caller's to keep.

    Attributes:
        plan: the steps, with the error and the gain of each.
    """

    def __init__(self, call: Callable[P, R], plan: Plan) -> None:
        self._call = call
        self.plan = plan

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Optimized({self.plan.workload}: {', '.join(self.plan.steps) or 'as it was'})"


def optimize(
    fn: Callable[P, R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_error: float = 0,
    seconds: float = 60.0,
    steps: Sequence[str] | None = None,
    name: str | None = None,
    on_progress: OnProgress | None = None,
) -> Optimized[P, R]:
    """Try the inference checklist on a copy of a callable, and keep what is right and pays.

    Each step is built on top of those kept before it, checked against float64 on these arguments
    and on others of the same sizes, and timed in turns with what there was. Those that gained
    nothing are tried again when the rest is in, those kept are taken out again, and what is left is
    tried in pairs. The result is timed against the callable as it was given, and where it is not
    faster the plan is empty.

    It is for inference: modules in train mode are put into eval mode first, and checked in it. The
    caller's callable, parameters and random state stay as they are. Up to three copies are held
    during the search, and one by the result. At the end code compiled by `torch.compile` in this
    process is dropped.

    Args:
        fn: any callable that returns tensors. Steps that rewrite layers need an `nn.Module` behind
            it: itself, or one that a function, method or `functools.partial` holds.
        args: positional arguments of a typical call.
        kwargs: its keyword arguments.
        max_error: the largest relative error against float64 that passes. 0: every result tried is
            to be eager's bit for bit. About 1e-2 lets 16 bits in.
        seconds: no trial is begun after so many. One that is under way is finished, and a compiler
            may take a minute.
        steps: only these; a name without its way, such as ``"half"``, is all of its ways.
        name: a name for the workload; the callable's by default.
        on_progress: called with a text and the part that is done, 0 to 1.

    Returns:
        An `Optimized`: the callable, and its `plan`. On KeyboardInterrupt, what was kept so far.

    Raises:
        ArgumentError: OL401, a bad argument, or a callable that returns no tensor.
        Exception: whatever `fn` itself raises on these arguments, unchanged.

    Example:
        >>> import torch, onelaunch as ol
        >>> model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
        >>> fast = ol.optimize(model, (x,), steps=["eval", "inference-mode"], seconds=1)
        >>> torch.equal(fast(x), model(x))
        True
    """
    workload = validated(fn, args, kwargs)
    _check_numbers(max_error, seconds)
    chosen = choose(steps, "optimize")
    with isolated(workload.device, chosen):
        found = _Optimization(workload, chosen, max_error, seconds, on_progress or _silent)
        call, plan = found.run(name or _name_of(fn))
    return Optimized(call, plan)


class _Optimization:
    """The state of one call of `optimize`."""

    def __init__(
        self,
        workload: Workload,
        steps: Sequence[Step],
        max_error: float,
        seconds: float,
        tell: OnProgress,
        timer: Timer | None = None,
    ) -> None:
        self.given = workload
        self.steps = steps
        self.max_error = max_error
        self.seconds = seconds
        self.tell = tell
        self.timer = timer or timers_for(workload.device)[0]
        self.remarks: list[str] = []

    def run(self, name: str) -> tuple[Callable[..., Any], Plan]:
        self.tell("float64 reference", 0.0)
        required = self._modes()
        inference = build(self.given, required)
        workload = replace(self.given, fn=inference.call)
        reference = make_reference(workload, torch.Generator().manual_seed(0))
        self.remarks += _doubts(reference)
        del inference, workload
        if not reference.repeatable:
            return self._unchanged(name, required)
        search = Search(
            self.given,
            self.steps,
            reference,
            self.max_error,
            self.timer,
            self.seconds,
            self.tell,
            required,
        )
        try:
            search.run()
        except KeyboardInterrupt:
            self.remarks.append("Interrupted: this is what was found by then.")
        return self._finished(name, search, reference)

    def _modes(self) -> tuple[Step, ...]:
        """Return eval mode as a step to take in any case, if a module is in train mode."""
        roots = modules_behind(self.given)
        training = in_train_mode([module for root in roots for module in root.modules()])
        if not training or EVAL not in self.steps:
            return ()
        if subject_of(self.given).shared:
            self.remarks.append(
                "Modules are in train mode and cannot be copied, so they stay in it: call .eval()."
            )
            return ()
        self.remarks.append(
            "Modules were in train mode: the plan is for eval mode, and was checked in it."
        )
        return (EVAL,)

    def _unchanged(self, name: str, required: tuple[Step, ...]) -> tuple[Callable[..., Any], Plan]:
        """Give up where nothing can be checked."""
        built = build(self.given, required)
        turns = self._against_eager(built)
        return built.call, self._plan(name, required, (), 0.0, turns)

    def _finished(
        self, name: str, search: Search, reference: Reference
    ) -> tuple[Callable[..., Any], Plan]:
        """Build the result anew, and compare it with what was given."""
        self.tell("the result against the original", 0.97)
        steps, error, required = search.best.steps, search.best.check.error, search.required
        self.remarks += search.remarks
        if search.left:
            self.remarks.append(f"Time was up before: {', '.join(search.left)}.")
        if any(step.group == "inductor" for step in self.steps):
            # The trials share the model's code, so what they compiled would count against it.
            search.forget()
            reset_compiler()
            built = self._built(steps)
        else:
            built = search.best.built
        turns = self._against_eager(built)
        trials = [*search.trials]
        if steps != required:
            before, after = turns.timings
            slower = after.median_us >= before.median_us
            trials.append(_as_a_whole(steps, error, turns, slower))
            if slower:
                steps, built = required, self._built(required)
                error = own_error(reference)
                turns = self._against_eager(built)
        if steps == required:
            self.remarks.append("Nothing that was tried pays, so nothing is changed.")
        return built.call, self._plan(name, steps, tuple(trials), error, turns)

    def _built(self, steps: Sequence[Step]) -> Built:
        free(self.given.device)
        with quiet():
            built = build(self.given, steps)
            built.warm()
        return built

    def _against_eager(self, built: Built) -> Turns:
        eager = build(self.given, ())
        eager.warm()
        seconds = max(LEAST_FINAL_SECONDS, min(FINAL_SECONDS, self.seconds / 20))
        return in_turns(eager, built, self.timer, seconds)

    def _plan(
        self,
        name: str,
        steps: Sequence[Step],
        trials: tuple[Trial, ...],
        error: float,
        turns: Turns,
    ) -> Plan:
        eager, result = turns.timings
        return Plan(
            workload=name,
            steps=tuple(step.name for step in steps),
            trials=trials,
            max_error=float(self.max_error),
            error=error,
            eager=eager,
            result=result if steps else eager,
            environment=environment(),
            remarks=tuple(self.remarks),
        )


def _as_a_whole(steps: Sequence[Step], error: float, turns: Turns, slower: bool) -> Trial:
    before, after = turns.timings
    reason = "slower than the original" if slower else None
    names = " + ".join(step.name for step in steps)
    outcome = "no gain" if slower else "kept"
    return Trial(names, "all that is kept", outcome, reason, error, before, after, "final")


def _doubts(reference: Reference) -> Iterator[str]:
    if reference.why is not None:
        yield f"Checked against eager, since the callable does not run in float64: {reference.why}"
    if not reference.repeatable:
        yield f"Nothing could be checked, so nothing is changed: {reference.doubt}."
    elif reference.skipped:
        skipped = "; ".join(f"{name} ({why})" for name, why in reference.skipped)
        yield f"Not checked on these draws: {skipped}."


@contextlib.contextmanager
def isolated(device: torch.device, steps: Sequence[Step]) -> Generator[None]:
    """Leave the random state, and the limits of the compiler, as they were."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        if any(step.group == "inductor" for step in steps):
            config: Any = importlib.import_module("torch._dynamo").config
            contexts.enter_context(config.patch(recompile_limit=RECOMPILE_LIMIT))
        yield
    free(device)


def reset_compiler() -> None:
    """Drop the code that was compiled in this process."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()


def validated(fn: object, args: object, kwargs: object, where: str = "optimize") -> Workload:
    """Check a callable and its arguments.

    Raises:
        ArgumentError: OL401.
    """
    if not callable(fn) or isinstance(fn, type):
        what = f"{kind_of(fn)} is not a callable"
        raise _bad(what, "it is called with the arguments", f"{where}(model, (x,))", where)
    if not isinstance(args, (tuple, list)):
        what = f"args is {kind_of(args)}, not a tuple"
        why = "it holds the positional arguments of a call"
        raise _bad(what, why, f"{where}(model, (x,))", where)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        what = f"kwargs is {kind_of(kwargs)}, not a dict"
        raise _bad(what, "it names the arguments", f'{where}(model, (x,), {{"mask": mask}})', where)
    return Workload(fn, tuple(args), dict(kwargs or {}))


def _check_numbers(max_error: object, seconds: object) -> None:
    if not isinstance(max_error, (int, float)) or not 0 <= max_error < math.inf:
        why = "it is a relative error: 0 for bit for bit, or 1e-2, say"
        raise _bad(f"max_error={max_error!r}", why, "max_error=1e-2", "optimize")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        why = "the search takes a number of seconds above 0"
        raise _bad(f"seconds={seconds!r}", why, "seconds=60", "optimize")


def _bad(what: str, why: str, fix: str, where: str) -> ArgumentError:
    return ArgumentError("OL401", what, where=where, why=why, fix=fix)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _silent(text: str, part: float) -> None:
    """Tell nobody."""
