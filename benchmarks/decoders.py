"""One token of a Llama of random weights, at one place of its cache: a step to repeat."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WORDS, LENGTH, PLACE = 6, 32000, 512, 40
SIZES: dict[str, tuple[int, int, int, int]] = {
    "15m": (288, 768, 6, 6),
    "100m": (1024, 2304, 16, 16),
    "1.2b": (4096, 11008, 32, 8),
}
"""Name -> width, width inside, heads, heads of keys; as of `examples.generate`."""


class Norm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).type_as(
            x
        )


class Layer(nn.Module):
    """Attention over the cache, and a gated network."""

    def __init__(self, width: int, inside: int, heads: int, keys: int) -> None:
        super().__init__()
        self.size, self.group = width // heads, heads // keys
        self.first, self.second = Norm(width), Norm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys * self.size, bias=False)
        self.value = nn.Linear(width, keys * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inside, bias=False)
        self.up = nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, keys, LENGTH, self.size))
        self.keys: Tensor
        self.values: Tensor

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(1, 1, -1, self.size).transpose(1, 2)

    def forward(
        self, x: Tensor, place: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        h = self.first(x)
        query, key = (_turned(self._heads(f(h)), *turn) for f in (self.query, self.key))
        self.keys.index_copy_(2, place, key)
        self.values.index_copy_(2, place, self._heads(self.value(h)))
        keys, values = (t.repeat_interleave(self.group, 1) for t in (self.keys, self.values))
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(1, 1, -1))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """From a token (1, 1) to the next one."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, inside, heads, keys = SIZES[size]
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, inside, heads, keys) for _ in range(LAYERS))
        self.norm = Norm(width)
        self.half = width // heads // 2
        self.register_buffer("place", torch.full((1,), PLACE))
        self.place: Tensor

    def forward(self, token: Tensor) -> Tensor:
        x = self.embedding(token)
        steps = torch.arange(self.half, device=x.device, dtype=torch.float32) / self.half
        angles = self.place * 10000.0**-steps
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = (torch.arange(LENGTH, device=x.device) <= self.place).view(1, 1, 1, LENGTH)
        for layer in self.layers:
            x = layer(x, self.place, turn, mask)
        return F.linear(self.norm(x), self.embedding.weight).argmax(-1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)
