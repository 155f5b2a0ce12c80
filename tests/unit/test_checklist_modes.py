"""Steps that change no number: modes, layout, settings, the launch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist.build import build
from onelaunch.tools.checklist.step import Step
from onelaunch.tools.checklist.steps import BY_NAME, STEPS
from onelaunch.tools.checklist.subject import NotPossible, Setting, Subject
from tests.unit.checklist_steps import contents, refusal, same, take


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU())


X = torch.randn(2, 3, 8, 8)


def test_eval_sets_the_mode_of_the_copy_alone() -> None:
    model = net()
    before = contents(model)
    built = take(model, (X,), "eval")
    assert built.did == {"eval": "5 of 5 modules were in train mode"}
    assert torch.equal(built.call(X), built.call(X))
    assert model.training
    assert same(model, before)


LINEAR = nn.Linear(32, 16)
ROWS = torch.randn(2, 32)
REFUSED: list[tuple[str, Any, Tensor, str]] = [
    ("eval", net().eval(), X, "every module is in eval mode already"),
    ("eval", torch.sin, X, "no module"),
    ("channels-last", nn.Linear(8, 8), X, "it has no 2-D convolution"),
    ("merge-branches:parallel", nn.Sequential(LINEAR, nn.Linear(16, 16)), ROWS, "no two layers that"
     " could be one read the same input"),
    ("pad-channels", nn.Sequential(nn.Linear(32, 8)), ROWS, "multiples of 8"),
    ("pad-channels", nn.Linear(32, 10), ROWS, "itself"),
    ("half:bf16", nn.Linear(32, 16).double(), ROWS.double(), "nothing is in float32"),
    ("half:bf16", nn.Linear(32, 16).bfloat16(), ROWS, "bfloat16 already"),
    ("int8:dynamic", nn.Conv1d(4, 8, 3), torch.randn(2, 4, 9), "no nn.Linear"),
    ("int8:dynamic", torch.sin, ROWS, "no module"),
    ("cudnn-benchmark", nn.Conv2d(3, 16, 3), X, "GPU"),
    ("tf32", LINEAR, ROWS, "GPU"),
    ("fp8:dynamic", LINEAR, ROWS, "GPU"),
    ("inductor:max-autotune", LINEAR, ROWS, "GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "x", "why"), REFUSED)
def test_a_step_that_is_not_possible_says_why(name: str, fn: Any, x: Tensor, why: str) -> None:
    assert why in refusal(fn, (x,), name)


def test_inference_mode_is_in_force_during_the_call_alone() -> None:
    seen: list[bool] = []

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_inference_mode_enabled())
            return self.inner(x)

    model = Asks()
    result = take(model, (X,), "inference-mode").call(X)
    assert seen == [True]
    assert not result.requires_grad
    assert not torch.is_inference_mode_enabled()
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(result, model(X))


@pytest.mark.parametrize("kind", ["lambda", "method", "partial"])
def test_modules_behind_a_callable_are_found(kind: str) -> None:
    model = net()
    calls: dict[str, Any] = {
        "lambda": lambda x: model(x) * 2,
        "method": model.forward,
        "partial": functools.partial(model),
    }
    built = take(calls[kind], (X,), "eval")
    assert torch.equal(built.call(X), built.call(X))
    assert model.training


def test_channels_last_gives_results_as_they_were_laid_out() -> None:
    model = net().eval()
    built = take(model, (X,), "channels-last")
    result = built.call(X)
    assert result.is_contiguous()
    torch.testing.assert_close(result, model(X))
    inner: Any = built.call
    assert inner.fn[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()


def test_channels_last_leaves_inputs_that_are_so() -> None:
    model, x = net().eval(), X.contiguous(memory_format=torch.channels_last)
    result = take(model, (x,), "channels-last").call(x)
    assert result.stride() == model(x).stride()


STATE = {"a": 1, "b": 1}
SEEN: list[dict[str, int]] = []


def setting(name: str) -> Setting:
    return Setting(lambda: STATE[name], lambda value: STATE.update({name: value}), 2)


def take_settings(subject: Subject) -> None:
    subject.settings += [setting("a"), setting("b")]


def call(x: Tensor) -> Tensor:
    SEEN.append(dict(STATE))
    if x.numel() == 0:
        raise LookupError("nothing")
    return x


def test_settings_are_put_back_also_after_an_exception() -> None:
    built = build(Workload(call, (X,)), [Step("settings", "", take_settings)])
    built()
    assert SEEN == [{"a": 2, "b": 2}]
    assert STATE == {"a": 1, "b": 1}
    with pytest.raises(LookupError):
        built.call(torch.ones(0))
    assert STATE == {"a": 1, "b": 1}


@pytest.mark.gpu
def test_settings_of_a_gpu_are_put_back() -> None:
    model, x = net().eval().cuda(), X.cuda()
    before = _flags()
    built = take(model, (x,), "cudnn-benchmark", "tf32", "graph", "inference-mode")
    built.warm()
    assert _flags() == before
    torch.testing.assert_close(built.call(x), model(x), atol=1e-2, rtol=1e-2)


def _flags() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()


def test_one_launch_records_and_gives_fresh_results() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    built = take(model, (X,), "inference-mode", "graph")
    built.warm()
    within: Any = built.call
    assert len(within.fn.recordings) == 1
    first = built.call(X)
    kept = first.clone()
    built.call(-X)
    assert torch.equal(first, kept)
    assert torch.equal(first, model(X))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            built.call(X)
    assert len(within.fn.recordings) <= 2  # one for inference mode around it


def test_inductor_compiles_casts_too() -> None:
    """One graph without a break, around whose edges the dtype is the user's."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(4, 32)
    built = take(model, (x,), "inference-mode", "half:bf16", "inductor:default")
    result = built.call(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, model(x), atol=3e-2, rtol=3e-2)


def test_steps_have_names_of_their_own_and_say_what_they_are() -> None:
    assert len(BY_NAME) == len(STEPS)
    assert all(step.title for step in STEPS)
    compared = {step.name for step in STEPS if not step.rounds}
    assert compared == {
        *("eval", "inference-mode", "merge-branches:parallel", "channels-last", "pad-channels"),
        *("inductor:default", "graph"),
    }


def test_not_possible_is_no_mistake_of_the_users() -> None:
    assert not issubclass(NotPossible, (TypeError, ValueError, RuntimeError))
