"""Whether an engine's results are right, measured against float64.

Eager's own distance from the float64 result is the yardstick: rounding differs from engine to
engine, so an engine may be ten times as far off as eager, or within what its dtype allows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelaunch import tree
from onelaunch.bench.workload import Inputs, Workload
from onelaunch.errors import GraphError, kind_of

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
COARSEST = 0.2  # for the 8-bit floats, of two or three bits of mantissa
EAGER_FACTOR = 10.0

Outputs = list[Tensor]


@dataclass(frozen=True)
class Verdict:
    """The distance from the reference, and what is wrong, or None."""

    error: float
    wrong: str | None


@dataclass(frozen=True)
class Case:
    """One set of inputs with what eager and the reference make of it."""

    inputs: Inputs
    eager: Outputs
    reference: Outputs


@dataclass(frozen=True)
class Reference:
    """What engines are checked against.

    Attributes:
        kind: ``"float64"``, or ``"eager"`` where the callable cannot run in float64.
        why: why it is not float64, or None.
        cases: the inputs given, then fresh random ones if the callable takes them.
        tolerance: the largest relative error that passes.
        repeatable: whether two eager calls on the same inputs agree; nothing can be checked if not.
        refused: why only the inputs given are checked, or None.
    """

    kind: str
    why: str | None
    cases: tuple[Case, ...]
    tolerance: float
    repeatable: bool
    refused: str | None = None

    @property
    def doubt(self) -> str:
        """Why nothing can be checked, where eager does not repeat its own result."""
        floats = [t for t in self.cases[0].eager if t.is_floating_point() or t.is_complex()]
        if any(bool(t.isnan().any()) for t in floats):
            return "eager's own result has NaN in it"
        return "the callable's own results change"

    def check(self, case: Case, result: Any) -> Verdict:
        """Judge an engine's result on the inputs of a case."""
        return judge(outputs(result), case, self.tolerance)


def outputs(result: Any) -> Outputs:
    """The tensors of a result, in order, without autograd."""
    return [t.detach() for t in tree.flatten(result).tensors]


def snapshot(result: Any) -> Outputs:
    """The same on memory of their own."""
    return [t.clone() for t in outputs(result)]


@torch.no_grad()
def make_reference(workload: Workload, generator: torch.Generator) -> Reference:
    """Run the callable, on copies, in its own dtype and in float64.

    Raises:
        GraphError: OL401, the callable returns no tensor.
        Exception: whatever it raises on the arguments given.
    """
    given = workload.copy()
    result = given()
    first = snapshot(result)
    if not first:
        why = "there is nothing to check or to wait for"
        fix = "return the tensors that the call computes"
        what = f"the callable returns no tensor, but {kind_of(result)}"
        where = getattr(workload.fn, "__qualname__", type(workload.fn).__qualname__)
        raise GraphError("OL401", what, where=where, why=why, fix=fix)
    again = snapshot(Workload(given.fn, *workload.copy_inputs())())
    sets = [(workload.copy_inputs(), first)]
    fresh = workload.fresh(generator)
    refused = None
    try:
        inner = Workload(workload.copy().fn, *workload.copy_inputs(fresh))
        sets.append((fresh, snapshot(inner())))
    except Exception as error:  # noqa: BLE001  a callable may refuse random values
        refused = f"{type(error).__name__}: {first_line(error)}"
    references, why = _in_float64(workload, [inputs for inputs, _ in sets])
    kind = "float64" if why is None else "eager"
    cases = tuple(
        Case(inputs, eager, eager if references is None else references[i])
        for i, (inputs, eager) in enumerate(sets)
    )
    own_error = max(judge(case.eager, case, math.inf).error for case in cases)
    base = max(_tolerance(t.dtype) for t in [*workload.tensors(), *first])
    finite = own_error if math.isfinite(own_error) else 0.0
    repeats = judge(again, Case(cases[0].inputs, first, first), base)
    tolerance = max(base, EAGER_FACTOR * finite)
    return Reference(kind, why, cases, tolerance, repeats.wrong is None, refused)


def _tolerance(dtype: torch.dtype) -> float:
    if dtype.is_complex:
        dtype = dtype.to_real()
    if not dtype.is_floating_point:
        return 0.0
    return TOLERANCE.get(dtype, COARSEST)


def _in_float64(workload: Workload, sets: list[Inputs]) -> tuple[list[Outputs] | None, str | None]:
    """The results in float64, or why there are none."""
    results: list[Outputs] = []
    try:
        with default_dtype(torch.float64):
            for args, kwargs in sets:
                wide = Workload(workload.fn, args, kwargs).in_float64()
                results.append(snapshot(wide()))
    except Exception as error:  # noqa: BLE001  any code of the user's may refuse float64
        return None, f"{type(error).__name__}: {first_line(error)}"
    return results, None


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
    inexact = [i for i, t in enumerate(eager) if t.is_floating_point() or t.is_complex()]
    error = relative_error([found[i] for i in inexact], [reference[i] for i in inexact])
    for i in set(range(len(eager))) - set(inexact):
        off = int(((found[i] != eager[i]) & (found[i] != reference[i])).sum())
        if off:
            return Verdict(error, f"{off} of {found[i].numel()} values of output {i} differ")
    if math.isnan(error):
        return Verdict(error, "NaN in the result")
    if error > tolerance:
        return Verdict(error, f"relative error {error:.1e} is above {tolerance:.1e}")
    return Verdict(error, None)


def relative_error(found: Outputs, reference: Outputs) -> float:
    """||found - reference|| / ||reference|| over all tensors together, in float64.

    NaN wherever either holds one; equal infinities agree. Costs one synchronisation.
    """
    off = norm = 0.0
    for mine, theirs in zip(found, reference, strict=True):
        mine, theirs = _real(mine), _real(theirs)
        agree = mine == theirs
        off += float((mine - theirs).masked_fill(agree, 0).square().sum())
        norm += float(theirs.masked_fill(agree & theirs.isinf(), 0).square().sum())
    if off == 0.0:
        return 0.0
    if math.isnan(off) or math.isnan(norm):
        return math.nan
    return math.sqrt(off / norm) if norm else math.inf


def _real(t: Tensor) -> Tensor:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def _form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def first_line(error: BaseException) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
