"""The check of an engine's results against float64.

Eager's own distance from the float64 result is the yardstick: rounding differs from engine to
engine, so an engine may be ten times as far off as eager, or within what its dtype allows. That is
so on the inputs given and on several draws, since an engine may have frozen what depends on them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onelaunch.call import tree
from onelaunch.driver.distance import is_inexact
from onelaunch.errors import ArgumentError, GraphError, describe_type
from onelaunch.tools.bench.draws import DRAWS, Draw, draws, nudged
from onelaunch.tools.bench.precision import norm, relative_error
from onelaunch.tools.bench.workload import Inputs, Workload, clone, each_tensor, to, widen

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
COARSEST = 0.2  # for the 8-bit floats, of two or three bits of mantissa
EAGER_FACTOR = 10.0
LEAST_SCALE = 0.1
"""The least size that a result counts as, in parts of that on the inputs given."""
SECONDS = 10.0
"""The longest time for draws before the engines are built, and again on each engine."""

HOST = torch.device("cpu")

Outputs = list[Tensor]


@dataclass(frozen=True)
class Verdict:
    """The distance from the reference, and the text of a mistake, or None."""

    error: float
    wrong: str | None


@dataclass(frozen=True)
class Case:
    """One set of inputs with the results of eager and of the reference.

    Attributes:
        name: ``"given"``, or the draw that they are of.
        tolerance: the largest relative error that passes.
        scale: the least size that the reference counts as, so that rounding around a result of 0
            is no error. Where float64 gives 0 alone, it is of the size of eager's result.
    """

    inputs: Inputs
    eager: Outputs
    reference: Outputs
    name: str = "given"
    tolerance: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True)
class Reference:
    """The results that engines are checked against.

    Attributes:
        kind: ``"float64"``, or ``"eager"`` where the callable cannot run in float64.
        why: the reason if it is not float64, or None.
        cases: the inputs given, then the draws that the callable takes.
        tolerance: the largest relative error that passes on the inputs given.
        repeatable: True if two eager calls on the same inputs agree; nothing can be checked if not.
        refused: the reason if only the inputs given are checked, or None.
        skipped: the draws without a check, each with the reason.
    """

    kind: str
    why: str | None
    cases: tuple[Case, ...]
    tolerance: float
    repeatable: bool
    refused: str | None = None
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def doubt(self) -> str:
        """The reason why nothing can be checked, where eager does not repeat its own result."""
        floats = [t for t in self.cases[0].eager if is_inexact(t)]
        if any(bool(_wide(t).isnan().any()) for t in floats):
            return "eager's own result has NaN in it"
        return "the callable's own results change"

    def doubts(self) -> Iterator[str]:
        """Say what could not be checked, or only in part."""
        if self.why is not None:
            said = "Checked against eager, since the callable does not run in float64"
            yield f"{said}: {self.why}"
        if not self.repeatable:
            changes = " (dropout, random numbers or state). For a model, call .eval() first"
            more = changes if self.doubt.endswith("change") else ""
            yield f"Nothing could be checked: {self.doubt}{more}."
        elif self.refused is not None:
            said = "Checked on the given inputs alone; random ones are refused"
            yield f"{said}: {self.refused}"
        elif self.skipped:
            skipped = "; ".join(f"{name} ({why})" for name, why in self.skipped)
            yield f"Not checked on these draws: {skipped}."

    def placed(self, workload: Workload) -> Workload:
        """Add the device of the results to a workload."""
        results = (t for case in self.cases for t in case.eager)
        device = next((t.device for t in results if t.device.type != "cpu"), None)
        return replace(workload, results_on=device)


def outputs(result: Any) -> Outputs:
    """List the tensors of a result, in order, without autograd."""
    return [t.detach() for t in tree.flatten(result).tensors]


def snapshot(result: Any) -> Outputs:
    """Copy the tensors of a result."""
    return [t.clone() for t in outputs(result)]


def equal(some: Outputs, others: Outputs) -> bool:
    """Return whether results are the same, bit for bit and without NaN."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def survived(kept: Any, before: Outputs) -> bool:
    """Return True if a result still holds its values after the next call."""
    try:
        return equal(snapshot(kept), before)
    except RuntimeError:
        # Inductor's CUDA graphs refuse to give out what the next call has overwritten.
        return False


@torch.no_grad()
def make_reference(
    workload: Workload, generator: torch.Generator, seconds: float = SECONDS
) -> Reference:
    """Run the callable, on copies, in its own dtype and in float64, on the inputs and on draws.

    Args:
        workload: the callable with its arguments.
        generator: of the draws; equal seeds give equal draws.
        seconds: draws that are not begun by then are left out.

    Raises:
        ArgumentError: OL401, the callable returns no tensor.
        Exception: the callable's own, on the arguments given.
    """
    start = time.monotonic()
    given = workload.copy()
    result = given()
    first = snapshot(result)
    if not first:
        why = "there is nothing to check or to wait for"
        fix = "return the tensors that the call computes"
        what = f"the callable returns no tensor, but {describe_type(result)}"
        where = getattr(workload.fn, "__qualname__", type(workload.fn).__qualname__)
        raise ArgumentError("OL401", what, where=where, why=why, fix=fix)
    again = snapshot(Workload(given.fn, *workload.copy_inputs())())
    base = max(_tolerance(t.dtype) for t in [*workload.tensors(), *first])
    trial = _DrawRuns(workload, given.fn, first, base, generator)
    repeats = judge(again, Case(((), {}), first, first), base)
    cases, skipped = [trial.given()], list[tuple[str, str]]()
    for draw, inputs in draws(workload, generator):
        if time.monotonic() - start > seconds:
            skipped.append((draw.name, f"{seconds:g} s were up"))
            continue
        if repeats.wrong is not None and len(cases) > 1:
            break  # nothing is checked: the second is there to see which results survive
        try:
            cases.append(trial.case(draw, inputs))
        except _NoCase as error:
            skipped.append((draw.name, str(error)))
    refused = skipped[0][1] if skipped and len(cases) == 1 else None
    return Reference(
        "float64" if trial.why is None else "eager",
        trial.why,
        tuple(cases),
        cases[0].tolerance,
        repeats.wrong is None,
        refused,
        tuple(skipped),
    )


class _NoCase(Exception):
    """The reason why nothing can be checked on a draw."""


@dataclass(eq=False)
class _DrawRuns:
    """Runs of a callable on the inputs given and on draws.

    Attributes:
        why: the reason if there is no reference in float64, or None.
    """

    _workload: Workload
    _fn: Callable[..., Any]
    _first: Outputs
    _base: float
    _generator: torch.Generator
    _wide: Callable[..., Any] | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        self._host = self._on_the_host()
        try:
            with default_dtype(torch.float64):
                wide = self._workload.in_float64()
                self._in_float64 = snapshot(wide())
            self._wide = wide.fn
        except Exception as error:  # noqa: BLE001  any code of the user's may refuse float64
            self.why = said(error)
            self._in_float64 = self._first

    def given(self) -> Case:
        return self._made("given", self._workload.copy_inputs(), self._first, self._in_float64)

    def case(self, draw: Draw, inputs: Inputs) -> Case:
        """Run eager and the reference on a draw.

        Raises:
            _NoCase: the callable refuses it, or its result there says nothing.
        """
        if not draw.within:
            self._try_on_the_host(inputs)
        eager = self._run(self._fn, inputs)
        self._only_as_wild(eager)
        reference = eager
        if self._wide is not None:
            with default_dtype(torch.float64):
                reference = self._run(self._wide, each_tensor(inputs, widen))
            self._only_as_wild(reference)
        case = self._made(draw.name, inputs, eager, reference)
        if draw is not DRAWS[0]:
            given = self._workload.args, self._workload.kwargs
            near = nudged(draw, inputs, given, self._generator)
            if not draw.within:
                self._try_on_the_host(near)
            beside = self._run(self._fn, near)
            if judge(beside, replace(case, reference=eager), case.tolerance).wrong is not None:
                raise _NoCase("the last bits of the inputs decide over the result")
        return case

    def _made(self, name: str, inputs: Inputs, eager: Outputs, reference: Outputs) -> Case:
        scale = LEAST_SCALE * (norm(self._in_float64) or norm(self._first))
        case = Case(inputs, eager, reference, name, scale=scale if math.isfinite(scale) else 0.0)
        own_error = judge(eager, case, math.inf).error
        finite = own_error if math.isfinite(own_error) else 0.0
        return replace(case, tolerance=max(self._base, EAGER_FACTOR * finite))

    def _run(self, fn: Callable[..., Any], inputs: Inputs) -> Outputs:
        try:
            return snapshot(Workload(fn, *each_tensor(inputs, clone))())
        except Exception as error:
            raise _NoCase(said(error)) from error

    def _on_the_host(self) -> Workload | None:
        """Copy the callable to the CPU; None if it is there already or cannot run there."""
        if self._workload.device.type == "cpu":
            return None
        try:
            host = self._workload.on(HOST)
            host()
        except Exception:  # noqa: BLE001  code that names a device, kernels for a GPU alone
            return None
        return host

    def _try_on_the_host(self, inputs: Inputs) -> None:
        """Let a CPU say whether an index or a probability would be out of range.

        On a GPU that ends all work of the process.
        """
        if self._workload.device.type == "cpu":
            return
        if self._host is None:
            raise _NoCase("it is beyond the values given, and the callable does not run on a CPU")
        self._run(self._host.fn, each_tensor(inputs, lambda t: to(t, HOST)))

    def _only_as_wild(self, found: Outputs) -> None:
        """Refuse results that are not finite, where those of the inputs given are."""
        for pair in zip(found, self._first, strict=False):
            mine, first = map(_wide, pair)
            for what, test in (("NaN", torch.isnan), ("infinity", torch.isinf)):
                if bool(test(mine).any()) and not bool(test(first).any()):
                    raise _NoCase(f"eager's result has {what} in it")


def _wide(t: Tensor) -> Tensor:
    """Return floats in float64: those of 8 bits are asked nothing as they are."""
    return t.double() if t.is_floating_point() else t


def said(error: BaseException) -> str:
    """Write an exception in a line; an error of ours with the user's line."""
    place = f", at {error.where}" if isinstance(error, GraphError) and error.where else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"


def _tolerance(dtype: torch.dtype) -> float:
    if dtype.is_complex:
        dtype = dtype.to_real()
    if not dtype.is_floating_point:
        return 0.0
    return TOLERANCE.get(dtype, COARSEST)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def judge(found: Outputs, case: Case, tolerance: float) -> Verdict:
    """Compare results with the reference, and in form with eager's."""
    eager, reference = case.eager, case.reference
    if len(found) != len(eager):
        return Verdict(math.nan, f"returned {len(found)} tensors where eager returns {len(eager)}")
    for i, (mine, theirs) in enumerate(zip(found, eager, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return Verdict(
                math.nan, f"output {i} is {_form(mine)} where eager's is {_form(theirs)}"
            )
    inexact = [i for i, t in enumerate(eager) if is_inexact(t)]
    mine, theirs = [found[i] for i in inexact], [reference[i] for i in inexact]
    error = relative_error(mine, theirs, case.scale)
    for i in set(range(len(eager))) - set(inexact):
        off = int(((found[i] != eager[i]) & (found[i] != reference[i])).sum())
        if off:
            return Verdict(error, f"{off} of {found[i].numel()} values of output {i} differ")
    if math.isnan(error):
        return Verdict(error, "NaN in the result")
    if error > tolerance:
        return Verdict(error, f"relative error {error:.1e} is above {tolerance:.1e}")
    return Verdict(error, None)


def _form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def message_of(error: BaseException | str) -> str:
    """Return the text of an exception, whose class may fail to make it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  code of the user's
        return "its message cannot be made"


def first_line(error: BaseException | str) -> str:
    """Pick the first line of a message that is not empty."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
