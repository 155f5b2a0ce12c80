"""Two runs of a call must do the same: what moves in Python is not frozen in silence."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.runtime import answers

from .drop_in import Rand, assert_same, compare, drop_in, drop_in_worlds, replays


def several(f: Callable[..., Any], argument: Callable[[int], Any]) -> None:
    for i in range(8):
        f(argument(i))


def refused(f: Callable[..., Any], rand: Rand, line: str | None = None) -> ol.CaptureError:
    """Call until it is refused; every result until then is that of eager."""
    fast = ol.graph(f, warmup=1)
    with pytest.raises(ol.CaptureError) as caught, torch.no_grad():
        several(fast, lambda i: rand(i, 4))
    error = caught.value
    assert error.code == "OL117", str(error)
    assert line is None or (error.where is not None and line in error.where), error.where
    assert not fast.recordings
    return error


class Library(nn.Module):
    """Stands for a class of an installed package, whose numbers nobody watches."""

    __module__ = "torch.nn.modules.library"
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        return x ** type(self).seen  # no recording follows a power


def clock(x: Tensor) -> Tensor:
    return x * time.perf_counter()


class Advancing:
    def __init__(self) -> None:
        self.steps = (i / 2 for i in range(100))

    def __call__(self, x: Tensor) -> Tensor:
        return x + next(self.steps)


def differing(device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """Programs whose second run differs from their first."""
    numbers = iter(range(100))
    scales = itertools.cycle([0.5, 2.0])
    functions = itertools.cycle([torch.sin, torch.cos])
    memory = itertools.cycle([torch.ones(4, device=device), torch.zeros(4, device=device)])
    strides = itertools.cycle([(2, 1), (1, 2)])
    dtypes = itertools.cycle([torch.float16, torch.bfloat16])
    sizes = itertools.count(1)
    return {
        "a clock": clock,
        "an iterator": lambda x: x + next(numbers),
        "an iterator of an object": Advancing(),
        "numbers in turn": lambda x: x * next(scales),
        "functions in turn": lambda x: next(functions)(x),
        "tensors in turn": lambda x: x + next(memory),
        "sizes": lambda x: torch.cat([x, x.new_zeros(next(sizes))])[:4],
        "more and more": lambda x: functools.reduce(torch.mul, [x] * next(sizes)),
        "a constant on the device": lambda x: x + torch.full((4,), next(sizes), device=device),
        "strides in turn": lambda x: x.new_empty_strided((2, 2), next(strides)).fill_(2) * x[:2],
        "dtypes in turn": lambda x: x.to(next(dtypes)).float() * 2,
        "written in turn": lambda x: next(memory).add_(x) * 2,
        "numbers of the host": lambda x: x + torch.tensor([next(sizes)] * 4, device=device),
        "draws": lambda x: x + sum(torch.rand_like(x) for _ in range(next(sizes))),
    }


@pytest.mark.parametrize("name", differing(torch.device("cpu")))
def test_what_moves_in_python_is_refused(name: str, device: torch.device, rand: Rand) -> None:
    error = refused(differing(device)[name], rand)
    if "is advanced in the call" in error.what:  # as a warm-up tells
        assert "next(" in str(error.where)
        return
    assert "in the run before" in error.what
    assert "in the capture" in error.what


def test_a_counter_of_a_library_is_seen(rand: Rand) -> None:
    """As one of the user's own is: a recording for each of some values, and then it is named."""
    fast, eager = ol.graph(Library(), warmup=1, on_refusal="eager"), Library()
    with torch.no_grad(), pytest.warns(ol.GraphWarning, match="OL118.*seen"):  # noqa: PT031
        for i in range(24):
            Library.seen = i
            expected = eager(rand(i, 4))
            Library.seen = i
            assert_same(fast(rand(i, 4)), expected, f"call {i}")
            assert Library.seen == i + 1


@pytest.mark.parametrize("name", ["sizes", "a constant on the device"])
def test_calls_are_right_until_then_and_after(name: str, device: torch.device, rand: Rand) -> None:
    expected = differing(device)[name]
    fast = ol.graph(differing(device)[name], warmup=1, on_refusal="eager")
    for i in range(10):
        told = pytest.warns(ol.GraphWarning, match="OL117")
        with told if i == 3 else nullcontext():  # the third capture that differs
            compare(fast, expected, lambda _: (rand(i, 4),), 1)  # noqa: B023
    assert not fast.recordings


def test_the_message_has_the_line_and_both_values(rand: Rand) -> None:
    numbers = itertools.count(3)

    def f(x: Tensor) -> Tensor:
        return x.sin() + next(numbers)  # the line

    error = refused(f, rand, "x.sin() + next(numbers)  # the line")
    assert "`add.Tensor`, got 5 in the run before, and 6 in the capture" in error.what


def choice(x: Tensor) -> Tensor:
    return random.choice([torch.sin, torch.cos])(x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * random.random(),
        choice,
        lambda x: x * random.uniform(1, 2),
        lambda x: x if random.random() < 2 else -x,
        lambda x: x * np.random.rand(),
        lambda x: x + float(np.random.normal()),
    ],
)
def test_numbers_of_pythons_and_numpys_generators(f: Callable[..., Any], rand: Rand) -> None:
    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        fast(rand(0, 4))
        random.seed(5)
        np.random.seed(5)
        before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
        with pytest.raises(ol.CaptureError, match="OL117") as caught:
            fast(rand(1, 4))
    assert caught.value.where is not None
    assert "test_runs_differ.py" in caught.value.where
    assert "torch.rand" in caught.value.fix
    after = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    assert after == before


OWN: dict[str, Callable[[], Any]] = {
    "Python's": lambda: random.Random(3),
    "NumPy's": lambda: np.random.default_rng(3),
    "NumPy's of another kind": lambda: np.random.Generator(np.random.MT19937(3)),
    "NumPy's of old": lambda: np.random.RandomState(3),
}


@pytest.mark.parametrize(
    ("name", "place"),  # as an argument one of NumPy's cannot be compared, and runs eagerly
    [*itertools.product(OWN, ["closure", "attribute", "item"]), ("Python's", "argument")],
)
def test_a_generator_of_its_own_that_seldom_decides(name: str, place: str, rand: Rand) -> None:
    """A branch taken once in a hundred calls shows in no two runs that are compared."""
    own = OWN[name]()
    holder, items = types.SimpleNamespace(rng=own), {"rng": [own]}
    programs: dict[str, Callable[..., Tensor]] = {
        "closure": lambda x, *_: -x if own.uniform(0, 1) < 0.01 else x + 1,
        "attribute": lambda x, *_: -x if holder.rng.uniform(0, 1) < 0.01 else x + 1,
        "item": lambda x, *_: -x if items["rng"][0].uniform(0, 1) < 0.01 else x + 1,
        "argument": lambda x, rng: -x if rng.uniform(0, 1) < 0.01 else x + 1,
    }
    fast = ol.graph(programs[place], warmup=1)
    more = (own,) if place == "argument" else ()
    with torch.no_grad():
        fast(rand(0, 4), *more)
        expected = copy.deepcopy(own)
        with pytest.raises(ol.CaptureError, match=r"OL117.*the generator `.*` is advanced"):
            fast(rand(1, 4), *more)
    assert own.uniform(0, 1) == expected.uniform(0, 1)  # as if it had not been called


@contextmanager
def beside(work: Callable[[threading.Event], object]) -> Generator[None]:
    """A thread that works until an event is set, which is at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("draw", [np.random.rand, *(own().random for own in OWN.values())])
def test_a_thread_that_waits_draws_nothing(draw: Callable[[], float], rand: Rand) -> None:
    """A server's threads, say. The call is refused as in a process without them."""
    fast = ol.graph(lambda x: -x if draw() < 1e-9 else x + 1, warmup=1)
    with torch.no_grad(), beside(threading.Event.wait):
        fast(rand(0, 4))
        with pytest.raises(ol.CaptureError, match=r"OL117.*the generator `?.*is advanced"):
            fast(rand(1, 4))


@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState, None], ids=str)
def test_draws_of_a_padded_call_beside_a_thread_that_runs(kind: Any, rand: Rand) -> None:
    """The runs that prove the padding leave no draw behind, the process's generator or another."""

    def runs(stop: threading.Event) -> None:
        while not stop.is_set():
            sum(range(1000))

    draw = random.random if kind is None else kind(5).uniform
    more = () if kind is None else (0, 1)
    fast = ol.graph(
        lambda x: x + (draw(*more) < 2),
        warmup=1,
        buckets=ol.Buckets(dim=0, sizes=(4, 8)),
        on_refusal="eager",
    )
    with beside(runs), warnings.catch_warnings(record=True) as warned:
        random.seed(5)
        warnings.simplefilter("always")
        compare(fast, lambda x: x + 1, lambda i: (rand(i, 3),), 6)
    assert any("OL117" in str(w.message) for w in warned)
    expected = (kind or random.Random)(5)
    assert [expected.uniform(0, 1) for _ in range(7)][-1] == draw(*more)


def draws(stop: threading.Event, seen: list[float]) -> None:
    """Draw from Python's and NumPy's generators of the process all the time."""
    while not stop.is_set():
        random.random()
        seen.append(np.random.rand())


def test_a_thread_that_draws_is_no_reason_to_refuse(rand: Rand) -> None:
    """Nor is a state put back meanwhile: the thread would draw its numbers twice."""
    seen: list[float] = []
    with beside(functools.partial(draws, seen=seen)):
        drop_in(lambda x: x + 1, lambda i: (rand(i, 4),), calls=6)
    assert len(set(seen)) == len(seen) > 100


numpys_uniform = np.random.uniform


@pytest.mark.parametrize(
    "draw",
    [lambda: np.random.rand(), lambda: numpys_uniform(0, 1), random.Random(3).random],
    ids=["module", "function", "own"],
)
def test_a_draw_while_another_thread_draws(draw: Callable[[], float], rand: Rand) -> None:
    fast = ol.graph(lambda x: -x if draw() < 1e-9 else x + 1, warmup=1)
    with torch.no_grad(), beside(functools.partial(draws, seen=[])):
        fast(rand(0, 4))
        with pytest.raises(ol.CaptureError, match="OL117"):
            fast(rand(1, 4))


def test_a_generator_that_it_reaches_and_leaves_alone(rand: Rand) -> None:
    holder = types.SimpleNamespace(rng=random.Random(3), train=False)
    drop_in_worlds(
        lambda: (
            lambda x: x + (holder.rng.random() if holder.train else 1),
            lambda i: (rand(i, 4),),
        )
    )


def test_a_random_branch_in_a_training_step(device: torch.device, rand: Rand) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)

    def layer_drop(x: Tensor) -> Tensor:
        for layer in layers:
            if random.random() > 0.1:
                x = layer(x)
        return x

    fast = ol.graph(layer_drop)
    with pytest.raises(ol.CaptureError, match="OL117") as caught:
        several(lambda x: fast(x).sum().backward(), lambda i: rand(i, 2, 4))
    assert "if random.random() > 0.1:" in (caught.value.where or "")


def test_a_branch_inside_a_backward(device: torch.device, rand: Rand) -> None:
    layer = nn.Linear(4, 4).to(device)
    scales = itertools.count(1)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * next(scales)

    def step(x: Tensor) -> Tensor:
        layer.zero_grad(set_to_none=True)
        loss = Scaled.apply(layer(x)).sum()
        loss.backward()
        return loss.detach()

    fast = ol.graph(step)
    with pytest.raises(ol.CaptureError, match="OL117"):
        several(fast, lambda i: rand(i, 2, 4))


def test_capture_ahead_of_time(rand: Rand) -> None:
    numbers = itertools.count()
    fast = ol.graph(lambda x: x + next(numbers))
    with pytest.raises(ol.CaptureError, match="OL117"), torch.no_grad():
        fast.capture(rand(0, 4))
    steady = ol.graph(lambda x: x + 1)
    with torch.no_grad():
        steady.capture(rand(0, 4))
    assert len(steady.recordings) == 1


def test_a_cache_that_grows_is_told_of_its_full_size(device: torch.device, rand: Rand) -> None:
    """By `cat`, as attention's does."""
    cache = [torch.zeros(1, 4, device=device)]

    def attend(x: Tensor) -> Tensor:
        cache[0] = torch.cat([cache[0], x[None]])
        return cache[0].sum(0)

    error = refused(attend, rand, "torch.cat([cache[0], x[None]])")
    assert "full size" in str(error)
    assert "StaticCache" in str(error)
    assert "full size" not in str(refused(clock, rand))


# What is right stays as it was.


def test_a_cache_that_the_first_call_fills(device: torch.device, rand: Rand) -> None:
    def world() -> Any:
        @functools.lru_cache
        def table(n: int) -> Tensor:
            return torch.arange(n, device=device).float().sqrt()

        return lambda x: x * table(4), lambda i: (rand(i, 4),)

    drop_in_worlds(world, warmup=1, calls=6, min_replays=4)


def test_a_number_that_the_caller_moves(rand: Rand) -> None:
    """It is guarded, and read at each call from the third value on: one recording for each way in
    which the comparison comes out."""

    class Scaled:
        scale = 1.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale if self.scale < 3 else x.sin()

    def between(i: int, f: Any) -> None:
        getattr(f, "fn", f).scale = float(i % 4)

    drop_in_worlds(
        lambda: (Scaled(), lambda i: (rand(i, 4),)),
        calls=24,
        between=between,
        recordings=2,
        min_replays=8,
    )


def test_a_generator_made_in_the_call(rand: Rand) -> None:
    drop_in(lambda x: x * random.Random(7).random(), lambda i: (rand(i, 4),))


def test_dropout_and_draws_on_the_device(rand: Rand) -> None:
    fast = ol.graph(lambda x: nn.functional.dropout(x, 0.5) * torch.rand_like(x), warmup=1)
    with torch.no_grad():
        results = [fast(rand(0, 64)) for _ in range(4)]
    assert len(fast.recordings) == 1
    assert replays(fast) == 3
    assert not torch.equal(results[2].cpu(), results[3].cpu())


def test_code_that_asks_whether_it_is_captured(rand: Rand) -> None:
    """It is told no, as in a call, on every driver."""
    told: set[bool] = set()

    def f(x: Tensor) -> Tensor:
        told.add(torch.cuda.is_current_stream_capturing())
        return x.sin() if True in told else x.cos()

    fast = ol.graph(f, warmup=1)
    compare(fast, torch.cos, lambda i: (rand(i, 4),), 4)
    assert told == {False}
    assert [recording.told_capturing for recording in fast.recordings] == [False]


def reads(x: Tensor) -> bool:
    """Read the device unless it is captured."""
    return not torch.cuda.is_current_stream_capturing() and bool((x < 1e6).all())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_code_that_computes_something_else_where_it_is_captured(
    rand: Rand, dropout: float, grad: bool
) -> None:
    """The decoder of transformers' UMT5 does so: eager goes without its causal mask. In training
    dropout hides the difference from run to run."""

    def f(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, dropout)
        return y if reads(x) else y * 2

    fast = ol.graph(f, warmup=1)
    with torch.set_grad_enabled(grad):
        x = rand(0, 64).requires_grad_(grad)
        y = fast(x)
        if not dropout:
            assert_same(y.detach(), x.detach())
        with pytest.raises(ol.CaptureError, match="something else where it is captured") as caught:
            fast(rand(1, 64).requires_grad_(grad))
        assert caught.value.code == "OL109"
        if not grad:
            with pytest.raises(ol.CaptureError, match="something else where it is captured"):
                ol.graph(f).capture(rand(0, 64))


def test_code_that_fails_where_it_is_captured_is_refused_for_what_it_does_else(rand: Rand) -> None:
    def f(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("no way here")
        return x * x.sum().item()

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        assert_same(fast(rand(0, 4)), rand(0, 4) * rand(0, 4).sum().item())
        with pytest.raises(ol.CaptureError, match=r"x\.sum\(\)\.item\(\)") as caught:
            fast(rand(1, 4))
        assert caught.value.code == "OL101"


def test_code_that_draws_other_numbers_where_it_is_captured(rand: Rand) -> None:
    """As attention's dropout by another kernel does."""

    def f(x: Tensor) -> Tensor:
        if reads(x):
            return x * torch.rand_like(x)
        return x * torch.rand(2, 4, device=x.device)[1]

    fast = ol.graph(f, warmup=1)
    with torch.no_grad():
        for i in range(6):
            fast(rand(i, 4))
    assert replays(fast) == 5


def unless_large(x: Tensor) -> Tensor:
    if not torch.cuda.is_current_stream_capturing() and bool((x > 1e6).all()):
        return x
    return x * 2


def test_code_that_reads_the_device_unless_it_is_captured(rand: Rand) -> None:
    """The call that would be captured compares both ways, and captures the one of a capture."""
    fast = ol.graph(unless_large, warmup=1)
    compare(fast, lambda x: x * 2, lambda i: (rand(i, 4),), 6)
    assert len(fast.recordings) == 1
    assert fast.recordings[0].told_capturing
    assert replays(fast) == 5


class Asking(nn.Module):
    """It reads the device unless it is captured.

    Args:
        effect: what else it does in each run.
    """

    def __init__(self, effect: str = "") -> None:
        super().__init__()
        self.effect = effect
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.off = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.effect == "writes":
            self.total += 1
        if self.effect == "counts":
            self.calls += 1
        if self.effect == "draws":
            x = x + torch.rand_like(x)
        y = x * 2 if reads(x) else x * 2 * self.off
        y = y + self.total + self.calls
        return Result(y) if self.effect == "object" else y


class Result:
    """An object that each call makes, with state of its own, as a cache of keys and values is."""

    def __init__(self, y: Tensor) -> None:
        self.y, self.seen = y, 0
        self.see()

    def see(self) -> None:
        self.seen += 1


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch without CUDA raises where it is asked."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("effect", ["", "object", "writes", "counts", "draws"])
def test_the_answer_is_changed_after_the_last_warm_up(
    device: torch.device, rand: Rand, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    """Of a callable without effects only the other way is run once more."""
    ran: list[bool] = []
    answered = answers._answered

    def counted(callee: Any, attempt: Any, answer: bool) -> Any:
        ran.append(answer)
        return answered(callee, attempt, answer)

    monkeypatch.setattr(answers, "_answered", counted)
    eager, model = Asking(effect).to(device), Asking(effect).to(device)
    fast = ol.graph(model, warmup=2)
    with torch.no_grad():
        for i in range(4):
            found, expected = fast(rand(i, 4)), eager(rand(i, 4))
            if effect == "object":
                assert found.seen == expected.seen
                found, expected = found.y, expected.y
            if effect != "draws":
                assert_same(found, expected)
    assert [recording.told_capturing for recording in fast.recordings] == [True]
    assert ran == ([True] if effect in ("", "object") else [False, True])


RESULTS = {
    "a tensor": lambda y, asked: y * (2 if asked else 3),
    "in an object": lambda y, asked: Result(y * (2 if asked else 3)),
    "integers": lambda y, asked: (y > 9) | asked,
    "a name": lambda y, asked: (y, "asked" if asked else "not"),
    "of an object": lambda y, asked: types.SimpleNamespace(y=y, asked=asked),
    "another dtype": lambda y, asked: y if asked else y.double(),
    "another container": lambda y, asked: [y] if asked else (y,),
    "a function": lambda y, asked: (y, torch.relu if asked else torch.tanh),
    "a view": lambda y, asked: (y, y[:1] if asked else y[:1].clone()),
}


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("made", RESULTS.values(), ids=RESULTS)
def test_another_way_that_computes_something_else_changes_no_answer(
    rand: Rand, made: Callable[..., Any], warmup: int
) -> None:
    fast = ol.graph(lambda x: made(x * 2, reads(x)), warmup=warmup)

    def calls() -> None:
        for i in range(6):
            found, expected = fast(rand(i, 4)), made(rand(i, 4) * 2, True)
            if isinstance(expected, (Result, types.SimpleNamespace)):
                found, expected = vars(found), vars(expected)
            assert_same(found, expected)

    with torch.no_grad():
        refused_as_different(calls)


def refused_as_different(calls: Callable[[], object]) -> None:
    with pytest.raises(ol.CaptureError, match="something else where it is captured"):
        calls()


class Scaled(nn.Module):
    """Its scale counts only where it is told that it is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if reads(x) else x * 1.0


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("when", [1, 2, 3, 6])
def test_state_that_counts_in_one_way_and_changes(
    device: torch.device, rand: Rand, when: int, grad: bool
) -> None:
    """The ways are compared in each state that a recording is made in."""
    model = Scaled().to(device)
    fast = ol.graph(model, warmup=3)

    def calls() -> None:
        for i in range(12):
            if i == when:
                model.scale = 3.0
            x = rand(i, 4)
            assert_same(fast(x), x * model.scale)

    with torch.set_grad_enabled(grad):
        refused_as_different(calls)


class Counted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        if reads(x):
            self.calls += 1
        return x * 2


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("grad", [False, True])
def test_code_that_counts_unless_it_is_captured(
    device: torch.device, rand: Rand, grad: bool
) -> None:
    model = Counted().to(device)
    fast = ol.graph(model)

    def calls() -> None:
        for i in range(6):
            assert_same(fast(rand(i, 4)), rand(i, 4) * 2)
            assert model.calls == i + 1

    with torch.set_grad_enabled(grad):
        refused_as_different(calls)


def _writes(model: Any, y: Tensor, asked: bool) -> None:
    model.kept.copy_(y if asked else -y)


def _stores(model: Any, y: Tensor, asked: bool) -> None:
    model.kept = y * 2 if asked else y * 3


def _stores_a_list(model: Any, y: Tensor, asked: bool) -> None:
    model.seen = [y * 2] if asked else [y * 2, y]


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("write", [_writes, _stores, _stores_a_list])
def test_code_that_leaves_other_state_where_it_is_captured(
    device: torch.device, rand: Rand, write: Callable[[Any, Tensor, bool], None]
) -> None:
    class Model(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            write(self, x, reads(x))
            return x * 2

    model = Model().to(device)
    model.register_buffer("kept", torch.zeros(4, device=device))
    fast = ol.graph(model)
    with torch.no_grad():
        refused_as_different(lambda: [fast(rand(i, 4)) for i in range(6)])


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("independent", [False, True], ids=["proven", "independent"])
@pytest.mark.parametrize("grad", [False, True])
def test_code_that_reads_the_device_unless_it_is_captured_in_buckets(
    rand: Rand, independent: bool, grad: bool
) -> None:
    """It is compared at the call's own size, and captured at the bucket's."""
    buckets = ol.Buckets(0, (4, 8), independent=independent)
    fast = ol.graph(unless_large, warmup=1, buckets=buckets)
    with torch.set_grad_enabled(grad):
        for i, n in enumerate((6, 6, 6, 5, 7, 8, 6, 3, 3, 3, 2)):
            x = rand(i, n, 5).requires_grad_(grad)
            y = fast(x)
            assert_same(y.detach(), rand(i, n, 5) * 2)
            if grad:
                y.sum().backward()
                assert_same(x.grad, torch.full_like(x, 2))
    assert len(fast.recordings) == 2
    assert replays(fast) >= 6


@pytest.mark.parametrize("shared_first", [True, False])
def test_arguments_of_one_storage_and_of_several_in_turn(rand: Rand, shared_first: bool) -> None:
    """Parts of one tensor that do not overlap are as tensors of their own: the calls are alike."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * y

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        whole = rand(i, 8)
        parts = whole[:4], whole[4:]
        return parts if (i % 2 == 0) is shared_first else (parts[0].clone(), parts[1].clone())

    drop_in(f, arguments, calls=8, min_replays=7)


def test_arguments_of_one_storage_that_are_taken_in_turn(rand: Rand) -> None:
    turns = itertools.count()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x, y)[next(turns) % 2] * 2

    fast = ol.graph(f, warmup=1)
    with pytest.raises(ol.CaptureError, match="argument 0 in the run before, and argument 1"):
        several(lambda whole: fast(whole[:4], whole[4:]), lambda i: rand(i, 8))


@pytest.mark.parametrize("of", ["argument", "result"])
def test_parts_of_a_tensor_that_are_taken_in_turn(rand: Rand, of: str) -> None:
    """They differ in nothing but where they begin."""
    turns = itertools.count()

    def f(x: Tensor) -> Tensor:
        whole = x if of == "argument" else x + 1
        return whole.chunk(2)[next(turns) % 2] * 2

    fast = ol.graph(f, warmup=1)
    what = "a tensor of offset 0 in the run before, and one of offset 4 in the capture"
    with pytest.raises(ol.CaptureError, match=what), torch.no_grad():
        several(fast, lambda i: rand(i, 8))


def test_a_refusal_keeps_no_tensor(rand: Rand) -> None:
    """It is raised again at each later call, without the tensors of the call that was first
    refused."""
    fast = ol.graph(clock, warmup=1)
    refused_once: list[weakref.ref[Tensor]] = []
    with torch.no_grad():
        for i in range(8):
            x = rand(i, 4)
            try:
                fast(x)
            except ol.CaptureError:
                refused_once.append(weakref.ref(x))
    del x
    gc.collect()
    assert refused_once
    assert [ref() for ref in refused_once] == [None] * len(refused_once)
