"""What comes in: sizes, kinds, layouts, numbers, objects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onelaunch as ol
from tests.device.drop_in import on_accelerators, on_cpu_and_cuda
from tests.device.steps import small_model

from .side_by_side import refused, right_or_refused, side_by_side

Rand = Callable[..., Tensor]


def test_an_input_that_is_overwritten(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TransformerEngine/pull/3210

    A comparison of graphed with graphed: the argument was the static input itself."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x: (x.mul_(2), x + 1)[1])
        x = rand(0, 4)
        for _ in range(7):
            yield fast(x), x.clone()

    side_by_side(program, device)


@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "bool"])
def test_numbers_of_numpy(device: torch.device, rand: Rand, kind: str) -> None:
    """https://github.com/pytorch/rl/issues/3002

    Scalars that an environment gives are NumPy's."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x, n: x * float(n) if kind != "bool" or n else -x)
        for i in range(12):
            n = getattr(np, kind + "_" * (kind == "bool"))(i // 4)
            yield fast(rand(i, 3), n)

    side_by_side(program, device)


def test_a_prompt_of_another_length(device: torch.device, rand: Rand) -> None:
    """https://github.com/dexmal/realtime-vla/issues/14

    Whether the graph of one prompt is valid for another, of another length."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.MultiheadAttention(4, 2, batch_first=True).to(device).eval()

        @torch.no_grad()
        def attend(x: Tensor, prompt: Tensor) -> Tensor:
            return net(x, prompt, prompt, need_weights=False)[0]

        fast = graph(attend)
        for i, n in enumerate([3, 3, 3, 3, 3, 7, 7, 7, 7, 7, 3, 7, 1, 3]):
            yield fast(rand(i, 1, 2, 4), rand(i + 50, 1, n, 4))

    side_by_side(program, device, captures=2)


def test_values_that_are_not_contiguous(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/20426

    V is a slice of QKV, not contiguous, and a static input was copied as if it were."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
        for i in range(8):
            qkv = rand(i, 2, 3, 5, 12)
            yield fast(*qkv.chunk(3, -1))
            yield fast(*rand(i + 50, 3, 2, 3, 5, 4))
            yield fast(*(t.transpose(1, 2) for t in rand(i + 90, 3, 2, 5, 3, 4)))

    side_by_side(program, device, captures=3)


def test_one_tensor_given_twice(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/104435

    Arguments that share memory in one call and not in the next."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda a, b: (a.add_(1), a * b)[1])
        for i in range(14):
            x, y = rand(i, 6), rand(i + 50, 6)
            a, b = [(x, y), (x, x), (x[:4], x[2:]), (x, x.view(6))][i % 4]
            yield fast(a, b), a.clone(), b.clone()

    side_by_side(program, device, replayed=0)


def test_dicts_in_another_order(device: torch.device, rand: Rand) -> None:
    """https://github.com/Exscientia/physicsml/issues/33

    Batches as dicts: of other order, with keys that are missing, and None for what is absent."""

    def program(graph: Any) -> Iterator[Any]:
        def energy(batch: dict[str, Any]) -> dict[str, Any]:
            y = sum(v * (i + 1) for i, v in enumerate(batch.values()) if v is not None)
            return {"energy": y, "keys": list(batch)}

        fast = graph(energy)
        for i in range(24):
            a, b = rand(i, 3), rand(i + 50, 3)
            yield fast([{"a": a, "b": b}, {"b": b, "a": a}, {"a": a}, {"a": a, "b": None}][i % 4])

    side_by_side(program, device, captures=4)


def test_nested_tuples_and_defaults(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/torchtitan/pull/2731

    Keyword arguments, `*args` and defaults, the same call in other spellings."""

    def program(graph: Any) -> Iterator[Any]:
        def f(x: Tensor, /, *more: Any, scale: float = 2.0, extra: Any = None, **rest: Any) -> Any:
            y = x * scale + (0 if extra is None else extra["t"][0])
            return y, [m + y for m in more], dict(rest)

        fast = graph(f)
        for i in range(6):
            x, t = rand(i, 3), rand(i + 40, 3)
            yield fast(x), fast(x, scale=2.0), fast(x, t, t, scale=3.0)
            yield fast(x, extra={"t": (t, None)}, mode="a")

    side_by_side(program, device)


def test_a_frozen_dataclass_with_tensors(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/3373

    Packed sequence parameters: a dataclass that makes a tensor in `__post_init__`."""

    @dataclasses.dataclass(frozen=True)
    class Packed:
        starts: Tensor
        longest: int
        index: Any = dataclasses.field(default=None, init=False)

        def __post_init__(self) -> None:
            positions = torch.arange(6, device=self.starts.device)
            object.__setattr__(self, "index", (positions[:, None] >= self.starts[1:]).sum(1))

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor, packed: Packed) -> Tensor:
            sums = torch.zeros(3, device=x.device).index_add(0, packed.index, x)
            return sums[packed.index] / packed.longest

        fast = graph(forward)
        for i in range(12):
            starts = torch.tensor([0, 1 + i % 3, 4], device=device)
            yield fast(rand(i, 6), Packed(starts, 3))

    side_by_side(program, device)


def test_a_batch_that_moves_itself(device: torch.device, rand: Rand) -> None:
    """https://github.com/rusty1s/pytorch_scatter/issues/244

    Scatter operations that allocate their result, over graphs of a fixed number of nodes."""

    class Graph:
        def __init__(self, x: Tensor, edges: Tensor) -> None:
            self.x, self.edge_index = x, edges

        def __getattr__(self, name: str) -> Any:
            if name == "num_nodes":
                return self.x.shape[0]
            raise AttributeError(name)

    def program(graph: Any) -> Iterator[Any]:
        def forward(g: Graph) -> tuple[Tensor, Tensor]:
            source, target = g.edge_index
            index = target[:, None].expand(-1, g.x.shape[1])
            zeros = torch.zeros(g.num_nodes, g.x.shape[1], device=g.x.device)
            added = zeros.scatter_add(0, index, g.x[source])
            most = zeros.scatter_reduce(0, index, g.x[source], "amax", include_self=False)
            return added, most

        fast = graph(forward)
        for i in range(8):
            edges = torch.tensor([[0, 1, 2, 3, i % 5], [1, 2, 0, i % 5, 4]], device=device)
            yield fast(Graph(rand(i, 5, 3), edges))

    side_by_side(program, device, captures=1)


def test_a_scatter_of_unknown_size(device: torch.device, rand: Rand) -> None:
    """https://github.com/torchmd/torchmd-net/pull/195

    Without `dim_size` a scatter asks for the greatest index, a synchronization."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor, batch: Tensor) -> Tensor:
            n = int(batch.max()) + 1
            return torch.zeros(n, device=x.device).index_add(0, batch, x)

        fast = graph(forward)
        for i in range(6):
            yield fast(rand(i, 4), torch.tensor([0, 0, 1, 1], device=device))

    refused(program, device, "OL101", "n = int(batch.max()) + 1")


def test_a_mask_as_an_index(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/170103

    `index_put_` with a boolean index is skipped by reduce-overhead, or fails in its capture."""

    def program(graph: Any) -> Iterator[Any]:
        def forward(x: Tensor) -> Tensor:
            y = x.clone()
            y[y > 0.5] = 0.0
            y[x < -0.5] = -1.0
            return y

        fast = graph(forward)
        for i in range(7):
            yield fast(rand(i, 4, 5))

    side_by_side(program, device, captures=1)


def test_a_mask_that_selects(device: torch.device, rand: Rand) -> None:
    """https://github.com/meta-pytorch/LeanRL/issues/14

    An operation with sizes that data decides, which only reduce-overhead tells of."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x: x[x > 0].sum())  # here
        for i in range(6):
            yield fast(rand(i, 4, 5))

    refused(program, device, "OL102", "# here")


@pytest.mark.cpu
def test_dtypes_and_defaults_that_change(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/99368

    Autocast on and off around a graphed callable, whose cast weights a cache keeps."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device)
        fast = graph(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(24):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=i % 3 != 0):
                y = fast(rand(i, 5, 4))
            y.float().square().mean().backward()
            optimizer.step()
            yield y.detach(), [p.detach().clone() for p in model.parameters()]

    if device.type == "tape":
        pytest.skip("the emulated device has no autocast")
    side_by_side(program, device)


@on_accelerators
def test_numbers_that_live_on_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/Comfy-Org/ComfyUI/issues/6866

    "skipping cudagraphs due to cpu device": a timestep that is a tensor of the host."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x, t: x * t + torch.full_like(x, 0.5) * t.sqrt())
        for i in range(8):
            yield fast(rand(i, 4), torch.tensor(0.5 * i))

    side_by_side(program, device)


def test_lengths_of_a_loss_on_the_host(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/152745

    `ctc_loss` with lengths that are tensors of the host."""

    def program(graph: Any) -> Iterator[Any]:
        torch.manual_seed(1)
        net = nn.Linear(6, 5).to(device)
        lengths = torch.tensor([7, 6]), torch.tensor([3, 2])

        @graph
        def step(x: Tensor, targets: Tensor) -> Tensor:
            net.zero_grad()
            loss = F.ctc_loss(net(x).log_softmax(-1), targets, *lengths)  # here
            loss.backward()
            return loss.detach()

        for i in range(6):
            targets = torch.tensor([[1, 2, 3], [2, 1, 4]], device=device)
            yield step(rand(i, 7, 2, 6), targets)

    right_or_refused(program, device, "OL101", "OL102", "OL103", "OL104")


@on_cpu_and_cuda
def test_a_metric_beside_the_result(device: torch.device, rand: Rand) -> None:
    """https://github.com/roboflow/rf-detr/pull/1468

    Results with numbers and strings beside tensors, a Counter and a dict of losses."""

    def program(graph: Any) -> Iterator[Any]:
        model = small_model(device).eval()

        @torch.no_grad()
        def evaluate(x: Tensor, y: Tensor) -> Any:
            out = model(x)
            losses = collections.OrderedDict(mse=F.mse_loss(out, y), l1=F.l1_loss(out, y))
            return out.argmax(-1), losses, {"rows": x.shape[0], "name": "eval"}

        fast = graph(evaluate)
        for i in range(6):
            yield fast(rand(i, 5, 4), rand(i + 9, 5, 3))

    side_by_side(program, device, captures=1)


def test_what_no_capture_can_compare(device: torch.device, rand: Rand) -> None:
    """https://github.com/takuseno/d3rlpy/pull/428

    An argument that is no value, as a lock or a generator, warns once and runs as it is."""

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda x, it: x * next(it))
        numbers = iter(range(1, 20))
        for i in range(8):
            yield fast(rand(i, 3), numbers)

    with pytest.warns(ol.GraphWarning, match="OL302"):
        side_by_side(program, device, replayed=0)


class Bag:
    """A registered container whose context is a value of its own class, compared by `==`."""

    def __init__(self, values: dict[str, Tensor], size: tuple[int, ...]) -> None:
        self.values, self.size = values, size

    @dataclasses.dataclass(frozen=True)
    class Context:
        keys: tuple[str, ...]
        size: tuple[int, ...]


def bag(values: list[Any], context: Any) -> Bag:
    return Bag(dict(zip(context.keys, values, strict=True)), context.size)


def test_a_registered_container(device: torch.device, rand: Rand) -> None:
    """https://github.com/meta-pytorch/LeanRL/issues/10

    A container that is registered as a tree of torch's is not taken by a graphed module."""
    torch.utils._pytree.register_pytree_node(
        Bag,
        lambda b: (list(b.values.values()), Bag.Context(tuple(b.values), b.size)),
        bag,
    )

    def program(graph: Any) -> Iterator[Any]:
        fast = graph(lambda b: b.values["x"] * 2 + b.values["y"] * b.size[0])
        for i in range(14):
            yield fast(Bag({"x": rand(i, 4), "y": rand(i + 50, 4)}, (4,) if i < 7 else (5,)))

    try:
        side_by_side(program, device, captures=2)
    finally:
        torch.utils._pytree._deregister_pytree_node(Bag)
