"""The rules of optimizers and schedulers in a call that trains."""

from __future__ import annotations

from onelaunch.tools.rules.rule import Rule, of_error

TRAINING: tuple[Rule, ...] = (
    of_error(
        "OL120",
        "finds optimizers that count or read on the host as they step",
        """
import torch

layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(layer.parameters())

def model(x):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

args = (torch.ones(2, 3),)
""",
        """
import torch

layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(layer.parameters(), fused=True, capturable=True)

def model(x):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

args = (torch.ones(2, 3),)
""",
    ),
    of_error("OL121", "finds GradScalers with an optimizer that is not fused"),
    of_error(
        "OL122",
        "finds schedulers that step, and options of optimizers that are set, in the call",
        """
import torch

layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

def model(x):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()

args = (torch.ones(2, 3),)
""",
        """
import torch

layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

def model(x):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()  # schedule.step() after the call

args = (torch.ones(2, 3),)
""",
    ),
    of_error("OL123", "finds options of optimizers that change at every call"),
)
