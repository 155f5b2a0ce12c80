"""What counts as right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from onelaunch.bench.reference import Case, judge, make_reference, relative_error
from onelaunch.bench.workload import Workload


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_relative_error_is_over_all_outputs_together() -> None:
    found = [torch.tensor([3.0]), torch.tensor([4.5])]
    reference = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert relative_error(found, reference) == pytest.approx(0.1)


def test_equal_results_have_no_error() -> None:
    for t in (torch.zeros(3), torch.empty(0), torch.tensor([math.inf, 1.0])):
        assert relative_error([t], [t]) == 0.0


@pytest.mark.parametrize("found", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(found: float) -> None:
    reference = [torch.tensor([1.0, 2.0])]
    wrong = [torch.tensor([1.0, found])]
    verdict = judge(wrong, Case(((), {}), reference, reference), math.inf)
    assert not verdict.error <= 1e30
    if math.isnan(found):
        assert verdict.wrong == "NaN in the result"


def test_nan_does_not_pass_even_where_the_reference_has_it() -> None:
    t = [torch.tensor([math.nan])]
    assert judge(t, Case(((), {}), t, t), 1.0).wrong is not None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([torch.zeros(3)], "returned 1 tensors where eager returns 2"),
        ([torch.zeros(2), torch.arange(3)], "output 0 is float32[2] where eager's is float32[3]"),
        (
            [torch.zeros(3).double(), torch.arange(3)],
            "output 0 is float64[3] where eager's is float32[3]",
        ),
        ([torch.zeros(3), torch.tensor([0, 1, 1])], "1 of 3 values of output 1 differ"),
        ([torch.ones(3), torch.arange(3)], "relative error inf is above 1.0e-04"),
    ],
)
def test_reasons(found: list[Tensor], reason: str) -> None:
    eager = [torch.zeros(3), torch.arange(3)]
    assert judge(found, Case(((), {}), eager, eager), 1e-4).wrong == reason


def test_integers_may_agree_with_either_reference() -> None:
    case = Case(((), {}), [torch.tensor([1])], [torch.tensor([2])])
    assert [judge([torch.tensor([n])], case, 1e-4).wrong is None for n in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_float64_and_two_sets_of_inputs() -> None:
    reference = make_reference(Workload(nn.Linear(4, 2), (torch.randn(3, 4),)), generator())
    assert reference.kind == "float64"
    assert [case.reference[0].dtype for case in reference.cases] == [torch.float64] * 2
    assert reference.repeatable
    assert reference.tolerance == 1e-4


def test_tolerance_follows_the_coarsest_dtype_and_eager() -> None:
    half = Workload(nn.Linear(4, 2).bfloat16(), (torch.randn(3, 4).bfloat16(),))
    assert make_reference(half, generator()).tolerance >= 5e-2

    def cancel(x: Tensor) -> Tensor:
        return (x + 1e4) - 1e4

    x = torch.rand(100) * 1e-2
    assert make_reference(Workload(cancel, (x,)), generator()).tolerance > 1e-2


def test_eager_is_the_reference_where_float64_does_not_run() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return x + 1

    reference = make_reference(Workload(picky, (torch.zeros(2),)), generator())
    assert (reference.kind, reference.why) == ("eager", "TypeError: float32 only")


def test_given_inputs_alone_where_random_ones_are_refused() -> None:
    given = torch.eye(3)

    def picky(x: Tensor) -> Tensor:
        if not torch.equal(x.float(), given):
            raise ValueError("not positive definite")
        return x + 1

    reference = make_reference(Workload(picky, (given.clone(),)), generator())
    assert len(reference.cases) == 1
    assert reference.refused == "ValueError: not positive definite"


def test_a_random_callable_cannot_be_checked() -> None:
    reference = make_reference(Workload(nn.Dropout(0.5), (torch.ones(100),)), generator())
    assert not reference.repeatable


def test_the_callables_own_error_comes_through() -> None:
    def broken(x: Tensor) -> Tensor:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        make_reference(Workload(broken, (torch.zeros(1),)), generator())


def test_the_default_dtype_is_as_before() -> None:
    make_reference(Workload(torch.relu, (torch.zeros(1),)), generator())
    assert torch.get_default_dtype() is torch.float32
