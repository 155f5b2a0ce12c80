"""`compare` with engines made for the purpose: what happens to each, and in what order."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.errors import GraphError
from onelaunch.tools.bench import ENGINES, Comparison, Row, Timing, compare
from onelaunch.tools.bench.comparison import DEFAULT
from onelaunch.tools.bench.engines.engine import Built, Mode, snippet
from onelaunch.tools.bench.isolated import Isolated
from onelaunch.tools.bench.workload import Workload

X = torch.randn(4, 8)


@dataclass(frozen=True)
class Made:
    """An engine that does what a test wants."""

    name: str
    make: Callable[[Workload], Built]
    why_missing: str | None = None
    mode: Mode = "no_grad"

    @property
    def title(self) -> str:
        return self.name

    def missing(self, device: torch.device) -> str | None:
        return self.why_missing

    def build(self, workload: Workload) -> Built:
        return self.make(workload)

    def code(self, workload: Workload) -> str:
        return snippet(f"y = model({workload.call_text})")


def as_it_is(workload: Workload) -> Built:
    return Built(workload.fn)


def raises(error: BaseException) -> Callable[..., Any]:
    def raising(*_: object) -> Any:
        raise error

    return raising


def linear() -> nn.Module:
    return nn.Linear(8, 3).eval()


def run(*engines: Any, fn: Callable[..., Any] | None = None, seconds: float = 0.02) -> Comparison:
    return compare(fn or linear(), (X,), engines=list(engines), seconds=seconds)


def test_a_failing_engine_is_a_row_and_the_run_goes_on() -> None:
    closed: list[str] = []

    def fails_later(workload: Workload) -> Built:
        calls = 0

        def call(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 20:  # when it is timed
                raise RuntimeError("tired\nof it")
            return workload.fn(x)

        return Built(call, close=lambda: closed.append("later"))

    result = run(
        Made("broken", raises(ValueError("cannot build"))),
        Made("tired", fails_later),
        Made("elsewhere", as_it_is, why_missing="needs another machine"),
        Made("fine", as_it_is),
    )
    assert [(row.engine, row.status, row.reason) for row in result.rows] == [
        ("broken", "failed", "ValueError: cannot build"),
        ("tired", "failed", "RuntimeError: tired"),
        ("elsewhere", "missing", "needs another machine"),
        ("fine", "ok", None),
    ]
    assert closed == ["later"]
    assert result.best is result["fine"]


def test_a_package_that_does_not_import_is_a_row() -> None:
    class Broken(Made):
        def missing(self, device: torch.device) -> str | None:
            raise OSError("libtvm.so: undefined symbol")

    broken = Broken("broken", as_it_is)
    isolated = Isolated(broken, "nowhere:x", worker=("nothing",))
    why = "its package does not work here: OSError: libtvm.so: undefined symbol"
    rows = run(broken, isolated, Made("fine", as_it_is)).rows
    assert [(row.status, row.reason) for row in rows] == [("missing", why)] * 2 + [("ok", None)]


@pytest.mark.parametrize(
    ("result_of", "reason"),
    [
        (lambda y: y * 1.01, "relative error"),
        (lambda y: y * math.nan, "NaN in the result"),
        (lambda y: y.double(), "float64[4, 3] where eager's is float32[4, 3]"),
        (lambda y: (y, y), "returned 2 tensors where eager returns 1"),
    ],
)
def test_a_wrong_engine_is_not_timed(result_of: Callable[[Tensor], Any], reason: str) -> None:
    def off(workload: Workload) -> Built:
        return Built(lambda x: result_of(workload.fn(x)))

    row = run(Made("off", off)).rows[0]
    assert row.status == "wrong"
    assert row.reason is not None
    assert reason in row.reason
    assert row.wall is None


def test_a_comparison_is_a_row_of_each_engine() -> None:
    result = Comparison("w", (Row("a", "A", "ok"), Row("b", "B", "failed")))
    assert list(result) == list(result.rows)
    assert len(result) == 2
    assert Comparison("w", ())


def test_an_engine_that_forgets_its_inputs_is_wrong() -> None:
    def frozen(workload: Workload) -> Built:
        result = workload()
        return Built(lambda x: result)

    assert run(Made("frozen", frozen)).wrong


def test_overwritten_results_are_seen_and_not_named_best() -> None:
    def static(workload: Workload) -> Built:
        out = workload()
        return Built(lambda x: out.copy_(workload.fn(x)), bare=lambda: None)

    result = run(Made("fresh", as_it_is), Made("static", static))
    assert [row.fresh_output for row in result.rows] == [True, False]
    assert result.best is result["fresh"]
    assert result.fastest is result["static"]


def test_rounds_are_interleaved_and_take_turns_to_be_first() -> None:
    order: list[str] = []

    def noted(name: str) -> Made:
        def make(workload: Workload) -> Built:
            def bare() -> None:
                if not order or order[-1] != name:
                    order.append(name)
                torch.zeros(200_000).sort()

            return Built(workload.fn, bare=bare)

        return Made(name, make)

    run(noted("a"), noted("b"), noted("c"), seconds=0.3)
    # The first of each is its estimate.
    assert "".join(order[3:]).startswith("abcacab".replace("acab", "bca"))


def test_state_and_random_numbers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    x = X.clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    compare(model, (x,), engines=["eager", "no_grad", "inference_mode"], seconds=0.02)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(x, X)
    assert model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        assert run("no_grad").rows[0].wall is not None
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_what_changes_from_call_to_call_is_timed_but_not_checked() -> None:
    result = run("no_grad", fn=nn.Dropout(0.5).train())
    assert result.rows[0].status == "unchecked"
    assert result.rows[0].wall is not None
    assert result.best is None
    assert ".eval()" in result.remarks[0]


def test_an_interrupt_gives_the_rows_so_far() -> None:
    result = run(
        Made("done", as_it_is),
        Made("stopper", raises(KeyboardInterrupt())),
        Made("later", as_it_is),
    )
    assert result.interrupted
    assert [row.status for row in result.rows] == ["ok", "interrupted", "interrupted"]
    assert result.rows[0].wall is not None
    assert result.rows[0].noisy
    assert result.rows[1].reason == "stopped while it was built or checked"
    assert result.rows[2].reason == "stopped before its turn"


def test_a_second_interrupt_stops_at_once() -> None:
    def stops(workload: Workload) -> Built:
        return Built(workload.fn, bare=raises(KeyboardInterrupt()))

    result = run(Made("done", stops))
    assert result.interrupted
    assert result.rows[0].status == "interrupted"


def test_an_interrupt_while_timing_keeps_what_was_timed() -> None:
    def on_progress(text: str, part: float) -> None:
        assert 0 <= part <= 1
        if text == "timing, round 2":
            raise KeyboardInterrupt

    result = compare(linear(), (X,), engines=["no_grad"], on_progress=on_progress)
    assert result.interrupted
    assert result.rows[0].status == "ok"
    assert result.rows[0].wall is not None
    assert result.rows[0].noisy


def test_warnings_become_notes_and_deprecations_do_not() -> None:
    def warns(workload: Workload) -> Built:
        warnings.warn("ran eagerly", UserWarning, stacklevel=1)
        warnings.warn("", UserWarning, stacklevel=1)
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
        return Built(workload.fn, notes=lambda: ["5 nodes"])

    notes = ("5 nodes", "UserWarning: ran eagerly", "UserWarning: no message")
    assert run(Made("warns", warns)).rows[0].notes == notes


BROKEN_CALLS: list[int] = []  # a global: what a function closes over is copied


def test_the_callables_own_exception_comes_through_once() -> None:
    def broken(x: Tensor) -> Tensor:
        BROKEN_CALLS.append(1)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run("eager", fn=broken)
    assert BROKEN_CALLS == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(linear(), (X,), seconds=0), "seconds=0"),
        (lambda: compare(linear(), (X,), seconds=math.nan), "seconds=nan"),
        (lambda: compare(linear(), (X,), engines=["eagre"]), "no engine is called eagre"),
        (lambda: compare(linear(), (X,), engines="eager"), "engines='eager'"),
        (lambda: compare(linear(), (X,), engines=[]), "engines=[]"),
        (lambda: compare(linear(), (X,), engines=cast(Any, [3])), "engines=[3]"),
        (lambda: compare(linear(), (X,), engines=cast(Any, 7)), "engines=7"),
        (lambda: compare(lambda x: 3, (X,), engines=["eager"]), "returns no tensor"),
    ],
)
def test_bad_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphError) as raised:
        call()
    assert raised.value.code == "OL401"
    assert message in str(raised.value)
    assert all(part in str(raised.value) for part in ("where:", "why:", "fix:"))


every_tool = pytest.mark.parametrize("tool", [ol.compare, ol.diagnose, ol.optimize, ol.profile])


@every_tool
def test_every_tool_lets_the_callables_own_exception_through(tool: Any) -> None:
    def broken(x: Tensor) -> Tensor:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tool(broken, (X,))


@every_tool
def test_every_tool_names_a_call_that_is_none(tool: Any) -> None:
    for given, message in (
        ((3,), "int is not callable"),
        ((linear(), X), "args is a Tensor, not a tuple"),
        ((linear(), (X,), [1]), "kwargs is a list"),
    ):
        with pytest.raises(ol.ArgumentError, match=message) as raised:
            tool(*given)
        assert raised.value.code == "OL401"


@every_tool
def test_every_tool_takes_a_call_in_one_form_and_names_it_for_another(tool: Any) -> None:
    """``(fn, args, kwargs)``: not ``fn`` with the arguments behind it."""
    for wrong in (
        lambda: tool(linear(), X),
        lambda: tool(linear(), X, X, X, X),
        lambda: tool(linear(), (X,), mask=X),
        lambda: tool(linear(), (X,), X),
        lambda: tool(),
    ):
        with pytest.raises(ol.ArgumentError, match=r"model, \(x,\)") as raised:
            wrong()
        assert raised.value.code == "OL401"
        assert tool.__name__ in str(raised.value)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    result = compare(linear(), (torch.randn(shape),), engines=["no_grad"], seconds=0.01)
    assert result.rows[0].status == "ok"
    assert result.rows[0].error == 0.0


def test_inputs_and_results_in_containers() -> None:
    def fn(pair: dict[str, Tensor], *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        return pair["a"] * scale, {"sum": pair["a"] + pair["b"]}

    result = compare(
        fn, ({"a": X, "b": X},), {"scale": 2.0}, engines=["eager", "onelaunch"], seconds=0.01
    )
    assert [row.status for row in result.rows] == ["ok", "ok"], result.rows


@pytest.mark.thorough
def test_a_model_too_large_to_copy_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("no_grad").remarks == ()
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    result = run("no_grad")
    assert result.rows[0].status == "ok"
    assert "share the parameters" in result.remarks[0]


def test_eager_and_the_best_engine_have_a_timeline() -> None:
    def slower(workload: Workload) -> Built:
        def call(x: Tensor) -> Tensor:
            for _ in range(50):
                workload.fn(x)
            return workload.fn(x)

        return Built(call)

    result = run("eager", Made("slower", slower))
    assert [line.engine for line in result.timelines] == ["eager"]
    assert "aten::addmm" in {span.name for span in result.timelines[0].spans}
    best = run(Made("best", as_it_is), Made("slower", slower))
    assert [line.engine for line in best.timelines] == ["best"]
    assert Comparison.from_json(best.to_json()) == best


def test_an_engine_that_cannot_be_traced_keeps_its_times() -> None:
    """It goes wrong under a profiler alone."""

    def shy(workload: Workload) -> Built:
        def call(x: Tensor) -> Tensor:
            if torch.autograd._profiler_enabled():
                raise RuntimeError("not now")
            return workload.fn(x)

        return Built(call)

    result = run(Made("shy", shy))
    assert result["shy"].status == "ok"
    assert result["shy"].wall is not None
    assert result.timelines == ()


def test_an_infinite_error_is_json_too() -> None:
    def huge(workload: Workload) -> Built:
        return Built(lambda x: workload.fn(x) * math.inf)

    result = run(Made("huge", huge))
    assert Comparison.from_json(result.to_json()) == result


def test_lookup_by_engine() -> None:
    rows = (Row("a", "A", "ok", wall=Timing(1.0, 0.0, 1)), Row("b", "B", "missing"))
    comparison = Comparison("w", rows)
    assert comparison["b"].title == "B"
    with pytest.raises(KeyError):
        comparison["c"]


def test_every_engine_has_a_name_of_its_own_and_its_code() -> None:
    workload = Workload(linear(), (X,), {"mask": X})
    assert len({engine.name for engine in DEFAULT}) == len(DEFAULT)
    for engine in ENGINES.values():
        compile(engine.code(workload), engine.name, "exec")


def test_nan_is_not_called_a_result_that_changes() -> None:
    result = compare(lambda x: x * math.nan, (X,), engines=["eager"], seconds=0.01)
    assert result["eager"].reason == "eager's own result has NaN in it"
    assert result.remarks == ("Nothing could be checked: eager's own result has NaN in it.",)


def test_a_refused_capture_names_the_line() -> None:
    result = compare(lambda x: x * x.sum().item(), (X,), engines=["onelaunch"], seconds=0.01)
    assert result["onelaunch"].reason is not None
    assert "test_bench_compare.py" in result["onelaunch"].reason


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_engine_that_froze_a_branch_is_wrong_on_a_draw(sign: float) -> None:
    def frozen(workload: Workload) -> Built:
        taken = workload.args[0].sum() > 0
        return Built(lambda x: x * 2 if taken else x)

    x = torch.rand(8) * sign
    result = compare(
        branching, (x,), engines=[Made("fine", as_it_is), Made("frozen", frozen)], seconds=0.02
    )
    assert result["fine"].status == "ok"
    assert result["frozen"].status == "wrong"
    assert result["frozen"].wall is None
    assert result["frozen"].reason is not None
    assert result["frozen"].reason.endswith("on the draw negated")
    assert "relative error" in result["frozen"].reason
    assert result.best is result["fine"]


FROZEN: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "a threshold": (lambda x: x.clamp(max=40), lambda x: x + 0),
    "a scale": (lambda x: x / (x.abs().max() + 1), lambda x: x / (X.abs().max() + 1)),
    "a sign": (lambda x: x.abs() + x, lambda x: x.abs() + X),
    "a zero": (lambda x: x + (x == 0).all(), lambda x: x + 0),
}


@pytest.mark.parametrize(("right", "wrong"), FROZEN.values(), ids=FROZEN)
def test_what_holds_for_some_values_only_is_wrong(
    right: Callable[..., Tensor], wrong: Callable[..., Tensor]
) -> None:
    result = run(
        Made("right", as_it_is), Made("wrong", lambda _: Built(wrong)), fn=right, seconds=0.02
    )
    if result.remarks:  # x == 0 hangs on the last bit, and is said not to be checked
        assert "zeros (the last bits" in result.remarks[0]
    else:
        assert [row.status for row in result.rows] == ["ok", "wrong"], result.rows


def test_an_engine_that_raises_on_a_draw_names_it() -> None:
    def small_only(workload: Workload) -> Built:
        def call(x: Tensor) -> Tensor:
            if x.abs().max() > 30:
                raise OverflowError("too large")
            return workload.fn(x)

        return Built(call)

    row = run(Made("small", small_only)).rows[0]
    assert (row.status, row.reason) == ("failed", "OverflowError: too large, on the draw large")


def test_draws_that_are_left_out_are_named() -> None:
    result = compare(torch.log, (torch.rand(4) + 1,), engines=["no_grad"], seconds=0.01)
    assert result.rows[0].status == "ok"
    assert result.remarks[0].startswith(
        "Not checked on these draws: negated (eager's result has NaN"
    )


def test_an_engine_too_slow_for_every_draw_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onelaunch.tools.bench.entry.SECONDS", 0)
    row = run(Made("slow", as_it_is)).rows[0]
    assert row.status == "ok"
    assert row.notes[0].startswith("0 s were up before the draws random, negated, ")
