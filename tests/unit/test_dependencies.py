"""What a recording depends on, and what it is spared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import onelaunch as ol


def test_what_torch_notes_about_modules_costs_no_look() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    fast: Any = ol.graph(model, warmup=1)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.ones(2, 4))
    (entry,) = fast.__graphed__._table.entries
    slots = entry.captured.guard._slots
    assert {slot.name for slot in slots if slot.key == "training"}
    assert not [slot.name for slot in slots if slot.kind == "contents"]
