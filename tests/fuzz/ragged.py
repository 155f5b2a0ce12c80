"""Random programs on graphs of random sizes: each call equals eager, or the program is refused.

    python -m tests.fuzz.ragged --programs 2000 --seed 1 --device cpu

A program is one to five statements on nodes `x`, edges `e` and graphs `u`, as message passing is
written, and as it must not be: sums of all rows, indices that are moved, counts of padding. It is
called at many sizes, and at those where only one row of something is padded.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onelaunch as ol

from . import command

NAMES = "x, e, u, edges, batch, ids, src, dst, n, m, g, S"
STEPS: dict[str, tuple[str, ...]] = {
    "x": (
        "x + S(e, dst, n)",
        "x * 0.5 + S(x.index_select(0, src), dst, n)",
        "S(x[src] * e, dst, n, 'mean') + x",
        "x + S(e, dst, n, 'max')",
        "x + S(e, src, n, 'min')",
        "x + u[batch]",
        "x * u.index_select(0, batch).sigmoid()",
        "x.relu() - 0.1",
        "x - S(x, batch, g, 'mean')[batch]",
        "x / (1 + S(torch.ones_like(e), dst, n))",
        "torch.zeros_like(x).index_add_(0, dst, x[src])",
        "x.index_add(0, src, e, alpha=-1)",
        "x.scatter(0, dst[:, None].expand_as(e), x[dst])",
        "x.index_copy(0, torch.arange(n, device=x.device), x * 2)",
        "x.index_fill(0, dst, 0.5)",
        "torch.cat([x, x]).index_add(0, dst, e)[:n] + 0",
        "torch.cat([x, x]).index_add(0, dst + n, e)[n:] + 0",
        "torch.cat([x * 0, x.new_ones(3, 4)]).index_add(0, dst, e)[:n] + 0",
        "x + ((batch[:, None] == batch[None]).to(x.dtype) @ x).tanh()",
        "((src[:, None] == torch.arange(n, device=x.device)).to(x.dtype).t() @ e)",
        "(ids[:, None] == ids[None]).to(x.dtype).sum(1, keepdim=True) * x",
        "(ids[:, None] != ids[None]).to(x.dtype).sum(1, keepdim=True) * x",
        "((ids[:, None] == ids[None]).to(x.dtype) @ x)[ids]",
        "torch.where(batch[:, None] == 0, x, x * 2)",
        "x.masked_fill((batch == g - 1)[:, None], 1.0)",
        "x - x.mean(0)",
        "x * x.sum()",
        "x + x.amax(0)",
        "x.cumsum(0)",
        "x.flip(0)",
        "x[n - 1 - torch.arange(n, device=x.device)]",
        "x[dst.clamp(min=1) - 1].new_zeros(n, 4).index_add(0, dst.clamp(min=1) - 1, e)",
        "x.index_add(0, (dst + 1).clamp(max=n - 1), e)",
        "x.index_add(0, dst // 2, e)",
        "x.index_add(0, torch.maximum(src, dst), e)",
        "x.index_add(0, torch.where(src > dst, src, dst), e)",
        "x.index_add(0, edges.flip(0)[0], e)",
        "x.index_add(0, torch.cat([src, dst]), torch.cat([e, e]))",
        "x.index_add(0, torch.cat([dst, torch.arange(n, device=x.device)]), torch.cat([e, x]))",
        "x.index_add(0, torch.cat([dst, batch]), torch.cat([e, x]))",
        "x.index_add(0, ids, x)",
        "x.index_add(0, batch, x)",
        "x.index_add(0, torch.arange(n, device=x.device)[src], e)",
        "x.index_add(0, ids[src], e)",
        "x.index_add(0, batch[dst], e)",
        "x.index_add(0, (src == dst).long(), e)",
        "x.index_add(0, S(torch.ones_like(dst), dst, n).clamp(max=n - 1)[src], e)",
        "x.index_add(0, (src != dst).long().cumsum(0).clamp(max=n - 1), e)",
        "x.index_add(0, (ids[:, None] == ids[None]).sum(1) - 1, x)",
        "x.index_add(0, (batch[:, None] != batch[None]).sum(1).clamp(max=n - 1), x)",
        "x.index_add(0, (x.new_ones(n).sum().long() - 1).expand(m), e)",
        "x.index_put((dst,), e, accumulate=True)",
        "x.scatter_reduce(0, dst[:, None].expand_as(e), e, 'prod', include_self=True)",
        "x.index_reduce(0, dst, e, 'amax')",
        "torch.zeros_like(x).index_reduce_(0, dst, e, 'mean', include_self=False)",
        "x.sort(0)[0]",
        "x[:1] + x",
        "x[-1:] + x",
        "x[ids]",
        "x[ids.sort()[0]]",
        "x.gather(0, dst[:, None].expand(m, 4))[:1] + x",
        "torch.softmax(x, -1)",
        "torch.softmax(x @ x.t(), -1) @ x",
        "torch.softmax((x @ x.t()).masked_fill(batch[:, None] != batch[None], -torch.inf), -1) @ x",
        "torch.softmax((x @ x.t()).masked_fill(ids[:, None] != ids[None], -torch.inf), -1) @ x",
        "torch.softmax((x @ x.t()).where(batch[:, None] == ids[None], -torch.inf), -1) @ x",
    ),
    "e": (
        "e + x[src] - x[dst]",
        "e * x.index_select(0, dst)",
        "e + u[batch[src]]",
        "e - S(e, dst, n, 'max')[dst]",
        "e.exp().clamp(max=9) / (1 + S(e.exp().clamp(max=9), dst, n)[dst])",
        "e - e.mean(0)",
        "e.tanh()",
        "e + x.gather(0, src[:, None].expand_as(e))",
        "e * (src != dst)[:, None]",
        "e[torch.arange(m, device=e.device)] * 2",
        "e.index_add(0, torch.arange(m, device=e.device), e)",
        "e.index_add(0, dst.clamp(max=m - 1), e)",
        "e + (batch[src] == batch[dst])[:, None]",
        "torch.where((batch[src] == batch[dst])[:, None], e, -e)",
    ),
    "u": (
        "u + S(x, batch, g)",
        "u + S(e, batch[dst], g, 'mean')",
        "u + S(x, batch, g, 'max')",
        "u - S(x, batch, g, 'min').tanh()",
        "u + ((batch[:, None] == torch.arange(g, device=u.device)).to(u.dtype).t() @ x)",
        "u.index_add(0, batch, x)",
        "u.index_add(0, batch, x) / S(x.new_ones(n), batch, g).clamp(min=1)[:, None]",
        "u + x.sum(0)",
        "u + e.mean(0)",
        "u.log_softmax(-1)",
        "u * u.shape[0]",
        "u + (batch[:, None] == torch.arange(g, device=u.device)).sum(0)[:, None]",
        "u + (batch[:, None] != torch.arange(g, device=u.device)).sum(0)[:, None]",
        "u.index_add(0, (batch[:, None] == batch[None]).sum(0)[:g].clamp(max=g - 1), u[:n])",
    ),
}  # fmt: skip
SIZES = [(4, 8), (8,), (3, 9), (6,), (7, 8), (2, 5, 9)]


def scatter(src: Tensor, index: Tensor, size: int, how: str = "sum") -> Tensor:
    """Bring rows together by index."""
    made = src.new_zeros(size, *src.shape[1:])
    at = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    if how == "sum":
        return made.scatter_add_(0, at, src)
    how = how if how == "mean" else f"a{how}"
    return made.scatter_reduce_(0, at, src, how, include_self=False)


@dataclass(frozen=True)
class Program:
    """Statements, and the buckets of nodes, edges and graphs."""

    seed: int
    steps: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[int, ...], ...]
    trained: bool

    def __str__(self) -> str:
        lines = [f"{name} = {source}" for name, source in self.steps]
        head = f"seed {self.seed} sizes={self.sizes} trained={self.trained}"
        return "\n    ".join([head, *lines])


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    every = [(name, source) for name, sources in STEPS.items() for source in sources]
    steps = tuple(r.choices(every, k=r.choice((1, 1, 2, 3, 4))))
    return Program(seed, steps, tuple(r.choice(SIZES) for _ in range(3)), r.random() < 0.3)


def arguments(r: torch.Generator, n: int, m: int, g: int) -> list[Tensor]:
    x, e, u = (torch.randn(k, 4, generator=r, dtype=torch.float64) for k in (n, m, g))
    edges = torch.randint(0, n, (2, m), generator=r)
    batch = torch.randint(0, g, (n,), generator=r).sort()[0]
    return [x, e, u, edges, batch, torch.randint(0, n, (n,), generator=r)]


@command.no_errors
def verdict(found: Program, device: torch.device) -> tuple[str, str]:
    """What became of a program: right, refused (with the code), void (eager fails) or wrong."""
    lines = [(name, eval(f"lambda {NAMES}: {source}", globals())) for name, source in found.steps]

    def f(
        x: Tensor, e: Tensor, u: Tensor, edges: Tensor, batch: Tensor, ids: Tensor
    ) -> tuple[Tensor, ...]:
        state = {"x": x * 1, "e": e * 1, "u": u * 1}
        src, dst = edges[0], edges[1]
        sizes = x.shape[0], e.shape[0], u.shape[0]
        for name, line in lines:
            state[name] = line(*state.values(), edges, batch, ids, src, dst, *sizes, scatter)
        return tuple(state.values())

    buckets = ol.Ragged(
        dict(zip(("nodes", "edges", "graphs"), found.sizes, strict=True)),
        {
            "x": "nodes",
            "e": "edges",
            "u": "graphs",
            "edges": (None, "edges"),
            "batch": "nodes",
            "ids": "nodes",
        },
        index={"edges": "nodes", "batch": "graphs", "ids": "nodes"},
    )
    r = random.Random(found.seed + 1)
    tops = [sizes[-1] for sizes in found.sizes]
    limits = [tops[0] - 1, tops[1], tops[2] - 1]
    plan = [[r.randint(1, most) for most in limits] for _ in range(12)]
    for _ in range(6):  # the ends of buckets
        plan.append([r.choice([1, most, max(most - 1, 1)]) for most in limits])
    r.shuffle(plan)
    fast = ol.graph(f, buckets=buckets, warmup=1)
    seed = torch.Generator().manual_seed(found.seed)
    with torch.set_grad_enabled(found.trained):
        for number, sizes in enumerate([s for twice in plan for s in (twice, twice)]):
            given = [t.to(device) for t in arguments(seed, *sizes)]
            results: list[list[Tensor]] = []
            for call in (f, fast):
                leaves = [t.clone() for t in given]
                if found.trained:
                    leaves[:3] = [t.requires_grad_() for t in leaves[:3]]
                try:
                    results.append(_seen(call(*leaves), leaves[:3]))
                except ol.CaptureError as error:
                    return "refused", error.code
                except Exception:
                    if call is f:
                        return "void", "eager"
                    raise
            for place, (a, b) in enumerate(zip(*results, strict=True)):
                if a.shape != b.shape or not torch.allclose(a, b, 1e-6, 1e-6, equal_nan=True):
                    return "wrong", f"call {number} of {sizes}, tensor {place}: {b} is not {a}"
    replayed = any(recording.replays for recording in fast.recordings)
    return "right" if replayed else "void", "replayed" if replayed else "no replay"


def _seen(result: Any, leaves: list[Tensor]) -> list[Tensor]:
    """The results, and gradients of the arguments."""
    found = [t.detach().cpu() for t in result]
    roots = [t for t in result if t.requires_grad]
    if roots:
        generator = torch.Generator().manual_seed(1)
        sent = [
            torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in roots
        ]
        grads = torch.autograd.grad(roots, leaves, sent, allow_unused=True)
        found += [torch.zeros(0) if t is None else t.cpu() for t in grads]
    return found


fuzz = command.fuzzer(program, verdict)


if __name__ == "__main__":
    sys.exit(command.main("Random programs on graphs of random sizes.", fuzz, 2000))
