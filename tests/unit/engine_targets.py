"""Targets for the engines that export: what models have in them, and what callables return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[Any, ...]


class Residual(nn.Module):
    """Convolutions with BatchNorm around a shortcut, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(nn.functional.max_pool2d(x + self.body(x), 2).mean((2, 3)))


class Encoder(nn.Module):
    """Token ids, a mask by keyword, a recurrent layer and attention; a buffer is added."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.register_buffer("positions", torch.randn(6, 16))

    def forward(self, tokens: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        states, (last, _) = self.recurrent(self.embed(tokens))
        states = self.layer(states + self.positions, src_key_padding_mask=mask)
        return {"states": states, "pooled": torch.tanh(states[:, 0]), "last": last}


@dataclass
class Summary:
    """Results of several dtypes in a dataclass."""

    total: Tensor
    steps: int
    rest: tuple[Tensor, list[Tensor]]


def summarize(x: Tensor, ids: Tensor, *, scale: float) -> Summary:
    return Summary(x.sum(-1) * scale, 3, (ids + 1, [x.t() > 0, (x[:, :2] * scale).half()]))


def ready(model: nn.Module, *args: Any, **kwargs: Any) -> Call:
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # pyright: ignore[reportArgumentType]
    return model.eval(), args, kwargs


def convolutions() -> Call:
    torch.manual_seed(0)
    return ready(Residual(), torch.randn(2, 3, 16, 16))


def sequence() -> Call:
    torch.manual_seed(0)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return ready(Encoder(), torch.randint(30, (2, 6)), mask=mask)


def layers() -> Call:
    torch.manual_seed(0)
    return ready(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(8, 64))


def function() -> Call:
    torch.manual_seed(0)
    return summarize, (torch.randn(6, 4), torch.arange(5)), {"scale": 2.5}


def strided() -> Call:
    """An input that is not contiguous, one given twice, and tensors closed over."""
    torch.manual_seed(0)
    weight, x = torch.randn(4, 4), torch.randn(4, 6).t()
    layer = nn.Linear(4, 3)
    return lambda a, b: {"x": (a["x"] @ weight, layer(b))}, ({"x": x}, x)
