"""Graph networks and packed transformers, written as PyTorch Geometric and e3nn write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def scatter(src: Tensor, index: Tensor, size: int, reduce: str = "sum") -> Tensor:
    """Bring rows together by index, as `torch_geometric.utils.scatter` does along dimension 0."""
    shape = (size, *src.shape[1:])
    at = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    if reduce == "sum":
        return src.new_zeros(shape).scatter_add_(0, at, src)
    if reduce == "mean":
        count = src.new_zeros(size).scatter_add_(0, index, src.new_ones(src.shape[0]))
        total = src.new_zeros(shape).scatter_add_(0, at, src)
        return total / count.clamp(min=1).view(-1, *[1] * (src.dim() - 1))
    return src.new_zeros(shape).scatter_reduce_(0, at, src, f"a{reduce}", include_self=False)


def softmax(src: Tensor, index: Tensor, size: int) -> Tensor:
    """Normalize the rows of each index, as `torch_geometric.utils.softmax` does."""
    out = src - scatter(src.detach(), index, size, "max").index_select(0, index)
    out = out.exp()
    return out / (scatter(out, index, size) + 1e-16).index_select(0, index)


class Graph(nn.Module):
    """A layer over (nodes, 8), (2, edges), (edges, 8), ids of graphs (nodes,) and (graphs, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.pair = nn.Linear(2 * WIDTH, WIDTH)


class GCN(Graph):
    """Sums of neighbours and the node itself, by the roots of degrees."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        loops = torch.arange(x.shape[0], device=x.device)
        row, col = torch.cat([edges, loops.expand(2, -1)], 1)
        weight = x.new_ones(row.shape[0])
        root = scatter(weight, col, x.shape[0]).pow(-0.5)
        root = root.masked_fill(root == float("inf"), 0)
        norm = root[row] * weight * root[col]
        message = norm.view(-1, 1) * self.a(x).index_select(0, row)
        return scatter(message, col, x.shape[0]) + self.b.bias


class GAT(Graph):
    """Attention over edges, of two heads."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        src, dst = edges[0], edges[1]
        h = self.a(x).view(-1, 2, WIDTH // 2)
        logits = (h * self.c.weight[0].view(2, -1)).sum(-1)
        alpha = logits.index_select(0, src) + logits.index_select(0, dst)
        alpha = softmax(F.leaky_relu(alpha + self.b(e)[:, :2], 0.2), dst, x.shape[0])
        message = h.index_select(0, src) * alpha.unsqueeze(-1)
        return scatter(message, dst, x.shape[0]).reshape(-1, WIDTH)


class SAGE(Graph):
    """Mean and maximum of neighbours, and their spread."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        src, dst = edges[0], edges[1]
        sent = x.index_select(0, src)
        mean = scatter(sent, dst, x.shape[0], "mean")
        spread = scatter(sent * sent, dst, x.shape[0], "mean") - mean * mean
        most = scatter(sent, dst, x.shape[0], "max")
        least = scatter(sent, dst, x.shape[0], "min")
        return self.a(x) + self.b(mean) + self.c(most - least) + spread.relu().add(1e-5).sqrt()


class EdgeConv(Graph):
    """The largest of what a small network makes of each edge, and new features of edges."""

    def forward(
        self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        src, dst = edges
        new = self.pair(torch.cat([x[dst], x[src] - x[dst]], -1)).relu() + self.a(e)
        return scatter(new, dst, x.shape[0], "max"), new


class Pooled(Graph):
    """A network whose results are of graphs: means, sums and maxima of nodes, and features."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        src, dst = edges
        h = x + torch.zeros_like(x).index_add(0, dst, (x[src] + e).relu())
        h = self.a(h).relu() + self.b(u)[batch]
        pools = [scatter(h, batch, u.shape[0], how) for how in ("mean", "sum", "max")]
        return self.c(u + pools[0] * 2 + pools[1] + pools[2]).log_softmax(-1)


class Equivariant(Graph):
    """A convolution of e3nn: spherical harmonics of edges, weighted by their lengths."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor) -> Tensor:
        src, dst = edges[0], edges[1]
        place = x[:, :3]
        vector = place[src] - place[dst]
        length = vector.norm(dim=-1)
        harmonics = math.sqrt(3) * F.normalize(vector, dim=-1)
        centers = torch.linspace(0, 3, WIDTH, device=x.device, dtype=x.dtype)
        radial = torch.exp(-((length[:, None] - centers) ** 2))
        weight = self.b(F.silu(self.a(radial)))
        scalars = weight * x[src]
        vectors = torch.einsum("ec,ev->ecv", self.c(x)[src] * weight, harmonics)
        out = torch.cat([scalars, vectors.flatten(1)], -1)
        made = torch.zeros(x.shape[0], out.shape[1], dtype=x.dtype, device=x.device)
        return made.index_add_(0, dst, out).div(3**0.5)


class Readout(Graph):
    """Attention of each graph's nodes to its features, and the mean by a product."""

    def forward(
        self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate = softmax((self.a(x) * u.index_select(0, batch)).sum(-1), batch, u.shape[0])
        one = (batch[:, None] == torch.arange(u.shape[0], device=x.device)).to(x.dtype)
        count = scatter(torch.ones_like(gate), batch, u.shape[0]).clamp(min=1)
        return scatter(gate[:, None] * x, batch, u.shape[0]), (one.t() @ x) / count[:, None]


class Meta(Graph):
    """New features of edges, nodes and graphs in turn, each from the features of the others."""

    def forward(
        self, x: Tensor, edges: Tensor, e: Tensor, batch: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        src, dst = edges
        e = self.pair(torch.cat([x[src], x[dst]], 1)) + e + u[batch[src]]
        x = x + self.a(scatter(e, dst, x.shape[0], "mean")).relu() + u[batch]
        of_edges = scatter(e, batch.index_select(0, dst), u.shape[0])
        return x, e, self.b(u) + of_edges + scatter(x, batch, u.shape[0], "mean")


class Packed(nn.Module):
    """A transformer of one layer over packed tokens (tokens, 8), by ids of their sequences."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = (nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x: Tensor, ids: Tensor, causal: bool = False) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, 2, WIDTH // 2).permute(1, 2, 0, 3)
        same = ids[:, None] == ids[None, :]
        if causal:
            same = same & torch.ones_like(same).tril()
        if self.fused:
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        else:
            scores = (q @ k.transpose(-1, -2)).masked_fill(~same, float("-inf"))
            y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(0, 1).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm(x))))
