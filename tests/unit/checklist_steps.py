"""Steps taken on a copy of a model, for the tests of each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.tools.bench.workload import Workload
from onelaunch.tools.checklist.build import ChangedCall, Refusal, build
from onelaunch.tools.checklist.steps import BY_NAME


def take(fn: Callable[..., Any], args: tuple[Any, ...], *names: str, **kwargs: Any) -> ChangedCall:
    """Build a callable by these steps."""
    return build(Workload(fn, args, kwargs), [BY_NAME[name] for name in names])


def refusal(fn: Callable[..., Any], args: tuple[Any, ...], *names: str) -> str:
    """The reason why one of these steps is not possible."""
    try:
        take(fn, args, *names)
    except Refusal as error:
        return str(error)
    raise AssertionError("all of them are possible")


def apart(found: Any, reference: Any) -> float:
    """The relative distance of two tensors."""
    found, reference = found.detach().double(), reference.detach().double()
    return float((found - reference).norm() / reference.norm())


def lively(net: nn.Module) -> nn.Module:
    """Give norms statistics and factors as training leaves them, and set eval mode."""
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        for name, t in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if isinstance(module, nn.modules.batchnorm._NormBase) and t.is_floating_point():
                low = 0.5 if name in ("weight", "running_var") else -0.5
                with torch.no_grad():
                    t.copy_(torch.rand(t.shape, generator=generator) + low)
    return net.eval()


def contents(net: nn.Module) -> dict[str, Tensor]:
    """A copy of all tensors of a module."""
    return copy.deepcopy(net.state_dict())


def same(net: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether a module's tensors are bit for bit as they were."""
    now = net.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[k], before[k]) for k in now)
