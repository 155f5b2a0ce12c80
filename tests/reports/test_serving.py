"""Requests one after another: caches, metadata, weights that change, samplers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onelaunch as ol
from tests.device.drop_in import random_tensor

from .side_by_side import side_by_side

Rand = Callable[..., Tensor]


class Cache:
    """What has been summed up in a request."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(2, 4, device=device)


class Attention(nn.Module):
    """One head over a cache of fixed size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.to(device)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        keys.index_copy_(1, position, k)
        values.index_copy_(1, position, v)
        seen = torch.arange(keys.shape[1], device=x.device) <= position[-1]
        scores = (q @ keys.mT).masked_fill(~seen, float("-inf"))
        return self.out(scores.softmax(-1) @ values)


def layer(device: torch.device, seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4).to(device)


@torch.no_grad()
def two_steps(graph: Any, make: Any, device: torch.device, change: Any, requests: int = 5) -> Any:
    """Requests with a cache of their own; `change(net, request)` comes between them."""
    net = make()
    fast = graph(net)
    for request in range(requests):
        change(net, request)
        cache = Cache(device)
        for step in range(7):
            x = random_tensor(7 * request + step, 2, 4, device=device)
            yield fast(x, cache), cache.total


class Summing(nn.Linear):
    """Adds what the layer makes of the input to the request's cache."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.total += super().forward(x)
        return cache.total * 1


def summing(device: torch.device) -> Summing:
    torch.manual_seed(1)
    return Summing(4, 4).to(device)


def test_static_caches_of_two_requests(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/156377

    Caches at static addresses: each request's own cache compiles and records again."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        net = Attention(device)
        fast = graph(net)
        for request in range(4):
            keys, values = (torch.zeros(2, 8, 4, device=device) for _ in range(2))
            for n in range(8):
                position = torch.tensor([n], device=device)
                yield fast(rand(8 * request + n, 2, 1, 4), keys, values, position)
            yield keys, values

    side_by_side(program, device)


def test_a_cache_inside_a_model(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/issues/156520

    A cache object with lists of tensors, given to each block of a model by its index."""

    class Store:
        def __init__(self) -> None:
            self.keys = [torch.zeros(4, 4, device=device) for _ in range(3)]

        def update(self, i: int, k: Tensor) -> Tensor:
            self.keys[i].copy_(k)
            return self.keys[i]

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        blocks = [layer(device, i) for i in range(3)]

        def block(x: Tensor, store: Store, i: int) -> Tensor:
            return x + store.update(i, blocks[i](x)) @ store.keys[i - 1]

        fast, stores = graph(block), [Store(), Store()]
        for i in range(14):
            x, store = rand(i, 4, 4), stores[i % 2]
            for j in range(3):
                x = fast(x, store, j)
            yield x, store.keys

    side_by_side(program, device)


def test_an_index_put_into_a_cache(device: torch.device, rand: Rand) -> None:
    """https://github.com/pytorch/pytorch/pull/152186

    `index_put` into an argument: skipped by reduce-overhead, "mutated inputs"."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        def write(cache: Tensor, slots: Tensor, new: Tensor) -> Tensor:
            cache[slots] = new
            cache.index_put_((slots + 1,), new * 2, accumulate=True)
            return cache.sum(0)

        fast, cache = graph(write), torch.zeros(12, 3, device=device)
        for i in range(7):
            slots = torch.tensor([i, (i + 4) % 11, (i + 8) % 11], device=device)
            yield fast(cache, slots, rand(i, 3, 3)), cache.clone()

    side_by_side(program, device, captures=1)


def test_a_cross_attention_cache_that_is_filled_once(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/transformers/pull/31166

    The first step computes the keys of the encoder, later ones reuse them: which step is this?"""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = layer(device, 3)

        def forward(self, x: Tensor, encoded: Tensor, cache: Any) -> Tensor:
            if not cache.is_updated:
                cache.keys.copy_(self.k(encoded))
                cache.is_updated = True
            return (x @ cache.keys.mT).softmax(-1) @ cache.keys

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        fast = graph(Cross())
        for request in range(5):
            cache = SimpleNamespace(keys=torch.zeros(5, 4, device=device), is_updated=False)
            encoded = rand(90 + request, 5, 4)
            for step in range(6):
                yield fast(rand(request * 9 + step, 2, 4), encoded, cache), cache.is_updated

    side_by_side(program, device)


def test_an_encoder_output_object_of_a_request(device: torch.device, rand: Rand) -> None:
    """https://github.com/huggingface/transformers/pull/48199

    The encoder's output stays one object through a request, and is another in the next."""

    @dataclasses.dataclass
    class Encoded:
        last_hidden_state: Tensor

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        def step(x: Tensor, encoded: Encoded) -> Tensor:
            h = encoded.last_hidden_state
            return (x @ h.mT).softmax(-1) @ h

        fast = graph(step)
        for request in range(6):
            encoded = Encoded(rand(50 + request, 5, 8))
            for token in range(6):
                yield fast(rand(request * 6 + token, 2, 8), encoded)

    side_by_side(program, device, captures=2)


def test_metadata_in_a_global_context(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/pull/44868

    The forward context of a step holds other tensors, and a replay reads those of the capture. Here
    they are inputs of the second recording."""

    @dataclasses.dataclass
    class Metadata:
        slots: Tensor
        lengths: Tensor

    context = SimpleNamespace(metadata=None)

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        cache = torch.zeros(16, 4, device=device)
        net = layer(device)

        def forward(x: Tensor) -> Tensor:
            meta: Any = context.metadata
            cache[meta.slots] = net(x)
            return cache[meta.slots] / meta.lengths[:, None]

        fast = graph(forward)
        for i in range(10):
            slots = torch.tensor([i, i + 3], device=device)
            context.metadata = Metadata(slots, torch.tensor([i + 1, i + 2], device=device))
            yield fast(rand(i, 2, 4)), cache.clone()

    side_by_side(program, device, replayed=5, captures=2)


def test_weights_in_new_memory(device: torch.device) -> None:
    """https://github.com/sgl-project/sglang/pull/27140

    Weights and state come back at other addresses after an update, and replays read the old."""

    def change(net: Any, request: int) -> None:
        net.weight.data = net.weight.data * 1.5

    def program(graph: Any) -> Iterator[Any]:
        return two_steps(graph, lambda: summing(device), device, change)

    side_by_side(program, device)


def test_a_parameter_is_replaced_between_requests(device: torch.device) -> None:
    """https://github.com/chengzeyi/stable-fast/issues/75

    `load_state_dict(assign=True)` swaps the parameters below a captured model."""

    def change(net: Any, request: int) -> None:
        if request > 1:
            state = {k: v.clone() + request for k, v in net.state_dict().items()}
            net.load_state_dict(state, assign=True)

    def program(graph: Any) -> Iterator[Any]:
        return two_steps(graph, lambda: summing(device), device, change)

    side_by_side(program, device)


def test_an_adapter_is_switched_on_between_requests(device: torch.device) -> None:
    """https://github.com/chengzeyi/stable-fast/issues/143

    With CUDA graphs on, a LoRA that is loaded or switched has no effect."""

    class Lora(Summing):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.adapters: dict[str, Any] = {}
            self.active: list[str] = []

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            y = F.linear(x, self.weight, self.bias)
            for name in self.active:
                a, b, scale = self.adapters[name]
                y = y + x @ a @ b * scale
            cache.total += y
            return cache.total * 1

    def make() -> Lora:
        torch.manual_seed(4)
        net = Lora().to(device)
        for i, name in enumerate("ab"):
            a, b = random_tensor(i, 4, 2, device=device), random_tensor(9 + i, 2, 4, device=device)
            net.adapters[name] = (a, b, 0.5)
        return net

    def change(net: Any, request: int) -> None:
        net.active[:] = [[], ["a"], ["b"], ["a", "b"], ["a"]][request]
        if request == 4:
            net.adapters["a"] = (*net.adapters["a"][:2], 2.0)

    side_by_side(lambda graph: two_steps(graph, make, device, change), device)


def test_a_hook_is_put_on_between_requests(device: torch.device) -> None:
    """https://github.com/sgl-project/sglang/pull/38439

    Forward hooks of modules inside of a captured region stop without a word."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.handles = layer(device), list[Any]()

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.total += self.inner(x)
            return cache.total * 1

    def change(net: Any, request: int) -> None:
        if request in (2, 3):
            scale = float(request)
            net.handles.append(net.inner.register_forward_hook(lambda m, a, out: out * scale))
        elif request == 4:
            net.handles.pop().remove()

    with pytest.warns(ol.GraphWarning, match="OL308"):
        side_by_side(lambda graph: two_steps(graph, Outer, device, change), device)


def test_state_of_the_model_starts_anew(device: torch.device) -> None:
    """https://github.com/PufferAI/PufferLib/pull/579

    Recurrent state is not reset after the warm-up of a capture."""

    class Ema(nn.Module):
        last: Any = None

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            self.last = x.clone() if self.last is None else self.last * 0.5 + x
            cache.total += self.last
            return cache.total * 1

    def change(net: Any, request: int) -> None:
        net.last = None

    side_by_side(lambda graph: two_steps(graph, Ema, device, change), device)


def test_state_whose_size_depends_on_the_prompt(device: torch.device, rand: Rand) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/13151

    Convolution state of a hybrid model: a stale tail is read where the prompt was shorter."""

    class Conv(nn.Module):
        last: Any = None

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            rows = x if x.shape[1] > 1 else torch.cat([self.last, x], 1)[:, 1:]
            self.last = rows[:, -3:].clone()
            cache.total += self.last.sum(1)
            return cache.total * 1

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        fast = graph(Conv())
        for request, prompt in enumerate((5, 2, 5, 2, 3)):
            cache = Cache(device)
            for step in range(8):
                x = rand(8 * request + step, 2, prompt if step == 0 else 1, 4)
                yield fast(x, cache), cache.total

    side_by_side(program, device)


def test_samples_left_over_from_a_chunk(device: torch.device, rand: Rand) -> None:
    """https://github.com/sgl-project/sglang-omni/issues/801

    A streaming decoder keeps what is left of a chunk: state whose size goes round."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = torch.zeros(2, 0, device=device)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.left, x], -1)
            n = x.shape[-1] // 4 * 4
            self.left = x[:, n:].clone()
            return x[:, :n].unflatten(-1, (-1, 4)).mean(-1)

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        fast = graph(Frames())
        for i in range(40):
            yield fast(rand(i, 2, 5))

    side_by_side(program, device)


def test_stored_state_with_static_results(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/pull/9724

    What a call stores is held weakly as results are, and another graph of the pool takes it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer(device)
            self.ema = torch.zeros(2, 4, device=device)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            h = self.inner(x)
            self.ema = self.ema * 0.9 + h
            cache.total = cache.total + self.ema
            return h + cache.total

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        fast, caches = graph(Net(), outputs="static"), [Cache(device), Cache(device)]
        for i, j in enumerate([0] * 4 + [1] * 4 + [0, 0, 1, 0, 1]):
            y = fast(rand(i, 2, 4), caches[j]).clone()
            yield y, [c.total.clone() for c in caches]

    side_by_side(program, device)


def test_requests_in_turn(device: torch.device, rand: Rand) -> None:
    """https://github.com/vllm-project/vllm/issues/20426

    With several requests in a batch, the cache of a replay is another request's."""

    @torch.no_grad()
    def program(graph: Any) -> Iterator[Any]:
        net = summing(device)
        fast, caches = graph(net), [Cache(device) for _ in range(4)]
        for i in range(40):
            cache = caches[(i * 7 + i // 5) % 4]
            yield fast(rand(i, 2, 4), cache), [c.total.clone() for c in caches]
            if i % 13 == 12:
                caches[i % 4] = Cache(device)

    side_by_side(program, device)
