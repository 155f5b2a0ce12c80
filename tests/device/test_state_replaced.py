"""State that is replaced before a capture, by objects no run has met, or by the call itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in_worlds, replays

Rand = Callable[..., Tensor]


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Listed(list[int]):
    def __init__(self, scale: float) -> None:
        super().__init__([1])
        self.scale = scale


def tagged(scale: float) -> Any:
    def tag() -> None: ...

    tag.scale = scale  # type: ignore[attr-defined]
    return tag


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("make", [Scale, Slotted, Layer, Listed, tagged])
def test_an_object_that_came_after_the_warm_up(
    rand: Rand, make: Callable[[float], Any], kept: bool
) -> None:
    def world() -> Any:
        held = SimpleNamespace(layer=make(2), old=[])

        def call(x: Tensor) -> Tensor:
            return x * held.layer.scale

        call.held = held  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    def between(i: int, f: Any) -> None:
        held = getattr(f, "held", None) or f.__wrapped__.held
        if i == 1:
            if kept:
                held.old.append(held.layer)
            held.layer = make(2)
        if i == 3:
            held.layer.scale = 5

    drop_in_worlds(world, calls=6, between=between, recordings=2, min_replays=3)


def of_a_dict(scale: float) -> Any:
    return {"layer": Scale(scale)}, lambda held: held["layer"], 0


def of_dicts(scale: float) -> Any:
    return {"a": {"b": Scale(scale)}}, lambda held: held["a"]["b"], 0


def of_a_function(scale: float) -> Any:
    layer = Scale(scale)
    return (lambda: layer), lambda held: held(), 0


def of_another_class(scale: float) -> Any:
    """What the first runs find is of a class that reads something else."""
    return Scale(scale), lambda held: held, Slotted(scale)


@pytest.mark.parametrize("make", [of_a_dict, of_dicts, of_a_function, of_another_class])
def test_what_leads_to_an_object_came_after_the_warm_up(
    rand: Rand, make: Callable[[float], Any]
) -> None:
    def world() -> Any:
        held, read, first = make(2)
        box = SimpleNamespace(held=first or make(2)[0], next=held)

        def call(x: Tensor) -> Tensor:
            return x * read(box.held).scale

        call.box, call.read = box, read  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    def between(i: int, f: Any) -> None:
        f = f if hasattr(f, "box") else f.__wrapped__
        if i == 1:
            f.box.held = f.box.next
        if i == 5:
            f.read(f.box.held).scale = 5

    drop_in_worlds(world, calls=9, between=between, recordings=None, min_replays=3)


def test_a_branch_that_no_run_before_the_capture_took(rand: Rand) -> None:
    """What the function reads that only that branch calls is seen in the capture itself."""

    def world() -> Any:
        box = SimpleNamespace(trains=True, scale=2)

        def scaled(x: Tensor) -> Tensor:
            return x * box.scale

        def call(x: Tensor) -> Tensor:
            return x * 2 if box.trains else scaled(x)

        call.box = box  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    def between(i: int, f: Any) -> None:
        box = getattr(f, "box", None) or f.__wrapped__.box
        if i == 1:
            box.trains = False
        if i == 5:
            box.scale = 5

    drop_in_worlds(world, calls=9, between=between, recordings=None, min_replays=3)


@pytest.mark.parametrize("kind", ["an attribute", "an item", "a variable"])
def test_a_tensor_and_none_by_turns(rand: Rand, kind: str) -> None:
    """Each of the two states has a recording, and each leaves the other."""

    def world() -> Any:
        box: Any = SimpleNamespace(cache=None)
        items: dict[str, Any] = {"cache": None}
        cache: Any = None

        def of_attribute(x: Tensor) -> Tensor:
            box.cache = x * 2 if box.cache is None else None
            return x if box.cache is None else x + box.cache

        def of_item(x: Tensor) -> Tensor:
            items["cache"] = x * 2 if items["cache"] is None else None
            return x if items["cache"] is None else x + items["cache"]

        def of_variable(x: Tensor) -> Tensor:
            nonlocal cache
            cache = x * 2 if cache is None else None
            return x if cache is None else x + cache

        call = {"an attribute": of_attribute, "an item": of_item, "a variable": of_variable}[kind]
        return call, lambda i: (rand(i, 4),)

    drop_in_worlds(world, calls=12, recordings=2, min_replays=6)


def test_a_tensor_of_which_only_the_shape_is_read(rand: Rand) -> None:
    def world() -> Any:
        box: Any = SimpleNamespace(cache=rand(0, 4))

        def call(x: Tensor) -> Tensor:
            rows = box.cache.shape[0]
            box.cache = x * 1
            return x * rows

        return call, lambda i: (rand(i, 4 if i % 5 < 3 else 6),)

    drop_in_worlds(world, calls=20, recordings=4, min_replays=6)


def test_what_a_call_stores_goes_to_the_dict_that_is_there(rand: Rand) -> None:
    def world() -> Any:
        box: Any = SimpleNamespace(items={"last": None})

        def call(x: Tensor) -> Tensor:
            box.items["last"] = x * 2
            return x + 1

        call.box = box  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    boxes: list[Any] = []

    def between(i: int, f: Any) -> None:
        box = getattr(f, "box", None) or f.__wrapped__.box
        if i == 4:
            box.items = {"last": None}
        if i == 7:
            boxes.append(box.items["last"])

    drop_in_worlds(world, calls=8, between=between, recordings=None, min_replays=3)
    assert boxes[0].equal(boxes[1])


class Pair(NamedTuple):
    first: Any
    second: int


def test_what_a_named_tuple_holds_is_read_by_its_name(rand: Rand) -> None:
    def world() -> Any:
        pair = Pair(Layer(2), 1)

        def call(x: Tensor) -> Tensor:
            pair.first.scale = (pair.first.scale + 1) % 3
            return x * (1 + pair.first.scale)

        return call, lambda i: (rand(i, 4),)

    drop_in_worlds(world, calls=9, recordings=None, min_replays=1)


def test_what_is_undone_may_lie_in_a_tuple(device: torch.device, rand: Rand) -> None:
    """Recurrent state has the capture repeated, and what it stored in a new tuple goes with it."""

    def world() -> Any:
        held = SimpleNamespace(
            pair=(torch.ones(4, device=device),), inside={"a": {"b": torch.zeros(4, device=device)}}
        )

        def call(x: Tensor) -> Tensor:
            held.pair = (held.pair[0] + x,)
            held.inside["a"]["b"] = held.inside["a"]["b"] - x
            return held.pair[0] * held.inside["a"]["b"]

        call.held = held  # type: ignore[attr-defined]
        return call, lambda i: (rand(i, 4),)

    drop_in_worlds(world, recordings=None)


@pytest.mark.parametrize("kind", ["module", "object", "list"])
def test_modules_that_change_places(device: torch.device, rand: Rand, kind: str) -> None:
    """Both runs that are compared take the module at the same place."""
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
    holder: Any = nn.Module() if kind == "module" else SimpleNamespace()
    holder.a, holder.b = a, b
    layers = [a, b]

    def swapped(x: Tensor) -> Tensor:
        y: Tensor = holder.a(x)
        holder.a, holder.b = holder.b, holder.a
        return y

    def turned(x: Tensor) -> Tensor:
        y = layers[0](x)
        layers.reverse()
        return y

    fast = ol.graph(turned if kind == "list" else swapped, warmup=2)
    with torch.no_grad():
        for i in range(2):
            assert_same(fast(rand(i, 4)), (a, b)[i](rand(i, 4)))
        with pytest.raises(ol.CaptureError, match=r"OL118.*another module.*(\n.*)*self.turn"):
            fast(rand(2, 4))
        assert (layers[0] if kind == "list" else holder.a) is a  # as if it had not been called
        assert_same((turned if kind == "list" else swapped)(rand(2, 4)), a(rand(2, 4)))


def test_chunks_of_a_weight_that_is_written(rand: Rand) -> None:
    """Autograd refuses to look at them after the write; the next call replaces them."""
    weight, kept = nn.Parameter(rand(9, 8, 4)), SimpleNamespace(chunks=())

    def f(x: Tensor) -> Tensor:
        kept.chunks = weight.chunk(2)
        return x * kept.chunks[0] + kept.chunks[1]

    fast = ol.graph(f, warmup=1)
    for i in range(6):
        expected = f(rand(i, 4, 4)).detach()
        assert_same(fast(rand(i, 4, 4)).detach(), expected)
        with torch.no_grad():
            weight.add_(1)


def test_state_that_becomes_a_view_of_other_state(rand: Rand) -> None:
    """What is written through it is read by the other's address in the same call."""

    def world() -> tuple[Any, Callable[[int], tuple[Tensor]]]:
        buffer = rand(9, 4, 4)
        kept = SimpleNamespace(row=buffer[0])

        def f(x: Tensor) -> Tensor:
            kept.row.add_(1)
            y = x + buffer
            kept.row = buffer[0]
            return y

        return f, lambda i: (rand(i, 4, 4),)

    drop_in_worlds(world, calls=8, recordings=None, min_replays=3)


def test_chunks_of_a_weight_that_a_step_scales(device: torch.device, rand: Rand) -> None:
    worlds: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = SimpleNamespace(chunks=model.weight.data.chunk(2))

        def step(
            x: Tensor,
            model: nn.Linear = model,
            optimizer: torch.optim.SGD = optimizer,
            kept: SimpleNamespace = kept,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            kept.chunks[0].mul_(0.5)
            optimizer.step()
            kept.chunks = model.weight.data.chunk(2)
            return loss

        worlds.append((model, step))
    (eager, step), (model, own) = worlds
    fast = ol.graph(own, warmup=1)
    for i in range(12):
        assert_same(fast(rand(i, 2, 4)), step(rand(i, 2, 4)))
        assert_same(dict(model.state_dict()), dict(eager.state_dict()))
    assert replays(fast) >= 3


def test_the_reason_for_another_attempt_is_told(rand: Rand) -> None:
    state = SimpleNamespace(total=rand(0, 3))

    def f(x: Tensor) -> Tensor:
        state.total = state.total + x
        return state.total * 1

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(3):
            fast(rand(i, 3))
    (recording,) = fast.recordings
    assert recording.retries == ("state that the callable replaces became inputs",)
