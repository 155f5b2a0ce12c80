"""Small programs on device tensors, for `refusals` to capture; many are captured without a word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Env:
    """What a program finds: tensors made before the capture, and the device's own functions."""

    device: torch.device
    api: Any  # torch.cuda, or torch.tape
    x: Tensor  # float32 (4, 4), positive definite
    i: Tensor  # int64 (4,)
    mask: Tensor  # bool (4, 4)
    host: Tensor  # float32 (4, 4), pageable
    pinned: Tensor  # float32 (4, 4), pinned where the device can
    number: Tensor  # float32 (), of the host
    generator: torch.Generator  # of the device, registered with no graph
    event: Any  # recorded before the capture
    timed: tuple[Any, Any]
    side: Any  # another stream
    linear: nn.Linear
    norm: nn.BatchNorm1d

    @staticmethod
    def on(driver: str) -> Env:
        """Everything, on the device of `driver`."""
        if driver == "tape":
            from onelaunch import testing

            testing.install()
        device = torch.device(driver)
        api = getattr(torch, driver)
        host = torch.eye(4) * 3 + torch.arange(16.0).view(4, 4) / 16
        host = host @ host.t()
        x = host.to(device)
        timed = (api.Event(enable_timing=True), api.Event(enable_timing=True))
        for event in timed:
            event.record()
        return Env(
            device=device,
            api=api,
            x=x,
            i=torch.tensor([0, 2, 1, 1], device=device),
            mask=x > 5,
            host=host,
            pinned=host.clone().pin_memory() if driver == "cuda" else host.clone(),
            number=torch.tensor(2.0),
            generator=torch.Generator(device) if driver == "cuda" else torch.Generator(),
            event=timed[0],
            timed=timed,
            side=api.Stream(),
            linear=nn.Linear(4, 4).to(device),
            norm=nn.BatchNorm1d(4).to(device),
        )


Program = Callable[[Env], Any]
PROGRAMS: dict[str, Program] = {}


def program(f: Program) -> Program:
    """Add a program that is no single expression."""
    PROGRAMS[f.__name__] = f
    return f


# Reads of device values on the host, and what only looks like one.
PROGRAMS |= {
    "item": lambda e: e.x.sum().item(),
    "bool": lambda e: bool(e.x.sum()),
    "int": lambda e: int(e.i[0]),
    "float": lambda e: float(e.x[0, 0]),
    "as_index": lambda e: [0, 1, 2][e.i[1]],
    "branch": lambda e: e.x if e.mask.any() else -e.x,
    "assertion": lambda e: [None for _ in range(1) if not (e.x > -1).all()],
    "range_of_tensor": lambda e: list(range(e.i[1])),
    "contains": lambda e: 3.0 in e.x,
    "tolist": lambda e: e.x.tolist(),
    "numpy_of_cpu": lambda e: e.x.cpu().numpy(),
    "cpu": lambda e: e.x.cpu(),
    "to_cpu": lambda e: e.x.to("cpu"),
    "to_cpu_non_blocking": lambda e: e.x.to("cpu", non_blocking=True),
    "repr": lambda e: repr(e.x),
    "format": lambda e: f"{e.x.sum():.2f}",
    "equal": lambda e: torch.equal(e.x, e.x),
    "allclose": lambda e: torch.allclose(e.x, e.x),
    "is_nonzero": lambda e: torch.is_nonzero(e.x.sum()),
    "assert_async": lambda e: torch._assert_async((e.x > -1).all()),
    "shape": lambda e: (e.x.shape, len(e.x), e.x.numel(), e.x.stride(), e.x.is_contiguous()),
    "data_ptr": lambda e: (e.x.data_ptr(), e.x.untyped_storage().nbytes()),
    "result_type": lambda e: torch.result_type(e.x, e.i),
    "iterate": lambda e: [row + 1 for row in e.x],
    "isclose_all": lambda e: torch.isclose(e.x, e.x).all(),
}

# Results as large as the data says, and forms of fixed size.
PROGRAMS |= {
    "nonzero": lambda e: e.x.nonzero(),
    "nonzero_static": lambda e: torch.nonzero_static(e.x, size=3),
    "where_indices": lambda e: torch.where(e.mask),
    "where_values": lambda e: torch.where(e.mask, e.x, 0.0),
    "unique": lambda e: torch.unique(e.i),
    "unique_consecutive": lambda e: torch.unique_consecutive(e.i),
    "masked_select": lambda e: e.x.masked_select(e.mask),
    "masked_fill": lambda e: e.x.masked_fill(e.mask, 1.0),
    "masked_scatter": lambda e: e.x.masked_scatter(e.mask, e.x),
    "index_mask": lambda e: e.x[e.mask],
    "index_byte_row_mask": lambda e: e.x[e.mask[0]],
    "assign_mask_number": lambda e: e.x.clone().__setitem__(e.mask, 1.0),
    "assign_mask_values": lambda e: e.x.clone().__setitem__(e.mask[0], e.x[:1]),
    "bincount": lambda e: torch.bincount(e.i),
    "bincount_minlength": lambda e: torch.bincount(e.i, minlength=8),
    "histc": lambda e: torch.histc(e.x, 4),
    "histc_bounded": lambda e: torch.histc(e.x, 4, min=0, max=1),
    "repeat_interleave_tensor": lambda e: torch.repeat_interleave(e.x, e.i, dim=0),
    "repeat_interleave_sized": lambda e: torch.repeat_interleave(e.x, e.i, 0, output_size=4),
    "repeat_interleave_int": lambda e: torch.repeat_interleave(e.x, 2, dim=0),
    "one_hot": lambda e: F.one_hot(e.i),
    "one_hot_sized": lambda e: F.one_hot(e.i, 3),
    "tensor_split": lambda e: torch.tensor_split(e.x, 2),
    "tensor_split_by_tensor": lambda e: torch.tensor_split(e.x, torch.tensor([1, 2])),
    "topk": lambda e: e.x.topk(2),
    "sort": lambda e: e.x.sort(),
    "argsort": lambda e: e.x.argsort(),
    "cumsum": lambda e: e.x.cumsum(0),
    "searchsorted": lambda e: torch.searchsorted(e.x[0].contiguous(), e.x),
    "index_tensor": lambda e: e.x[e.i],
    "index_put_accumulate": lambda e: e.x.clone().index_put_((e.i,), e.x, accumulate=True),
    "scatter_add": lambda e: e.x.scatter_add(0, e.i[None].expand(4, 4), e.x),
    "embedding": lambda e: F.embedding(e.i, e.x),
    "cross_entropy": lambda e: F.cross_entropy(e.x, e.i),
    "inv": lambda e: torch.linalg.inv(e.x),
    "inv_ex": lambda e: torch.linalg.inv_ex(e.x),
    "cholesky": lambda e: torch.linalg.cholesky(e.x),
    "cholesky_ex": lambda e: torch.linalg.cholesky_ex(e.x),
    "solve": lambda e: torch.linalg.solve(e.x, e.x),
    "det": lambda e: torch.linalg.det(e.x),
}

# Random numbers.
PROGRAMS |= {
    "dropout": lambda e: F.dropout(e.x, 0.5),
    "rand": lambda e: torch.rand(4, device=e.device),
    "randint": lambda e: torch.randint(9, (4,), device=e.device),
    "randperm": lambda e: torch.randperm(8, device=e.device),
    "normal_": lambda e: torch.empty_like(e.x).normal_(),
    "normal_of_tensors": lambda e: torch.normal(e.x, e.x.abs() + 1),
    "bernoulli": lambda e: torch.bernoulli(e.x.sigmoid()),
    "multinomial": lambda e: torch.multinomial(e.x.abs() + 1, 2),
    "multinomial_replacement": lambda e: torch.multinomial(e.x.abs() + 1, 2, replacement=True),
    "exponential_": lambda e: torch.empty_like(e.x).exponential_(),
    "manual_seed": lambda e: torch.manual_seed(3),
    "device_manual_seed": lambda e: (e.api.manual_seed_all(3), torch.rand(4, device=e.device)),
    "get_rng_state": lambda e: e.api.get_rng_state(),
    "unregistered_generator": lambda e: torch.rand(4, device=e.device, generator=e.generator),
}


@program
def seed_between(e: Env) -> Any:
    y = torch.rand(4, device=e.device)
    torch.manual_seed(3)
    return y + torch.rand(4, device=e.device)


@program
def set_rng_state(e: Env) -> Any:
    state = e.api.get_rng_state()
    y = torch.rand(4, device=e.device)
    e.api.set_rng_state(state)
    return y


# Copies between host and device, and tensors made from values of the host.
PROGRAMS |= {
    "tensor_of_number": lambda e: torch.tensor(2.0, device=e.device),
    "tensor_of_list": lambda e: torch.tensor([1.0, 2.0], device=e.device),
    "tensor_of_nothing": lambda e: torch.tensor([], device=e.device),
    "nothing_to_cpu": lambda e: e.x[:0].cpu(),
    "nothing_to_device": lambda e: e.host[:0].to(e.device),
    "scalar_tensor": lambda e: torch.scalar_tensor(2.0, device=e.device),
    "full": lambda e: torch.full((4,), 2.0, device=e.device),
    "arange": lambda e: torch.arange(4, device=e.device),
    "new_tensor": lambda e: e.x.new_tensor([1.0]),
    "to_device": lambda e: e.host.to(e.device),
    "to_device_non_blocking": lambda e: e.host.to(e.device, non_blocking=True),
    "pinned_to_device": lambda e: e.pinned.to(e.device),
    "pinned_to_device_non_blocking": lambda e: e.pinned.to(e.device, non_blocking=True),
    "copy_from_host": lambda e: e.x.copy_(e.host),
    "copy_from_host_non_blocking": lambda e: e.x.copy_(e.host, non_blocking=True),
    "copy_from_pinned_non_blocking": lambda e: e.x.copy_(e.pinned, non_blocking=True),
    "copy_to_host": lambda e: torch.empty(4, 4).copy_(e.x),
    "copy_to_pinned_non_blocking": lambda e: e.pinned.copy_(e.x, non_blocking=True),
    "copy_of_host_number": lambda e: e.x[0, 0].copy_(e.number),
    "fill_": lambda e: e.x.fill_(2.0),
    "fill_host_number": lambda e: e.x.fill_(e.number),
    "assign_number": lambda e: e.x.__setitem__(0, 2.0),
    "assign_host_number": lambda e: e.x.__setitem__(0, e.number),
    "assign_host_row": lambda e: e.x.__setitem__(0, e.host[0]),
    "times_host_number": lambda e: e.x * e.number,
    "where_host_number": lambda e: torch.where(e.mask, e.x, e.number),
    "index_of_host": lambda e: e.x[torch.tensor([0, 1])],
    "index_list": lambda e: e.x[[0, 1]],
    "index_int": lambda e: e.x[0, 1:],
    "host_work": lambda e: (e.host @ e.host).sum().item(),
}

# Memory and metadata.
PROGRAMS |= {
    "in_place": lambda e: e.x.add_(1),
    "in_place_view": lambda e: e.x[1].mul_(2),
    "transpose_": lambda e: e.x.clone().t_(),
    "views": lambda e: e.x.t().reshape(-1).view(2, 8)[:, ::2],
    "resize_": lambda e: e.x.clone().resize_(64, 64),
    "out_resized": lambda e: torch.add(e.x, e.x, out=torch.empty(0, device=e.device)),
    "set_": lambda e: torch.empty(0, device=e.device).set_(e.x),
    "data_assigned": lambda e: setattr(e.x.clone(), "data", e.x),
    "clone": lambda e: e.x.clone(),
    "cat": lambda e: torch.cat([e.x, e.x]),
    "foreach": lambda e: torch._foreach_add([e.x, e.x], 1.0),
    "allocate": lambda e: torch.empty(1 << 22, device=e.device),
    "contiguous": lambda e: e.x.t().contiguous(),
    "cast": lambda e: e.x.half().float(),
    "complex": lambda e: torch.fft.fft(e.x).abs(),
}

# Layers and autograd.
PROGRAMS |= {
    "linear": lambda e: e.linear(e.x),
    "batch_norm_training": lambda e: e.norm(e.x),
    "conv": lambda e: F.conv1d(e.x[None], e.x[:, :, None]),
    "attention": lambda e: F.scaled_dot_product_attention(e.x[None], e.x[None], e.x[None]),
    "grad": lambda e: torch.autograd.grad(e.linear(e.x).sum(), e.linear.weight),
    "clip_grad_norm": lambda e: (
        e.linear(e.x).sum().backward(),
        nn.utils.clip_grad_norm_(e.linear.parameters(), 1.0),
    ),
}

# Streams and events.
PROGRAMS |= {
    "synchronize": lambda e: e.api.synchronize(),
    "stream_synchronize": lambda e: e.api.current_stream().synchronize(),
    "stream_query": lambda e: e.api.current_stream().query(),
    "event_made": lambda e: e.api.Event(),
    "event_recorded": lambda e: (e.x + 1, e.api.Event().record()),
    "event_of_before_synchronize": lambda e: e.event.synchronize(),
    "event_of_before_query": lambda e: e.event.query(),
    "event_elapsed": lambda e: e.timed[0].elapsed_time(e.timed[1]),
    "stream_made": lambda e: e.api.Stream(),
}


@program
def event_synchronize(e: Env) -> Any:
    event = e.api.Event()
    event.record()
    event.synchronize()


@program
def event_query(e: Env) -> Any:
    event = e.api.Event()
    event.record()
    return event.query()


@program
def fork_and_join(e: Env) -> Any:
    e.side.wait_stream(e.api.current_stream())
    with e.api.stream(e.side):
        y = e.x + 1
    e.api.current_stream().wait_stream(e.side)
    return y * 2
