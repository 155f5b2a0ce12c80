"""Containers and objects that the callable has already come back as the very objects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onelaunch as ol

from .drop_in import Rand, assert_same, replays


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    x: Tensor
    inner: dict[str, Tensor]


class Registered:
    """A cache that others registered with torch's pytree."""

    def __init__(self, keys: Tensor, values: Tensor, length: int = 3) -> None:
        self.keys, self.values, self.length = keys, values, length


class Plain(Registered):
    """A cache that nobody registered: an object like any other."""


pytree.register_pytree_node(
    Registered,
    lambda cache: ([cache.keys, cache.values], cache.length),
    lambda parts, length: Registered(*parts, length),
)

ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x, 2, None],
    "dict": lambda x: {"x": x, "n": 1},
    "ordered dict": lambda x: collections.OrderedDict(b=x, a=x),
    "named tuple": lambda x: Pair(x, [x]),
    "dataclass": lambda x: Record(x, {"y": x}),
    "registered": lambda x: Registered(x, x + 1),
    "nested": lambda x: {"a": [{"b": (Record(x, {"y": x}), [x])}]},
    "no tensors": lambda x: [1, {"a": 2}],
}


def inside(value: Any) -> list[Any]:
    """The containers in a value, itself the first."""
    if isinstance(value, dict):
        return [value, *(c for child in value.values() for c in inside(child))]
    if isinstance(value, list | tuple):
        return [value, *(c for child in value for c in inside(child))]
    if dataclasses.is_dataclass(value):
        return [value, *inside(vars(value))[1:]]
    return [value] if isinstance(value, Registered) else []


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_an_argument_that_is_returned(rand: Rand, name: str, grad: bool) -> None:
    def f(x: Tensor, given: Any, *, named: Any) -> Any:
        return x * 2, given, {"deep": [inside(given), named]}

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        x = rand(i, 3).requires_grad_(grad)
        given, named = ARGUMENTS[name](rand(10 + i, 3)), ARGUMENTS[name](rand(20 + i, 3))
        with torch.set_grad_enabled(grad):
            y, same, deep = fast(x, given, named=named)
            if grad:
                y.sum().backward()
        assert_same(y.detach(), rand(i, 3) * 2)
        assert same is given
        got, last = deep["deep"]
        assert last is named
        assert [id(c) for c in got] == [id(c) for c in inside(given)]
    assert replays(fast) == 4


def test_the_same_list_at_two_places(rand: Rand) -> None:
    fast = ol.graph(lambda a, b: (b, a, a[0] * 2), warmup=1)
    with torch.no_grad():
        for i in range(4):
            given = [rand(i, 3)]
            first, second, y = fast(given, given)
            assert first is given
            assert second is given
            assert_same(y, rand(i, 3) * 2)
    assert replays(fast) == 3


def test_a_container_made_of_parts_is_new(rand: Rand) -> None:
    fast = ol.graph(lambda d: ({"x": d["x"], "inner": d["inner"]}, d["x"] + 1), warmup=1)
    with torch.no_grad():
        for i in range(4):
            given = {"x": rand(i, 3), "inner": [rand(i, 2)]}
            made, _ = fast(given)
            assert made is not given
            assert made["x"] is given["x"]
            assert made["inner"] is given["inner"]


@pytest.mark.parametrize("kind", [Registered, Plain])
def test_a_cache_that_is_passed_on(device: torch.device, rand: Rand, kind: Any) -> None:
    """Callers take the cache out of the result for their next call."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def step(x: Tensor, cache: Any) -> Any:
        cache.keys.add_(x)
        cache.values.mul_(2)
        return CausalLMOutputWithPast(logits=cache.keys * x, past_key_values=cache)

    fast = ol.graph(step, warmup=1)
    cache, expected = (kind(rand(0, 3), rand(1, 3)) for _ in range(2))
    first = cache
    with torch.no_grad():
        for i in range(6):
            got, want = fast(rand(i, 3), cache), step(rand(i, 3), expected)
            assert_same(got.logits, want.logits)
            cache = got.past_key_values
            assert cache is first
            assert_same((cache.keys, cache.values), (expected.keys, expected.values))
    assert len(fast.recordings) == 1
    assert replays(fast) == 5


class Keeps(nn.Module):
    """Returns what it keeps itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.memory = [torch.zeros(3, device=device), torch.ones(3, device=device)]
        self.cache = Plain(torch.zeros(3, device=device), torch.ones(3, device=device))
        self.last: Any = None

    def forward(self, x: Tensor, given: Any) -> Any:
        self.memory[0] = self.memory[0] + x
        self.cache.keys = self.cache.keys * 0.5 + x
        self.last = given
        return self.memory, {"cache": self.cache}, self.memory[0] + self.cache.keys


def test_what_the_callable_keeps(device: torch.device, rand: Rand) -> None:
    model, eager = Keeps(device), Keeps(device)
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(6):
            given = [rand(50 + i, 2)]
            memory, other, y = fast(rand(i, 3), given)
            want = eager(rand(i, 3), given)
            assert_same(y, want[2])
            assert memory is model.memory
            assert other["cache"] is model.cache
            assert model.last is given
            assert_same(memory, want[0])
            assert_same(vars(model.cache), vars(eager.cache))
    assert replays(fast) >= 3


def test_buckets(rand: Rand) -> None:
    fast = ol.graph(lambda d: (d, d["x"] * 2), warmup=1, buckets=ol.Buckets(dim=0, sizes=(4, 8)))
    for i in range(8):
        given = {"x": rand(i, 3 + i % 5, 2)}
        assert_same(fast(given), (given, given["x"] * 2))


def test_generate_with_a_static_cache(device: torch.device) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="eager",
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().to(device)
    tokens = torch.randint(1, 50, (1, 5)).to(device)

    def generated(model: Any) -> Tensor:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=14,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )

    fast = ol.graph(model, warmup=1, on_refusal="eager")
    assert_same(generated(fast), generated(model))
    assert len(fast.recordings) <= 2
    assert replays(fast) >= 10
