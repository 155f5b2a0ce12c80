"""What a callable reads is seen where it runs: nothing is found by its name alone."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import (
    Rand,
    assert_same,
    compare,
    drop_in,
    drop_in_worlds,
    follows,
    on_accelerators,
    replays,
)

Place = tuple[Callable[[Tensor], Tensor], Callable[[], object]]
"""A callable, and a change after which it computes something else."""


class Config:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


class Reads:
    """A descriptor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class Numbers(list[float]):
    scale = 2.0


class Pair(tuple[float, ...]):
    scale: float


class Counted(tuple[float, ...]):
    """Whose length is not what Python asks for."""

    def __len__(self) -> int:
        raise NotImplementedError


class Slotted:
    __slots__ = ("scale",)
    scale: float


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def __len__(self) -> int:
        return 2

    def scale(self, x: Tensor) -> Tensor:
        return x * 3 if isinstance(self, Tripling) else x * 2

    def factor(self) -> float:
        return 2.0


class Tripling(Doubling):
    def factor(self) -> float:
        return 3.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * 3

    def __len__(self) -> int:
        return 3


class Settings(types.ModuleType):
    @property
    def scale(self) -> float:
        return 3.0

    def __len__(self) -> int:
        return 3


def scaled(box: Any) -> Any:
    box.scale = 2.0
    return box


def times(x: Tensor, scale: float) -> Tensor:
    return x * scale


def derived(base: type = Doubling) -> Any:
    return type("Derived", (base,), {})


def sized(length: int) -> Any:
    """A metaclass."""
    return type("Meta", (type,), {"__len__": lambda cls: length})


def mode(read: Callable[[Any], float]) -> Any:
    class Mode(enum.Enum):
        FAST = 1
        scale = read

    Mode.FAST.factor = 2.0  # type: ignore[attr-defined]
    return Mode


def with_config() -> Any:
    return types.SimpleNamespace(config=Config())


def with_cache() -> Any:
    return types.SimpleNamespace(cache=torch.ones(3))


def first(of: Any) -> Any:
    return next(iter(of))


def put(name: str, value: Any, of: Callable[[Any], Any] = lambda box: box) -> Callable[[Any], None]:
    return lambda box: setattr(of(box), name, value)


def triple(of: Callable[[Any], Any] = lambda box: box) -> Callable[[Any], None]:
    return put("__class__", Tripling, of)


def weaken(scale: Any) -> None:
    scale.weight = nn.Parameter(torch.full_like(scale.weight, 0.1))


OF_BOXES: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Callable[..., Tensor]], Callable[[Any], object]]
] = {
    "a partial's function": (
        Config,
        lambda box: functools.partial(lambda x, y: x * box.scale + y, y=1.0),
        put("scale", 3.0),
    ),
    "the defaults of a partial's function": (
        lambda: lambda x, y, scale=2.0: x * scale + y,
        lambda f: functools.partial(f, y=1.0),
        put("__defaults__", (3.0,)),
    ),
    "the code of a partial's function": (
        lambda: lambda x, y: x * 2 + y,
        lambda f: functools.partial(f, y=1.0),
        put("__code__", (lambda x, y: x * 3 + y).__code__),
    ),
    "a partial's module": (
        lambda: nn.PReLU(init=0.5),
        lambda scale: functools.partial(scale.forward),
        weaken,
    ),
    "a module of a partial": (lambda: nn.PReLU(init=0.5), functools.partial, weaken),
    "a keyword added to a partial": (
        lambda: functools.partial(lambda x, y=1.0, z=0.0: x * y + z, y=2.0),
        lambda partial: partial,
        lambda partial: partial.keywords.update(z=1.0),
    ),
    "a method of an object made inside": (
        lambda: type("Local", (), {"times": lambda self, x: x * 2}),
        lambda local: lambda x: local().times(x),
        put("times", lambda self, x: x * 3),
    ),
    "an attribute of an enum": (
        lambda: mode(lambda self: self.factor),
        lambda mode: lambda x: x * mode.FAST.scale(),
        lambda mode: setattr(mode.FAST, "factor", 3.0),
    ),
    "a method of an enum": (
        lambda: mode(lambda self: 2.0),
        lambda mode: lambda x: x * mode.FAST.scale(),
        put("scale", lambda self: 3.0),
    ),
    "a property of a metaclass": (
        lambda: type("M", (type,), {"at": 2.0, "scale": property(lambda c: c.at)})("C", (), {}),
        lambda box: lambda x: x * box.scale,
        put("at", 3.0, of=type),
    ),
    "a descriptor": (
        lambda: type("Here", (), {"scale": Reads(2.0)})(),
        lambda box: lambda x: x * box.scale,
        lambda box: setattr(type(box), "scale", Reads(3.0)),
    ),
    "an attribute of a list": (
        lambda: scaled(Numbers([1.0])),
        lambda numbers: lambda x: x * numbers.scale,
        put("scale", 3.0),
    ),
    "an attribute of a tuple": (
        lambda: scaled(Pair((1.0, 2.0))),
        lambda pair: lambda x: x * pair.scale + pair[0],
        put("scale", 3.0),
    ),
    "a tuple without a length": (
        lambda: types.SimpleNamespace(numbers=Counted((1.0, 2.0))),
        lambda box: lambda x: x * box.numbers[1],
        lambda box: setattr(box, "numbers", Counted((1.0, 3.0))),
    ),
    "a class by a method": (Doubling, lambda box: lambda x: x * box.factor(), triple()),
    "a class by a call": (Doubling, lambda box: lambda x: box(x), triple()),
    "a class by its length": (Doubling, lambda box: lambda x: x * len(box), triple()),
    "a class that is asked for": (
        Doubling,
        lambda box: lambda x: x * 3 if isinstance(box, Tripling) else x * 2,
        triple(),
    ),
    "the class of the callable": (Doubling, lambda box: box, triple()),
    "the class of a method's object": (Doubling, lambda box: box.scale, triple()),
    "the class of a module without attributes": (
        nn.Tanh,
        lambda tanh: lambda x: tanh(x),
        put("__class__", nn.Sigmoid),
    ),
    "a special method that a subclass gets": (
        lambda: derived()(),
        lambda box: lambda x: box(x),
        put("__call__", Tripling.__call__, of=type),
    ),
    "the class of an element of a set": (
        lambda: {Doubling()},
        lambda boxes: lambda x: x * 3 if any(isinstance(b, Tripling) for b in boxes) else x * 2,
        triple(first),
    ),
    "the class of an element of a frozenset": (
        lambda: frozenset([Doubling()]),
        lambda boxes: lambda x: x * sum(map(len, boxes)),
        triple(first),
    ),
    "the class of a key": (
        lambda: {Doubling(): 1.0},
        lambda boxes: lambda x: x * 3 if any(type(box) is Tripling for box in boxes) else x * 2,
        triple(first),
    ),
    "the bases of a class": (
        lambda: derived(derived())(),
        lambda box: lambda x: x * 3 if isinstance(box, Tripling) else x * 2,
        put("__bases__", (Tripling,), of=lambda box: type(box).__base__),
    ),
    "the bases by a special method": (
        lambda: derived()(),
        lambda box: lambda x: box(x),
        put("__bases__", (Tripling,), of=type),
    ),
    "a metaclass": (
        lambda: sized(2)("Sized", (), {}),
        lambda box: lambda x: x * len(box),
        put("__class__", sized(3)),
    ),
    "the class of a Python module": (
        lambda: types.ModuleType("settings"),
        lambda settings: lambda x: x * 3 if isinstance(settings, Settings) else x * 2,
        put("__class__", Settings),
    ),
    "a slot filled later": (
        Slotted,
        lambda box: lambda x: x * getattr(box, "scale", 2.0),
        put("scale", 3.0),
    ),
    "arguments from vars": (
        Config,
        lambda config: lambda x: times(x, **vars(config)),
        put("scale", 3.0),
    ),
    "an object in vars": (
        with_config,
        lambda box: lambda x: x * vars(box)["config"].scale,
        lambda box: setattr(box.config, "scale", 3.0),
    ),
    "an object in a list that is spread": (
        lambda: [Config()],
        lambda configs: lambda x: x * vars([*configs][-1])["scale"],
        put("scale", 3.0, of=first),
    ),
    "a global in front of a builtin": (
        dict,
        lambda namespace: eval("lambda x: x * max(2.0, 1.0)", namespace),
        lambda namespace: namespace.update(max=min),
    ),
    "whether there is a tensor": (
        with_cache,
        lambda box: lambda x: x * (2 if box.cache is None else 3),
        put("cache", None),
    ),
    "the shape of a tensor that no kernel reads": (
        with_cache,
        lambda box: lambda x: x * box.cache.shape[0],
        lambda box: setattr(box, "cache", torch.ones(2)),
    ),
    "the dtype of a tensor that no kernel reads": (
        with_cache,
        lambda box: lambda x: x * (2 if box.cache.dtype == torch.float32 else 3),
        lambda box: setattr(box, "cache", box.cache.double()),
    ),
}
"""What the callable reads of, the callable, which has it in its closure, and a change of it."""


class Made:
    """An object of each call."""

    config = Config()

    def __init__(self) -> None:
        self.scale = self.config.scale

    def times(self, x: Tensor) -> Tensor:
        return x * self.scale


def of_what_an_init_reads() -> Place:
    Made.config = Config()
    return lambda x: Made().times(x), lambda: setattr(Made.config, "scale", 3.0)


def of_a_default_factory() -> Place:
    box: collections.defaultdict[int, float] = collections.defaultdict(lambda: 2.0)

    def f(x: Tensor) -> Tensor:
        scale = box[0]
        box.clear()
        return x * scale

    return f, lambda: setattr(box, "default_factory", lambda: 3.0)


def of_an_object_in_a_namespace() -> Place:
    box = with_config()

    def f(x: Tensor) -> Tensor:
        namespace = box.__dict__
        return x * namespace["config"].scale

    return f, lambda: setattr(box.config, "scale", 3.0)


def of_a_tuple_in_a_list_that_is_made() -> Place:
    pairs = [types.SimpleNamespace(pair=scaled(Pair((1.0, 2.0))))]

    def pair(held: Any) -> Any:
        return held.pair

    return (
        lambda x: x * list(map(pair, pairs))[-1].scale,
        lambda: setattr(pairs[0].pair, "scale", 3.0),
    )


def of_the_order_of_a_dict() -> Place:
    steps: dict[str, float] = {"add": 1.0, "times": 2.0}

    def f(x: Tensor) -> Tensor:
        for name, number in steps.items():
            x = x + number if name == "add" else x * number
        return x

    return f, lambda: steps.update(add=steps.pop("add"))


def of_the_code_of_a_decorated_function() -> Place:
    config = Config()

    @functools.lru_cache(maxsize=0)
    def scale() -> float:
        return config.scale

    return lambda x: x * scale(), lambda: setattr(config, "scale", 3.0)


def of_a_module_that_counts_in_a_library() -> Place:
    cache = nn.Module()
    cache.steps = 0

    def f(x: Tensor) -> Tensor:
        cache.steps = (cache.steps + 1) % 2
        return x * (2 + cache.steps)

    return f, lambda: setattr(cache, "steps", 0)


PLACES = {name: place for name, place in globals().items() if name.startswith("of_")}


def place_of(name: str) -> Place:
    if name in PLACES:
        return PLACES[name]()
    make, program, change = OF_BOXES[name]
    box = make()
    return program(box), lambda: change(box)


def test_a_class_that_changes_from_call_to_call(device: torch.device, rand: Rand) -> None:
    """Any two runs in a row differ, and the class explains why: no false OL117."""
    boxes: set[Doubling] = {Doubling()}
    (box,) = boxes

    def f(x: Tensor) -> Tensor:
        return x * 3 if any(isinstance(box, Tripling) for box in boxes) else x + x

    fast = ol.graph(f, on_refusal="raise")
    with torch.no_grad():
        for i in range(12):
            box.__class__ = (Doubling, Tripling)[i % 2]
            assert_same(fast(rand(i, 3)), f(rand(i, 3)))
    assert replays(fast)


@pytest.mark.parametrize("place", [*PLACES, *OF_BOXES])
def test_a_change_is_seen(device: torch.device, rand: Rand, place: str) -> None:
    (f, change), (other, change_other) = place_of(place), place_of(place)
    for one in (f, other):
        owner = getattr(one, "func", one)
        owner = getattr(owner, "__self__", owner)
        if isinstance(owner, nn.Module):
            owner.to(device)
    fast = ol.graph(f, warmup=1)
    for calls in (8, 8, 1):
        compare(fast, other, lambda i: (rand(i, 3),), calls)
        change()
        change_other()
    assert fast.stats().replays >= 5


@on_accelerators
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.double(),
        lambda head: head.weight.unsqueeze_(0),
        lambda head: head.weight.requires_grad_(False),
        lambda head: setattr(head.weight, "data", torch.ones(5, 5)),
        lambda head: torch.utils.swap_tensors(head.weight, torch.ones(7, 7)),
    ],
)
@torch.no_grad()
def test_what_a_tensor_of_the_host_is(
    device: torch.device, rand: Rand, change: Callable[[nn.Linear], object]
) -> None:
    """No kernel reads it, and it is the same object: code asks for its dtype, shape and flag."""
    head = nn.Linear(3, 2)

    def f(x: Tensor) -> Tensor:
        weight = head.weight
        x = x.to(weight.dtype) * weight.dim() + weight.shape[-1]
        return x * 2 if weight.requires_grad else x

    assert replays(follows(f, lambda i: (rand(i, 3),), lambda: change(head))) >= 3


def test_the_gradient_of_a_buffer_is_asked_for(device: torch.device, rand: Rand) -> None:
    model = nn.Module()
    model.register_buffer("c", torch.ones(3, device=device))

    def f(x: Tensor) -> Tensor:
        return x * 2 if model.c.grad is None else x * 3

    def change() -> None:
        model.c.grad = torch.ones(3, device=device)

    assert replays(follows(f, lambda i: (rand(i, 3),), change)) >= 3


def test_names_of_unrelated_objects_are_no_state(rand: Rand) -> None:
    """`self.opt.step` is the optimizer's: a counter of that name elsewhere may count."""

    class Optimizer:
        rate = 0.5

        def step(self, x: Tensor) -> Tensor:
            return x * self.rate

    class Trainer:
        def __init__(self) -> None:
            self.opt = Optimizer()
            self.step = 0
            self.log: list[int] = []

        def train(self, x: Tensor) -> Tensor:
            return self.opt.step(x)

    trainer = Trainer()
    fast = ol.graph(trainer.train, warmup=1)
    with torch.no_grad():
        for i in range(12):
            assert_same(fast(rand(i, 3)), rand(i, 3) * 0.5)
            trainer.step += 1
            trainer.log.append(i)
    assert len(fast.recordings) == 1
    assert replays(fast) == 11


def test_a_frozen_parameter_with_a_gradient(device: torch.device, rand: Rand) -> None:
    """An optimizer steps it wherever it has one, and its momentum moves it on."""

    def job() -> tuple[nn.Linear, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3).to(device)
        layer.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            loss = layer(x).square().sum()
            loss.backward()
            optimizer.step()
            layer.weight.grad = None
            return loss.detach()

        return layer, step

    (mine, step), (theirs, eager) = job(), job()
    fast = ol.graph(step, warmup=1)
    for i in range(12):
        if i == 6:
            for layer in (mine, theirs):
                layer.bias.grad = torch.ones_like(layer.bias)
        assert_same(fast(rand(i, 2, 3)), eager(rand(i, 2, 3)), f"call {i}")
        assert_same(dict(mine.state_dict()), dict(theirs.state_dict()), f"call {i}")
    assert replays(fast) > 4


def test_a_number_behind_a_comprehension(device: torch.device, rand: Rand) -> None:
    """Python 3.12 runs one in the frame of the function that it stands in."""

    class Layer:
        calls = 0.0

    def world() -> Any:
        layers = [Layer()]

        def f(x: Tensor) -> Tensor:
            [layer for layer in layers if layer][-1].calls += 1
            each = {n + 1: layer for n, layer in enumerate(layers)}
            return x * each[1].calls

        return f, lambda i: (rand(i, 4),)

    drop_in_worlds(world, calls=8, recordings=None, min_replays=0)


def test_a_weak_proxy_of_what_is_gone(rand: Rand) -> None:
    """A progress bar leaves one behind: nothing can be asked of it, not even its class."""

    class Bar:
        def close(self) -> None:
            """End it."""

    def f(x: Tensor) -> Tensor:
        bar = Bar()
        proxy = weakref.proxy(bar)
        proxy.close()
        return x * 2

    drop_in(f, lambda i: (rand(i, 3),))


class Turning:
    on: object = 7
    count = 5


@pytest.mark.parametrize("module", [False, True])
def test_an_attribute_that_an_instance_loses(
    device: torch.device, rand: Rand, module: bool
) -> None:
    """Without it the class's is read, and the call stores the instance's anew: so do replays."""

    def make() -> tuple[Callable[[Tensor], Tensor], Any]:
        state: Any = nn.Identity() if module else Turning()
        if module:
            state.__class__ = type("Turns", (nn.Identity,), {"on": 7, "count": 5})

        def f(x: Tensor) -> Tensor:
            state.on = not state.on
            state.count += 1
            return x * 2 if state.on else x * 3

        return f, state

    (f, state), (eager, expected) = make(), make()
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for _ in range(3):
            for i in range(6):
                assert_same(fast(rand(i, 3)), eager(rand(i, 3)))
                assert (state.on, state.count) == (expected.on, expected.count)
            del state.on, state.count, expected.on, expected.count
    assert replays(fast) >= 6


@pytest.mark.parametrize("module", ["onelaunch_of_mine", "logging_setup", "threadings.states"])
def test_a_module_whose_name_begins_as_one_that_is_not_walked(
    device: torch.device, rand: Rand, module: str
) -> None:
    kind: Any = type("Settings", (), {"__module__": module, "__init__": Config.__init__})
    settings, x = kind(), rand(0, 4)
    fast: Any = ol.graph(lambda x: x * settings.scale)
    for settings.scale in (2.0, 3.0):
        for _ in range(5):
            assert_same(fast(x), x * settings.scale)
    assert len(fast.recordings) == 2
