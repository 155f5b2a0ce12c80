"""One thread compiles, and another graphs, replays and warms up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol
from onelaunch.call.ambient import ambient
from onelaunch.capture.compilation import _session

from .drop_in import assert_same, random_tensor, replays

pytestmark = pytest.mark.usefixtures("fresh")


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def compiling(inside: Callable[[], object]) -> None:
    """Run a function while this thread compiles, in its compiler."""
    ran: list[object] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        with _session():  # torch 2.11 says nothing by itself
            assert torch.compiler.is_compiling()
            ran.append(inside())
        return graph.forward

    torch.compile(_doubled, backend=backend)(torch.ones(3))
    assert ran
    assert not torch.compiler.is_compiling()


def in_another_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


@pytest.mark.parametrize("default", [False, True], ids=["plain", "default_device"])
@pytest.mark.parametrize(
    "options", [{}, {"buckets": ol.Buckets(sizes=(2, 4))}], ids=["", "buckets"]
)
def test_other_threads_graph_meanwhile(
    device: torch.device, options: dict[str, Any], default: bool
) -> None:
    """A default device is a function mode, for which each call looks around."""

    def f(x: Tensor) -> Tensor:
        return x * 3 + 1

    def x(rows: int) -> Tensor:
        return random_tensor(rows, rows, 4, device=device)

    def work() -> None:
        torch.set_default_device(device if default else None)
        with torch.no_grad():
            assert ambient() is None
            fast.capture(x(2))
            fast.warm_up([x(4)])
            for rows in (2, 4, 2, 4):
                assert_same(fast(x(rows)), f(x(rows)))
            for _ in range(6):
                assert_same(own(x(3)), f(x(3)))

    fast: Any = ol.graph(f, **options)
    own: Any = ol.graph(f)
    compiling(lambda: in_another_thread(work))
    assert replays(fast) == 4
    assert not fast.stats().eager_reasons
    assert replays(own) == 3


def test_the_thread_that_compiles_captures_nothing(device: torch.device) -> None:
    fast: Any = ol.graph(_doubled)
    given = random_tensor(0, 2, 4, device=device)

    def inside() -> None:
        assert ambient() == "torch.compile is tracing"
        with torch.no_grad(), pytest.raises(ol.CaptureError, match="is tracing") as e:
            fast.capture(given)
        assert e.value.code == "OL109"

    compiling(inside)
    assert not fast.recordings
    with torch.no_grad():
        fast.capture(given)
    assert len(fast.recordings) == 1
