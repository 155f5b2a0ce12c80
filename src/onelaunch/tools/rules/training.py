"""The rules of optimizers and schedulers in a call that trains."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule, of_error

_STEP = """\
import torch

layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.{optimizer}


def model(x):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    {end}


args = (torch.ones(2, 3),)
"""
_SGD = """\
SGD(layer.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)"""

TRAINING: tuple[Rule, ...] = (
    of_error(
        "OL120",
        "finds optimizers that count or read on the host as they step",
        _STEP.format(optimizer="Adam(layer.parameters())", end="return loss.detach()"),
        _STEP.format(
            optimizer="Adam(layer.parameters(), fused=True, capturable=True)",
            end="return loss.detach()",
        ),
    ),
    of_error("OL121", "finds GradScalers with an optimizer that is not fused"),
    of_error(
        "OL122",
        "finds schedulers that step, and options of optimizers that are set, in the call",
        _STEP.format(optimizer=_SGD, end="schedule.step()\n    return loss.detach()"),
        _STEP.format(optimizer=_SGD, end="return loss.detach()  # schedule.step() after the call"),
    ),
    of_error("OL123", "finds options of optimizers that change at every call"),
)
