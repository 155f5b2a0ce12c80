"""State that the caller replaces between calls: the context of a step, in a global or elsewhere."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, replays

CALLS = 14


@dataclasses.dataclass
class Metadata:
    scale: Tensor
    count: int = 3


class Plain:
    """An ordinary class."""

    def __init__(self, scale: Tensor, count: int = 3, owner: Any = None) -> None:
        self.scale, self.count, self.owner = scale, count, owner


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


METADATA: Any = None
CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("CURRENT")


def in_a_global() -> tuple[Any, Any]:
    def put(t: Tensor) -> None:
        global METADATA
        METADATA = Metadata(t)

    return put, lambda x: x * METADATA.scale + METADATA.count


def in_a_namespace(make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> Any:
    def built() -> tuple[Any, Any]:
        context = SimpleNamespace(now=None)

        def put(t: Tensor) -> None:
            context.now = make(t)

        return put, lambda x: x * read(context.now)

    return built


def in_a_module() -> tuple[Any, Any]:
    module = Holder()
    return lambda t: setattr(module, "scale", t), module


def in_a_variable() -> tuple[Any, Any]:
    scale: Any = None

    def put(t: Tensor) -> None:
        nonlocal scale
        scale = t

    return put, lambda x: x * scale


def in_a_context_variable() -> tuple[Any, Any]:
    return lambda t: CURRENT.set(Metadata(t)), lambda x: x * CURRENT.get().scale


def in_a_list() -> tuple[Any, Any]:
    stack: list[Any] = [None]
    return lambda t: stack.__setitem__(-1, Metadata(t)), lambda x: x * stack[-1].scale


BACKEND = SimpleNamespace(factor=2.0)
PLACES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "global": in_a_global,
    "tensor": in_a_namespace(lambda t: t, lambda c: c),
    "dataclass": in_a_namespace(Metadata, lambda c: c.scale * c.count),
    "class": in_a_namespace(Plain, lambda c: c.scale * c.count),
    "dict": in_a_namespace(
        lambda t: {"a": [t, 2], "b": (t + 1, {"c": t})}, lambda c: c["a"][0] + c["b"][1]["c"]
    ),
    "owned": in_a_namespace(lambda t: Plain(t, owner=BACKEND), lambda c: c.scale * c.owner.factor),
    "twice": in_a_namespace(lambda t: Plain(t, owner=t), lambda c: c.scale + c.owner),
    "view": in_a_namespace(lambda t: Metadata(t.expand(2, 3)[0]), lambda c: c.scale),
    "module": in_a_module,
    "variable": in_a_variable,
    "context variable": in_a_context_variable,
    "list": in_a_list,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_content_for_each_call(device: torch.device, rand: Rand, place: str, grad: bool) -> None:
    put, f = PLACES[place]()
    fast = ol.graph(f)
    for i in range(CALLS):
        put(rand(100 + i, 3))
        x, y = (rand(i, 3).requires_grad_(grad) for _ in range(2))
        result, expected = fast(x), f(y)
        assert_same(result, expected)
        if grad:
            result.sum().backward()
            expected.sum().backward()
            assert_same(x.grad, y.grad)
    assert replays(fast) >= CALLS - 6
    assert len(fast.recordings) == 1


def test_a_content_that_stays_for_a_request(device: torch.device, rand: Rand) -> None:
    put, f = PLACES["dataclass"]()
    fast = ol.graph(f)
    for request in range(5):
        put(rand(100 + request, 3))
        for i in range(6):
            assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert fast.stats().captures <= 3


def test_numbers_inside_are_guarded(device: torch.device, rand: Rand) -> None:
    """A recording for each count, and both read the tensor of the call."""
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x * context.now.scale * context.now.count

    fast = ol.graph(f)
    for i in range(24):
        context.now = Metadata(rand(100 + i, 3), i % 2)
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert len(fast.recordings) == 2
    assert replays(fast) > 10


def test_an_object_behind_it_is_guarded(device: torch.device, rand: Rand) -> None:
    """The contents share it, so its attributes are state."""
    backend, context = SimpleNamespace(factor=2.0, bias=rand(7, 3)), SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x * context.now.scale * context.now.owner.factor + context.now.owner.bias

    fast = ol.graph(f)
    for i in range(30):
        context.now = Plain(rand(100 + i, 3), owner=backend)
        if i in (10, 20):
            backend.factor += 1.0
            backend.bias = rand(50 + i, 3)
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast) > 8


def test_a_layout_that_changes(device: torch.device, rand: Rand) -> None:
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x * context.now.scale.sum()

    fast = ol.graph(f)
    for i in range(24):
        context.now = Metadata(
            rand(100 + i, 3 + (i > 11)).to([torch.float32, torch.float64][i > 17])
        )
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast) > 6


def test_none_in_between(device: torch.device, rand: Rand) -> None:
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x + 1 if context.now is None else x * context.now.scale

    fast = ol.graph(f)
    for i in range(30):
        context.now = None if i % 3 == 0 else Metadata(rand(100 + i, 3))
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast) > 15


def test_memory_of_the_call_before_comes_again(device: torch.device, rand: Rand) -> None:
    """Views of one buffer, which the caller fills."""
    buffer, context = rand(3, 8), SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x * context.now.scale

    fast = ol.graph(f)
    for i in range(CALLS):
        buffer.copy_(rand(100 + i, 8))
        context.now = Metadata(buffer[:3])
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast) >= CALLS - 6


def test_the_argument_itself(device: torch.device, rand: Rand) -> None:
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return x.mul_(2) + context.now.scale

    fast = ol.graph(f)
    for i in range(CALLS):
        results: list[Tensor] = []
        for call in (fast, f):
            x = rand(i, 3)
            context.now = Metadata(x)
            results.append(call(x))
        assert_same(*results)


# What the callable does to it.


def _count(content: Any, x: Tensor) -> Tensor:
    content.count += 1
    return x * content.scale


def _write(content: Any, x: Tensor) -> Tensor:
    content.scale.add_(x)
    return x * content.scale


def _store(content: Any, x: Tensor) -> Tensor:
    content.scale = content.scale * 2
    return x * content.scale


def _new(content: Any, x: Tensor) -> Tensor:
    content.seen = x * 2
    return x * content.scale


def _set_once(content: Any, x: Tensor) -> Tensor:
    if not hasattr(content, "cached"):
        content.cached = content.scale * 2
    return x * content.cached


@pytest.mark.filterwarnings("ignore::onelaunch.GraphWarning")
@pytest.mark.parametrize("kind", [Metadata, Plain])
@pytest.mark.parametrize("change", [_count, _write, _store, _new, _set_once])
def test_what_the_callable_changes(
    device: torch.device, rand: Rand, change: Any, kind: Any
) -> None:
    """It is as eager leaves it, in the caller's own object."""
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        return change(context.now, x)

    fast = ol.graph(f, on_refusal="eager")
    for i in range(CALLS):
        contents: list[Any] = []
        for call in (fast, f):
            content = kind(rand(100 + i, 3))
            context.now = content
            for k in range(2):
                contents.append(call(rand(2 * i + k, 3)))
            assert context.now is content
            contents.append(vars(content))
        half = len(contents) // 2
        assert_same(contents[:half], contents[half:])


@pytest.mark.parametrize("hand", ["return", "inside", "store", "tensor"])
def test_what_the_callable_hands_on(device: torch.device, rand: Rand, hand: str) -> None:
    context, kept = SimpleNamespace(now=None), SimpleNamespace(last=None)

    def f(x: Tensor) -> Any:
        y = x * context.now.scale
        if hand == "store":
            kept.last = context.now
        return {"return": context.now, "inside": [context.now, y], "tensor": context.now.scale}.get(
            hand, y
        )

    fast = ol.graph(f, on_refusal="eager")
    for i in range(CALLS):
        context.now = content = Plain(rand(100 + i, 3))
        x = rand(i, 3)
        result, expected = fast(x), f(x)
        if hand == "return":
            assert result is expected is content
        elif hand == "inside":
            assert result[0] is content
            assert_same(result[1], expected[1])
        else:
            assert_same(result, expected)
        if hand == "tensor":
            assert result is content.scale
        if hand == "store":
            assert kept.last is content


def test_one_object_in_two_places(device: torch.device, rand: Rand) -> None:
    context = SimpleNamespace(now=None, last=None)

    def f(x: Tensor) -> Tensor:
        same = context.now is context.last
        return x * context.now.scale * (2 if same else 3) + context.last.scale

    fast = ol.graph(f, on_refusal="eager")
    for i in range(24):
        context.now = Plain(rand(100 + i, 3))
        context.last = context.now if i < 16 else Plain(rand(200 + i, 3))
        assert_same(fast(rand(i, 3)), f(rand(i, 3)))


def test_an_object_that_another_place_changes(device: torch.device, rand: Rand) -> None:
    """Its part is reached by another name too, which the callable writes through."""
    part = SimpleNamespace(t=rand(1, 3), n=0)
    context = SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        part.t = part.t + x
        return context.now.scale * context.now.owner.t

    fast = ol.graph(f, on_refusal="eager")
    found: list[list[Tensor]] = []
    for call in (fast, f):
        part.t = rand(1, 3)
        results: list[Tensor] = []
        for i in range(CALLS):
            context.now = Plain(rand(100 + i, 3), owner=part)
            results.append(call(rand(i, 3)))
        found.append([*results, part.t])
    assert_same(*found)


def test_weights_that_are_replaced_stay_where_they_are(device: torch.device, rand: Rand) -> None:
    """A parameter is read in place: as an input, each call would copy it."""
    net = nn.Linear(3, 3, device=device)
    fast = ol.graph(net)
    with torch.no_grad():
        for i in range(20):
            if i % 5 == 0:
                state = {k: v.detach().clone() + i for k, v in net.state_dict().items()}
                net.load_state_dict(state, assign=True)
            assert_same(fast(rand(i, 2, 3)), net(rand(i, 2, 3)))


def test_a_cache_that_the_callable_writes_stays_where_it_is(
    device: torch.device, rand: Rand
) -> None:
    context = SimpleNamespace(cache=None)

    def f(x: Tensor) -> Tensor:
        context.cache[1:3].copy_(x[:2])
        return context.cache.sum() + x

    fast = ol.graph(f)
    for request in range(3):
        caches: list[Tensor] = []
        results: list[Tensor] = []
        for call in (fast, f):
            context.cache = torch.zeros(8, device=device)
            for i in range(6):
                results.append(call(rand(10 * request + i, 3)))
            caches.append(context.cache)
        assert_same(results[:6], results[6:])
        assert_same(*caches)


def test_nothing_of_a_past_content_is_kept(device: torch.device, rand: Rand) -> None:
    import gc
    import weakref

    put, f = PLACES["class"]()
    fast = ol.graph(f)
    alive: list[Any] = []
    for i in range(CALLS):
        t = rand(100 + i, 3)
        alive.append(weakref.ref(t))
        put(t)
        fast(rand(i, 3))
    del t
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2


@pytest.mark.parametrize("kind", ["view", "itself", "marked"])
def test_a_tensor_that_is_more_than_its_values(device: torch.device, rand: Rand, kind: str) -> None:
    """Memory that the callable writes, its own tensor, or one with an attribute."""
    buffer, context = torch.zeros(3, device=device), SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        buffer.add_(1)
        scale = context.now.scale
        return x + scale * (3 if getattr(scale, "marked", False) else 2)

    def run(call: Any) -> list[Tensor]:
        buffer.zero_()
        results: list[Tensor] = []
        for i in range(2 * CALLS):
            scale = rand(100 + i, 3)
            if i > 8 and i % 4:
                scale = {"view": buffer[:3], "itself": buffer}.get(kind, scale)
                if kind == "marked":
                    scale.marked = True  # pyright: ignore[reportAttributeAccessIssue]
            context.now = Metadata(scale)
            results.append(call(rand(i, 3)))
        return results

    fast = ol.graph(f)
    assert_same(run(fast), run(f))
    assert replays(fast) > 4


def test_other_state_beside_a_tuple(device: torch.device, rand: Rand) -> None:
    """It stays guarded: here a flag that the callable turns over."""
    flags, context = {"odd": True}, SimpleNamespace(now=None)

    def f(x: Tensor) -> Tensor:
        flags["odd"] = not flags["odd"]
        return x * 2 + context.now[1] if flags["odd"] else x - context.now[1]

    def run(call: Any) -> list[Tensor]:
        flags["odd"] = True
        results: list[Tensor] = []
        for i in range(2 * CALLS):
            context.now = (True, rand(100 + i // 2, 3))
            results.append(call(rand(i, 3)))
        return results

    fast = ol.graph(f)
    assert_same(run(fast), run(f))
    assert replays(fast) > 4
