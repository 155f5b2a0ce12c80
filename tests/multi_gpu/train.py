"""Trains on each rank, eagerly and graphed from one seed, and compares. Run under torchrun.

    torchrun --nproc-per-node 2 tests/multi_gpu/train.py ddp-pair --out /tmp/reports

Each rank writes RANK.json: how far its parameters are from eager's, and what was recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import onelaunch as ol

Step = Callable[[Tensor, Tensor], Tensor]


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64)
    layers = (nn.Linear(32, 64), norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    return nn.Sequential(*layers).to(device)


def side_stream(device: torch.device) -> Any:
    """Where DDP is made for a step that will be captured, as PyTorch's notes on graphs ask."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream())
    return contextlib.nullcontext()


def adam(parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"capturable": True} if device.type == "cuda" else {}
    if device.type == "cuda":
        return torch.optim.Adam(parameters, lr=1e-2, **options)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def step_of(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(module: nn.Module, device: torch.device) -> DDP:
    return DDP(module, device_ids=[device.index] if device.type == "cuda" else None)


def ddp_pair(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    model = network(device)
    fast = ol.graph(model) if graphed else model
    wrapped = ddp(fast, device)
    return model, step_of(wrapped, adam(model.parameters(), device)), fast


def ddp_step(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    model = network(device)
    with side_stream(device):
        wrapped = ddp(model, device)
    step = step_of(wrapped, adam(model.parameters(), device))
    fast: Any = ol.graph(step) if graphed else step
    return model, fast, fast


def ddp_of_one(device: torch.device, graphed: bool, way: str) -> tuple[nn.Module, Step, Any]:
    """A step that rank 1 alone cannot record."""
    model = network(device)
    with side_stream(device):
        wrapped = ddp(model, device)
    optimizer = adam(model.parameters(), device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        if dist.get_rank() == 1:
            loss.item()
        optimizer.step()
        return loss.detach()

    fast: Any = ol.graph(step, on_refusal=way) if graphed else step  # type: ignore[call-overload]
    return model, fast, fast


def one_refuses(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    return ddp_of_one(device, graphed, "eager")


def one_raises(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    return ddp_of_one(device, graphed, "raise")


def fsdp_step(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network(device)
    fully_shard(model, reshard_after_forward=False)
    step = step_of(model, adam(model.parameters(), device))
    fast: Any = ol.graph(step) if graphed else step
    return model, fast, fast


def fsdp_deep(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """Layers sharded one by one, low precision, clipping, fused Adam and a schedule."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network(device)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for part in (model[0], model[3]):
        fully_shard(part, reshard_after_forward=False, mp_policy=low)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=200)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    fast: Any = ol.graph(step) if graphed else step

    def call(x: Tensor, y: Tensor) -> Tensor:
        loss = fast(x, y)
        schedule.step()
        return loss

    return model, call, fast


def fsdp_accumulated(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """Gradients of two batches, reduced once; now and then a forward alone, after which FSDP
    leaves the parameters unsharded."""
    from torch.distributed.fsdp import fully_shard

    model: Any = network(device)
    fully_shard(model, reshard_after_forward=False)
    optimizer = adam(model.parameters(), device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        first, second = x.chunk(2)
        optimizer.zero_grad(set_to_none=False)
        for part, wanted in ((first, y[:8]), (second, y[8:])):
            model.set_requires_gradient_sync(part is second)
            loss = F.cross_entropy(model(part), wanted) / 2
            loss.backward()
        optimizer.step()
        return loss.detach()

    fast: Any = ol.graph(step) if graphed else step

    calls = iter(range(10**6))

    def call(x: Tensor, y: Tensor) -> Tensor:
        loss = fast(x, y)
        if next(calls) % 10:
            return loss
        with torch.no_grad():
            return loss + model(x).sum()

    return model, call, fast


def fsdp_broken_off(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """A capture that ends between forward and backward, with whole parameters and collectives
    under way; the same step goes on eagerly."""
    from torch.distributed.fsdp import fully_shard

    model = network(device)
    for part in (model[0], model):
        fully_shard(part, reshard_after_forward=False)
    optimizer = adam(model.parameters(), device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1e6:
            return loss.detach()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast: Any = ol.graph(step, on_refusal="eager") if graphed else step
    return model, fast, fast


def all_reduce(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """What a collective writes is an argument, and what it reads another."""
    model = network(device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x)
        gathered = torch.empty(2 * len(x), *x.shape[1:], device=device)
        dist.all_gather_into_tensor(gathered, x * 2)
        return gathered.sum() + y.sum()

    fast: Any = ol.graph(step) if graphed else step

    def call(x: Tensor, y: Tensor) -> Tensor:
        return fast(x, y) + x.sum()

    return model, call, fast


def late_collectives(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """Those whose results are there only when somebody has waited or looked."""
    from torch.distributed import _functional_collectives as functional

    model = network(device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        scattered = torch.empty(8, 32, device=device)
        work = dist.reduce_scatter_tensor(scattered, x * 3, async_op=True)
        total: Tensor = functional.all_reduce(x + 1, "sum", dist.group.WORLD)
        work.wait()
        return (total * 2).sum() + scattered.sum() + y.sum()

    fast: Any = ol.graph(step) if graphed else step
    return model, fast, fast


# What is refused.


def pair_over_ddp(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    wrapped = ddp(network(device), device)
    return wrapped, step_of(ol.graph(wrapped), adam(wrapped.parameters(), device)), None


def function_over_ddp(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    wrapped = ddp(network(device), device)
    fast = ol.graph(lambda x: wrapped(x))
    return wrapped, step_of(fast, adam(wrapped.parameters(), device)), fast


def pair_over_fsdp(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network(device)
    fully_shard(model[0], reshard_after_forward=False)
    return model, step_of(ol.graph(model), adam(model.parameters(), device)), None


def fsdp_result(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    """A DTensor as result."""
    from torch.distributed.fsdp import fully_shard

    model: Any = network(device)
    fully_shard(model, reshard_after_forward=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        result: Tensor = model[0].weight.grad * 2
        model.zero_grad()
        return result

    fast: Any = ol.graph(step)
    return model, fast, fast


def fsdp_reshard(device: torch.device, graphed: bool) -> tuple[nn.Module, Step, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network(device)
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=False)
    fast: Any = ol.graph(step_of(model, adam(model.parameters(), device)))
    return model, fast, fast


WAYS = {
    "ddp-pair": ddp_pair,
    "ddp-step": ddp_step,
    "fsdp-step": fsdp_step,
    "fsdp-deep": fsdp_deep,
    "fsdp-accumulated": fsdp_accumulated,
    "fsdp-broken-off": fsdp_broken_off,
    "all-reduce": all_reduce,
    "late-collectives": late_collectives,
    "one-refuses": one_refuses,
}
REFUSED = {
    "pair-over-ddp": pair_over_ddp,
    "function-over-ddp": function_over_ddp,
    "pair-over-fsdp": pair_over_fsdp,
    "fsdp-reshard": fsdp_reshard,
    "fsdp-result": fsdp_result,
    "one-raises": one_raises,
}


def local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds."""
    return (t.to_local() if hasattr(t, "to_local") else t).detach().clone()


def train(way: str, device: torch.device, steps: int, graphed: bool) -> tuple[list[Tensor], Any]:
    model, step, fast = (WAYS | REFUSED)[way](device, graphed)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator).to(device)
        y = torch.randint(5, (16,), generator=generator).to(device)
        losses.append(step(x, y).clone())
    return [torch.stack(losses), *map(local, model.state_dict().values())], fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS | REFUSED)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="a folder that exists")
    parser.add_argument("--seconds", type=int, default=100, help="after which it gives up")
    parser.add_argument("--keep", action="store_true", help="shut down with recordings alive")
    options = parser.parse_args()
    # A shut-down that hangs says where.
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    report: dict[str, Any] = {"rank": dist.get_rank(), "way": options.way}
    kept = None
    try:
        eager: list[Tensor] = []
        if options.way in WAYS:
            eager, _ = train(options.way, device, options.steps, graphed=False)
        ours, fast = train(options.way, device, options.steps, graphed=True)
        report["equal"] = all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
        report["off"] = max(
            float((a.double() - b.double()).abs().max()) for a, b in zip(eager, ours, strict=True)
        )
        report["replays"] = sum(recording.replays for recording in fast.recordings)
        kept = fast if options.keep else None
        del fast
    except ol.GraphError as error:
        report |= {"refused": error.code, "what": str(error)}
    dist.barrier()
    dist.destroy_process_group()
    (options.out / f"{report['rank']}.json").write_text(json.dumps(report))
    del kept
    if device.type == "cpu":
        # Threads of gloo's that outlive its groups race with Python's own end, and now and then
        # abort it ("terminate called without an active exception"), without onelaunch too.
        os._exit(0)


if __name__ == "__main__":
    main()
