"""What counts as right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch import testing
from onelaunch.tools.bench.draws import DRAWS, draws
from onelaunch.tools.bench.precision import relative_error
from onelaunch.tools.bench.reference import Case, Reference, judge, make_reference
from onelaunch.tools.bench.workload import Workload


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def reference_of(fn: Any, *args: Tensor, **options: Any) -> Reference:
    return make_reference(Workload(fn, args), generator(), **options)


def names(fn: Any, *args: Tensor) -> list[str]:
    return [case.name for case in reference_of(fn, *args).cases]


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
    right = [judge([torch.tensor([n])], case, 1e-4).wrong is None for n in (1, 2, 3)]
    assert right == [True, True, False]


def test_float64_and_several_sets_of_inputs() -> None:
    reference = reference_of(nn.Linear(4, 2), torch.randn(3, 4))
    assert reference.kind == "float64"
    assert [case.name for case in reference.cases] == ["given", *(d.name for d in DRAWS)]
    assert all(case.reference[0].dtype is torch.float64 for case in reference.cases)
    assert all(case.tolerance == 1e-4 for case in reference.cases)
    assert reference.skipped == ()
    assert reference.repeatable
    assert reference.tolerance == 1e-4


def test_tolerance_follows_the_coarsest_dtype_and_eager() -> None:
    half = reference_of(nn.Linear(4, 2).bfloat16(), torch.randn(3, 4).bfloat16())
    assert half.tolerance >= 5e-2

    def cancel(x: Tensor) -> Tensor:
        return (x + 1e4) - 1e4

    x = torch.rand(100) * 1e-2
    assert reference_of(cancel, x).tolerance > 1e-2


def test_eager_is_the_reference_where_float64_does_not_run() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return x + 1

    reference = reference_of(picky, torch.zeros(2))
    assert (reference.kind, reference.why) == ("eager", "TypeError: float32 only")


def test_given_inputs_alone_where_random_ones_are_refused() -> None:
    given = torch.eye(3)

    def picky(x: Tensor) -> Tensor:
        if not torch.equal(x.float(), given):
            raise ValueError("not positive definite")
        return x + 1

    reference = reference_of(picky, given.clone())
    assert len(reference.cases) == 1
    assert reference.refused == "ValueError: not positive definite"


def test_a_random_callable_cannot_be_checked() -> None:
    reference = reference_of(nn.Dropout(0.5), torch.ones(100))
    assert not reference.repeatable


def test_the_default_dtype_is_as_before() -> None:
    reference_of(torch.relu, torch.zeros(1))
    assert torch.get_default_dtype() is torch.float32


def test_draws_are_the_same_from_the_same_seed() -> None:
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    some, others = (reference_of(layer, x).cases for _ in range(2))
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a.inputs[0][0], b.inputs[0][0])
        assert torch.equal(a.eager[0], b.eager[0])


def test_draws_beyond_what_the_callable_takes_are_left_out_and_named() -> None:
    def picky(x: Tensor) -> Tensor:
        if bool((x.abs() > 50).any()):
            raise ValueError("too large")
        return x.log()

    reference = reference_of(picky, torch.rand(8) + 1)
    assert dict(reference.skipped) == {
        "negated": "eager's result has NaN in it",
        "zeros": "eager's result has infinity in it",
        "large": "ValueError: too large",
        "negative": "eager's result has NaN in it",
    }
    assert [case.name for case in reference.cases] == [
        *("given", "random", "small", "least", "greatest", "positive")
    ]
    assert reference.refused is None


def test_a_result_that_hangs_on_the_last_bit_is_no_measure() -> None:
    x = torch.randn(4, 8, generator=generator())
    reference = reference_of(lambda x: x.argmax(1), x)
    assert {name for name, _ in reference.skipped} == {"zeros", "least", "greatest"}
    assert "last bits" in reference.skipped[0][1]


def test_draws_end_when_the_time_is_up() -> None:
    reference = reference_of(torch.relu, torch.randn(4), seconds=0.0)
    assert [case.name for case in reference.cases] == ["given"]
    assert [name for name, _ in reference.skipped] == [draw.name for draw in DRAWS]
    assert reference.refused == "0 s were up"


def test_integers_keep_their_range_and_masks_their_values() -> None:
    ids = torch.tensor([[3, 5], [9, 4]])
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    ones = torch.tensor([[1.0, 0.0, 1.0]])
    flags = torch.tensor([True, False, True])
    x = torch.randn(2, 2)
    seen: list[str] = []
    for draw, (args, _) in draws(Workload(torch.add, (ids, mask, ones, flags, x)), generator()):
        seen.append(draw.name)
        assert set(args[0].unique().tolist()) <= {3, 5, 9, 4}
        assert set(args[1].unique().tolist()) <= {0.0, -math.inf}
        assert set(args[2].unique().tolist()) <= {0.0, 1.0}
        assert args[3].dtype is torch.bool
        assert not torch.equal(args[4], x)
        assert all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            for a, b in zip(args, (ids, mask, ones, flags, x), strict=True)
        )
        if draw.name == "least":
            assert (args[0] == 3).all()
            assert not args[3].any()
        if draw.name == "greatest":
            assert (args[0] == 9).all()
            assert args[3].all()
    assert seen == [draw.name for draw in DRAWS]


def test_without_floats_there_is_less_to_draw() -> None:
    embedding = nn.Embedding(10, 3)
    assert names(embedding, torch.arange(10)) == ["given", "random", "least", "greatest"]
    assert names(lambda: torch.ones(3)) == ["given", "random"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64])
def test_draws_of_every_float(dtype: torch.dtype) -> None:
    given = torch.randn(4, 4).to(dtype).t()
    for _, ((x,), _) in draws(Workload(torch.sin, (given,)), generator()):
        assert x.dtype is dtype
        assert x.stride() == (1, 4)
    assert len(names(lambda x: x + 1, given)) > 5


TRIED: list[tuple[str, bool]] = []  # a global: what a function closes over is copied


def test_on_a_device_the_cpu_tries_what_is_beyond_the_values_given() -> None:
    """An index out of range would end all work of a process on a GPU."""
    testing.install()
    TRIED.clear()
    table = torch.arange(10.0)

    def look_up(x: Tensor) -> Tensor:
        inside = bool(((x.cpu() >= 0) & (x.cpu() < 10)).all())
        TRIED.append((x.device.type, inside))
        if not inside:
            raise IndexError("out of range")
        return table.to(x.device)[x.long()]

    x = (torch.rand(20) * 9).to("tape")
    reference = reference_of(look_up, x)
    assert all(inside for device, inside in TRIED if device == "tape")
    assert any(not inside for device, inside in TRIED if device == "cpu")
    assert {"negated", "large", "negative"} <= {name for name, _ in reference.skipped}
    assert {"random", "small"} <= {case.name for case in reference.cases}


def test_what_runs_on_a_device_alone_keeps_to_the_values_given() -> None:
    testing.install()

    def picky(x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            raise TypeError("a GPU's kernel")
        return x + 1

    reference = reference_of(picky, torch.randn(8).to("tape"))
    assert [case.name for case in reference.cases] == ["given", "random", "least", "greatest"]
    assert "does not run on a CPU" in dict(reference.skipped)["negated"]


def test_rounding_around_a_result_of_zero_is_no_error() -> None:
    reference = reference_of(nn.Linear(8, 3, bias=False), torch.randn(4, 8))
    (zeros,) = (case for case in reference.cases if case.name == "zeros")
    assert not zeros.eager[0].any()
    for moved, right in ((1e-9, True), (1e-2, False)):
        verdict = judge([zeros.eager[0] + moved], zeros, zeros.tolerance)
        assert (verdict.wrong is None) is right
