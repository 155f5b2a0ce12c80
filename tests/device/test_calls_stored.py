"""Table of calls: tensors stored on modules, arguments, closures and globals."""

from __future__ import annotations

import array
import dataclasses
import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import Rand, assert_same, drop_in, refused, replays, right_or_refused


@dataclasses.dataclass
class Box:
    value: Any = None


class Remembers(nn.Module):
    """Stores a tensor on a plain attribute."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x + 1


def test_a_tensor_stored_on_the_module(rand: Rand) -> None:
    eager, model = Remembers(), Remembers()
    fast = ol.graph(model, warmup=2)
    kept: list[tuple[Tensor | None, Tensor | None]] = []
    with torch.no_grad():
        for i in range(8):
            assert_same(fast(rand(i, 3)), eager(rand(i, 3)))
            assert_same(fast.last, eager.last)
            kept.append((fast.last, eager.last))
        for got, expected in kept:
            assert_same(got, expected)
    assert replays(fast) >= 5


def test_a_stored_tensor_that_is_also_returned_is_the_same_object(rand: Rand) -> None:
    class Both(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    fast = ol.graph(Both(), warmup=1)
    with torch.no_grad():
        for i in range(5):
            y = fast(rand(i, 3))
            assert y is fast.last
            assert_same(y, rand(i, 3) * 2)
    assert replays(fast) > 0


class Recurrent(nn.Module):
    """h is replaced by a new tensor at each call and read by the next."""

    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.h = rand(77, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.h * 0.5 + x
        return self.h.clone()


class Averages(nn.Module):
    mean: Tensor

    def __init__(self, rand: Rand) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros_like(rand(0, 3)))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x * 0.1
        return x - self.mean


def stores_on_argument(x: Tensor, box: Box) -> Tensor:
    box.value = x * 2
    return x + 1


def appends_to_argument(x: Tensor, out: list[Tensor]) -> Tensor:
    out.append(x * 2)
    return x + 1


def assigns_to_argument(x: Tensor, out: dict[str, Tensor]) -> Tensor:
    out["y"] = x * 2
    return x + 1


def storing_in_closure(rand: Rand) -> Callable[[Tensor], Tensor]:
    last = rand(0, 3)

    def f(x: Tensor) -> Tensor:
        nonlocal last
        y = x + last
        last = x * 2
        return y

    return f


def changing_places(rand: Rand) -> Callable[[Tensor], Tensor]:
    """Both were there before: each call moves them on, whichever the kernels read."""
    pair = [rand(70, 3), rand(71, 3)]

    def f(x: Tensor) -> Tensor:
        pair[0], pair[1] = pair[1], pair[0]
        return x + pair[0]

    return f


def delay_line(rand: Rand) -> Callable[[Tensor], Tensor]:
    """The tensor of the call before is returned, and no kernel reads it."""
    kept = [rand(70, 3)]

    def f(x: Tensor) -> Tensor:
        last, kept[0] = kept[0], x * 2
        return last

    return f


STORING: dict[str, tuple[Callable[[Rand], Any], Callable[[Rand, int], tuple[Any, ...]]]] = {
    "recurrent state": (Recurrent, lambda rand, i: ()),
    "a buffer": (Averages, lambda rand, i: ()),
    "an argument": (lambda rand: stores_on_argument, lambda rand, i: (Box(),)),
    "a list argument": (lambda rand: appends_to_argument, lambda rand, i: ([],)),
    "a dict argument": (lambda rand: assigns_to_argument, lambda rand, i: ({"y": rand(i, 3)},)),
    "popped from a dict argument": (
        lambda rand: lambda x, inputs: x + inputs.pop("y"),
        lambda rand, i: ({"y": rand(50 + i, 3), "z": rand(i, 1)},),
    ),
    "a closure": (storing_in_closure, lambda rand, i: ()),
    "tensors that change places": (changing_places, lambda rand, i: ()),
    "a delay line": (delay_line, lambda rand, i: ()),
}
"""The place of a tensor -> what makes the callable, and its arguments after the first."""


@pytest.mark.parametrize("place", STORING)
def test_a_tensor_that_is_stored(rand: Rand, place: str) -> None:
    make, rest = STORING[place]
    right_or_refused(lambda: (make(rand), lambda i: (rand(i, 3), *rest(rand, i))), "OL105")


HISTORY: list[Tensor] = []


def appends_to_global(x: Tensor) -> Tensor:
    HISTORY.append(x * 2)
    return x + 1


def test_a_list_that_got_a_tensor_is_named(rand: Rand) -> None:
    seen: list[Tensor] = []

    def doubled(x: Tensor) -> Tensor:
        seen.append(x * 2)
        return x + 1

    fast = ol.graph(doubled, warmup=1)
    with torch.no_grad():
        fast(rand(1, 3))
        error = refused(fast, rand(0, 3), match=r"OL105.*`seen` got a tensor")
    said = "return the tensor, and append it after the call: `seen.append(fast(x))`"
    assert error.fix == said


def test_an_array_that_moves_is_told_by_its_numbers(rand: Rand) -> None:
    steps = array.array("d", [1.0])

    def counted(x: Tensor) -> Tensor:
        steps.append(len(steps) + 1.0)
        return x * steps[0]

    fast = ol.graph(counted, warmup=1)
    with torch.no_grad():
        results = [fast(rand(i, 3)) for i in range(5)]
    assert_same(results, [rand(i, 3) for i in range(5)])
    assert steps.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    why = fast.recordings[0].why
    assert re.search(r"state changed: steps: captured \[1.0, 2.0\], got \[1.0, 2.0, 3.0, ", why)


@pytest.mark.parametrize("where", ["global list", "module list", "module dict", "closure list"])
def test_a_container_changed(rand: Rand, where: str) -> None:
    HISTORY.clear()

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.named: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if where == "module list":
                self.seen.append(x * 2)
            else:
                self.named["last"] = x * 2
            return x + 1

    model = Collects()
    closure: list[Tensor] = []

    def appends(x: Tensor) -> Tensor:
        closure.append(x * 2)
        return x + 1

    f, read = {
        "global list": (appends_to_global, lambda: list(HISTORY)),
        "module list": (model, lambda: list(model.seen)),
        "module dict": (model, lambda: [model.named["last"]]),
        "closure list": (appends, lambda: list(closure)),
    }[where]
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            try:
                fast(rand(i, 3))
            except ol.CaptureError as error:
                assert error.code == "OL105"  # noqa: PT017
                assert i == 2  # the second call may have been the last to store one
                # What the failed captures stored is gone again.
                assert_same(read(), [rand(0, 3) * 2, rand(1, 3) * 2])
                return
            assert_same(read()[-1], rand(i, 3) * 2)
            if where != "module dict":
                assert len(read()) == i + 1


def test_a_counter_on_the_module_does_not_split_or_stop_recording(rand: Rand) -> None:
    """Python effects are not repeated: documented, and no reason to record anew at each call."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    drop_in(Counts(), lambda i: (rand(i, 3),), calls=6)


class Tagged:
    """An object whose attributes no walk finds."""

    __slots__ = ("value",)

    value: Any


LAST: Tensor | None = None


def _in_a_global(box: dict[str, Any], t: Tensor) -> None:
    global LAST
    LAST = t


def _in_an_iterator(box: dict[str, Any], t: Tensor) -> None:
    box["it"] = iter([t])


def _in_slots(box: dict[str, Any], t: Tensor) -> None:
    box["slots"].value = t


def _on_a_tensor(box: dict[str, Any], t: Tensor) -> None:
    box["w"].tag = t


def _as_a_gradient(box: dict[str, Any], t: Tensor) -> None:
    box["w"].grad = t


def _in_a_set(box: dict[str, Any], t: Tensor) -> None:
    box["set"].clear()
    box["set"].add(t)


_OUT_OF_SIGHT: dict[str, tuple[Callable[..., None], Callable[[dict[str, Any]], Tensor | None]]] = {
    "global": (_in_a_global, lambda box: LAST),
    "iterator": (_in_an_iterator, lambda box: next(box["it"])),
    "slots": (_in_slots, lambda box: box["slots"].value),
    "tensor": (_on_a_tensor, lambda box: box["w"].tag),
    "gradient": (_as_a_gradient, lambda box: box["w"].grad),
    "set": (_in_a_set, lambda box: next(iter(box["set"]))),
}


@pytest.mark.parametrize("place", _OUT_OF_SIGHT)
def test_a_tensor_stored_out_of_sight_is_renewed_or_refused(rand: Rand, place: str) -> None:
    """The recording's memory outlives the call wherever it is kept; each replay overwrites it."""
    put, get = _OUT_OF_SIGHT[place]
    box: dict[str, Any] = {"slots": Tagged(), "set": set(), "w": rand(60, 3)}

    def f(x: Tensor) -> Tensor:
        put(box, x * 2)
        return x + 1

    fast = ol.graph(f, warmup=1)
    kept: list[Tensor | None] = []
    with torch.no_grad():
        for i in range(5):
            try:
                fast(rand(i, 3))
            except ol.CaptureError as error:
                assert error.code == "OL105"  # noqa: PT017
                return
            kept.append(get(box))
            assert_same(kept[-1], rand(i, 3) * 2)
    if place != "gradient":  # which is accumulated into
        assert_same(kept, [rand(i, 3) * 2 for i in range(5)])
    assert replays(fast) > 0


def test_a_hook_of_a_submodule_that_keeps_what_it_sees(rand: Rand) -> None:
    seen: dict[str, Tensor] = {}
    model = nn.Sequential(nn.Tanh(), nn.ReLU())
    model[0].register_forward_hook(lambda module, given, result: seen.update(act=result))
    fast = ol.graph(model, warmup=1)
    with torch.no_grad():
        for i in range(5):
            told = pytest.warns(ol.GraphWarning, match="OL308") if i == 1 else nullcontext()
            with told:
                fast(rand(i, 3))
            assert_same(seen["act"], torch.tanh(rand(i, 3)))


@dataclasses.dataclass
class Holder:
    y: Tensor
    more: list[Tensor]


def test_a_container_in_several_places_of_a_result_is_one_object(rand: Rand) -> None:
    def f(x: Tensor) -> dict[str, Any]:
        several, holder = [x * 2], Holder(x + 1, [x])
        return {"a": several, "b": (several, holder), "c": {"deep": holder}, "apart": [x * 2]}

    fast = ol.graph(f, warmup=1)
    for i in range(5):
        result = fast(rand(i, 4))
        (several, holder), one = result["b"], result["c"]["deep"]
        assert result["a"] is several
        assert holder is one
        assert holder.more is not several
        assert result["apart"] is not several
        several.append(rand(i, 4))  # the next call has objects of its own
    assert replays(fast) == 4


class Keeper(nn.Module):
    last: Any = None
    best: Any = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.best = {"y": x * 2, "parts": [x + 1]}
        return self.last


def test_a_container_that_is_stored_and_returned_is_one_object(rand: Rand) -> None:
    model = Keeper()
    fast = ol.graph(model, warmup=1)
    for i in range(6):
        result = fast(rand(i, 4))
        assert model.last is result
        assert model.best is result
        result["parts"].append(i)
        assert model.last["parts"] == [result["parts"][0], i]
    assert replays(fast) > 0


@dataclasses.dataclass
class Output(OrderedDict[str, Tensor]):
    """A result as transformers has them: the fields are items, too."""

    y: Tensor | None = None
    z: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


def test_what_a_result_is_made_of_is_no_state(rand: Rand) -> None:
    fast = ol.graph(lambda x: Output(x * 2), warmup=1)
    for i in range(5):
        assert_same(fast(rand(i, 4)).y, rand(i, 4) * 2)
    assert fast.stats().captures == 1


def test_caches_of_functools(device: torch.device, rand: Rand) -> None:
    """A cache keeps a tensor of the call in a key, or for a size that is asked for by turns."""

    @functools.lru_cache(maxsize=4)
    def weights(mask: Tensor, scale: int) -> Tensor:
        return mask.float() * scale

    @functools.lru_cache(maxsize=1)
    def ramp(n: int, on: torch.device) -> Tensor:
        return torch.arange(n, device=on).float()

    def f(x: Tensor) -> Tensor:
        return x * weights(x > 0, 2) + ramp(4, x.device) + ramp(2, x.device).sum()

    fast = ol.graph(f)
    for i in range(7):
        x = rand(i, 3, 4)
        assert_same(fast(x), f(x))
    assert replays(fast) >= 4
    assert_same(ramp(2, device), torch.arange(2, device=device).float())
