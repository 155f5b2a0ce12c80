"""Programs as people write them, through a diagnosis: it ends, and leaves all as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

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
    assert "OL309" in codes(ol.diagnose(Keeping().eval(), torch.ones(3)))
    assert KEPT == []


def test_where_dynamo_fails_half_way_no_mode_stays() -> None:
    """A view in an inference mode is more than AOTAutograd takes, and split asks it."""

    def f(x: Tensor) -> Any:
        with torch.inference_mode():
            y = x[:, 1]
        return y.sum().tolist()

    assert codes(ol.diagnose(f, torch.ones(2, 6))) == {"OL101"}
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.zeros(2) + 1, torch.ones(2))


def test_a_function_keeps_its_attributes() -> None:
    def counted(x: Tensor) -> Tensor:
        counted.calls += 1  # type: ignore[attr-defined]
        return x * 2

    counted.calls = 0  # type: ignore[attr-defined]
    found = ol.diagnose(counted, torch.ones(3))
    assert not [f for f in found.findings if f.severity == "blocks-capture"]
    assert counted.calls == 0  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix() -> None:
    matrix = torch.eye(4).to_sparse_csr()
    assert "OL109" in codes(ol.diagnose(lambda x: matrix @ x, torch.ones(4, 4)))


def test_torchscript() -> None:
    assert codes(ol.diagnose(torch.jit.script(nn.ReLU()), torch.ones(4))) == set()


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
    ol.diagnose(lambda x, cache: cache.put(x), torch.ones(3), cache)
    assert cache.used == 0
    assert not cache.rows.any()


def test_a_seed_that_nothing_is_drawn_after() -> None:
    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x * 2

    before = torch.get_rng_state()
    (found,) = [f for f in ol.diagnose(seeded, torch.ones(3)).findings if f.code == "OL106"]
    assert found.source == "torch.manual_seed(0)"
    assert torch.equal(torch.get_rng_state(), before)
