"""Arguments and results of every structure, and bad input to every public entry point."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol

from .drop_in import assert_same, drop_in, drop_in_worlds, replays, right_or_refused

Rand = Callable[..., Tensor]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


@dataclasses.dataclass
class State:
    hidden: Tensor
    steps: int = 0
    extra: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor
    label: str = "a"


class Subtuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Subdict(dict):  # type: ignore[type-arg]
    pass


# Structures.


INPUTS: dict[str, Callable[[Rand, int], Any]] = {
    "tuple": lambda r, i: (r(i, 3), r(i + 50, 3)),
    "list": lambda r, i: [r(i, 3), [r(i + 50, 3), 2]],
    "dict": lambda r, i: {"a": r(i, 3), "b": {"c": [r(i + 50, 3)], "d": None}},
    "ordered dict": lambda r, i: collections.OrderedDict(b=r(i, 3), a=r(i + 50, 3)),
    "default dict": lambda r, i: collections.defaultdict(list, a=r(i, 3)),
    "int keys": lambda r, i: {0: r(i, 3), 1: r(i + 50, 3)},
    "named tuple": lambda r, i: Pair(r(i, 3), r(i + 50, 3)),
    "named tuple with None": lambda r, i: Pair(r(i, 3)),
    "dataclass": lambda r, i: State(r(i, 3), 4, {"more": r(i + 50, 3)}),
    "frozen dataclass": lambda r, i: Frozen(r(i, 3), "b"),
    "list of dataclasses": lambda r, i: [State(r(i + k, 3), k) for k in range(3)],
    "empty containers": lambda r, i: [(), [], {}, None, r(i, 3)],
    "deep": lambda r, i: [[[[{"x": ({"y": [r(i, 3)]},)}]]]],
    "same list twice": lambda r, i: (lambda inner: [inner, inner])([r(i, 3)]),
}


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for child in tree for leaf in leaves(child)]
    return []


@pytest.mark.parametrize("name", INPUTS)
def test_structures_as_arguments(rand: Rand, name: str) -> None:
    def f(tree: Any) -> list[Tensor]:
        return [x * (k + 2) for k, x in enumerate(leaves(tree))]

    drop_in(f, lambda i: (INPUTS[name](rand, i),))


@pytest.mark.parametrize("name", INPUTS)
def test_structures_as_results(rand: Rand, name: str) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return INPUTS[name](lambda seed, *shape: x * 2 if seed < 50 else y + x, 0)

    drop_in(f, lambda i: (rand(i, 3), rand(i + 50, 3)))


@pytest.mark.parametrize(
    "make", [lambda x, y: Subtuple((x, y)), lambda x, y: Subdict(a=x, b=1)], ids=["tuple", "dict"]
)
def test_subclasses_of_containers_are_right_refused_or_eager(rand: Rand, make: Any) -> None:
    def world() -> Any:
        return lambda x: make(x * 2, x), lambda i: (rand(i, 3),)

    right_or_refused(world, "OL108")
    fast = ol.graph(lambda tree: [x * 2 for x in leaves(tree)], warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(5):
            tree = make(rand(i, 3), rand(50 + i, 3))
            assert_same(fast(tree), [x * 2 for x in leaves(tree)])


def test_a_result_container_is_new_at_each_call(rand: Rand) -> None:
    fast = ol.graph(lambda x: {"y": [x * 2], "n": {"k": 1}}, warmup=1)
    with torch.no_grad():
        for i in range(6):
            out = fast(rand(i, 3))
            assert list(out) == ["y", "n"]
            assert out["n"] == {"k": 1}
            assert_same(out["y"], [rand(i, 3) * 2])
            out["y"].append("of the caller")
            out["n"]["k"] = 2
            out.clear()
    assert replays(fast) > 0


def test_an_argument_container_returned(rand: Rand) -> None:
    """Returning the very container that was given is the caller's container."""

    def f(d: dict[str, Tensor]) -> Any:
        return d, d["x"] * 2

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            d = {"x": rand(i, 3)}
            same, y = fast(d)
            assert_same((same, y), (d, rand(i, 3) * 2))
            assert same["x"] is d["x"]


def test_model_output(rand: Rand) -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    def f(x: Tensor) -> Any:
        return BaseModelOutputWithPooling(
            last_hidden_state=x * 2, pooler_output=x.sum(0), hidden_states=(x, x + 1)
        )

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(5):
            out = fast(rand(i, 3, 4))
            assert type(out) is BaseModelOutputWithPooling
            assert list(out.keys()) == ["last_hidden_state", "pooler_output", "hidden_states"]
            assert_same(out.last_hidden_state, rand(i, 3, 4) * 2)
            assert_same(out["pooler_output"], rand(i, 3, 4).sum(0))
            assert_same(out[2], (rand(i, 3, 4), rand(i, 3, 4) + 1))
            assert out.attentions is None
    assert replays(fast) > 0


def test_model_output_as_an_argument(rand: Rand) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    def f(encoded: Any) -> Tensor:
        return encoded.last_hidden_state * 2 + encoded[0]

    drop_in(f, lambda i: (BaseModelOutput(last_hidden_state=rand(i, 3)),))


RESULTS: dict[str, Any] = {
    "None": None,
    "int": 3,
    "float": -0.0,
    "string": "done",
    "bool": True,
    "size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "empty tuple": (),
    "nested constants": {"a": [1, (2.0, None)], "b": "c"},
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_callable_that_returns_no_tensor(rand: Rand, name: str) -> None:
    """It still has effects on tensors."""

    def f(x: Tensor) -> Any:
        x.mul_(2)
        return RESULTS[name]

    drop_in(f, lambda i: (rand(i, 3),))


def test_a_result_beside_constants(rand: Rand) -> None:
    drop_in(lambda x: (x * 2, None, x.shape, 3, "a", x.dtype), lambda i: (rand(i, 3, 2),))


def test_a_result_that_cannot_be_rebuilt_is_refused_or_right(rand: Rand) -> None:
    class Result:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    fast = ol.graph(lambda x: Result(x * 2), warmup=1)
    kept: list[tuple[Tensor, int]] = []
    refused = None
    with torch.no_grad():
        try:
            for i in range(5):
                kept.append((fast(rand(i, 3)).y, i))
        except ol.CaptureError as error:
            refused = error.code
        for y, i in kept:
            assert_same(y, rand(i, 3) * 2)
    assert refused in (None, "OL108")


def test_a_generator_function_is_refused_or_right(rand: Rand) -> None:
    def f(x: Tensor) -> Any:
        yield x * 2
        yield x + 1

    fast = ol.graph(f, warmup=1)
    refused = None
    with torch.no_grad():
        try:
            for i in range(4):
                assert_same(list(fast(rand(i, 3))), [rand(i, 3) * 2, rand(i, 3) + 1])
        except ol.CaptureError as error:
            refused = error.code
    assert refused in (None, "OL108")


def test_no_arguments(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        counter = rand(0, 3)

        def f() -> Tensor:
            counter.add_(1)
            return counter * 2

        return f, lambda i: ()

    drop_in_worlds(world)


def test_no_tensors_at_all() -> None:
    fast = ol.graph(lambda a, b: a + b, warmup=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for i in range(5):
            assert fast(i, 1) == i + 1
            assert fast(2, 1) == 3


def test_zero_size_batches(device: torch.device, rand: Rand) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device).eval()
    drop_in(lambda x: model(x), lambda i: (rand(i, 0, 4),))
    drop_in(lambda x: (x * 2, x.sum(), x.t()), lambda i: (rand(i, 0, 4),))


def test_big_and_empty_batches_in_turn(device: torch.device, rand: Rand) -> None:
    model = nn.Linear(4, 2).to(device)
    drop_in(
        lambda x: model(x),
        lambda i: (rand(i, 3 * (i % 2), 4),),
        calls=8,
        recordings=2,
        min_replays=4,
    )


# Functions and methods.


def test_a_graphed_function_looks_like_the_function(rand: Rand) -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        """Multiply."""
        return x * by

    fast = ol.graph(scaled)
    assert isinstance(fast, ol.Graphed)
    assert callable(fast)
    assert fast.__name__ == "scaled"
    assert fast.__qualname__ == scaled.__qualname__
    assert fast.__doc__ == "Multiply."
    assert fast.__module__ == scaled.__module__
    assert fast.__wrapped__ is scaled
    assert inspect.signature(fast) == inspect.signature(scaled)
    assert "scaled" in repr(fast)


def test_decorators_with_and_without_options(rand: Rand) -> None:
    @ol.graph
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @ol.graph(warmup=1, outputs="static")
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    with torch.no_grad():
        for i in range(5):
            assert_same(doubled(rand(i, 3)), rand(i, 3) * 2)
            assert_same(tripled(rand(i, 3)), rand(i, 3) * 3)
    assert replays(doubled) > 0
    assert replays(tripled) > 0
    assert doubled.__name__ == "doubled"
    assert tripled.__name__ == "tripled"


class Engine:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    @ol.graph(warmup=1)
    def step(self, x: Tensor) -> Tensor:
        """One step."""
        return x * self.scale

    def plain(self, x: Tensor) -> Tensor:
        return x + self.scale


def test_a_decorated_method(rand: Rand) -> None:
    a, b = Engine(rand(1, 3)), Engine(rand(2, 3))
    with torch.no_grad():
        for i in range(6):
            assert_same(a.step(rand(i, 3)), rand(i, 3) * rand(1, 3))
            assert_same(b.step(rand(i, 3)), rand(i, 3) * rand(2, 3))
        a.scale = rand(5, 3)
        for i in range(4):
            assert_same(a.step(rand(i, 3)), rand(i, 3) * rand(5, 3))
    assert Engine.step.__doc__ == "One step."


def test_a_decorated_method_of_a_module(device: torch.device, rand: Rand) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, device=device)

        @ol.graph(warmup=1)
        def encode(self, x: Tensor) -> Tensor:
            return self.linear(x)

    a, b = Model(), Model()
    with torch.no_grad():
        for i in range(5):
            for m in (a, b):
                assert_same(m.encode(rand(i, 2, 3)), m.linear(rand(i, 2, 3)))


def test_a_bound_method(rand: Rand) -> None:
    engine = Engine(rand(1, 3))
    fast = ol.graph(engine.plain, warmup=1)
    assert fast.__name__ == "plain"
    with torch.no_grad():
        for i in range(5):
            assert_same(fast(rand(i, 3)), rand(i, 3) + rand(1, 3))
    assert replays(fast) > 0


def test_other_callables(device: torch.device, rand: Rand) -> None:
    import functools

    class Callable_:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 3

    drop_in(Callable_(), lambda i: (rand(i, 3),))
    drop_in(functools.partial(torch.add, alpha=2), lambda i: (rand(i, 3), rand(9 + i, 3)))
    drop_in(torch.sin, lambda i: (rand(i, 3),))
    drop_in(torch.nn.functional.gelu, lambda i: (rand(i, 3),))
    assert_same(nn.ReLU()(rand(0, 3)), torch.relu(rand(0, 3)))


def test_graph_of_a_graphed_function_is_refused() -> None:
    with pytest.raises(ol.GraphError, match="OL401"):
        ol.graph(ol.graph(lambda x: x * 2))


# Bad input.


@pytest.mark.parametrize("target", [3, "model", None, [1], torch.ones(2), object()], ids=repr)
def test_a_target_that_is_not_callable(target: Any) -> None:
    if target is None:
        return  # graph(None, ...) is graph(...): the decorator with options
    with pytest.raises((ol.GraphError, TypeError)) as caught:
        ol.graph(target)
    assert "callable" in str(caught.value)


@pytest.mark.parametrize("target", [3, "model", None], ids=repr)
def test_a_decorated_thing_that_is_not_callable(target: Any) -> None:
    with pytest.raises((ol.GraphError, TypeError)) as caught:
        ol.graph(warmup=1)(target)
    assert "callable" in str(caught.value)


def test_a_class_is_not_a_model() -> None:
    with pytest.raises((ol.GraphError, TypeError)):
        ol.graph(nn.Linear)(4, 4)(torch.ones(4))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("warmup", -1),
        ("warmup", 0),
        ("warmup", 2.5),
        ("warmup", "3"),
        ("warmup", None),
        ("warmup", True),
        ("outputs", "Fresh"),
        ("outputs", None),
        ("outputs", 1),
        ("inputs", "node"),
        ("inputs", None),
        ("compile", "yes"),
        ("compile", None),
        ("pool", 3),
        ("pool", "pool"),
        ("pool", (0, 1)),
        ("max_recordings", -1),
        ("max_recordings", 0),
        ("max_recordings", 1.5),
        ("max_recordings", None),
        ("on_mismatch", "raise"),
        ("on_mismatch", None),
        ("on_refusal", "error"),
        ("on_refusal", None),
        ("policy", "never"),
        ("policy", None),
    ],
)
def test_bad_options(option: str, value: Any) -> None:
    with pytest.raises((ol.GraphError, TypeError, ValueError)) as caught:
        ol.graph(lambda x: x, **{option: value})
    assert option in str(caught.value)
    assert repr(value) in str(caught.value)
    if isinstance(caught.value, ol.GraphError):
        assert caught.value.code == "OL401"


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="warm_up"):
        ol.graph(lambda x: x, warm_up=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("max_bytes", [-1, 0, 1.5, "1 GB", True])
def test_bad_pools(max_bytes: Any) -> None:
    with pytest.raises((ol.GraphError, TypeError, ValueError)) as caught:
        ol.Pool(max_bytes=max_bytes)
    assert "max_bytes" in str(caught.value)


def test_an_unused_pool_is_empty() -> None:
    assert ol.Pool().memory_bytes == 0
    assert ol.Pool(max_bytes=1 << 20).memory_bytes == 0


def test_bad_capture_arguments_raise_what_the_callable_raises(rand: Rand) -> None:
    fast = ol.graph(lambda x: x @ x)
    with torch.no_grad():
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            fast.capture()
        with pytest.raises(RuntimeError):
            fast.capture(rand(0, 3, 4))
        fast.capture(rand(0, 3, 3))
    assert len(fast.recordings) == 1


def test_recordings_cannot_be_changed(rand: Rand) -> None:
    fast = drop_in(lambda x: x * 2, lambda i: (rand(i, 3),))
    (recording,) = fast.recordings
    assert isinstance(recording, ol.Recording)
    with pytest.raises((AttributeError, TypeError)):
        recording.replays = 0
    with pytest.raises((AttributeError, TypeError)):
        fast.recordings = []


def test_what_a_recording_says(rand: Rand) -> None:
    def f(x: Tensor, pair: tuple[Tensor, Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale + pair[0], pair[1]

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(4):
            fast(rand(i, 3), (rand(i, 3), rand(i, 2)), scale=2.0)
    (recording,) = fast.recordings
    assert len(recording.inputs) >= 3
    assert all(isinstance(name, str) for name in recording.inputs)
    assert len(recording.outputs) == 2
    assert recording.capture_seconds > 0
    assert recording.memory_bytes >= 0
    assert recording.nodes >= 1
    assert recording.replays == 3
    assert isinstance(recording.why, str)
    assert recording.why
    assert "spec" not in recording.why
    assert fast.memory_bytes >= recording.memory_bytes
    assert hash(recording.spec) is not None


def test_errors_have_four_parts_and_a_code(rand: Rand) -> None:
    fast = ol.graph(lambda x: x * x[0].item(), warmup=1)
    with torch.no_grad():
        fast(rand(0, 3))
        with pytest.raises(ol.GraphError) as caught:
            fast(rand(0, 3))
    text = str(caught.value)
    assert text.startswith("[OL101] ")
    for part in ("where:", "why:", "fix:"):
        assert part in text


def test_an_argument_on_a_device_without_a_driver() -> None:
    fast = ol.graph(lambda x: x * 2, warmup=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ol.GraphWarning)
        for _ in range(4):
            assert fast(torch.empty(3, device="meta")).device.type == "meta"
