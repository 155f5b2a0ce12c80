"""Programs as people write them, through a diagnosis: it ends, and leaves all as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch import testing

KEPT: list[Any] = []


def codes(diagnosis: ol.Diagnosis) -> set[str]:
    return {f.code for f in diagnosis.findings if f.severity != "slow"}


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        KEPT.append(y.detach().mean())
        return y


def test_a_list_of_the_module_is_left_as_it_was() -> None:
    KEPT.clear()
    (found,) = ol.diagnose(Keeping().eval(), (torch.ones(3),)).only({"OL105", "OL309"}).findings
    assert found.codes == ("OL105", "OL309")
    assert KEPT == []


def test_where_dynamo_fails_half_way_no_mode_stays() -> None:
    """A view in an inference mode is more than AOTAutograd takes, and split asks it."""

    def f(x: Tensor) -> Any:
        with torch.inference_mode():
            y = x[:, 1]
        return y.sum().tolist()

    assert codes(ol.diagnose(f, (torch.ones(2, 6),))) == {"OL101"}
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.zeros(2) + 1, torch.ones(2))


def test_a_function_keeps_its_attributes() -> None:
    def counted(x: Tensor) -> Tensor:
        counted.calls += 1  # type: ignore[attr-defined]
        return x * 2

    counted.calls = 0  # type: ignore[attr-defined]
    found = ol.diagnose(counted, (torch.ones(3),))
    assert not [f for f in found.findings if f.severity == "blocks-capture"]
    assert counted.calls == 0  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix() -> None:
    matrix = torch.eye(4).to_sparse_csr()
    assert "OL109" in codes(ol.diagnose(lambda x: matrix @ x, (torch.ones(4, 4),)))


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse")
@pytest.mark.parametrize(
    ("bad", "good", "code"),
    [
        pytest.param(lambda x: (x * 2).to_sparse(), lambda x: x * 2, "OL102", id="sparse result"),
        pytest.param(
            lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0),
            lambda x: x[:2].clone(),
            "OL109",
            id="nested tensor",
        ),
        pytest.param(
            lambda x: torch.where(x > 3)[0],
            lambda x: torch.where(x > 3, x, 0.0),
            "OL102",
            id="mask inside an operation",
        ),
    ],
)
def test_what_only_a_run_sees_blocks(bad: Any, good: Any, code: str) -> None:
    x = torch.arange(16.0).view(4, 4)
    blocked, clean = ol.diagnose(bad, (x,)), ol.diagnose(good, (x,))
    assert blocked.replayed is False
    assert {f.code for f in blocked.findings if f.severity == "blocks-capture"} == {code}
    assert all("source" not in f.found_by for f in blocked.findings if f.code == code)
    assert clean.replayed
    assert not [f for f in clean.findings if f.severity == "blocks-capture"]


def test_a_copy_of_pageable_memory_into_a_tensor_of_the_device() -> None:
    testing.install()

    def copied(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(torch.rand(4, device="cpu"))

    def drawn(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(torch.rand_like(x))

    x = torch.ones(4, device="tape")
    (found,) = [f for f in ol.diagnose(copied, (x,)).findings if f.code == "OL103"]
    assert found.source.startswith("return torch.empty_like(x).copy_(torch.rand(4")
    assert set(found.found_by) == {"run", "capture"}
    assert codes(ol.diagnose(drawn, (x,))) == set()


def test_torchscript() -> None:
    assert codes(ol.diagnose(torch.jit.script(nn.ReLU()), (torch.ones(4),))) == set()


def test_a_cache_that_is_full_before_the_calls_end() -> None:
    class Cache:
        def __init__(self) -> None:
            self.rows, self.used = torch.zeros(6, 3), 0

        def put(self, row: Tensor) -> Tensor:
            if self.used == len(self.rows):
                raise IndexError("full")
            self.rows[self.used] = row
            self.used += 1
            return self.rows.sum(0)

    cache = Cache()
    ol.diagnose(lambda x, cache: cache.put(x), (torch.ones(3), cache))
    assert cache.used == 0
    assert not cache.rows.any()


def test_a_seed_that_nothing_is_drawn_after() -> None:
    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x * 2

    before = torch.get_rng_state()
    (found,) = [f for f in ol.diagnose(seeded, (torch.ones(3),)).findings if f.code == "OL106"]
    assert found.source == "torch.manual_seed(0)"
    assert torch.equal(torch.get_rng_state(), before)


def clip(grad: Tensor) -> Tensor:
    if grad.norm() > 1:
        return grad / grad.norm()
    return grad


def check(module: nn.Module, before: Any, after: Any) -> None:
    assert not torch.isnan(after[0]).any()


def note(module: nn.Module, args: Any, result: Tensor) -> None:
    KEPT.append(result.shape)


def told(diagnosis: ol.Diagnosis) -> set[tuple[str, str]]:
    return {(f.code, f.source) for f in diagnosis.findings if f.severity != "slow"}


def test_faults_in_hooks_of_a_step_are_found_at_their_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight.register_hook(clip)
    model[1].register_full_backward_hook(check)
    optimizer.register_step_post_hook(lambda *_: print(first.bias.sum().item()))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = told(ol.diagnose(step, (torch.ones(2, 4),)))
    assert {source for code, source in found if code == "OL101"} == {
        "if grad.norm() > 1:",
        "assert not torch.isnan(after[0]).any()",
        "optimizer.register_step_post_hook(lambda *_: print(first.bias.sum().item()))",
    }


def test_hooks_that_are_no_fault_of_a_line_have_that_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.ReLU())
    model[0].register_full_backward_hook(check)
    found = ol.diagnose(model, (torch.ones(2, 4),))
    (blocked,) = [f for f in found.findings if f.code == "OL112"]
    assert blocked.source == "def check(module: nn.Module, before: Any, after: Any) -> None:"
    assert (blocked.file.rpartition("/")[2], blocked.column) == ("test_doctor_programs.py", 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.ReLU())
    model[0].register_forward_hook(note)
    model[1].register_forward_pre_hook(lambda module, args: KEPT.append(len(args)))
    found = told(ol.diagnose(model.eval(), (torch.ones(2, 4),)))
    assert {source for code, source in found if code == "OL308"} == {
        "def note(module: nn.Module, args: Any, result: Tensor) -> None:",
        "model[1].register_forward_pre_hook(lambda module, args: KEPT.append(len(args)))",
    }
    KEPT.clear()


class InPlace(nn.Module):
    """A module whose first layer writes its argument, and needs what it wrote in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return self.layer(x)


@pytest.mark.parametrize("training", [True, False])
def test_an_argument_that_an_operation_made_is_written_in_place(training: bool) -> None:
    """A copy that is a leaf would raise where the caller's tensor does not."""
    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True) * 2
    model, made_by = InPlace().train(training), x.grad_fn
    (found,) = ol.diagnose(model, (x,)).only({"OL113", "OL505"}).findings
    assert found.codes == ("OL113", "OL505")
    assert found.source == "x.relu_()"
    assert x.grad_fn is made_by
    assert x.tolist() == [2.0, -2.0, 4.0]
    assert all(p.grad is None for p in model.parameters())
