"""Events that a callable records: for its own streams, or for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onelaunch as ol

from .drop_in import Rand, drop_in, on_accelerators, refused


def of(device: torch.device) -> Any:
    return torch.get_device_module(device)


@on_accelerators
@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("how", ["event", "stream", "returned", "stored"])
def test_an_event_for_the_host_is_refused(
    device: torch.device, rand: Rand, how: str, timing: bool
) -> None:
    module = of(device)
    event = module.Event(enable_timing=timing)
    kept: dict[str, Any] = {"event": event}

    def f(x: Tensor) -> Any:
        y = x * 2
        if how == "event":
            event.record()
        elif how == "stream":
            module.current_stream().record_event(event)
        elif how == "stored":
            kept["event"].record()
        else:
            made = module.Event(enable_timing=timing)
            made.record()
            return y, made
        return y

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        error = refused(fast, rand(0, 3), match=r"OL109|OL108.*Event")
    # One in the result is refused as such: no call can return it anew.
    assert error.code == "OL108" or "record" in str(error.where)
    event.record()
    event.synchronize()


@on_accelerators
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", ["events", "streams"])
def test_a_fork_and_a_join_are_captured(
    device: torch.device, rand: Rand, how: str, kept: bool
) -> None:
    module = of(device)
    side = module.Stream()
    held = [module.Event(), module.Event()]

    def f(x: Tensor) -> Tensor:
        fork, join = held if kept else (module.Event(), module.Event())
        main = module.current_stream()
        y = x * 2
        if how == "streams":
            side.wait_stream(main)
        else:
            fork.record(main)
            side.wait_event(fork)
        with module.stream(side):
            z = y + 1
            if how == "events":
                join.record()
        if how == "streams":
            main.wait_stream(side)
        else:
            join.wait(main)
        return z * y

    drop_in(f, lambda i: (rand(i, 3),))
