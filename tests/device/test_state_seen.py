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

from .drop_in import assert_same, drop_in_worlds, on_accelerators, replays

Rand = Callable[..., Tensor]
Place = tuple[Callable[[Tensor], Tensor], Callable[[], object]]
"""A callable, and a change after which it computes something else."""


class Config:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


def of_a_partials_function() -> Place:
    config = Config()

    def f(x: Tensor, y: float) -> Tensor:
        return x * config.scale + y

    return functools.partial(f, y=1.0), lambda: setattr(config, "scale", 3.0)


def of_the_defaults_of_a_partials_function() -> Place:
    def f(x: Tensor, y: float, scale: float = 2.0) -> Tensor:
        return x * scale + y

    return functools.partial(f, y=1.0), lambda: setattr(f, "__defaults__", (3.0,))


def of_the_code_of_a_partials_function() -> Place:
    def f(x: Tensor, y: float) -> Tensor:
        return x * 2 + y

    def g(x: Tensor, y: float) -> Tensor:
        return x * 3 + y

    return functools.partial(f, y=1.0), lambda: setattr(f, "__code__", g.__code__)


def of_a_partials_module() -> Place:
    scale = nn.PReLU(init=0.5)

    def change() -> None:
        scale.weight = nn.Parameter(torch.full_like(scale.weight, 0.1))

    return functools.partial(scale.forward), change


def of_a_module_of_a_partial() -> Place:
    scale = nn.PReLU(init=0.5)

    def change() -> None:
        scale.weight = nn.Parameter(torch.full_like(scale.weight, 0.1))

    return functools.partial(scale), change


def of_a_keyword_added_to_a_partial() -> Place:
    partial = functools.partial(lambda x, y=1.0, z=0.0: x * y + z, y=2.0)
    return partial, lambda: partial.keywords.update(z=1.0)


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


def of_a_method_of_an_object_made_inside() -> Place:
    class Local:
        def times(self, x: Tensor) -> Tensor:
            return x * 2

    return lambda x: Local().times(x), lambda: setattr(Local, "times", lambda self, x: x * 3)


def of_an_attribute_of_an_enum() -> Place:
    class Mode(enum.Enum):
        FAST = 1

        def scale(self) -> float:
            return self.factor  # type: ignore[attr-defined]

    Mode.FAST.factor = 2.0  # type: ignore[attr-defined]
    return lambda x: x * Mode.FAST.scale(), lambda: setattr(Mode.FAST, "factor", 3.0)


def of_a_method_of_an_enum() -> Place:
    class Mode(enum.Enum):
        FAST = 1

        def scale(self) -> float:
            return 2.0

    return lambda x: x * Mode.FAST.scale(), lambda: setattr(Mode, "scale", lambda self: 3.0)


class Meta(type):
    factor = 2.0

    @property
    def scale(cls) -> float:
        return cls.factor


def of_a_property_of_a_metaclass() -> Place:
    Meta.factor = 2.0

    class Here(metaclass=Meta):
        pass

    return lambda x: x * Here.scale, lambda: setattr(Meta, "factor", 3.0)


def of_a_descriptor() -> Place:
    class Reads:
        def __init__(self, value: float) -> None:
            self.value = value

        def __get__(self, owner: Any, kind: Any = None) -> float:
            return self.value

    class Here:
        scale = Reads(2.0)

    here = Here()
    return lambda x: x * here.scale, lambda: setattr(Here, "scale", Reads(3.0))


class Numbers(list[float]):
    scale = 2.0


class Pair(tuple[float, ...]):
    scale: float


def of_an_attribute_of_a_list() -> Place:
    numbers = Numbers([1.0])
    numbers.scale = 2.0
    return lambda x: x * numbers.scale, lambda: setattr(numbers, "scale", 3.0)


def of_an_attribute_of_a_tuple() -> Place:
    pair = Pair((1.0, 2.0))
    pair.scale = 2.0
    return lambda x: x * pair.scale + pair[0], lambda: setattr(pair, "scale", 3.0)


class Counted(tuple[float, ...]):
    """Whose length is not what Python asks for."""

    def __len__(self) -> int:
        raise NotImplementedError


def of_a_tuple_without_a_length() -> Place:
    box = types.SimpleNamespace(numbers=Counted((1.0, 2.0)))
    return lambda x: x * box.numbers[1], lambda: setattr(box, "numbers", Counted((1.0, 3.0)))


class Twice:
    def scale(self) -> float:
        return 2.0


class Thrice(Twice):
    def scale(self) -> float:
        return 3.0


def of_a_class_assigned() -> Place:
    box = Twice()
    return lambda x: x * box.scale(), lambda: setattr(box, "__class__", Thrice)


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def __len__(self) -> int:
        return 2


class Tripling(Doubling):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 3

    def __len__(self) -> int:
        return 3


def of_a_class_by_a_call() -> Place:
    box = Doubling()
    return lambda x: box(x), lambda: setattr(box, "__class__", Tripling)


def of_a_class_by_its_length() -> Place:
    box = Doubling()
    return lambda x: x * len(box), lambda: setattr(box, "__class__", Tripling)


def of_a_class_that_is_asked_for() -> Place:
    box = Doubling()

    def f(x: Tensor) -> Tensor:
        return x * 3 if isinstance(box, Tripling) else x * 2

    return f, lambda: setattr(box, "__class__", Tripling)


def of_the_class_of_the_callable() -> Place:
    box = Doubling()
    return box, lambda: setattr(box, "__class__", Tripling)


def of_the_class_of_a_methods_object() -> Place:
    class Doubled:
        def scale(self, x: Tensor) -> Tensor:
            return x * 3 if isinstance(self, Tripled) else x * 2

    class Tripled(Doubled):
        pass

    box = Doubled()
    return box.scale, lambda: setattr(box, "__class__", Tripled)


def of_the_class_of_a_module_without_attributes() -> Place:
    tanh = nn.Tanh()
    return lambda x: tanh(x), lambda: setattr(tanh, "__class__", nn.Sigmoid)


def of_a_special_method_that_a_subclass_gets() -> Place:
    class Derived(Doubling):
        pass

    box = Derived()
    return lambda x: box(x), lambda: setattr(Derived, "__call__", Tripling.__call__)


def of_the_class_of_an_element_of_a_set() -> Place:
    boxes = {Doubling()}

    def f(x: Tensor) -> Tensor:
        return x * 3 if any(isinstance(box, Tripling) for box in boxes) else x * 2

    return f, lambda: setattr(next(iter(boxes)), "__class__", Tripling)


def of_the_class_of_an_element_of_a_frozenset() -> Place:
    boxes = frozenset([Doubling()])

    def f(x: Tensor) -> Tensor:
        return x * sum(map(len, boxes))

    return f, lambda: setattr(next(iter(boxes)), "__class__", Tripling)


def of_the_class_of_a_key() -> Place:
    boxes = {Doubling(): 1.0}

    def f(x: Tensor) -> Tensor:
        return x * 3 if any(type(box) is Tripling for box in boxes) else x * 2

    return f, lambda: setattr(next(iter(boxes)), "__class__", Tripling)


def of_the_bases_of_a_class() -> Place:
    class Base(Doubling):
        pass

    class Derived(Base):
        pass

    box = Derived()

    def f(x: Tensor) -> Tensor:
        return x * 3 if isinstance(box, Tripling) else x * 2

    return f, lambda: setattr(Base, "__bases__", (Tripling,))


def of_the_bases_by_a_special_method() -> Place:
    class Derived(Doubling):
        pass

    box = Derived()
    return lambda x: box(x), lambda: setattr(Derived, "__bases__", (Tripling,))


def of_a_metaclass() -> Place:
    class Meta(type):
        def __len__(cls) -> int:
            return 2

    class Longer(Meta):
        def __len__(cls) -> int:
            return 3

    class Sized(metaclass=Meta):
        pass

    return lambda x: x * len(Sized), lambda: setattr(Sized, "__class__", Longer)


def of_the_class_of_a_python_module() -> Place:
    class Settings(types.ModuleType):
        @property
        def scale(self) -> float:
            return 3.0

        def __len__(self) -> int:
            return 3

    settings: Any = types.ModuleType("settings")

    def f(x: Tensor) -> Tensor:
        return x * 3 if isinstance(settings, Settings) else x * 2

    return f, lambda: setattr(settings, "__class__", Settings)


class Slotted:
    __slots__ = ("scale",)
    scale: float


def of_a_slot_filled_later() -> Place:
    box = Slotted()
    return lambda x: x * getattr(box, "scale", 2.0), lambda: setattr(box, "scale", 3.0)


def of_a_default_factory() -> Place:
    box: collections.defaultdict[int, float] = collections.defaultdict(lambda: 2.0)

    def f(x: Tensor) -> Tensor:
        scale = box[0]
        box.clear()
        return x * scale

    return f, lambda: setattr(box, "default_factory", lambda: 3.0)


def of_arguments_from_vars() -> Place:
    config = Config()

    def inner(x: Tensor, scale: float) -> Tensor:
        return x * scale

    return lambda x: inner(x, **vars(config)), lambda: setattr(config, "scale", 3.0)


def of_an_object_in_vars() -> Place:
    box = types.SimpleNamespace(config=Config())
    return lambda x: x * vars(box)["config"].scale, lambda: setattr(box.config, "scale", 3.0)


def of_an_object_in_a_namespace() -> Place:
    box = types.SimpleNamespace(config=Config())

    def f(x: Tensor) -> Tensor:
        namespace = box.__dict__
        return x * namespace["config"].scale

    return f, lambda: setattr(box.config, "scale", 3.0)


def of_an_object_in_a_list_that_is_spread() -> Place:
    configs = [Config()]
    return lambda x: x * vars([*configs][-1])["scale"], lambda: setattr(configs[0], "scale", 3.0)


def of_a_tuple_in_a_list_that_is_made() -> Place:
    pairs = [types.SimpleNamespace(pair=Pair((1.0, 2.0)))]
    pairs[0].pair.scale = 2.0

    def pair(held: Any) -> Any:
        return held.pair

    def f(x: Tensor) -> Tensor:
        return x * list(map(pair, pairs))[-1].scale

    return f, lambda: setattr(pairs[0].pair, "scale", 3.0)


def of_a_global_in_front_of_a_builtin() -> Place:
    namespace: dict[str, Any] = {}
    exec("def f(x): return x * max(2.0, 1.0)", namespace)
    return namespace["f"], lambda: namespace.update(max=min)


def of_the_order_of_a_dict() -> Place:
    steps: dict[str, float] = {"add": 1.0, "times": 2.0}

    def f(x: Tensor) -> Tensor:
        for name, number in steps.items():
            x = x + number if name == "add" else x * number
        return x

    return f, lambda: steps.update(add=steps.pop("add"))


def of_whether_there_is_a_tensor() -> Place:
    box = types.SimpleNamespace(cache=torch.ones(3))
    return lambda x: x * (2 if box.cache is None else 3), lambda: setattr(box, "cache", None)


def of_the_shape_of_a_tensor_that_no_kernel_reads() -> Place:
    box = types.SimpleNamespace(cache=torch.ones(3))
    return lambda x: x * box.cache.shape[0], lambda: setattr(box, "cache", torch.ones(2))


def of_the_dtype_of_a_tensor_that_no_kernel_reads() -> Place:
    box = types.SimpleNamespace(cache=torch.ones(3))

    def f(x: Tensor) -> Tensor:
        return x * (2 if box.cache.dtype == torch.float32 else 3)

    return f, lambda: setattr(box, "cache", box.cache.double())


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


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen(device: torch.device, rand: Rand, place: str) -> None:
    (f, change), (other, change_other) = PLACES[place](), PLACES[place]()
    for one in (f, other):
        owner = getattr(one, "func", one)
        owner = getattr(owner, "__self__", owner)
        if isinstance(owner, nn.Module):
            owner.to(device)
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for step in range(2):
            for i in range(8):
                assert_same(fast(rand(i, 3)), other(rand(i, 3)), f"step {step}, call {i}")
            change()
            change_other()
        assert_same(fast(rand(9, 3)), other(rand(9, 3)))
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
def test_what_a_tensor_of_the_host_is(
    device: torch.device, rand: Rand, change: Callable[[nn.Linear], object]
) -> None:
    """No kernel reads it, and it is the same object: code asks for its dtype, shape and flag."""
    head = nn.Linear(3, 2)

    def f(x: Tensor) -> Tensor:
        weight = head.weight
        x = x.to(weight.dtype) * weight.dim() + weight.shape[-1]
        return x * 2 if weight.requires_grad else x

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for _ in range(2):
            for i in range(4):
                assert_same(fast(rand(i, 3)), f(rand(i, 3)))
            change(head)
    assert replays(fast) >= 3


def test_the_gradient_of_a_buffer_is_asked_for(device: torch.device, rand: Rand) -> None:
    model = nn.Module()
    model.register_buffer("c", torch.ones(3, device=device))

    def f(x: Tensor) -> Tensor:
        return x * 2 if model.c.grad is None else x * 3

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for _ in range(2):
            for i in range(4):
                assert_same(fast(rand(i, 3)), f(rand(i, 3)))
            model.c.grad = torch.ones(3, device=device)
    assert replays(fast) >= 3


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

    fast = ol.graph(f)
    with torch.no_grad():
        for i in range(6):
            assert torch.equal(fast(rand(i, 3)), rand(i, 3) * 2)
    assert fast.stats().replays


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
