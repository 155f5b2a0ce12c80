"""`onelaunch.dynamo.cudagraph_policy` by itself; its recordings are in tests/device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch import Tensor
from torch._inductor import cudagraph_utils

import onelaunch as ol
from onelaunch.dynamo import cudagraph_policy
from onelaunch.dynamo.backend import regions

HAS_HOOK = hasattr(cudagraph_utils, "CUDAGraphPolicy")
with_hook = pytest.mark.skipif(not HAS_HOOK, reason="the hook is torch 2.12's")


class Code(SimpleNamespace):
    """What the policy reads of a `CompiledFxGraph`."""


@with_hook
@config.patch({"triton.cudagraphs": True})
def test_a_graph_that_inductor_refuses() -> None:
    """As Inductor refuses it, and with its reason."""
    why = f'skipping cudagraphs due to complex views. Found from : \n   File "{__file__}", line 1\n'
    info = Code(cudagraph_fail_reasons=["mutated inputs"])
    refused = Code(disabled_cudagraphs_reason=why, cudagraph_info=None, device_types={"cuda"})
    unfit = Code(disabled_cudagraphs_reason=None, cudagraph_info=info, device_types={"cuda"})
    on_host = Code(disabled_cudagraphs_reason=why, cudagraph_info=None, device_types={"cpu"})
    with pytest.warns(
        ol.GraphWarning, match=r"OL312.*complex views(.|\n)*test_cudagraph_policy.py:1"
    ):
        assert not cudagraph_policy().should_wrap(refused)
    with pytest.warns(ol.GraphWarning, match="OL312.*mutated inputs"):
        assert not cudagraph_policy().should_wrap(unfit)
    assert not cudagraph_policy().should_wrap(on_host)


def test_options_are_checked() -> None:
    if not HAS_HOOK:
        with pytest.raises(ol.ArgumentError, match=r"OL401.*has no torch"):
            cudagraph_policy()
        return
    wrong: list[dict[str, Any]] = [{"warmup": 0}, {"pool": 3}, {"max_recordings": 0}]
    for options in wrong:
        with pytest.raises(ol.ArgumentError, match="OL401"):
            cudagraph_policy(**options)
    policy = cudagraph_policy()
    assert isinstance(policy, cudagraph_utils.CUDAGraphPolicy)
    with config.patch(cudagraph_policy=policy):
        assert config.get_config_copy()["cudagraph_policy"] is policy
        assert b"RecordingPolicy" not in config.save_config()


@with_hook
def test_on_plain_cpu_tensors_inductors_code_runs() -> None:
    """And its caches hold it with and without the policy."""
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    for policy in (None, cudagraph_policy()):
        with config.patch(cudagraph_policy=policy):
            fast = torch.compile(f, mode="reduce-overhead")
            for i in range(6):
                torch.testing.assert_close(fast(torch.ones(4) + i), f(torch.ones(4) + i))
        torch._dynamo.reset()
    assert not regions.graphs()
