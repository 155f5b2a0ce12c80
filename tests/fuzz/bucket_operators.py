"""Expressions that random programs are made of, as people write them on batches of sequences.

`x` is (batch, length, 4), `y` like it, `mask` (batch, length) of 0 and 1, `ids` (batch, length) of
0 to 7, `w` (4, 4) and `b` (4,) parameters, `table` (8, 4), `s` the state of the program.
"""

from __future__ import annotations

import math  # noqa: F401 - expressions name it
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = torch.finfo(torch.float32).min


class State(nn.Module):
    """What a program keeps: a count of ids, a sum of rows, norms in training and in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(8, 4, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.still = nn.BatchNorm1d(4, dtype=torch.float64).eval()
        self.apart = nn.InstanceNorm1d(4, track_running_stats=True, dtype=torch.float64)
        self.requires_grad_(False)

    def counted(self, ids: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Count ids, each as much as its weight; what is counted does not go into the result."""
        self.counts.index_add_(0, ids.flatten(), (ids.new_ones(ids.shape) * weight).flatten())
        return ids * 0

    def scattered(self, ids: Tensor, weight: Tensor) -> Tensor:
        self.counts.scatter_add_(0, ids.flatten(), weight.flatten())
        return ids * 0

    def summed(self, x: Tensor, ids: Tensor) -> Tensor:
        self.rows.index_add_(0, ids.flatten(), x.flatten(0, 1).detach())
        return ids * 0

    def called(self, x: Tensor) -> Tensor:
        self.counts.add_(1)
        return x * 1


def attend(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / 2
    scores = scores if hides is None else scores + hides
    return scores.softmax(-1) @ v


def hidden(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    return scores.masked_fill(mask[:, None, :] == 0, value)


def written(x: Tensor, where: Any, value: Any) -> Tensor:
    y = x.clone()
    y[where] = value
    return y


def cached(x: Tensor) -> Tensor:
    memory = x.new_zeros(x.shape[0], 16, 4)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]] * 1


def heads(x: Tensor) -> Tensor:
    q = x.view(*x.shape[:2], 2, 2).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q)
    return y.transpose(1, 2).reshape(x.shape)


def swapped(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([other, one], -1)


def guided(x: Tensor, y: Tensor, dim: int) -> Tensor:
    one, other = (torch.cat([x, y], dim) * 2).chunk(2, dim)
    return one + 3 * (other - one)


def rotary(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    turn = at * torch.tensor([1.0, 0.1], device=x.device, dtype=x.dtype)
    one, other = x[..., :2], x[..., 2:]
    turned = (one * turn.cos() - other * turn.sin(), one * turn.sin() + other * turn.cos())
    return torch.cat(turned, -1)


def triangle(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.ones(n, n, device=x.device, dtype=torch.bool).tril()


def running(x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        state = state * 0.5 + step
        out.append(state)
    return torch.stack(out, 1)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


SAME = lines("""
attend(x, x, y, (1 - mask[:, None, :]) * -1e4)
attend(x, x, y, (1 - mask[:, None, :]) * -3e4 + x[..., :1])
attend(x, x, y, mask[:, None, :].log()) + attend(y, y, x, (1 - mask[:, None, :]) * -1e4)
hidden(x @ y.mT, mask, -1e4).softmax(-1) @ x
hidden(x @ y.mT, mask, LEAST).softmax(-1) @ x
(hidden(x @ y.mT, mask, -2e4) / 0.5 + b[0]).softmax(-1) @ x
(hidden(x @ y.mT, mask, -1e4) - x[..., :1]).softmax(-1) @ x
hidden(x @ y.mT, mask, -1e4).log_softmax(-1).exp() @ x
torch.baddbmm((1 - mask[:, None, :]).expand(-1, x.shape[1], -1) * -1e4, x, y.mT).softmax(-1) @ x
torch.where(mask[:, None, :] > 0, x @ y.mT, -1e5).softmax(-1) @ x
(x @ y.mT).masked_fill(~triangle(x), -1e4).softmax(-1) @ x
F.scaled_dot_product_attention(x, x, y, attn_mask=(1 - mask[:, None, :]) * -1e4)
F.scaled_dot_product_attention(x, x, y, attn_mask=mask[:, None, :] > 0)
x + x.masked_fill(mask[..., None] == 0, -1e4).amax(1, keepdim=True)
x + x.masked_fill(mask[..., None] == 0, -1e4).logsumexp(1, keepdim=True)
x + torch.where(mask[..., None] > 0, x, -1e4).max(1, keepdim=True)[0]
x + (x + (1 - mask[..., None]) * -1e4).amax(1, keepdim=True)
x - (x - (1 - mask[..., None]) * 1e4).amax(1, keepdim=True)
x + x.masked_fill(mask[..., None] == 0, 1e4).amin(1, keepdim=True)
(x.masked_fill(mask[..., None] == 0, -1e4)).exp().sum(1, keepdim=True) + x
F.interpolate(F.instance_norm(x.mT), scale_factor=2.0).mT[:, ::2] * 1
F.interpolate(F.instance_norm(x), size=8, mode="linear")[..., ::2] * 1
F.interpolate(F.group_norm(x.mT, 2), scale_factor=2.0).mT[:, ::2] * 1
F.max_pool1d(F.instance_norm(x), 3, 1, 1)
F.avg_pool1d(F.layer_norm(x, (4,)).mT, 3, 1, 1).mT * 1
s.still(x.mT).mT * 1
s.norm(x.mT).mT * 1
s.apart(x.mT).mT * 1
s.called(x)
x + s.counted(ids)[..., None]
x + s.counted(ids, mask)[..., None]
x + s.scattered(ids, mask)[..., None]
x + s.summed(x * mask[..., None], ids)[..., None]
x.relu()
x.sigmoid() * y
x.tanh() + b
x.abs().sqrt()
(x * x).clamp(max=9)
x.clamp(-1, 1).exp()
F.gelu(x)
F.silu(x) * y
F.softplus(x)
F.leaky_relu(x, 0.1)
F.elu(x)
F.hardswish(x)
F.logsigmoid(x)
F.relu6(x)
x.sign() * y
x.round() + y
torch.where(x > 0, x, y)
torch.where(mask[..., None] > 0, x, -y)
x.masked_fill(mask[..., None] == 0, 0.0)
x * mask[..., None]
torch.maximum(x, y)
torch.minimum(x, b)
torch.lerp(x, y, 0.3)
torch.addcmul(x, y, b, value=0.5)
torch.addcdiv(x, y, b.abs() + 1)
torch.atan2(x, y)
torch.nan_to_num(x / y.abs())
torch.fmod(x, 3.0)
torch.remainder(x, 2.0)
x.pow(2) - y.pow(2)
x / (1 + x.abs())
x.sin() + y.cos()
x.float().double().to(x.dtype)
x - x.mean(-1, keepdim=True)
x / (x.norm(dim=-1, keepdim=True) + 1)
x.softmax(-1)
x.log_softmax(-1)
F.normalize(x, dim=-1)
F.layer_norm(x, (4,), b, None)
F.rms_norm(x, (4,), b)
F.group_norm(x.mT, 2).mT * 1
F.instance_norm(x.mT).mT * 1
F.batch_norm(x.mT, b, b.abs() + 1).mT * 1
F.batch_norm(x.mT, None, None, training=True).mT * 1
x.cumsum(-1)
x.cumsum(1)
x.cumsum(0)
x.flip(1).cumsum(1).flip(1)
x.cumprod(1).clamp(-9, 9)
x.cummax(1)[0]
x.logcumsumexp(1)
x @ w
F.linear(x, w, b)
x @ w.t() + y @ w
torch.einsum("btd,de->bte", x, w)
torch.einsum("btd,bsd,bse->bte", x, y, x) * 0.1
torch.baddbmm(x, x, w.expand(x.shape[0], 4, 4))
F.bilinear(x, y, w.view(1, 4, 4).expand(4, 4, 4).contiguous(), b)
x.sort(-1)[0]
x.sort(1)[0]
x.sort(0)[0]
x.argsort(-1).to(x.dtype) + x
x.topk(4, -1)[0] * 1
x.flip(-1)
x.flip(1)
x.flip(0).flip(0)
x.roll(1, -1)
x.roll(1, 1)
x.roll(1, 0)
x.roll((1, 1), (1, 2))
swapped(x)
rotary(x)
running(x)
cached(x)
guided(x, y, 0)
guided(x, y, 1)
x.transpose(0, 1).contiguous().transpose(0, 1) * 2
x.permute(2, 0, 1).relu().permute(1, 2, 0) * 1
x.reshape(-1, 4).relu().view(x.shape)
x.reshape(x.shape[0], -1).tanh().view(x.shape)
x.mT.reshape(x.shape) * 1
x.view(x.shape[0], -1, 2).sin().reshape(x.shape)
x.unflatten(-1, (2, 2)).flip(-1).flatten(-2)
x.view(*x.shape[:2], 2, 2).transpose(-1, -2).reshape(x.shape)
x.unfold(-1, 2, 2).sum(-1).repeat(1, 1, 2)
x.view(torch.int64).view(x.dtype) * 1 if x.dtype == torch.float64 else x * 1
F.pad(x, (0, 0, 1, 0))[:, :-1] * 1
F.pad(x, (0, 0, 0, 1))[:, 1:] * 1
F.pad(x, (0, 0, 1, -1))
F.pad(x, (1, -1))
F.pad(x.mT, (1, 1), mode="replicate").mT[:, 1:-1] * 1
F.conv1d(x.mT, w[:, :, None].expand(4, 4, 3).contiguous(), padding=1).mT * 1
F.conv1d(F.pad(x.mT, (2, 0)), w[:, :, None].expand(4, 4, 3).contiguous()).mT * 1
F.conv1d(x, w[:1, :1, None].expand(x.shape[1], 1, 1).contiguous(), groups=x.shape[1])
F.conv1d(x.reshape(-1, 1, 4), w[:1, None, :3].contiguous(), padding=1).reshape(x.shape)
F.max_pool1d(x.mT, 3, 1, 1).mT * 1
F.avg_pool1d(x.mT, 3, 1, 1).mT * 1
F.max_pool1d(x, 3, 1, 1)
F.glu(torch.cat([x, y], -1))
F.interpolate(x, size=8, mode="linear")[..., ::2] * 1
F.interpolate(x.mT, scale_factor=2.0).mT[:, ::2] * 1
F.cosine_similarity(x, y, dim=-1)[..., None] * x
(x * y).sum(-1, keepdim=True) + x
x - x.amax(-1, keepdim=True)
x - x.amax(1, keepdim=True)
x - x.mean(0)
x - x.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
(x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None] + x
x + (x * mask[..., None]).amax(1, keepdim=True)
x + x.masked_fill(mask[..., None] == 0, -1e9).amax(1, keepdim=True).clamp(-9, 9)
x / x.std(-1, keepdim=True).clamp_min(0.5)
x * x.shape[1]
x / x.shape[0]
x * math.sqrt(x.shape[-1])
x + torch.arange(x.shape[1], device=x.device)[:, None]
x + torch.arange(x.shape[0], device=x.device)[:, None, None]
x + torch.linspace(0, 1, x.shape[1], device=x.device)[:, None]
x + torch.ones(x.shape[1], 1, device=x.device)
x + torch.eye(x.shape[1], 4, device=x.device)
x + x.new_full((x.shape[0], 1, 1), 2.0)
x + table[: x.shape[1]] if x.shape[1] < 9 else x * 1
x + F.embedding(ids, table)
x + table[ids]
x + F.one_hot(ids, 8).to(x.dtype)[..., :4]
x + ids[..., None].to(x.dtype)
x * (ids % 2)[..., None]
x.gather(-1, ids[..., None].clamp(max=3)) + x
x.gather(1, (ids % ids.shape[1])[..., None].expand(x.shape)) + x
x[:, ids[0] % x.shape[1]]
x[torch.arange(x.shape[0], device=x.device)]
x[ids[:, 0] % x.shape[0]]
x.take_along_dim(ids[..., None] % 4, -1) + x
x.index_select(-1, torch.tensor([3, 1, 0, 2], device=x.device))
x.index_select(1, torch.arange(x.shape[1], device=x.device))
x.index_add(2, torch.tensor([0, 0, 1, 3], device=x.device), y)
x.index_copy(2, torch.tensor([1, 2], device=x.device), y[..., :2])
x.index_fill(2, torch.tensor([0, 3], device=x.device), 1.5)
x.index_put((torch.arange(x.shape[0], device=x.device), ids[:, 0] * 0), y[:, 0])
x.scatter(2, ids[..., None] % 4, y[..., :1])
x.scatter_add(2, ids[..., None] % 4, y)
x.scatter_reduce(2, (ids[..., None] % 4).expand(x.shape), y, "amax")
x.select_scatter(y[..., 0], 2, 1)
x.select_scatter(y[:, 0], 1, 0)
x.select_scatter(y[:, -1], 1, -1)
x.slice_scatter(y[..., 1:3], 2, 1, 3)
x.slice_scatter(y[:, :1], 1, 0, 1)
x.diagonal_scatter(y.diagonal(0, 1, 2).contiguous() * 2, 0, 1, 2)
written(x, (slice(None), 0), 2.0)
written(x, (slice(None), -1), 2.0)
written(x, (slice(None), slice(0, 2)), 1.0)
written(x, x > 1, 0.5)
written(x, (..., 1), y[..., 0])
torch.cat([x, y], 0)[: x.shape[0]] * 1
torch.cat([x, y], 1)[:, x.shape[1] :] * 1
torch.cat([x, y], 1)[:, -x.shape[1] :] * 1
torch.cat([y[:, :1], x], 1)[:, :-1] * 1
torch.stack([x, y]).sum(0)
torch.stack([x, y], 1).reshape(-1, *x.shape[1:])[: x.shape[0]] * 1
torch.stack([x, y], 2).flatten(1, 2)[:, ::2] * 1
x.repeat(2, 1, 1)[: x.shape[0]] * 1
x.repeat(1, 2, 1)[:, 1 : x.shape[1] + 1] * 1
x.repeat_interleave(2, 1)[:, ::2] * 1
x.repeat_interleave(2, 1)[:, : x.shape[1]] * 1
x.expand(2, *x.shape).sum(0)
x.narrow(1, 0, x.shape[1]) * 1
torch.cat(x.split(1, 1), 1)
torch.cat(x.split([1, 3], 2)[::-1], 2)
torch.cat(list(x.unbind(0))).view(x.shape)
torch.stack(x.unbind(1)[::-1], 1)
torch.cat([t.mean(-1, keepdim=True) for t in x.chunk(4, -1)], -1)
attend(x, x, y)
attend(x, x, y, (1 - mask[:, None, :]) * -1e9)
attend(x, x, y, (1 - mask[:, None, :]) * LEAST)
attend(x, x, y, mask[:, None, :].log())
hidden(x @ y.mT, mask, -math.inf).softmax(-1) @ x
hidden(x @ y.mT, mask, -1e9).softmax(-1) @ x
(x @ y.mT).masked_fill(~triangle(x), -math.inf).softmax(-1) @ x
(x @ y.mT).tril() @ x * 0.1
torch.where(mask[:, None, :] > 0, x @ y.mT, LEAST).softmax(-1) @ x
F.scaled_dot_product_attention(x, y, x)
F.scaled_dot_product_attention(x, y, x, is_causal=True)
F.scaled_dot_product_attention(x, y, x, attn_mask=mask[:, None, :] > 0)
F.scaled_dot_product_attention(x, y, x, attn_mask=(1 - mask[:, None, :]) * -1e9)
heads(x)
torch.cdist(x, y) @ y * 0.1
torch.linalg.cross(x[..., :3], y[..., :3], dim=-1).sum(-1, keepdim=True) + x
torch.fft.rfft(x, dim=-1).abs().sum(-1, keepdim=True) + x
torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1).real * 1
torch.linalg.solve(w @ w.t() + 5 * torch.eye(4, device=x.device, dtype=x.dtype), x.mT).mT * 1
torch.bucketize(x, b.sort()[0]).to(x.dtype) + x
torch.searchsorted(b.sort()[0], x).to(x.dtype) * y
x.renorm(2, 0, 1.0)
torch.diff(x, dim=1, prepend=x[:, :1])
torch.diff(x, dim=-1, append=x[..., :1])
x.kthvalue(2, -1, keepdim=True)[0] + x
x.median(-1, keepdim=True)[0] + x
x.var(-1, keepdim=True) * y
x.logsumexp(-1, keepdim=True) - x
x.prod(-1, keepdim=True).clamp(-5, 5) + x
x.clone().mul_(y).add_(b)
x.clone().transpose(0, 1).add_(1).transpose(0, 1) * 1
x.clone().copy_(y)
torch.zeros_like(x).copy_(x).sub_(y)
x.contiguous().view(-1).clone().view(x.shape)
x.diag_embed().sum(-1)
x.tril() + y.triu()
x + x[:1]
x + x[:, :1]
x + x[:, -1:]
x + x[-1:]
x + x[:, x.shape[1] // 2].unsqueeze(1)
x - torch.roll(x, 1, 0)
x.as_strided(x.shape, x.contiguous().stride()) * 1 if x.is_contiguous() else x * 1
""")
"""Of the shape of `x` again, so that they follow each other."""

FINAL = lines("""
x.masked_fill(mask[..., None] == 0, -1e4).amax(1)
x.masked_fill(mask[..., None] == 0, -1e4).amax((0, 1))
x.masked_fill(mask[..., None] == 0, -1e4).max(1)[1]
x.masked_fill(mask[..., None] == 0, LEAST).amax(1)
x.masked_fill(mask[..., None] == 0, -1e4).logsumexp(1)
x.masked_fill(mask[..., None] == 0, -1e4).topk(1, 1)[0] * 1
x.masked_fill(mask[..., None] == 0, -1e4).sort(1)[0][:, -1] * 1
x.masked_fill(mask[..., None] == 0, -1e4).cummax(1)[0]
x.masked_fill(mask[..., None] == 0, -1e4).clamp(min=-9).amax(1)
x.masked_fill(mask[..., None] == 0, 1e4).amin(1)
x.masked_fill(mask[..., None] == 0, -1e4).softmax(1).sum(1)
x.masked_fill(mask[..., None] == 0, -1e4).exp().sum(1)
(x + (1 - mask[..., None]) * -1e4).amax(1)
(x + (1 - mask[..., None]) * LEAST).softmax(1).amax(1)
F.interpolate(F.instance_norm(x.mT), size=3)
F.interpolate(F.instance_norm(x), size=2)
F.interpolate(F.instance_norm(x[:, None]), size=(x.shape[1], 2), mode="bilinear")
F.interpolate(F.group_norm(x.mT, 2), size=3, mode="area")
F.adaptive_avg_pool1d(F.instance_norm(x.mT), 1)
F.adaptive_max_pool1d(F.layer_norm(x, (4,)).mT, 2)
s.still(x.flatten(0, 1)).view(x.shape)
s.norm(x.flatten(0, 1)).view(x.shape)
s.counted(ids[:, 0]) + ids[:, 0]
s.scattered(ids, mask * 2)
x * 2
x.sum()
x.sum(0)
x.sum(1)
x.sum(-1)
x.mean(1)
x.mean((0, 1))
x.amax(1)
x.amin(0)
x.argmax(-1)
x.argmax(1)
x.argmin(0)
x.max(-1)[1]
x.any(-1)
x > y
(x > 0).all(1)
x.long() % 5
(x > 0).sum(-1)
(x > 0).sum(1)
x.norm(dim=-1)
x.std(0)
x.relu().sum((1, 2))
x[:3].relu().sum(0)
x[:3].sum(0)
x[:, :3].sum(1)
x[:, :2] * 1
x[:2] * 1
x[1:] * 1
x[:, 1:] * 1
x[:, :-1] * 1
x[::2] * 1
x[:, ::2] * 1
x[:, ::3].sum(1)
x[0] * 1
x[:, 0] * 1
x[-1] * 1
x[:, -1] * 1
x[:, -2:] * 1
x[len(x) // 2] * 1
x[:, 0, 0].clone()
x[..., -1] * 1
x.reshape(2, -1)[1, 0] * 1 if x.shape[0] % 2 == 0 else x[0, 0, 0] * 1
x.reshape(2, -1)[1, 0] * 1
x.reshape(4, -1)[:, 0] * 1
x.mT.reshape(4, -1)[1, 1] * 1
x.reshape(-1)[5] * 1
x.transpose(0, 1).reshape(-1, 4)[1] * 1
x.flatten(0, 1) * 1
x.flatten(0, 1)[3] * 1
x.flatten(1) * 1
x.flatten(1)[:, 7:9] * 1
torch.cat([x, y]).unbind(0)[3] * 1
torch.cat([x, y])[4] * 1
torch.cat([x, y])[::9] * 1
torch.cat([x, y])[3:5] * 1
torch.cat([x, y], 1)[:, ::3] * 1
torch.cat([x, y], 1)[:, 5] * 1
torch.cat([x, y], 1).diagonal(0, 1, 2)[..., 3] * 1
torch.cat([x, y], 1).diagonal(-3, 1, 2) * 1
torch.cat([x, y])[:, 0].diagonal(-4) * 1
F.pad(torch.cat([x, y], 1), (0, 0, -3, 0))[:, :2] * 1
F.pad(torch.cat([x, y], 1), (0, 0, -1, -1))
F.conv1d(torch.cat([x, y], 1).mT, w[:, :, None].expand(4, 4, 2).contiguous(), stride=2)
F.conv1d(torch.cat([x, y], 1).mT, w[:, :, None].expand(4, 4, 2).contiguous(), stride=4)[..., 1] * 1
F.max_pool1d(torch.cat([x, y], 1).mT, 2).contiguous()
F.avg_pool1d(x.mT, 2) * 1 if x.shape[1] > 1 else x.mT * 1
torch.cat([x, y]).gather(0, (ids[:1, :, None] % x.shape[0]).expand(1, -1, 4))
torch.cat([x, y]).gather(0, torch.full((1, *x.shape[1:]), 4, device=x.device))
torch.cat([x, y]).index_select(0, torch.tensor([4], device=x.device))
torch.cat([x, y])[torch.tensor([1, 4], device=x.device)]
torch.cat([x, y]).take(torch.tensor([21], device=x.device))
torch.cat([x, y], 1).take_along_dim(ids[:, :1, None], 1)
torch.cat([x, y]).unfold(0, 2, 2)[1] * 1
torch.cat([x, y]).roll(1, 0)
torch.cat([x, y]).flip(0)
torch.cat([x, y]).cumsum(0)
torch.cat([x, y], 1)
torch.cat([x, x[:, :1]], 1)
torch.cat([x, b.expand(x.shape[0], 1, 4)], 1)
torch.cat([b.expand(x.shape[0], 1, 4), x], 1) * 2
torch.cat([b.expand(x.shape[0], 1, 4), x], 1)[:, 0] * 1
torch.cat([x, y], -1)
torch.stack([x, y])
torch.stack([x, y], 1)
torch.stack([x, y], 1).flatten(0, 1)[2:5] * 1
x.repeat(2, 1, 1)
x.repeat(2, 1, 1)[5] * 1
x.repeat_interleave(2, 0)
x.repeat_interleave(2, 0)[3] * 1
x.chunk(2, 1)[0] * 1
x.chunk(2, 0)[-1] * 1
x.split(2, 1)[0] * 1
x.split(3)[0].sum(0)
x.tensor_split(2, 1)[1] * 1
x.unbind(1)[1] * 1
x.unfold(1, 2, 1) * 1
x.unfold(1, 2, 2).sum(-1)
x.diagonal(0, 1, 2) * 1
x.diagonal(0, 0, 1) * 1
x[:, 0].diagonal() * 1
x.tril(-1)[:, 1:] * 1
x @ x.mT
x[:, 0] @ x[:, 0].t()
(x @ y.mT).softmax(-1)
(x @ y.mT).tril()
(x @ y.mT).sum(-1)
(x @ y.mT).diagonal(0, 1, 2) * 1
x.flatten(0, 1) @ w
torch.einsum("btd,btd->bt", x, y)
torch.einsum("btd,bte->bde", x, y * mask[..., None])
torch.einsum("btd,bte->bde", x, y)
(x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
(x * mask[..., None]).sum((0, 1))
(x * mask[..., None]).mean(1)
x.masked_fill(mask[..., None] == 0, -math.inf).amax(1)
x.masked_fill(mask[..., None] == 0, -1e9).max(1)[1]
torch.cat([x, y], 1).masked_fill(mask.repeat(1, 2)[..., None] == 0, -1e9).max(1)[1]
torch.cat([x, y], 1).masked_fill(mask.repeat(1, 2)[..., None] == 0, -1e9).argmax(1)
x[torch.arange(x.shape[0], device=x.device), mask.long().sum(1) - 1]
x[torch.arange(x.shape[0], device=x.device), -1] * 1
x.gather(1, (mask.long().sum(1) - 1)[:, None, None].expand(-1, 1, 4))
x.sort(0)[1]
x.argsort(1)
x.topk(1, 1)[0] * 1
x.argsort(-1, stable=True)[..., :2]
mask.cumsum(1) * ids
ids * 2
ids.sum(1)
ids[:, :3].sum(1)
ids.reshape(2, -1)[1, 0] + 1
ids.flip(1)
ids.argmax(1)
ids.cumsum(0)
(ids == 3).any(1)
torch.cat([ids, ids], 1)[:, 5] + 0
torch.isin(ids, torch.tensor([1, 2], device=x.device))
F.one_hot(ids, 8)
torch.bincount(ids[0], minlength=8)
ids.float().mean()
F.cross_entropy(torch.cat([x, y], -1).flatten(0, 1), ids.flatten())
F.cross_entropy(torch.cat([x, y], -1).flatten(0, 1), ids.flatten(), reduction="none")
F.mse_loss(x, y)
F.mse_loss(x, y, reduction="none")
F.l1_loss(x, y, reduction="sum")
F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
F.embedding_bag(ids, table)
F.adaptive_avg_pool1d(x.mT, 1)
F.adaptive_avg_pool1d(x, 2)
F.adaptive_max_pool1d(x.mT, 2)
F.interpolate(x.mT, size=3)
F.pixel_shuffle(x.view(x.shape[0], 4, x.shape[1], 1), 2)
F.unfold(x[:, None], (1, 2)) * 1
torch.histc(x, 4, -1, 1)
torch.nonzero(x[0, 0] > -1e9)
torch.zeros(8, 4, device=x.device, dtype=x.dtype).index_add(0, ids.flatten(), x.flatten(0, 1))
x.new_zeros(16, 4).index_copy(0, torch.arange(x.shape[0], device=x.device), x[:, 0])
torch.cartesian_prod(x[:, 0, 0], x[:, 0, 1])[4] * 1
torch.combinations(x[:, 0, 0])[1] * 1
torch.outer(x[:, 0, 0], y[:, 0, 1])
torch.outer(x[:, 0, 0], y[:, 0, 1]).flatten()[7] * 1
torch.kron(x[:, 0], w)
torch.trapezoid(x, dim=1)
x.view(x.shape[0], -1).std(1)
(x * w[0, :1]).sqrt()
(x * w[0]).abs().pow(0.5) + 1
(x @ w).norm(dim=-1)
F.normalize(x @ w, dim=-1, eps=0)
(x @ w).log1p()
""")
"""Of any shape; each ends a program."""

Expression = Callable[..., Any]


def compiled(source: str) -> Expression:
    return eval(f"lambda x, y, mask, ids, w, b, table, s: {source}", globals())
