"""Inference with torch alone: loops by hand, state that is carried, ensembles, casts, outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Run, inference
from .programs_training import MiniGPT


@inference()
def greedy_decoding_by_hand(run: Run) -> None:
    fast = run.graph(MiniGPT().to(run.device).eval())
    ids = torch.zeros(1, 24, dtype=torch.int64, device=run.device)
    ids[0, :4] = run.ints(0, 40, 4)
    with torch.no_grad():
        for at in range(4, 16):
            logits, _ = fast(ids)
            ids[0, at] = logits[0, at - 1].argmax()
    run.see(ids)


@inference()
def sampling_with_temperature_and_top_k(run: Run) -> None:
    model = MiniGPT().to(run.device).eval()

    @run.graph
    def next_token(ids: Tensor, temperature: Tensor) -> Tensor:
        logits = model(ids)[0][:, -1] / temperature
        best, places = logits.topk(8)
        pick = torch.multinomial(best.softmax(-1), 1)
        return places.gather(1, pick)

    ids = run.ints(0, 40, 2, 8)
    temperature = torch.tensor(0.8, device=run.device)
    with torch.inference_mode():
        for i in range(10):
            ids = torch.cat([ids[:, 1:], next_token(ids, temperature + i / 10)], 1)
            run.see(ids)


class Cached(nn.Module):
    """One layer of attention over a cache of fixed size, written where the caller says."""

    keys: Tensor
    values: Tensor

    def __init__(self, length: int = 24) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(40, 16), nn.Linear(16, 48)
        self.out = nn.Linear(16, 40)
        self.register_buffer("keys", torch.zeros(1, 2, length, 8))
        self.register_buffer("values", torch.zeros(1, 2, length, 8))

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(token)).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(self.keys.shape[2], device=token.device) <= at[-1]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None])
        return self.out(y.transpose(1, 2).reshape(1, -1, 16))


@inference()
def a_cache_that_counts_in_a_tensor(run: Run) -> None:
    class Ring(nn.Module):
        place: Tensor
        memory: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(6, 8))
            self.register_buffer("place", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.memory.index_copy_(0, self.place.view(1), x[None])
            self.place.add_(1).remainder_(6)
            return self.memory.mean(0)

    ring = Ring().to(run.device)
    fast = run.graph(ring)
    with torch.no_grad():
        for i in range(14):
            run.see(fast(run.rand(i, 8)))
    run.see(ring)


@inference()
def streaming_convolution_with_a_stored_context(run: Run) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3)
            self.context: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.context is None:
                self.context = torch.zeros(1, 4, 2, device=x.device)
            x = torch.cat([self.context, x], -1)
            self.context = x[..., -2:].clone()
            return self.conv(x)

    model = Causal().to(run.device).eval()
    fast = run.graph(model)
    with torch.no_grad():
        for i in range(12):
            if i == 8:
                model.context = None
            run.see(fast(run.rand(i, 1, 4, 6)), model.context)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(8, 8)
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.norm = nn.Conv2d(16, 3, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(4, device=x.device) / 4)
        angles = t[:, None] * frequencies
        h = self.down(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None]
        low = self.middle(F.silu(self.norm(F.avg_pool2d(h, 2))))
        return self.up(torch.cat([h, F.interpolate(low, scale_factor=2)], 1))


def noise_schedule(run: Run, steps: int) -> Tensor:
    return torch.linspace(0.99, 0.9, steps, device=run.device).cumprod(0)


@inference()
def diffusion_by_ddim(run: Run) -> None:
    fast = run.graph(UNet().to(run.device).eval())
    kept = noise_schedule(run, 10)
    x = torch.randn(1, 3, 8, 8, device=run.device)
    with torch.no_grad():
        for t in reversed(range(1, 10)):
            e = fast(x, torch.full((1,), float(t), device=run.device))
            clean = (x - (1 - kept[t]).sqrt() * e) / kept[t].sqrt()
            x = kept[t - 1].sqrt() * clean + (1 - kept[t - 1]).sqrt() * e
            run.see(x)


@inference()
def diffusion_with_guidance_as_one_step(run: Run) -> None:
    model = UNet().to(run.device).eval()

    @run.graph
    def step(x: Tensor, t: Tensor, now: Tensor, after: Tensor, scale: float) -> Tensor:
        with_prompt, without = model(torch.cat([x, x]), t.expand(2)).chunk(2)
        e = without + scale * (with_prompt - without)
        clean = ((x - (1 - now).sqrt() * e) / now.sqrt()).clamp(-1, 1)
        return after.sqrt() * clean + (1 - after).sqrt() * torch.randn_like(x)

    kept = noise_schedule(run, 12)
    x = torch.randn(1, 3, 8, 8, device=run.device)
    with torch.inference_mode():
        for t in reversed(range(1, 12)):
            x = step(x, torch.tensor([float(t)], device=run.device), kept[t], kept[t - 1], 7.5)
            run.see(x)


@inference()
def a_normalising_flow_both_ways(run: Run) -> None:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x: Tensor, backward: bool = False) -> Tensor:
            a, b = x.chunk(2, -1)
            s, t = self.net(a).chunk(2, -1)
            b = (b - t) * (-s.tanh()).exp() if backward else b * s.tanh().exp() + t
            return torch.cat([a, b], -1)

    fast = run.graph(Coupling().to(run.device))
    with torch.no_grad():
        for i in range(7):
            z = fast(run.rand(i, 5, 8))
            run.see(z, fast(z, backward=True))
