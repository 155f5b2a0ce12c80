"""The default generator while the CUDA driver captures: draws of other threads, and of the body."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onelaunch.driver.cuda.generators import SHARED
from onelaunch.driver.refusals import DrawsAfterAll
from onelaunch.errors import CaptureError
from tests.gpu.recorded import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]


def draw() -> Tensor:
    return torch.rand(4, device=DEVICE)


def stream_of(count: int, seed: int = 3) -> list[Tensor]:
    """The numbers that eager draws after a seed."""
    torch.manual_seed(seed)
    return [draw() for _ in range(count)]


def in_a_thread(act: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def offset() -> int:
    return torch.cuda.default_generators[0].get_offset()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_another_thread_draws_in_a_capture(driver, pool, fails: bool, inference: bool) -> None:
    expected = stream_of(4)
    torch.manual_seed(3)
    x, drawn = torch.ones(4, device=DEVICE), [draw()]

    def body(capture) -> Tensor:
        in_a_thread(lambda: drawn.append(draw()))
        y = x * 2
        in_a_thread(lambda: drawn.append(draw()))
        if fails:
            raise KeyError
        return y

    with torch.inference_mode(inference):
        if fails:
            with pytest.raises(KeyError):
                driver.capture(body, pool, draws=False)
        else:
            graph, y = driver.capture(body, pool, draws=False)
            at = offset()
            graph.launch((), ())
            assert torch.equal(y, x * 2)
            assert offset() == at
    drawn.append(draw())
    for a, b in zip(drawn, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not SHARED, reason="each capture has a state of its own")
def test_a_body_that_draws_after_all(driver, pool) -> None:
    expected = stream_of(4)
    torch.manual_seed(3)
    drawn = [draw()]
    with pytest.raises(DrawsAfterAll) as caught:
        driver.capture(lambda capture: draw(), pool, draws=False)
    assert "test_cuda_draws.py" in str(caught.value.where)
    drawn.append(draw())
    graph, made = driver.capture(lambda capture: draw(), pool)
    graph.launch((), ())
    drawn += [made.clone(), draw()]
    for a, b in zip(drawn, expected, strict=True):
        assert torch.equal(a, b)


def test_a_generator_of_ones_own_beside_the_default_one(driver, pool) -> None:
    """The graph advances it, and not the default generator."""
    own = torch.Generator(DEVICE)
    expected = stream_of(3)
    of_own = [torch.rand(4, device=DEVICE, generator=own.manual_seed(8)) for _ in range(1)]
    torch.manual_seed(3)
    drawn = [draw()]

    def body(capture) -> Tensor:
        in_a_thread(lambda: drawn.append(draw()))
        return torch.rand(4, device=DEVICE, generator=own)

    graph, made = driver.capture(body, pool, [own], draws=False)
    own.manual_seed(8)
    graph.launch((), ())
    drawn.append(draw())
    for a, b in zip([*drawn, made], [*expected, *of_own], strict=True):
        assert torch.equal(a, b)
    assert own.get_offset() > 0


def test_another_thread_draws_all_the_time(driver, pool) -> None:
    """No number comes twice or is lost, whenever a capture begins."""
    over, drawn, errors = threading.Event(), list[Tensor](), list[BaseException]()

    def draws() -> None:
        try:
            while not over.is_set():
                drawn.append(draw())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    torch.manual_seed(3)
    thread = threading.Thread(target=draws)
    thread.start()
    x = torch.ones(4, device=DEVICE)
    try:
        for i in range(200):
            if i % 4 == 3:
                with pytest.raises(CaptureError):
                    driver.capture(lambda capture: x.sum().item(), pool, draws=False)
            else:
                graph, _ = driver.capture(lambda capture: x * 2, pool, draws=False)
                graph.reset()
    finally:
        over.set()
        thread.join()
    assert not errors, errors[0]
    at = offset()
    expected = stream_of(len(drawn))
    assert at == offset()
    assert torch.equal(torch.stack(drawn), torch.stack(expected))
